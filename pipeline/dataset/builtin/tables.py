"""Two tables that scikit-learn bundles: measurements and one number to predict, in fixed splits of 60, 20 and 20%."""

from typing import Any

import numpy as np
import tensorflow as tf

from pipeline.dataset.splits import Data


def breast_cancer() -> Data:
    """Load the Wisconsin breast cancer table: 569 tumours, 30 measurements each, malignant (0) or benign (1)."""
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer()
    return _split("breast_cancer", table, np.int64, table.target)


def diabetes() -> Data:
    """Load the diabetes table of Efron et al. 2004: 442 patients, 10 measurements each, and its progress in a year."""
    from sklearn.datasets import load_diabetes

    return _split("diabetes", load_diabetes(scaled=False), np.float32)


def _split(
    name: str, table: Any, kind: type, classes: np.ndarray | None = None
) -> Data:
    from sklearn.model_selection import train_test_split

    x, y = table.data.astype(np.float32), table.target.astype(kind)[:, np.newaxis]
    train, rest = train_test_split(
        np.arange(len(x)), test_size=0.4, random_state=0, stratify=classes
    )
    of_rest = None if classes is None else classes[rest]
    validation, test = train_test_split(
        rest, test_size=0.5, random_state=0, stratify=of_rest
    )
    rows = {
        "train": np.sort(train),
        "validation": np.sort(validation),
        "test": np.sort(test),
    }
    splits = {
        part: tf.data.Dataset.from_tensor_slices((x[found], y[found]))
        for part, found in rows.items()
    }
    return Data(
        **splits, classes=None if classes is None else 2, name=name, version="1.0.0"
    )
