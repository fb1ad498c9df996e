"""Tokens are positions of sequences without padding, over the effective batch."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from pipeline.accumulation.internals import Share
from pipeline.dataset import tokens
from pipeline.dataset.batches import in_order

LENGTHS = (3, 1, 4, 2)


def ragged(dtype, frame=()):
    """Return sequences of `LENGTHS`, whose positions have the shape `frame`."""

    def examples():
        for length in LENGTHS:
            yield np.ones((length, *frame), dtype), 0

    spec = (tf.TensorSpec((None, *frame), dtype), tf.TensorSpec((), tf.int32))
    split = tf.data.Dataset.from_generator(examples, output_signature=spec)
    known_length = tf.data.experimental.assert_cardinality(len(LENGTHS))
    return split.apply(known_length)


def labeled(inputs):
    """Return a split of four examples with these inputs."""
    labels = tf.zeros(len(LENGTHS))
    return tf.data.Dataset.from_tensor_slices((inputs, labels))


def count(examples, pad=None, masked=False):
    """Return the tokens of one batch of all examples; None if there are none."""
    padding = None
    if pad is not None:
        padding = pad["value"]
    input_spec, _ = examples.element_spec
    counter = tokens.counter(input_spec, padding, masked)
    if counter is None:
        return None
    batch = next(iter(in_order(examples, len(LENGTHS), pad)))
    traced = tf.function(counter)
    return int(traced(batch))


@pytest.mark.parametrize("pad", [None, {"multiple": 8, "value": 0}])
@pytest.mark.parametrize(("dtype", "frame"), [("int32", ()), ("float32", (5,))])
def test_padding_does_not_count(dtype, frame, pad):
    assert count(ragged(dtype, frame), pad) == sum(LENGTHS)


def test_the_first_sequence_of_several_inputs_counts():
    inputs = {
        "pixels": tf.zeros((4, 3, 3)),
        "word": tf.zeros((4, 7), tf.int32),
        "z": tf.zeros((4, 9), tf.int32),
    }
    assert count(labeled(inputs)) == 4 * 7


def test_zeros_that_the_model_masks_do_not_count():
    ids = [range(1, length + 1) for length in LENGTHS]
    padded = tf.keras.utils.pad_sequences(ids, padding="post")
    examples = labeled(padded)
    assert count(examples, masked=True) == sum(LENGTHS)
    assert count(examples) == 4 * max(LENGTHS)


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((4, 3)),
        np.zeros((4, 3, 3, 1)),
        np.zeros((4, 1), "int32"),
        np.zeros((4, 3, 3), "uint8"),
    ],
    ids=["features", "images", "a number", "bytes of an image"],
)
def test_other_examples_have_none(x):
    assert count(labeled(x)) is None


def test_images_of_unequal_size_have_none():
    images = tf.TensorSpec((None, None, 3), tf.float32)
    assert tokens.counter(images) is None


# Ten texts of seven tokens, which three workers share.
TEXT = tf.TensorSpec((7,), tf.int32)
WORKERS = 3


def share_of(worker):
    batch = (tf.zeros((10, 7), tf.int32), tf.zeros(10))
    return Share.for_replicas(batch, worker, 1, WORKERS)


def test_every_worker_counts_those_of_all():
    counter = tokens.counter(TEXT)
    for worker in range(WORKERS):
        tokens_of_all = counter(share_of(worker))
        assert int(tokens_of_all) == 10 * 7


def test_a_worker_does_not_count_masked_tokens_of_its_share_as_those_of_all():
    counter = tokens.counter(TEXT, masked=True)
    share = share_of(0)
    with pytest.raises(ValueError, match="in the shares of other workers is not known"):
        counter(share)
