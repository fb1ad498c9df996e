"""Two tables bundled with scikit-learn: measurements, and a number to predict.

Each has fixed splits: 60% for training, 20% for validation and 20% for the test.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from pipeline.dataset.splits import Data


def breast_cancer() -> Data:
    """Load the Wisconsin breast cancer table.

    It has 569 tumors with 30 measurements each, malignant (0) or benign (1): 60% for
    training, 20% for validation and 20% for the test.
    """
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer()
    return _split("breast_cancer", table, np.int64, table.target)


def diabetes() -> Data:
    """Load the diabetes table of Efron et al. 2004.

    It has 442 patients with 10 measurements each: 60% for training, 20% for validation
    and 20% for the test. The label is the progression of the disease after one year.
    """
    from sklearn.datasets import load_diabetes

    return _split("diabetes", load_diabetes(scaled=False), np.float32)


def _split(
    name: str, table: Any, kind: type, classes: np.ndarray | None = None
) -> Data:
    """Split the rows of a table into training, validation and test splits.

    Args:
        name: name of the dataset.
        table: the table, as scikit-learn loads it.
        kind: dtype of the labels.
        classes: the classes, 0 or 1, by which to stratify the splits, if there are any.
    """
    from sklearn.model_selection import train_test_split

    x = table.data.astype(np.float32)
    y = table.target.astype(kind)[:, np.newaxis]
    train, rest = train_test_split(
        np.arange(len(x)), test_size=0.4, random_state=0, stratify=classes
    )
    classes_of_rest = None
    class_count = None
    if classes is not None:
        classes_of_rest = classes[rest]
        class_count = 2
    validation, test = train_test_split(
        rest, test_size=0.5, random_state=0, stratify=classes_of_rest
    )

    def dataset(rows: np.ndarray) -> tf.data.Dataset:
        in_order = np.sort(rows)
        return tf.data.Dataset.from_tensor_slices((x[in_order], y[in_order]))

    return Data(
        train=dataset(train),
        validation=dataset(validation),
        test=dataset(test),
        classes=class_count,
        name=name,
        version="1.0.0",
    )
