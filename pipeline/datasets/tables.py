"""Two tables that scikit-learn bundles, as `Data`: floats in, one number out, in fixed splits of 60, 20 and 20%."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from pipeline.dataset import Data


def breast_cancer() -> Data:
    """Load the Wisconsin breast cancer data: 569 tumours, 30 measurements each; 0 is malignant, 1 benign."""
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer()
    return _split(table, "breast_cancer", np.int64, classes=2, stratify=table.target)


def diabetes() -> Data:
    """Load the diabetes data of Efron et al. 2004: 442 patients, 10 measurements each, and the disease's progress."""
    from sklearn.datasets import load_diabetes

    return _split(load_diabetes(scaled=False), "diabetes", np.float32)


def _split(table: Any, name: str, kind: type, classes: int | None = None, stratify: Any = None) -> Data:
    from sklearn.model_selection import train_test_split

    x, y = table.data.astype(np.float32), table.target.astype(kind)[:, np.newaxis]
    train, rest = train_test_split(np.arange(len(x)), test_size=0.4, random_state=0, stratify=stratify)
    of_rest = None if stratify is None else stratify[rest]
    validation, test = train_test_split(rest, test_size=0.5, random_state=0, stratify=of_rest)

    def of(rows: np.ndarray) -> tf.data.Dataset:
        rows = np.sort(rows)
        return tf.data.Dataset.from_tensor_slices((x[rows], y[rows]))

    return Data(of(train), of(validation), classes=classes, name=name, version="1.0.0", test=of(test))
