"""Examples of unequal length are padded in their effective batch, and masked."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from omegaconf import OmegaConf

from pipeline.accumulation import Update
from pipeline.common.errors import ConfigError, DataError
from pipeline.config.stages import Slice
from pipeline.dataset import Data, load
from pipeline.dataset import batches as batching
from pipeline.dataset.bad_example import errors_located
from pipeline.dataset.checksums import DataFiles
from tests.parameters import mostly_slow

TOKENS = 12
WIDTH = 4
RATE = 0.5
LENGTHS = (3, 1, 7, 2, 5, 4, 6, 2, 9)
PADDED_LENGTH = 12  # the longest has 9: the next multiple of 4
PAD = {"pad": {"multiple": 4, "value": 0}}


def texts(first: int = 1) -> Data:
    """Return texts of `LENGTHS`, whose labels are the next tokens.

    Args:
        first: the smallest token.
    """
    numbers = np.random.default_rng(0)
    rows = []
    for length in LENGTHS:
        row = numbers.integers(first, TOKENS, length + 1)
        rows.append(row.astype("int32"))

    def examples():
        for row in rows:
            yield row[:-1], row[1:]

    spec = tf.TensorSpec([None], tf.int32)
    split = tf.data.Dataset.from_generator(examples, output_signature=(spec, spec))
    known_length = tf.data.experimental.assert_cardinality(len(rows))
    return Data(split.apply(known_length), None)


def batches(size: int, data: Data | None = None, **node: object) -> list:
    """Return the effective batches of one epoch; those of `texts` by default."""
    if data is None:
        data = texts()
    node = OmegaConf.create({**PAD, **node})
    return list(batching.effective_batches(node, data, [Slice(size, 1)], seed=0))


def batch_of_all(split: tf.data.Dataset, **node: object) -> tuple:
    """Return the one batch of all texts of a split, with its further parts."""
    (batch,) = batches(len(LENGTHS), Data(split, None), **node)
    return batch


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_batch_is_as_long_as_its_longest_example_needs(in_memory):
    padded_batches = batches(4, in_memory=in_memory)
    ragged_batches = batches(4, in_memory=in_memory, pad=None)
    for padded_batch, ragged_batch in zip(padded_batches, ragged_batches, strict=True):
        x, y, weights = padded_batch
        ragged_inputs, _ = ragged_batch
        lengths = ragged_inputs.row_lengths().numpy()

        # A multiple of four.
        padded_length = math.ceil(max(lengths) / 4) * 4
        shape = (len(lengths), padded_length)
        assert x.shape == y.shape == weights.shape == shape

        # (examples, positions): whether it is one of the text.
        mask = np.arange(padded_length) < lengths[:, None]
        assert weights.numpy().tolist() == mask.tolist()
        for padded, ragged in zip((x, y), ragged_batch, strict=True):
            values = padded.numpy()
            kept = []
            for row, length in zip(values, lengths, strict=True):
                kept.append(row[:length].tolist())
            assert kept == ragged.to_list()
            assert not values[~mask].any()


@pytest.mark.slow
def test_weights_of_examples_and_of_elements_are_spread_and_padded():
    # One weight an example: each of its positions gets it.
    weights_of_examples = np.arange(1, len(LENGTHS) + 1, dtype="float32")
    weighted = tf.data.Dataset.zip(
        texts().train, tf.data.Dataset.from_tensor_slices(weights_of_examples)
    )
    weighted = weighted.map(lambda example, weight: (*example, weight))
    _, _, weights = batch_of_all(weighted)
    expected = weights_of_examples * np.array(LENGTHS)
    assert sorted(weights.numpy().sum(1)) == sorted(expected)

    # One weight a position: here the label itself, which is 0 where it is padded.
    elements = texts().train.map(lambda x, y: (x, y, tf.cast(y, tf.float32)))
    _, y, weights = batch_of_all(elements)
    assert (weights.numpy() == y.numpy()).all()

    # A label without positions has no weights.
    outputs = texts().train.map(lambda x, y: (x, {"next": y, "first": x[0]}))
    _, _, weights = batch_of_all(outputs)
    assert weights["next"].shape == (len(LENGTHS), PADDED_LENGTH)
    assert weights["first"] is None


def weighted(lengths_of_weights=LENGTHS, size=None, length=None) -> Data:
    """Return the texts as a dataset function does, with weights of these lengths.

    Args:
        lengths_of_weights: the number of weights of each text.
        size: the size of the weights' axis, if it is fixed.
        length: the length of each text; by default, that of `LENGTHS`.
    """

    def examples():
        for row, count in zip(texts().train, lengths_of_weights, strict=True):
            tokens = row[0].numpy()
            if length is not None:
                tokens = np.arange(1, length + 1, dtype="int32")
            yield tokens, tokens, np.full(count, 1 / count, "float32")

    spec = tf.TensorSpec([None], tf.int32)
    weights_spec = tf.TensorSpec([size], tf.float32)
    split = tf.data.Dataset.from_generator(
        examples, output_signature=(spec, spec, weights_spec)
    )
    return Data(
        split.apply(tf.data.experimental.assert_cardinality(len(LENGTHS))), None
    )


@pytest.mark.parametrize(
    ("size", "made_ragged"),
    mostly_slow(
        [(1, False), (1, True), (4, False), (4, True)], [(1, False), (4, True)]
    ),
)
def test_weights_of_other_lengths_than_the_labels_are_named_with_the_example(
    size, made_ragged
):
    lengths = list(LENGTHS)
    lengths[5] = 3  # its text has four tokens
    node = {"_target_": f"{__name__}.weighted", "lengths_of_weights": lengths, **PAD}
    data = load.load(OmegaConf.create(node))
    with pytest.raises(DataError) as error, errors_located(data, DataFiles(())):
        list(batching.in_order(data.train, size, PAD["pad"], padded=not made_ragged))
    assert str(error.value) == (
        "the data cannot be read: example 5 of the train split, counted from 0: "
        "sample_weight must be one value, or one for each position of y. "
        "Received: 3 for 4 positions"
    )


@pytest.mark.parametrize("size", mostly_slow([1, 3], [3]))
def test_weights_of_positions_may_have_an_axis_of_fixed_size(size):
    """Labels of one length have as many weights, or each of them one."""
    node = {
        "_target_": f"{__name__}.weighted",
        "lengths_of_weights": [size] * len(LENGTHS),
        "size": size,
        "length": 3,
        **PAD,
    }
    data = load.load(OmegaConf.create(node))
    for batch_size in (1, 4):
        batches_in_order = batching.in_order(data.train, batch_size, PAD["pad"])
        _, y, weights = next(iter(batches_in_order))
        assert weights.shape == y.shape == (batch_size, 4)
        expected = np.full(y.shape, 1 / size, "float32")
        expected[:, 3:] = 0
        np.testing.assert_array_equal(weights, expected)


@pytest.mark.slow
def test_each_step_of_labels_that_have_an_axis_of_their_own_has_one_weight():
    one_hot = texts().train.map(lambda x, y: (x, tf.one_hot(y, TOKENS)))
    _, y, weights = batch_of_all(one_hot)
    assert y.shape == (len(LENGTHS), PADDED_LENGTH, TOKENS)
    assert weights.shape == (len(LENGTHS), PADDED_LENGTH)
    assert weights.numpy().sum() == sum(LENGTHS)


@pytest.mark.slow
def test_an_axis_of_one_size_keeps_it():
    images = texts().train.map(lambda x, y: (tf.ones([6, tf.size(x), 1]), y[0]))
    x, _ = batch_of_all(images, pad={"multiple": 16, "value": 0})
    assert x.shape == (len(LENGTHS), 6, 16, 1)


@pytest.mark.slow
def test_words_are_padded_with_empty_ones():
    words = texts().train.map(lambda x, y: (tf.strings.as_string(x), y[0]))
    x, _ = batch_of_all(words)
    # Each text is shorter than the batch.
    assert x.numpy()[:, -1].tolist() == [b""] * len(LENGTHS)


def test_a_pad_value_that_its_type_has_not_is_rejected():
    small = texts().train.map(lambda x, y: (tf.cast(x, tf.uint8), y))
    line = r"dataset.pad.value must be a value of the inputs' type, uint8"
    for value in (-1, 0.5):
        pad = {"multiple": 4, "value": value}
        with pytest.raises(ConfigError, match=line):
            batches(4, Data(small, None), pad=pad)


def test_a_pad_value_that_is_a_value_of_the_inputs_is_rejected():
    line = r"dataset.pad.value must not occur in the inputs"
    with pytest.raises(tf.errors.InvalidArgumentError, match=line):
        batches(4, texts(first=0))
    assert batches(4, texts(first=0), pad={"multiple": 4, "value": TOKENS})


def test_ragged_inputs_must_not_contain_the_padding_either():
    """A cut by tokens pads them later."""
    line = r"dataset.pad.value must not occur in the inputs"
    with pytest.raises(tf.errors.InvalidArgumentError, match=line):
        list(batching.in_order(texts(first=0).train, 4, PAD["pad"], padded=False))
    assert list(batching.in_order(texts().train, 4, PAD["pad"], padded=False))


def model() -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None,), dtype="int32")
    embedded = keras.layers.Embedding(TOKENS + 1, WIDTH)(inputs)
    attention = keras.layers.MultiHeadAttention(1, WIDTH)
    hidden = attention(embedded, embedded, use_causal_mask=True) + embedded
    return keras.Model(inputs, keras.layers.Dense(TOKENS)(hidden))


def step(
    batch, micro_batch_size: int, reduction: str = "mean_with_sample_weight"
) -> tuple[list, dict]:
    """Return the weights after one update, and its results."""
    network = model()
    optimizer = keras.optimizers.SGD(RATE)
    optimizer.build(network.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction
    )
    update = Update(network, loss, optimizer, micro_batch_size)
    results = tf.function(update, autograph=False)(batch)
    values = {name: float(value) for name, value in results.items()}
    return network.get_weights(), values


def deviation(weights: list, others: list) -> float:
    """Return the greatest absolute difference of two models' weights."""
    differences = []
    for weight, other in zip(weights, others, strict=True):
        differences.append(np.abs(weight - other).max())
    return float(max(differences))


