"""Rejects ragged inputs to a model that takes only dense sequences.

Whether the layers of a model take ragged tensors cannot be read from them, so it is
tried, on made-up examples. Without the check, a layer would fail in an operation whose
message says nothing about ragged inputs.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from .batch import Batches, Nest, Share, parts_of, to_dense

_LENGTHS = (3, 8)  # positions of the made-up examples


@tf.autograph.experimental.do_not_convert
def check_takes_ragged(
    model: keras.Model | None, batch: Nest | Share | Batches
) -> None:
    """Reject ragged inputs, cut by a number of examples, if the model fails on them.

    A model that also fails with the same examples, padded, is not judged: it may need
    other values. Neither is the function that takes the place of a model, nor a model
    of `Batches`, whose ragged parts are made dense.

    Raises:
        ValueError: the model takes padded inputs, but not the ragged ones.
    """
    if model is None or isinstance(batch, Batches):
        return
    inputs = parts_of(batch)[0]
    if not any(isinstance(leaf, tf.RaggedTensor) for leaf in tf.nest.flatten(inputs)):
        return
    with tf.init_scope():
        if not tf.executing_eagerly():
            return
        with tf.device("CPU:0"):
            leaves = [_examples_like(leaf) for leaf in tf.nest.flatten(inputs)]
            if any(leaf is None for leaf in leaves):
                return
            examples = tf.nest.pack_sequence_as(inputs, leaves)
            padded = tf.nest.map_structure(to_dense, examples)
            if _accepts(model, examples) or not _accepts(model, padded):
                return
    rule = (
        "micro_batch_tokens must be given, with or without micro_batch_size, for "
        "ragged inputs to a model that takes only dense ones"
    )
    remedy = "Each micro-batch is then padded. Or pad the batches yourself"
    raise ValueError(f"{rule}. {remedy}. Received: {model.name}")


def _examples_like(leaf: Any) -> Any:
    """Return two made-up examples for a part of the inputs, or None for strings.

    All values are 1, which any vocabulary has, and which masks do not leave out.
    """
    sizes = leaf.shape[1:].as_list()
    if not isinstance(leaf, tf.RaggedTensor):
        if leaf.dtype == tf.string or None in sizes:
            return None
        return tf.ones([len(_LENGTHS), *sizes], leaf.dtype)
    if leaf.dtype == tf.string or leaf.ragged_rank != 1 or None in sizes[1:]:
        return None
    values = tf.ones([sum(_LENGTHS), *sizes[1:]], leaf.dtype)
    return tf.RaggedTensor.from_row_lengths(values, _LENGTHS)


def _accepts(model: keras.Model, examples: Nest) -> bool:
    """Return whether a model computes the examples; nothing is assigned."""
    try:
        with keras.StatelessScope():
            model(examples, training=False)
    except Exception:  # any error of any layer
        return False
    return True
