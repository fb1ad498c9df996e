"""Gradients that are accumulated over streams, windows and restarts.

Weights and `iterations` are those of plain Keras.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import (
    AccumulatingModel,
    AccumulatingOptimizer,
    GradientAccumulator,
)
from tests.accumulation.windows import WAYS, Row, by_parts, by_plain_keras, in_pairs
from tests.parameters import mostly_slow

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")
EPOCHS = 3
# Of weights of about 1: 72 examples in another order, 72 · 2⁻⁵³ = 8e-15.
CLOSE = 1e-13
ROWS = [Row(**row) for row in in_pairs(WAYS)]


def strategy_of(replicas: int) -> tf.distribute.Strategy:
    if replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice()
    )


@pytest.mark.parametrize("index", mostly_slow(range(len(ROWS)), range(6)))
def test_a_loop_takes_the_steps_of_plain_keras(float64, tmp_path, index):
    row = ROWS[index]
    expected, updates = by_plain_keras(row, EPOCHS)
    weights, iterations = by_parts(row, EPOCHS, strategy_of(row.replicas), tmp_path)
    assert iterations == updates
    np.testing.assert_allclose(weights, expected, rtol=0, atol=CLOSE)


def test_the_table_would_show_a_leaked_part(float64):
    """The control: an epoch's tail that leaks into the next one gives other weights."""
    flushed = Row(True, True, True, 4, None, False, False, 1)
    leaked = flushed._replace(flush=False)
    expected, updates = by_plain_keras(flushed, EPOCHS)
    weights, iterations = by_plain_keras(leaked, EPOCHS)
    assert (updates, iterations) == (6, 4)
    assert np.max(np.abs(weights - expected)) > 1e9 * CLOSE


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def decaying() -> keras.optimizers.Optimizer:
    return keras.optimizers.AdamW(0.1, weight_decay=0.5)


def network(dropout: bool = False) -> keras.Model:
    """Return one whose first kernel has a gradient that depends on no batch as well."""
    keras.utils.set_random_seed(0)
    penalty = keras.regularizers.L2(0.1)
    model = keras.Sequential([keras.Input((5,)), layers.Dense(4, "tanh")])
    if dropout:
        model.add(layers.Dropout(0.5, seed=1))
    model.add(layers.Dense(3, bias_regularizer=penalty))
    return model


def trained(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    examples: int,
    batch: int,
    known_length: bool,
) -> tuple[np.ndarray, int]:
    """Return the weights and `iterations` after two epochs of `fit`."""
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(examples, 5))
    y = np.arange(examples) % 3
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)
    if not known_length:
        data = data.filter(lambda *_: True)
    callbacks = []
    if isinstance(optimizer, AccumulatingOptimizer):
        callbacks.append(optimizer.flush_at_epoch_end())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
    weights = [np.ravel(values) for values in model.get_weights()]
    return np.concatenate(weights), int(model.optimizer.iterations.numpy())


@pytest.mark.parametrize("inner", [sgd, decaying])
@pytest.mark.parametrize("examples", [44, 48])
def test_data_of_unknown_length_in_fit(float64, inner, examples):
    """Plain Keras itself counts and decays once more at the end of such data.

    So its data have a known length.
    """
    expected, updates = trained(network(), inner(), examples, 16, True)
    assert updates == 6
    optimizer = AccumulatingOptimizer(inner(), 4)
    weights, iterations = trained(network(), optimizer, examples, 4, False)
    assert iterations == updates
    np.testing.assert_allclose(weights, expected, rtol=0, atol=CLOSE)

    model = AccumulatingModel(network(), micro_batch_size=4)
    weights, iterations = trained(model, inner(), examples, 16, False)
    assert iterations == updates
    np.testing.assert_allclose(weights, expected, rtol=0, atol=CLOSE)


