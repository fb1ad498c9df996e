"""Makes a table, one row per example, from a batch and the predictions for it."""

from typing import Any

import keras
import numpy as np
import pyarrow as pa
import tensorflow as tf

from pipeline.accumulation import internals


def table_of(batch: Any, predicted: Any, first: int) -> pa.Table:
    """Return the rows of a batch.

    The columns are the position of the example in its split, the outputs, the labels
    and the loss. Several outputs or labels have a column each, such as `output.NAME`.

    Args:
        batch: `(x, y)`, `(x, y, sample_weight)` or `(x,)`.
        predicted: the `Predicted` of the batch, as NumPy arrays or tensors.
        first: the position of the first example in the split.
    """
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    count = int(internals.examples_in(x))
    columns = {"position": pa.array(np.arange(first, first + count, dtype=np.int64))}
    for name, output in predicted.outputs.items():
        columns[_name("output", name, len(predicted.outputs))] = _column(output)

    if y is not None:
        labels = keras.tree.flatten_with_path(y)
        for path, label in labels:
            name = "/".join(map(str, path))
            columns[_name("label", name, len(labels))] = _column(label)
    if tf.is_tensor(predicted.losses):
        columns["loss"] = _column(predicted.losses)
    return pa.table(columns)


def _name(kind: str, name: str, count: int) -> str:
    if count == 1 or not name:
        return kind
    return f"{kind}.{name}"


def _column(values: Any) -> pa.Array:
    """Return a tensor as a column: a vector or more of an example is a list."""
    if isinstance(values, tf.RaggedTensor):
        return pa.array(values.to_list())
    if values.dtype == tf.bfloat16:
        values = tf.cast(values, tf.float32)
    array = values.numpy()
    column = pa.array(array.reshape(-1))
    # Make lists from the innermost axis outwards.
    for axis in range(array.ndim - 1, 0, -1):
        size = array.shape[axis]
        lists = int(np.prod(array.shape[:axis]))
        offsets = np.arange(lists + 1, dtype=np.int64) * size
        column = pa.LargeListArray.from_arrays(offsets, column)
    return column