def test_what_is_padded_changes_nothing_but_the_shape(float64):
    """The reference is each text alone, unpadded, summed by hand.

    The mean of the texts' means is something else.
    """
    network = model()
    losses_of_texts = []
    with tf.GradientTape() as tape:
        for x, y in texts().train:
            # A batch of one text.
            logits = network(x[None], training=True)
            losses = keras.losses.sparse_categorical_crossentropy(
                y[None], logits, from_logits=True
            )
            losses_of_texts.append(losses)
        sums = [tf.reduce_sum(losses) for losses in losses_of_texts]
        mean = tf.add_n(sums) / sum(LENGTHS)

    variables = [variable.value for variable in network.trainable_variables]
    gradients = tape.gradient(mean, variables)
    expected = []
    for weight, gradient in zip(network.get_weights(), gradients, strict=True):
        step_of_weight = RATE * tf.convert_to_tensor(gradient).numpy()
        expected.append(weight - step_of_weight)

    batch = batch_of_all(texts().train)
    for micro_batch_size in (len(LENGTHS), 2):
        weights, results = step(batch, micro_batch_size)
        assert deviation(weights, expected) < 1e-12
        assert abs(results["loss"] - float(mean)) < 1e-12

    means = [tf.reduce_mean(losses) for losses in losses_of_texts]
    mean_of_means = float(tf.reduce_mean(means))
    assert abs(mean_of_means - float(mean)) > 1e-3

    # Keras' default divides by the padding as well.
    _, results = step(batch, 2, "sum_over_batch_size")
    assert results["loss"] < 0.7 * float(mean)


@pytest.mark.slow
def test_more_padding_changes_nothing(float64):
    batch = batch_of_all(texts().train)
    longer = batch_of_all(texts().train, pad={"multiple": 32, "value": 0})
    inputs_of_longer, *_ = longer
    assert inputs_of_longer.shape[1] == 32
    weights, _ = step(batch, 4)
    weights_of_longer, _ = step(longer, 4)
    assert deviation(weights, weights_of_longer) < 1e-12