def test_a_gradient_of_a_regularizer_alone_waits_for_the_batch(float64):
    """One that depends on the batch does not wait: else all would be in memory at once."""
    variables = [keras.Variable(np.ones(2)), keras.Variable(np.ones(2))]
    accumulator = GradientAccumulator(variables)
    data = tf.data.Dataset.from_tensors(np.ones(2)).repeat(3).filter(lambda _: True)

    @tf.function
    def step(iterator: tf.data.Iterator) -> None:
        batch = next(iterator)
        accumulator.add([batch * variables[0].value, 2 * variables[1].value])

    iterator = iter(data)
    for _ in range(3):
        step(iterator)
    with pytest.raises(tf.errors.OutOfRangeError):
        step(iterator)
    sums = [variable.numpy().tolist() for variable in accumulator.variables]
    assert sums == [3.0, [3.0, 3.0], [6.0, 6.0], [3.0, 3.0]]


def test_noise_is_the_same_whether_the_length_is_known(float64):
    weights = []
    for known_length in (True, False):
        model = AccumulatingModel(network(dropout=True), 4, same_noise=True)
        weights.append(trained(model, sgd(), 48, 16, known_length)[0])
    assert weights[0].tolist() == weights[1].tolist()


ONE = (1.0, 1.0)
Step = Callable[[], None]


def eager(function: Step) -> Step:
    return function


def traced(function: Step) -> Step:
    return tf.function(function, autograph=False)


def pair() -> list[keras.Variable]:
    return [keras.Variable(np.ones(2)), keras.Variable(np.ones(2))]


def apply(
    optimizer: AccumulatingOptimizer, variables: list[keras.Variable], present: str
) -> None:
    """Call `apply` with a gradient of one for `a`, for `b`, for both or for none."""
    gradients = []
    for name in "ab":
        gradient = None
        if name in present:
            gradient = tf.constant(ONE, "float64")
        gradients.append(gradient)
    optimizer.apply(gradients, variables)


def apply_to_one(optimizer: AccumulatingOptimizer, variable: keras.Variable) -> None:
    """Call `apply` with a gradient of one for a single variable."""
    optimizer.apply([tf.constant(ONE, "float64")], [variable])


@pytest.mark.parametrize("way", [eager, traced])
def test_a_restart_between_two_parts_loses_no_gradient(float64, tmp_path, way):
    """`a` has a gradient in the first part alone, `b` in the second: each moves by a half."""

    def begun() -> tuple[AccumulatingOptimizer, list[keras.Variable]]:
        variables = pair()
        optimizer = AccumulatingOptimizer(keras.optimizers.SGD(1.0), 2)
        optimizer.build(variables)
        return optimizer, variables

    optimizer, variables = begun()
    way(partial(apply, optimizer, variables, "a"))()
    path = tf.train.Checkpoint(optimizer=optimizer).save(tmp_path / "begun")

    optimizer, variables = begun()
    tf.train.Checkpoint(optimizer=optimizer).restore(path).assert_consumed()
    way(partial(apply, optimizer, variables, "b"))()
    assert [variable.numpy().tolist() for variable in variables] == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("way", [eager, traced])
def test_an_accumulator_averages_what_a_checkpoint_brought(float64, tmp_path, way):
    one = tf.constant(ONE, "float64")
    first = GradientAccumulator(pair())
    first.add([one, None])
    path = tf.train.Checkpoint(accumulator=first).save(tmp_path / "begun")

    second = GradientAccumulator(pair())
    tf.train.Checkpoint(accumulator=second).restore(path).assert_consumed()
    add = way(lambda: second.add([None, one]))
    add()
    average = way(second.average)
    assert [each.numpy().tolist() for each in average()] == [[0.5, 0.5]] * 2
    second.reset()
    add()
    if way is eager:
        assert second.average()[0] is None
    else:  # a trace cannot return None now and a tensor then
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="must be zero, not None"
        ):
            average()


