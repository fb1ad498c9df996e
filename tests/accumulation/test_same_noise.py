"""Dropout and noise that do not depend on how an effective batch is cut."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import Update
from pipeline.accumulation.internals import drawn, keys_of, noisy_layers, trace_forward
from pipeline.accumulation.same_noise import Key
from tests.parameters import mostly_slow

# As in test_update.py: 1e-15 an update, which 8 updates add up and these rates hardly amplify.
EXACT = 1e-12
TIME, WIDTH = 6, 8
SIZES = (
    48,
    48,
    29,
    1,
)  # a tail that two devices cannot share evenly, and one that leaves a device idle
UPDATES = 8


pytestmark = pytest.mark.usefixtures("float64")


def sequences():
    """Each ready layer, one that is called twice, noise that examples share, and the dropout inside of attention."""
    keras.utils.set_random_seed(0)
    twice = layers.Dropout(0.3)
    inputs = keras.Input((TIME, WIDTH))
    x = layers.SpatialDropout1D(0.2)(twice(inputs))
    x = layers.MultiHeadAttention(2, 4, dropout=0.2)(x, x)
    x = layers.GaussianDropout(0.1)(layers.GaussianNoise(0.1)(x))
    x = layers.AlphaDropout(0.1)(layers.Dense(7, "tanh")(x))
    x = layers.Dropout(0.2, noise_shape=(None, 1, 7))(
        layers.Dropout(0.2, noise_shape=(1, 1, 7))(x)
    )
    x = layers.Dropout(0.2, noise_shape=(7,))(x)
    return keras.Model(inputs, layers.Dense(3)(twice(layers.Flatten()(x))))


def images():
    """Noise over whole feature maps, and rows that are several of an example's."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((TIME, WIDTH))
    x = layers.SpatialDropout2D(0.3)(layers.Reshape((TIME, 4, 2))(inputs))
    x = layers.SpatialDropout3D(0.3)(layers.Reshape((2, 3, 4, 2))(x))
    x = keras.ops.reshape(
        layers.Dropout(0.3)(keras.ops.reshape(x, (-1, 3))), (-1, TIME * WIDTH)
    )
    return keras.Model(inputs, layers.Dense(3)(x))


MODELS = {"sequences": sequences, "images": images}


def batches():
    random = np.random.default_rng(0)
    x, y = (
        random.normal(size=(sum(SIZES), TIME, WIDTH)),
        random.integers(0, 3, sum(SIZES)),
    )
    stops = np.cumsum(SIZES)
    for update in range(UPDATES):
        part = slice(stops[update % 4] - SIZES[update % 4], stops[update % 4])
        yield x[part], y[part]


@functools.cache
def losses(name, micro_batch_size, devices=1, same_noise=True, jit_compile=False):
    strategy = (
        tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        if devices == 2
        else tf.distribute.get_strategy()
    )
    with strategy.scope():
        model, optimizer = MODELS[name](), keras.optimizers.SGD(0.02, momentum=0.9)
        optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {
        "same_noise": same_noise,
        "strategy": strategy,
        "jit_compile": jit_compile,
    }
    update = Update(model, loss, optimizer, micro_batch_size, **options)
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
        [(name, *cut) for cut in ((7, 1), (5, 2)) for name in MODELS],
        [("images", 7, 1)],
    ),
)
def test_noise_is_that_of_one_piece_whatever_the_cut(name, micro_batch_size, devices):
    np.testing.assert_allclose(
        losses(name, micro_batch_size, devices), losses(name, 48), rtol=EXACT
    )


@pytest.mark.parametrize("name", mostly_slow(MODELS, ["images"]))
def test_otherwise_each_micro_batch_has_noise_of_its_own(name):
    apart = np.abs(
        losses(name, 12, same_noise=False) / losses(name, 48, same_noise=False) - 1
    )
    assert apart.max() > 1e9 * EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["images", pytest.param("sequences", marks=pytest.mark.soak)]
)
def test_noise_is_that_of_one_piece_where_it_is_compiled(name):
    whole, cut = (losses(name, size, jit_compile=True) for size in (48, 16))
    np.testing.assert_allclose(cut, whole, rtol=EXACT)


def outputs(layer, x, places, key=(1, 2)):
    """What `layer` gives for parts of `x`, which begin at `places`."""
    call = tf.function(
        lambda part, place: placed(layer, part, place, key),
        reduce_retracing=True,
        autograph=False,
    )
    specs = tf.TensorSpec((None, *x.shape[1:]), x.dtype), tf.TensorSpec((), tf.int32)
    call = call.get_concrete_function(*specs)
    stops = [*places[1:], len(x)]
    return np.concatenate(
        [
            call(tf.constant(x[a:b]), tf.constant(a))
            for a, b in zip(places, stops, strict=True)
        ]
    )


