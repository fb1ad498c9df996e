"""`jit_compile`: what XLA compiles, how often, and that it computes the same."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.framework.config import disable_op_determinism

from pipeline.accumulation import AccumulatingModel, Evaluation, Update
from pipeline.accumulation.internals import compiled_by_xla, shapes_compiled
from tests.accumulation.replicas import strategy_on
from tests.parameters import mostly_slow

# As in test_update.py: an update in float64 is equal to 1e-15 in any order of its sums.
EXACT = 1e-12
MICRO = 5
NOT_COMPILED = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError)


class Interpreted(layers.Layer):
    """Runs in Python, which XLA cannot."""

    def call(self, x):
        zeros = tf.numpy_function(np.zeros_like, [x], x.dtype)
        return x + tf.ensure_shape(zeros, x.shape)


class Traced(layers.Layer):
    """Counts how often it is traced in training, and in evaluation."""

    def __init__(self):
        super().__init__()
        self.traces = {True: 0, False: 0}

    def call(self, x, training=False):
        if tf.inside_function():
            self.traces[bool(training)] += 1
        return x


class Seen(layers.LSTM):
    """Notes whether it may use cuDNN where it computes."""

    def __init__(self, units):
        super().__init__(units)
        self.seen = set()

    def inner_loop(self, *arguments, **options):
        self.seen.add(self.use_cudnn)
        return super().inner_loop(*arguments, **options)


@pytest.fixture
def gpu(monkeypatch):
    """TensorFlow says that it has a GPU; what is computed is computed on the CPU."""
    devices = [
        tf.config.PhysicalDevice("/physical_device:CPU:0", "CPU"),
        tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU"),
    ]
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda: devices)


def network(*middle):
    keras.utils.set_random_seed(0)
    hidden = layers.Dense(4, "tanh")
    return keras.Sequential([keras.Input((3,)), hidden, *middle, layers.Dense(1)])


def batch(examples, shape=(3,)):
    random = np.random.default_rng(examples)
    x = random.normal(size=(examples, *shape))
    return x, random.normal(size=(examples, 1))


def update_of(model, jit_compile, **options):
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(model.trainable_variables)
    loss = keras.losses.MeanSquaredError()
    return Update(model, loss, optimizer, MICRO, jit_compile=jit_compile, **options)


def traced(function, shape=(None, 3), dtype=tf.float64):
    specs = (tf.TensorSpec(shape, dtype), tf.TensorSpec((None, 1), dtype))
    return tf.function(
        lambda x, y: function((x, y)), input_signature=specs, autograph=False
    )


def mean_loss_of(evaluation):
    return lambda batch: evaluation(batch).mean_loss()


def test_auto_is_off_on_a_cpu():
    assert not compiled_by_xla("auto", network(), batch(2))


def test_auto_is_what_fit_makes_of_it(gpu):
    assert compiled_by_xla("auto", network(), batch(2))
    zooming = network(layers.Rescaling(1.0), layers.RandomZoom(0.1))
    assert not compiled_by_xla("auto", zooming, batch(2))
    inside = network(keras.Sequential([keras.Input((4,)), layers.Identity()]))
    assert compiled_by_xla("auto", inside, batch(2))
    # As of Keras' LSTM where it uses cuDNN.
    inside.layers[1].layers[0].supports_jit = False
    assert not compiled_by_xla("auto", inside, batch(2))

    x, y = batch(2)
    ragged = tf.RaggedTensor.from_tensor(x)
    assert not compiled_by_xla("auto", network(), (ragged, y))
    with strategy_on(2).scope():
        assert not compiled_by_xla("auto", network(), batch(2))
    tf.config.experimental.enable_op_determinism()
    try:
        assert not compiled_by_xla("auto", network(), batch(2))
    finally:
        disable_op_determinism()


def test_what_is_asked_for_holds_anywhere(gpu):
    inside = network(layers.Identity())
    inside.layers[1].supports_jit = False
    assert compiled_by_xla(True, inside, batch(2)) is True
    assert compiled_by_xla(False, network(), batch(2)) is False


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_it_computes_the_same_and_is_traced_once():
    """It takes full micro-batches and a short last one.

    Noise that does not depend on the cut does not depend on XLA either.
    """

    def numbers(jit_compile):
        """Return all results of updates and evaluations, and the trained weights."""
        counts = Traced()
        dropout = layers.Dropout(0.3, seed=1)
        model = network(dropout, counts, layers.GaussianNoise(0.1, seed=2))
        counts.traces = {True: 0, False: 0}  # Keras traces it, too
        update = update_of(model, jit_compile, same_noise=True)
        evaluation = Evaluation(model, update.objective, MICRO, jit_compile=jit_compile)
        step = traced(update)
        evaluate = traced(mean_loss_of(evaluation))

        results = []
        for size in (10, 13, 3, 5):
            results += [float(value) for value in step(*batch(size)).values()]
        for size in (13, 2):
            results.append(float(evaluate(*batch(size))))
        assert update.compiled is jit_compile
        # In training once more, for what `same_noise` finds out before.
        assert counts.traces == {True: 2, False: 1}
        weights = [np.ravel(weight) for weight in model.get_weights()]
        return np.concatenate([results, *weights])

    np.testing.assert_allclose(numbers(True), numbers(False), rtol=EXACT, atol=EXACT)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("jit_compile", "evaluates"),
    mostly_slow(
        itertools.product([False, True, "auto"], [False, True]), [("auto", False)]
    ),
)
def test_whole_micro_batches_are_compiled_and_a_short_last_one_is_not(
    gpu, jit_compile, evaluates
):
    model = network(Interpreted())
    function = update_of(model, jit_compile)
    if evaluates:
        objective = function.objective
        function = mean_loss_of(
            Evaluation(model, objective, MICRO, jit_compile=jit_compile)
        )
    step = traced(function)
    step(*batch(MICRO - 1))
    if jit_compile is False:
        return
    for size in (MICRO, MICRO + 2):
        with pytest.raises(NOT_COMPILED):
            step(*batch(size))


@pytest.mark.slow
def test_a_network_that_can_use_cudnn_does_without(gpu):
    recurrent = Seen(2)
    inside = keras.Sequential([keras.Input((None, 3)), recurrent])
    model = keras.Sequential([keras.Input((None, 3)), inside, layers.Dense(1)])
    x, y = batch(MICRO, (4, 3))
    for jit_compile, seen in ((True, {False}), (False, {"auto"})):
        recurrent.seen = set()
        step = traced(update_of(model, jit_compile), (None, None, 3), tf.float32)
        loss = step(x.astype("float32"), y.astype("float32"))["loss"]
        assert np.isfinite(float(loss))
        assert recurrent.seen == seen
        assert recurrent.use_cudnn == "auto"


def test_batches_of_the_same_lengths_share_what_is_compiled():
    numbers = []
    for examples, shape in ((4, (8, 1)), (3, (8, 1)), (4, (16, 1)), (4, (1, 8))):
        numbers.append(int(shapes_compiled(batch(examples, shape))))
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) == 3
    assert all(0 <= number < 2**53 for number in numbers)
    # A whole update in one program is compiled for each number of examples.
    whole = [int(shapes_compiled(batch(n, (8, 1)), whole_batch=True)) for n in (4, 3)]
    assert whole[0] != whole[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("jit_compile", "compiled"), [("auto", True), (True, True), (False, False)]
)
def test_compile_and_fit_do_as_asked(gpu, jit_compile, compiled):
    inner = network(Interpreted())
    model = AccumulatingModel(inner, MICRO)
    model.compile("sgd", "mse", jit_compile=jit_compile)
    assert model.get_compile_config()["jit_compile"] == jit_compile
    x, y = batch(MICRO)
    for call in (model.fit, model.evaluate):
        if compiled:
            with pytest.raises(NOT_COMPILED):
                call(x, y, batch_size=MICRO, verbose=0)
        else:
            call(x, y, batch_size=MICRO, verbose=0)
