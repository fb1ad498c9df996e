"""Makes a table, one row per example, from a batch and the predictions for it."""

from collections.abc import Collection, Mapping
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
        batch: `(x, y)`, `(x, y, sample_weight)` or `(x,)`, without padding.
        predicted: the `Predicted` of the batch, whose outputs may be ragged.
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


def sequences_among(outputs: Mapping[str, tf.Tensor]) -> set[str]:
    """Return the names of the traced outputs whose axis 1 has no fixed size."""
    names = set()
    for name, output in outputs.items():
        if output.shape.rank > 1 and output.shape[1] is None:
            names.add(name)
    return names


def without_padding(
    outputs: Mapping[str, tf.Tensor],
    batch: Any,
    padded: Any,
    sequences: Collection[str],
) -> dict[str, Any]:
    """Return outputs without the positions that are padding.

    An output is cut to the lengths of its labels if these are ragged, and otherwise to
    the lengths of the ragged inputs if these all agree. An output that does not have
    the padded length stays whole.

    Args:
        outputs: the outputs for a padded batch, by name.
        batch: the batch without padding.
        padded: the padded batch.
        sequences: the names of the outputs that may be cut off.
    """
    cut: dict[str, Any] = dict(outputs)
    for name in sequences:
        sequence = _sequence_of(name, batch, padded)
        if sequence is None:
            continue
        lengths, size = sequence
        output = outputs[name]
        if output.shape[1] == size:
            cut[name] = tf.RaggedTensor.from_tensor(output, lengths=lengths)
    return cut


def _sequence_of(name: str, batch: Any, padded: Any) -> tuple[tf.Tensor, int] | None:
    """Return the length of each example of an output, and the padded length.

    Return None if the lengths are not known.
    """
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    padded_x, padded_y, _ = keras.utils.unpack_x_y_sample_weight(padded)
    if isinstance(y, Mapping):
        y = y.get(name)
        padded_y = padded_y.get(name)
    if isinstance(y, tf.RaggedTensor):
        return y.row_lengths(), padded_y.shape[1]

    sequences = []
    pairs = zip(tf.nest.flatten(x), tf.nest.flatten(padded_x), strict=True)
    for part, padded_part in pairs:
        if isinstance(part, tf.RaggedTensor):
            sequences.append((part.row_lengths(), padded_part.shape[1]))
    if not sequences:
        return None
    lengths, size = sequences[0]
    for others, other_size in sequences[1:]:
        if other_size != size or tf.reduce_any(others != lengths):
            return None
    return lengths, size


def _name(kind: str, name: str, count: int) -> str:
    if count == 1 or not name:
        return kind
    return f"{kind}.{name}"


def _column(values: Any) -> pa.Array:
    """Return a tensor as a column, in which all axes but the first become lists."""
    if isinstance(values, tf.RaggedTensor):
        offsets = values.row_splits.numpy().astype(np.int64)
        return pa.LargeListArray.from_arrays(offsets, _column(values.values))
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