def placed(layer, part, place, key):
    model = keras.Sequential([layer])
    with drawn(
        noisy_layers(model, part),
        [tf.constant(key, tf.int64)],
        place,
        tf.shape(part)[0],
    ):
        return layer(part, training=True)


GAUSSIAN = (layers.GaussianDropout, layers.GaussianNoise)


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
        [(3, "float64"), (3, "bfloat16")],
    ),
)
@pytest.mark.parametrize(
    "kind",
    [layers.Dropout, layers.AlphaDropout, layers.GaussianDropout, layers.GaussianNoise],
)
def test_every_example_has_its_place_in_the_noise(kind, width, dtype):
    layer = kind(0.3, dtype=dtype)
    x = tf.ones((64, width), dtype).numpy()
    whole = outputs(layer, x, [0])
    # The last bit of a logarithm or a cosine depends on its place in a vector of the processor.
    bits = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}[dtype]
    bit = dict.fromkeys(("rtol", "atol"), 8 * 2.0**-bits if kind in GAUSSIAN else 0)
    np.testing.assert_allclose(
        outputs(layer, x, [0, 1, 4, 20, 44]).astype("float64"),
        whole.astype("float64"),
        **bit,
    )
    assert len(np.unique(whole.astype("float64").round(3), axis=0)) > 1
    assert not np.array_equal(outputs(layer, x, [0], key=(1, 3)), whole)


def test_the_noise_is_what_keras_says_it_is():
    x = np.full((20000, 8), 2.0)
    # The error of a mean of 160,000 draws is 1/400 of their deviation, 2 at most; five times for that.
    near = {"atol": 5 * 2 / 400}
    dropped = outputs(layers.Dropout(0.25), x, [0])
    assert set(np.unique(dropped)) == {0, 2 / 0.75}
    np.testing.assert_allclose((dropped == 0).mean(), 0.25, **near)
    noisy = outputs(layers.GaussianNoise(0.5), x, [0])
    np.testing.assert_allclose([noisy.mean(), noisy.std()], [2, 0.5], **near)
    multiplied = outputs(layers.GaussianDropout(0.5), x, [0])
    np.testing.assert_allclose([multiplied.mean(), multiplied.std()], [2, 2], **near)
    normal = np.random.default_rng(0).normal(size=(20000, 8))
    alpha = outputs(layers.AlphaDropout(0.25), normal, [0])
    np.testing.assert_allclose([alpha.mean(), alpha.std()], [0, 1], **near)
    maps = outputs(layers.SpatialDropout1D(0.25), np.ones((1000, 5, 3)), [0])
    assert (maps == maps[:, :1]).all()
    assert 0.2 < (maps == 0).mean() < 0.3


def test_examples_layers_and_updates_have_noise_of_their_own():
    layer = layers.Dropout(0.5)
    x = np.ones((4, 400))
    found = outputs(layer, x, [0])
    assert len(np.unique(found, axis=0)) == 4
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dropout(0.5), layers.Dropout(0.5)]
    )
    first, second = (np.array(keys_of(noisy_layers(model, x))) for _ in range(2))
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first, second)


@pytest.mark.slow
def test_a_model_stays_as_keras_made_it(tmp_path):
    model = sequences()
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = next(batches())
    tf.function(Update(model, loss, optimizer, 16, same_noise=True), autograph=False)(
        (x, y)
    )
    assert not any("call" in vars(layer) for layer in model.layers)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert [type(layer) for layer in loaded.layers] == [
        type(layer) for layer in model.layers
    ]
    np.testing.assert_array_equal(
        loaded.predict(x, verbose=0), model.predict(x, verbose=0)
    )
    assert (
        np.asarray(model.layers[1].seed_generator.state)[1] == 1
    )  # one key an update, of two calls and three cuts


def test_rows_that_are_of_no_example_are_refused():
    inputs = keras.Input((TIME,))
    more = layers.Lambda(
        lambda x: tf.concat([x, tf.ones_like(x[:1])], 0), output_shape=(TIME,)
    )(inputs)
    less = layers.Lambda(lambda x: x[:-1], output_shape=(TIME,))(
        layers.Dropout(0.5)(more)
    )
    model = keras.Model(inputs, layers.Dense(1)(less))
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    update = tf.function(
        Update(model, keras.losses.MeanSquaredError(), optimizer, 2, same_noise=True),
        autograph=False,
    )
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="same_noise: rows that are of no example"
    ):
        update((np.ones((4, TIME)), np.ones((4, 1))))


class Own(layers.Dropout):
    def call(self, inputs, training=False):
        return super().call(inputs, training=training) + 0


class Legacy(layers.Layer):
    def call(self, inputs, training=False):
        return (
            inputs + tf.random.normal(tf.shape(inputs), dtype=inputs.dtype)
            if training
            else inputs
        )


class Unseeded(layers.Layer):
    def call(self, inputs, training=False):
        return keras.random.dropout(inputs, 0.5) if training else inputs