@pytest.mark.parametrize("way", [eager, traced])
def test_momentum_leaves_a_variable_without_a_gradient(float64, way):
    """Plain Keras leaves it at 0.9 as well; a gradient of zero would move it to 0.81."""
    variables = pair()
    optimizer = AccumulatingOptimizer(sgd(), 2)
    optimizer.build(variables)
    both = way(partial(apply, optimizer, variables, "ab"))
    only_b = way(partial(apply, optimizer, variables, "b"))
    for step in (both, both, only_b, only_b):
        step()
    assert variables[0].numpy() == pytest.approx([0.9, 0.9])
    assert variables[1].numpy() == pytest.approx([0.71, 0.71])

    for step in (only_b, both):
        step()  # now `a` had one in the second part: its mean is a half
    assert variables[0].numpy() == pytest.approx([0.9 - 0.09 - 0.05] * 2)


@pytest.mark.parametrize("way", [eager, traced])
def test_losses_of_different_variables_share_an_optimizer_in_any_order(float64, way):
    variables = pair()
    optimizer = AccumulatingOptimizer(keras.optimizers.SGD(1.0), 3)
    optimizer.build(variables)
    only_a = way(partial(apply, optimizer, variables, "a"))
    only_b = way(partial(apply, optimizer, variables, "b"))
    for step in (only_a, only_b, only_a):
        step()
    assert variables[0].numpy() == pytest.approx([1 / 3] * 2)
    assert variables[1].numpy() == pytest.approx([2 / 3] * 2)


@pytest.mark.parametrize(
    ("way", "error"), [(eager, ValueError), (traced, tf.errors.InvalidArgumentError)]
)
def test_none_alone_in_a_whole_update_is_refused(float64, way, error):
    variables = pair()
    optimizer = AccumulatingOptimizer(sgd(), 2)
    optimizer.build(variables)
    nothing = way(partial(apply, optimizer, variables, ""))
    nothing()
    for _ in range(2):  # nothing has changed when it raises
        with pytest.raises(error, match="grads must have a gradient of at least one"):
            nothing()
    assert int(optimizer.parts.numpy()) == 1
    apply(optimizer, variables, "a")  # which counts for a half
    assert int(optimizer.iterations.numpy()) == 1
    assert variables[0].numpy() == pytest.approx([0.95, 0.95])

    nothing()
    with pytest.raises(ValueError, match="Received: None alone"):
        optimizer.flush()


def test_a_traced_step_that_does_not_fit_the_sums_changes_nothing(float64):
    """The step by `c` was traced when `a` and `b` had no gradients apart."""
    variables = [*pair(), *pair()[:1]]
    optimizer = AccumulatingOptimizer(keras.optimizers.SGD(1.0), 2)
    optimizer.build(variables)
    only_a, _, only_c = (
        traced(partial(apply_to_one, optimizer, variable)) for variable in variables
    )
    only_c()
    only_c()
    only_a()
    before = sums_of(optimizer.accumulator)
    for _ in range(2):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="None for some variables of a traced"
        ):
            only_c()
    assert int(optimizer.parts.numpy()) == 1
    assert sums_of(optimizer.accumulator) == before

    only_a()
    assert int(optimizer.iterations.numpy()) == 2
    assert [value.numpy().tolist() for value in variables] == [[0, 0], [1, 1], [0, 0]]


def test_too_many_sets_of_variables_in_a_traced_step_change_nothing(float64):
    variables = [*pair(), *pair(), *pair()]
    optimizer = AccumulatingOptimizer(keras.optimizers.SGD(1.0), 9)
    optimizer.build(variables)
    for variable in variables[:5]:
        apply_to_one(optimizer, variable)
    before = sums_of(optimizer.accumulator)
    step = traced(partial(apply_to_one, optimizer, variables[5]))
    with pytest.raises(ValueError, match="Received: 5 sets of variables that had"):
        step()
    assert int(optimizer.parts.numpy()) == 5
    assert sums_of(optimizer.accumulator) == before


def sums_of(accumulator: GradientAccumulator) -> list:
    return [variable.numpy().tolist() for variable in accumulator.variables]


