"""Two tables that scikit-learn bundles: measurements and one number to predict, in fixed splits of 60, 20 and 20%."""

from __future__ import annotations

from typing import Any

import numpy as np

Table = dict[str, tuple[np.ndarray, np.ndarray]]  # x (examples, measurements) and y (examples, 1) of each split


def breast_cancer() -> Table:
    """Return the Wisconsin breast cancer data: 569 tumours, 30 measurements each; 0 is malignant, 1 benign."""
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer()
    return _split(table, np.int64, table.target)


def diabetes() -> Table:
    """Return the diabetes data of Efron et al. 2004: 442 patients, 10 measurements each, and the disease's progress."""
    from sklearn.datasets import load_diabetes

    return _split(load_diabetes(scaled=False), np.float32)


def _split(table: Any, kind: type, classes: np.ndarray | None = None) -> Table:
    from sklearn.model_selection import train_test_split

    x, y = table.data.astype(np.float32), table.target.astype(kind)[:, np.newaxis]
    train, rest = train_test_split(np.arange(len(x)), test_size=0.4, random_state=0, stratify=classes)
    of_rest = None if classes is None else classes[rest]
    validation, test = train_test_split(rest, test_size=0.5, random_state=0, stratify=of_rest)
    rows = {"train": np.sort(train), "validation": np.sort(validation), "test": np.sort(test)}
    return {name: (x[found], y[found]) for name, found in rows.items()}