class Generator(layers.Layer):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, inputs, training=False):
        return (
            inputs + self.generator.normal(tf.shape(inputs), dtype=inputs.dtype)
            if training
            else inputs
        )


class Seeds(layers.Layer):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.seeds = [keras.random.SeedGenerator(1)]

    def call(self, inputs, training=False):
        return (
            keras.random.dropout(inputs, 0.5, seed=self.seeds[0])
            if training
            else inputs
        )


class Plain(layers.Layer):
    """Draws nothing, in a function of its own."""

    def build(self, shape):
        self.scale = self.add_weight(shape=())

    def call(self, inputs):
        return tf.function(lambda x: x * self.scale.value, autograph=False)(inputs)


class TimeFirst(layers.Layer):
    """Gives its dropout the time on the first axis."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.dropout = layers.Dropout(0.5)

    def call(self, inputs, training=False):
        return tf.transpose(
            self.dropout(tf.transpose(inputs, (1, 0, 2)), training=training), (1, 0, 2)
        )


class Cell(layers.Layer):
    """Of a recurrent layer, whose loop calls its dropout once a step."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.state_size, self.dropout = WIDTH, layers.Dropout(0.5)

    def call(self, inputs, states, training=False):
        state = self.dropout(inputs, training=training) + states[0]
        return state, [state]


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (lambda: layers.Dropout(0.5), []),
        (lambda: layers.Dropout(0.0), []),
        (lambda: layers.LSTM(3, dropout=0.5, name="recurrent"), ["recurrent"]),
        (lambda: Own(0.5, name="own"), ["own"]),
        (lambda: Unseeded(), ["keras.random without a seed"]),
        (lambda: Seeds(name="listed"), ["listed"]),
        (lambda: Plain(), []),
        (lambda: TimeFirst(name="time_first"), ["time_first"]),
        (lambda: layers.RNN(Cell(), name="looping"), ["looping"]),
    ],
)
def test_what_cannot_have_it_is_named(layer, names):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((TIME, WIDTH)), layer(), layers.Dropout(0.1), layers.Dense(1)]
    )
    x = np.ones((2, TIME, WIDTH))
    assert trace_forward(model, x, same_noise=True).cut_dependent_noise == names
    drawing = set(trace_forward(model, x, same_noise=False).cut_dependent_noise)
    assert drawing >= {*names, model.layers[-2].name}


def test_ragged_examples_have_no_place_for_their_noise():
    inputs = keras.Input((None, WIDTH), ragged=True)
    dense = layers.Lambda(lambda x: x.to_tensor(), output_shape=(None, WIDTH))(inputs)
    model = keras.Model(
        inputs, layers.Dense(1)(layers.Dropout(0.5, name="padded")(dense))
    )
    x = tf.RaggedTensor.from_row_lengths(np.ones((5, WIDTH)), [2, 3])
    assert trace_forward(model, x, same_noise=True).cut_dependent_noise == ["padded"]


@pytest.mark.slow
def test_replicas_whose_seeds_have_parted_draw_from_one():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model, optimizer = images(), keras.optimizers.SGD(0.02)
        optimizer.build(model.trainable_variables)
    seeds = [layer.seed_generator.state.value for layer in noisy_layers(model, ())]
    for seed in seeds:  # as where a plain update leaves a replica without an example
        strategy.experimental_local_results(seed)[1].assign([7, 7])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    update = Update(model, loss, optimizer, 16, strategy=strategy, same_noise=True)
    x, y = next(batches())
    found = tf.function(lambda: update((x, y))["loss"], autograph=False)()
    np.testing.assert_allclose(found, losses("images", 48)[0], rtol=EXACT)
    for seed in seeds:
        first, second = strategy.experimental_local_results(seed)
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("kind", [Legacy, Generator])
def test_operations_of_tensorflow_that_draw_are_named(kind):
    model = keras.Sequential(
        [keras.Input((WIDTH,)), kind(name="legacy"), layers.Dense(1)]
    )
    (name,) = trace_forward(
        model, np.ones((2, WIDTH)), same_noise=True
    ).cut_dependent_noise
    assert "legacy" in name


@pytest.mark.parametrize("seed", [5, 906691060, 2**31 + 5])
def test_the_key_of_a_second_call_is_that_of_tensorflow_with_xla_too(seed):
    """It is made of the folded seed, which is negative for 5 and 2³¹ + 5."""
    given = tf.constant([seed, 0], tf.int64)
    folded = tf.random.experimental.stateless_fold_in(given, 1)
    expected = tf.raw_ops.StatelessRandomGetKeyCounter(seed=folded)
    for jit_compile in (False, True):
        _, *found = tf.function(
            lambda: Key.from_seed(given, 1), jit_compile=jit_compile, autograph=False
        )()
        assert [each.numpy().tolist() for each in found] == [
            each.numpy().tolist() for each in expected
        ]