def test_a_gradient_of_another_shape_changes_nothing(float64):
    variables = [keras.Variable(np.zeros(2)), keras.Variable(np.zeros((2, 3)))]
    accumulator = GradientAccumulator(variables)
    accumulator.add([tf.ones(2), tf.ones((2, 3))])
    before = sums_of(accumulator)

    shape = tf.constant([5, 3])
    rows = tf.IndexedSlices(tf.ones((1, 3)), tf.constant([0]), shape)
    for wrong in (tf.ones(3), tf.ones(()), tf.ones((2, 1)), tf.ones((1, 2, 3)), rows):
        with pytest.raises(
            ValueError, match=r"gradients must have the shapes of their variables\."
        ) as raised:
            accumulator.add([tf.ones(2), wrong])
        assert f"{tuple(wrong.shape)} for variable 1" in str(raised.value)
    with pytest.raises(ValueError, match=r"weight must be a scalar.*shape \(2,\)"):
        accumulator.add([tf.ones(2), tf.ones((2, 3))], weight=[1.0, 2.0])
    assert sums_of(accumulator) == before

    def of_unknown_shape(gradient: tf.Tensor) -> None:
        accumulator.add([tf.ones(2), gradient])

    step = tf.function(
        of_unknown_shape, input_signature=[tf.TensorSpec(None)], autograph=False
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="not compatible"):
        step(tf.ones(3))
    assert sums_of(accumulator) == before


def test_rows_without_a_shape_of_their_own():
    accumulator = GradientAccumulator([keras.Variable(np.zeros((3, 2)))])
    accumulator.add([tf.IndexedSlices(tf.ones((2, 2)), tf.constant([0, 0]))])
    assert accumulator.average()[0].numpy().tolist() == [[2, 2], [0, 0], [0, 0]]


def test_a_layer_that_is_frozen_between_two_fits(float64):
    """And unfrozen again: as plain Keras trains it on batches of 16."""

    def weights_of(optimizer: keras.optimizers.Optimizer, batch: int) -> np.ndarray:
        model = network()
        trained(model, optimizer, 48, batch, True)
        for trainable in (False, True):
            model.layers[0].trainable = trainable
            weights, _ = trained(model, optimizer, 48, batch, True)
        return weights

    expected = weights_of(sgd(), 16)
    found = weights_of(AccumulatingOptimizer(sgd(), 4), 4)
    np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE)


def test_variables_are_taken_as_keras_takes_them(float64):
    """A filtered list, TensorFlow's own variables, and any order."""
    one = tf.constant(ONE, "float64")

    def weights_of(optimizer: keras.optimizers.Optimizer) -> list:
        variables = pair()
        optimizer.build(variables)
        of_tensorflow = [variable.value for variable in variables]
        for _ in range(2):
            optimizer.apply_gradients([(one, variables[1])])
            optimizer.apply([2 * one, one], of_tensorflow)
            optimizer.apply([3 * one, one], variables[::-1])
            optimizer.apply([], [])
        return [variable.numpy() for variable in variables]

    found = weights_of(AccumulatingOptimizer(sgd(), 1))
    np.testing.assert_allclose(found, weights_of(sgd()), rtol=1e-15)


def test_variables_that_it_was_not_built_for():
    one = tf.ones(2)
    variables = pair()
    optimizer = AccumulatingOptimizer(sgd(), 2)
    with pytest.raises(ValueError, match="trainable_variables must be given before"):
        optimizer.apply([one])
    optimizer.build(variables)
    other = keras.Variable(np.ones(2), name="other")
    rule = "trainable_variables must be the 2 that the optimizer was built for, or some"
    with pytest.raises(ValueError, match=f"{rule} of them, each once. Received: other"):
        optimizer.apply([one, one], [variables[0], other])
    with pytest.raises(ValueError, match=rule):
        optimizer.apply([one, one], [variables[0], variables[0]])
    with pytest.raises(ValueError, match=r"grads must be as many .* Received: 1 for 2"):
        optimizer.apply([one], variables)
    with pytest.raises(ValueError, match="gradients must be 2, one a variable"):
        optimizer.apply([one])
