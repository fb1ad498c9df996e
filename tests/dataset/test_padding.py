"""Examples of unequal length: padded to the longest of their effective batch, and left out of what is computed."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from omegaconf import OmegaConf

from pipeline.accumulation import Update
from pipeline.common.errors import ConfigError
from pipeline.config.stages import Slice
from pipeline.dataset import Data
from pipeline.dataset import batches as batching

TOKENS, WIDTH = 12, 4
LENGTHS = (3, 1, 7, 2, 5, 4, 6, 2, 9)
PAD = {"pad": {"multiple": 4, "value": 0}}


def texts(first: int = 1) -> Data:
    numbers = np.random.default_rng(0)
    rows = [
        numbers.integers(first, TOKENS, length + 1).astype("int32")
        for length in LENGTHS
    ]
    spec = tf.TensorSpec([None], tf.int32)
    split = tf.data.Dataset.from_generator(
        lambda: ((row[:-1], row[1:]) for row in rows), output_signature=(spec, spec)
    )
    return Data(split.apply(tf.data.experimental.assert_cardinality(len(rows))), None)


def batches(size: int, data: Data | None = None, **node: object) -> list:
    settings = {"seed": 0, "slices": [Slice(size, 1)]}
    return list(
        batching.effective_batches(
            OmegaConf.create({**PAD, **node}), data or texts(), **settings
        )
    )


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_batch_is_as_long_as_its_longest_example_needs(in_memory):
    ragged = batches(4, in_memory=in_memory, pad=None)
    for (x, y, weights), (whole_x, whole_y) in zip(
        batches(4, in_memory=in_memory), ragged, strict=True
    ):
        lengths = whole_x.row_lengths().numpy()
        assert (
            x.shape
            == y.shape
            == weights.shape
            == (len(lengths), -(-max(lengths) // 4) * 4)
        )
        assert (
            weights.numpy().tolist()
            == (np.arange(x.shape[1]) < lengths[:, None]).tolist()
        )
        for padded, whole in ((x, whole_x), (y, whole_y)):
            kept = [
                row[:length].tolist()
                for row, length in zip(padded.numpy(), lengths, strict=True)
            ]
            assert kept == whole.to_list()
            assert not (padded.numpy() * (weights.numpy() == 0)).any()


@pytest.mark.slow
def test_weights_of_examples_and_of_elements_are_spread_and_padded():
    given = tf.data.Dataset.from_tensor_slices(
        np.arange(1, len(LENGTHS) + 1, dtype="float32")
    )
    weighted = tf.data.Dataset.zip(texts().train, given).map(lambda xy, w: (*xy, w))
    ((_, y, weights),) = batches(len(LENGTHS), Data(weighted, None))
    assert sorted(weights.numpy().sum(1)) == sorted(
        w * n for w, n in zip(range(1, 10), LENGTHS, strict=True)
    )
    elements = texts().train.map(lambda x, y: (x, y, tf.cast(y, tf.float32)))
    ((_, y, weights),) = batches(len(LENGTHS), Data(elements, None))
    assert (weights.numpy() == y.numpy()).all()
    outputs = texts().train.map(lambda x, y: (x, {"next": y, "first": x[0]}))
    ((_, _, weights),) = batches(len(LENGTHS), Data(outputs, None))
    assert weights["next"].shape == (9, 12)
    assert weights["first"] is None


@pytest.mark.slow
def test_each_step_of_labels_that_have_an_axis_of_their_own_has_one_weight():
    one_hot = texts().train.map(lambda x, y: (x, tf.one_hot(y, TOKENS)))
    ((_, y, weights),) = batches(len(LENGTHS), Data(one_hot, None))
    assert (y.shape, weights.shape) == ((9, 12, TOKENS), (9, 12))
    assert weights.numpy().sum() == sum(LENGTHS)
    images = texts().train.map(lambda x, y: (tf.ones([6, tf.size(x), 1]), y[0]))
    ((x, _),) = batches(
        len(LENGTHS), Data(images, None), pad={"multiple": 16, "value": 0}
    )
    assert x.shape == (9, 6, 16, 1)  # what is of one size stays so
    words = texts().train.map(lambda x, y: (tf.strings.as_string(x), y[0]))
    ((x, _),) = batches(len(LENGTHS), Data(words, None))
    assert x.numpy()[:, -1].tolist().count(b"") == 9


def test_a_pad_value_that_its_type_has_not_is_refused():
    small = texts().train.map(lambda x, y: (tf.cast(x, tf.uint8), y))
    for value in (-1, 0.5):
        with pytest.raises(
            ConfigError,
            match=r"dataset.pad.value must be a value of the inputs' type, uint8",
        ):
            batches(4, Data(small, None), pad={"multiple": 4, "value": value})


def test_a_pad_value_that_is_a_value_of_the_inputs_is_refused():
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"dataset.pad.value must not be a value of the inputs",
    ):
        batches(4, texts(first=0))
    assert batches(4, texts(first=0), pad={"multiple": 4, "value": TOKENS})


def model() -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None,), dtype="int32")
    hidden = keras.layers.Embedding(TOKENS + 1, WIDTH)(inputs)
    hidden = (
        keras.layers.MultiHeadAttention(1, WIDTH)(hidden, hidden, use_causal_mask=True)
        + hidden
    )
    return keras.Model(inputs, keras.layers.Dense(TOKENS)(hidden))


def step(
    batch, micro_batch_size: int, reduction: str = "mean_with_sample_weight"
) -> tuple[list, dict]:
    made = model()
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build(made.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction
    )
    results = tf.function(
        Update(made, loss, optimizer, micro_batch_size), autograph=False
    )(batch)
    return made.get_weights(), {name: float(value) for name, value in results.items()}


def deviation(ones: list, others: list) -> float:
    return max(
        float(np.abs(one - other).max())
        for one, other in zip(ones, others, strict=True)
    )


def test_what_is_padded_changes_nothing_but_the_shape(float64):
    """Against each text alone, unpadded, summed by hand; the mean of the texts' means is something else."""
    (batch,) = batches(len(LENGTHS))
    made = model()
    with tf.GradientTape() as tape:
        alone = [
            keras.losses.sparse_categorical_crossentropy(
                y[None], made(x[None], training=True), from_logits=True
            )
            for x, y in texts().train
        ]
        mean = tf.add_n([tf.reduce_sum(values) for values in alone]) / sum(LENGTHS)
    gradients = tape.gradient(
        mean, [variable.value for variable in made.trainable_variables]
    )
    expected = [
        w - 0.5 * tf.convert_to_tensor(g).numpy()
        for w, g in zip(made.get_weights(), gradients, strict=True)
    ]
    for micro_batch_size in (9, 2):
        weights, results = step(batch, micro_batch_size)
        assert deviation(weights, expected) < 1e-12
        assert abs(results["loss"] - float(mean)) < 1e-12
    of_means = float(tf.reduce_mean([tf.reduce_mean(values) for values in alone]))
    assert abs(of_means - float(mean)) > 1e-3
    # Keras' default divides by the padding as well.
    assert step(batch, 2, "sum_over_batch_size")[1]["loss"] < 0.7 * float(mean)


@pytest.mark.slow
def test_more_padding_changes_nothing(float64):
    (batch,), (longer,) = batches(9), batches(9, pad={"multiple": 32, "value": 0})
    assert longer[0].shape[1] == 32
    assert deviation(step(batch, 4)[0], step(longer, 4)[0]) < 1e-12
