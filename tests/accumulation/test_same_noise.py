"""Dropout and noise that do not depend on how an effective batch is cut."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import Update
from pipeline.accumulation.internals import (
    draw_noise_seeds,
    noise_by_position,
    noisy_layers,
)
from pipeline.accumulation.same_noise import Key
from tests.accumulation.replicas import strategy_on
from tests.parameters import mostly_slow

# As in test_update.py: 1e-15 an update, which 8 updates add up and these rates hardly
# amplify.
EXACT = 1e-12
TIME = 6
WIDTH = 8
# A tail that two devices cannot share evenly, and one that leaves a device idle.
SIZES = (48, 48, 29, 1)
UPDATES = 8


pytestmark = pytest.mark.usefixtures("float64")


def sequences():
    """Return a model with each layer that can draw for an example.

    One is called twice, some noise is shared by examples, and attention has its own
    dropout.
    """
    keras.utils.set_random_seed(0)
    twice = layers.Dropout(0.3)
    inputs = keras.Input((TIME, WIDTH))
    x = layers.SpatialDropout1D(0.2)(twice(inputs))
    x = layers.MultiHeadAttention(2, 4, dropout=0.2)(x, x)
    x = layers.GaussianDropout(0.1)(layers.GaussianNoise(0.1)(x))
    x = layers.AlphaDropout(0.1)(layers.Dense(7, "tanh")(x))
    x = layers.Dropout(0.2, noise_shape=(1, 1, 7))(x)
    x = layers.Dropout(0.2, noise_shape=(None, 1, 7))(x)
    x = layers.Dropout(0.2, noise_shape=(7,))(x)
    return keras.Model(inputs, layers.Dense(3)(twice(layers.Flatten()(x))))


def images():
    """Return a model with noise over whole feature maps.

    In its last dropout an example has several rows.
    """
    keras.utils.set_random_seed(0)
    inputs = keras.Input((TIME, WIDTH))
    x = layers.SpatialDropout2D(0.3)(layers.Reshape((TIME, 4, 2))(inputs))
    x = layers.SpatialDropout3D(0.3)(layers.Reshape((2, 3, 4, 2))(x))
    rows = layers.Dropout(0.3)(keras.ops.reshape(x, (-1, 3)))
    x = keras.ops.reshape(rows, (-1, TIME * WIDTH))
    return keras.Model(inputs, layers.Dense(3)(x))


MODELS = {"sequences": sequences, "images": images}


def batches():
    random = np.random.default_rng(0)
    x = random.normal(size=(sum(SIZES), TIME, WIDTH))
    y = random.integers(0, 3, sum(SIZES))
    stops = np.cumsum(SIZES)
    for update in range(UPDATES):
        stop = stops[update % 4]
        part = slice(stop - SIZES[update % 4], stop)
        yield x[part], y[part]


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def built(model):
    """Return an optimizer that is built for the model."""
    optimizer = keras.optimizers.SGD(0.02, momentum=0.9)
    optimizer.build(model.trainable_variables)
    return optimizer


@functools.cache
def losses(name, micro_batch_size, devices=1, same_noise=True, jit_compile=False):
    """Return the loss of each update of a model of `MODELS`."""
    strategy = strategy_on(devices)
    with strategy.scope():
        model = MODELS[name]()
        optimizer = built(model)
    update = Update(
        model,
        cross_entropy(),
        optimizer,
        micro_batch_size,
        same_noise=same_noise,
        strategy=strategy,
        jit_compile=jit_compile,
    )
    signature = (
        tf.TensorSpec((None, TIME, WIDTH), tf.float64),
        tf.TensorSpec((None,), tf.int64),
    )
    step = tf.function(
        lambda x, y: update((x, y))["loss"], input_signature=signature, autograph=False
    )
    return np.array([float(step(*batch)) for batch in batches()])


@pytest.mark.parametrize(
    ("name", "micro_batch_size", "devices"),
    mostly_slow(
        [
            ("sequences", 7, 1),
            ("images", 7, 1),
            ("sequences", 5, 2),
            ("images", 5, 2),
        ],
        [("images", 7, 1)],
    ),
)
def test_noise_is_that_of_one_piece_whatever_the_cut(name, micro_batch_size, devices):
    in_pieces = losses(name, micro_batch_size, devices)
    np.testing.assert_allclose(in_pieces, losses(name, 48), rtol=EXACT)


@pytest.mark.parametrize("name", mostly_slow(MODELS, ["images"]))
def test_otherwise_each_micro_batch_has_noise_of_its_own(name):
    in_pieces = losses(name, 12, same_noise=False)
    in_one_piece = losses(name, 48, same_noise=False)
    assert np.abs(in_pieces / in_one_piece - 1).max() > 1e9 * EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["images", pytest.param("sequences", marks=pytest.mark.soak)]
)
def test_noise_is_that_of_one_piece_where_it_is_compiled(name):
    in_one_piece = losses(name, 48, jit_compile=True)
    in_pieces = losses(name, 16, jit_compile=True)
    np.testing.assert_allclose(in_pieces, in_one_piece, rtol=EXACT)


def outputs(layer, x, starts, key=(1, 2)):
    """Return the outputs of `layer` for parts of `x`, which begin at `starts`."""

    def call(part, place):
        noisy = noisy_layers(keras.Sequential([layer]), part)
        keys = [tf.constant(key, tf.int64)]
        with noise_by_position(noisy, keys, place, tf.shape(part)[0]):
            return layer(part, training=True)

    function = tf.function(call, reduce_retracing=True, autograph=False)
    specs = tf.TensorSpec((None, *x.shape[1:]), x.dtype), tf.TensorSpec((), tf.int32)
    function = function.get_concrete_function(*specs)
    outputs_of_parts = []
    for start, stop in zip(starts, [*starts[1:], len(x)], strict=True):
        part = function(tf.constant(x[start:stop]), tf.constant(start))
        outputs_of_parts.append(part)
    return np.concatenate(outputs_of_parts)


GAUSSIAN = (layers.GaussianDropout, layers.GaussianNoise)
BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}


@pytest.mark.parametrize(
    ("width", "dtype"),
    mostly_slow(
        [
            (1, "float64"),
            (3, "float64"),
            (8, "float32"),
            (3, "float16"),
            (3, "bfloat16"),
        ],
        [(3, "float64")],
    ),
)
@pytest.mark.parametrize(
    "kind",
    [layers.Dropout, layers.AlphaDropout, layers.GaussianDropout, layers.GaussianNoise],
)
def test_every_example_has_its_place_in_the_noise(kind, width, dtype):
    layer = kind(0.3, dtype=dtype)
    x = tf.ones((64, width), dtype).numpy()
    in_one_piece = outputs(layer, x, [0]).astype("float64")
    in_pieces = outputs(layer, x, [0, 1, 4, 20, 44]).astype("float64")
    # The last bit of a logarithm or a cosine depends on its place in a vector of the
    # processor.
    bound = 0
    if kind in GAUSSIAN:
        bound = 8 * 2.0 ** -BITS[dtype]
    np.testing.assert_allclose(in_pieces, in_one_piece, rtol=bound, atol=bound)

    assert len(np.unique(in_one_piece.round(3), axis=0)) > 1
    with_another_key = outputs(layer, x, [0], key=(1, 3)).astype("float64")
    assert not np.array_equal(with_another_key, in_one_piece)


def test_gaussian_noise_with_a_deviation_of_one_has_its_place():
    x = np.ones((8, 3))
    in_one_piece = outputs(layers.GaussianNoise(1.0), x, [0])
    in_pieces = outputs(layers.GaussianNoise(1.0), x, [0, 1, 4])
    np.testing.assert_allclose(in_pieces, in_one_piece, rtol=EXACT, atol=EXACT)
    assert len(np.unique(in_one_piece.round(3))) > 8


def test_the_noise_is_what_keras_says_it_is():
    x = np.full((20000, 8), 2.0)
    # The error of a mean of 160,000 draws is 1/400 of their deviation, 2 at most; five
    # times for that.
    atol = 5 * 2 / 400
    dropped = outputs(layers.Dropout(0.25), x, [0])
    assert set(np.unique(dropped)) == {0, 2 / 0.75}
    np.testing.assert_allclose((dropped == 0).mean(), 0.25, atol=atol)

    def assert_mean_and_deviation(values, expected):
        np.testing.assert_allclose([values.mean(), values.std()], expected, atol=atol)

    noisy = outputs(layers.GaussianNoise(0.5), x, [0])
    assert_mean_and_deviation(noisy, [2, 0.5])
    multiplied = outputs(layers.GaussianDropout(0.5), x, [0])
    assert_mean_and_deviation(multiplied, [2, 2])
    normal = np.random.default_rng(0).normal(size=(20000, 8))
    alpha = outputs(layers.AlphaDropout(0.25), normal, [0])
    assert_mean_and_deviation(alpha, [0, 1])

    # All steps of a map are dropped, or none.
    maps = outputs(layers.SpatialDropout1D(0.25), np.ones((1000, 5, 3)), [0])
    assert (maps == maps[:, :1]).all()
    assert 0.2 < (maps == 0).mean() < 0.3


def test_examples_layers_and_updates_have_noise_of_their_own():
    x = np.ones((4, 400))
    of_examples = outputs(layers.Dropout(0.5), x, [0])
    assert len(np.unique(of_examples, axis=0)) == 4

    model = keras.Sequential(
        [keras.Input((4,)), layers.Dropout(0.5), layers.Dropout(0.5)]
    )
    first_update = np.array(draw_noise_seeds(noisy_layers(model, x)))
    second_update = np.array(draw_noise_seeds(noisy_layers(model, x)))
    assert not np.array_equal(first_update[0], first_update[1])
    assert not np.array_equal(first_update, second_update)


@pytest.mark.slow
def test_a_model_stays_as_keras_made_it(tmp_path):
    model = sequences()
    update = Update(model, cross_entropy(), built(model), 16, same_noise=True)
    x, y = next(batches())
    tf.function(update, autograph=False)((x, y))
    assert not any("call" in vars(layer) for layer in model.layers)

    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert list(map(type, loaded.layers)) == list(map(type, model.layers))
    expected = model.predict(x, verbose=0)
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), expected)
    # One key an update, of two calls and three cuts.
    assert np.asarray(model.layers[1].seed_generator.state)[1] == 1


def test_rows_that_are_of_no_example_are_refused():
    inputs = keras.Input((TIME,))
    add_row = layers.Lambda(
        lambda x: tf.concat([x, tf.ones_like(x[:1])], 0), output_shape=(TIME,)
    )
    drop_row = layers.Lambda(lambda x: x[:-1], output_shape=(TIME,))
    hidden = drop_row(layers.Dropout(0.5)(add_row(inputs)))
    model = keras.Model(inputs, layers.Dense(1)(hidden))
    loss = keras.losses.MeanSquaredError()
    update = Update(model, loss, built(model), 2, same_noise=True)
    step = tf.function(update, autograph=False)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="the noise has rows that belong to no examp",
    ):
        step((np.ones((4, TIME)), np.ones((4, 1))))


@pytest.mark.slow
def test_replicas_whose_seeds_have_parted_draw_from_one():
    strategy = strategy_on(2)
    with strategy.scope():
        model = images()
        optimizer = built(model)
    # Seeds part where a plain update leaves a replica without an example.
    seeds = [layer.seed_generator.state.value for layer in noisy_layers(model, ())]
    for seed in seeds:
        strategy.experimental_local_results(seed)[1].assign([7, 7])

    update = Update(
        model, cross_entropy(), optimizer, 16, strategy=strategy, same_noise=True
    )
    x, y = next(batches())
    value = tf.function(lambda: update((x, y))["loss"], autograph=False)()
    np.testing.assert_allclose(value, losses("images", 48)[0], rtol=EXACT)
    for seed in seeds:
        first, second = strategy.experimental_local_results(seed)
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("seed", mostly_slow([5, 906691060, 2**31 + 5], [2**31 + 5]))
def test_the_key_of_a_second_call_is_that_of_tensorflow_with_xla_too(seed):
    """It is made of the folded seed, which is negative for 5 and 2³¹ + 5."""
    pair = tf.constant([seed, 0], tf.int64)
    folded = tf.random.experimental.stateless_fold_in(pair, 1)
    expected = tf.raw_ops.StatelessRandomGetKeyCounter(seed=folded)
    for jit_compile in (False, True):
        function = tf.function(
            lambda: Key.from_seed(pair, 1), jit_compile=jit_compile, autograph=False
        )
        _, key, counter = function()
        assert key.numpy().tolist() == expected.key.numpy().tolist()
        assert counter.numpy().tolist() == expected.counter.numpy().tolist()
