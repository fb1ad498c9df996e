"""Gradients that are accumulated over streams, windows and restarts.

Weights and `iterations` are those of plain Keras.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

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
ROWS = [Row(**ways) for ways in in_pairs(WAYS)]


def strategy_of(replicas: int) -> tf.distribute.Strategy:
    if replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice()
    )


# Parts without a gradient, a restart and replicas; a mask and flushed tails.
QUICK = (1,)


@pytest.mark.parametrize("index", mostly_slow(range(len(ROWS)), QUICK))
def test_a_loop_takes_the_steps_of_plain_keras(float64, tmp_path, index):
    row = ROWS[index]
    expected, updates = by_plain_keras(row, EPOCHS)
    weights, iterations = by_parts(row, EPOCHS, strategy_of(row.replicas), tmp_path)
    assert iterations == updates
    np.testing.assert_allclose(weights, expected, rtol=0, atol=CLOSE)


def test_the_table_would_show_a_leaked_part(float64):
    """The control: an epoch's tail that leaks into the next one gives other weights."""
    flushed = Row(
        known_length=True,
        tail=True,
        flush=True,
        factor=4,
        saved_after=None,
        none_now_and_then=False,
        mask=False,
        replicas=1,
    )
    leaked = flushed._replace(flush=False)
    expected, updates = by_plain_keras(flushed, EPOCHS)
    weights, updates_of_leaked = by_plain_keras(leaked, EPOCHS)
    # Three epochs of 6 parts: two updates each, or 18 / 4 in all.
    assert updates == 6
    assert updates_of_leaked == 4
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


class Trained(NamedTuple):
    """What a `fit` leaves: all weights in one array, and the count of the optimizer."""

    weights: np.ndarray
    iterations: int


def trained(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    examples: int,
    batch: int,
    known_length: bool,
    run_eagerly: bool = False,
) -> Trained:
    """Train for two epochs by `fit`."""
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
    model.compile(optimizer, loss, run_eagerly=run_eagerly)
    model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
    weights = [np.ravel(values) for values in model.get_weights()]
    iterations = int(model.optimizer.iterations.numpy())
    return Trained(np.concatenate(weights), iterations)


def assert_same(ours: Trained, theirs: Trained) -> None:
    assert ours.iterations == theirs.iterations
    np.testing.assert_allclose(ours.weights, theirs.weights, rtol=0, atol=CLOSE)


@pytest.mark.parametrize(
    ("examples", "inner"),
    mostly_slow(itertools.product([44, 48], [sgd, decaying]), [(44, decaying)]),
)
def test_data_of_unknown_length_in_fit(float64, inner, examples):
    """Plain Keras itself counts and decays once more at the end of such data.

    So its data have a known length.
    """
    plain = trained(
        network(), inner(), examples, batch=16, known_length=True, run_eagerly=True
    )
    assert plain.iterations == 6

    optimizer = AccumulatingOptimizer(inner(), 4)
    by_optimizer = trained(network(), optimizer, examples, batch=4, known_length=False)
    assert_same(by_optimizer, plain)

    model = AccumulatingModel(network(), micro_batch_size=4)
    by_model = trained(model, inner(), examples, batch=16, known_length=False)
    assert_same(by_model, plain)


def test_a_gradient_of_a_regularizer_alone_waits_for_the_batch(float64):
    """One that depends on the batch does not wait: else all would be in memory at once."""
    variables = pair()
    accumulator = GradientAccumulator(variables)
    data = tf.data.Dataset.from_tensors(np.ones(2)).repeat(3).filter(lambda _: True)

    @tf.function
    def step(iterator: tf.data.Iterator) -> None:
        batch = next(iterator)
        by_batch = batch * variables[0].value
        by_regularizer = 2 * variables[1].value
        accumulator.add([by_batch, by_regularizer])

    iterator = iter(data)
    for _ in range(3):
        step(iterator)
    with pytest.raises(tf.errors.OutOfRangeError):
        step(iterator)
    # Of three batches, not of four: the weight, both sums, and the counts.
    assert sums_of(accumulator) == [3.0, [3.0, 3.0], [6.0, 6.0], [3.0, 3.0]]


@pytest.mark.slow
def test_noise_is_the_same_whether_the_length_is_known(float64):
    def weights_of(known_length: bool) -> list[float]:
        model = AccumulatingModel(network(dropout=True), 4, same_noise=True)
        return trained(model, sgd(), 48, 16, known_length).weights.tolist()

    assert weights_of(known_length=True) == weights_of(known_length=False)


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
    apply_to_a = way(partial(apply, optimizer, variables, "a"))
    apply_to_a()
    path = tf.train.Checkpoint(optimizer=optimizer).save(tmp_path / "begun")

    optimizer, variables = begun()
    tf.train.Checkpoint(optimizer=optimizer).restore(path).assert_consumed()
    apply_to_b = way(partial(apply, optimizer, variables, "b"))
    apply_to_b()
    for variable in variables:
        assert variable.numpy().tolist() == [0.5, 0.5]


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
    for gradient in average():
        assert gradient.numpy().tolist() == [0.5, 0.5]

    # Now the first variable has none.
    second.reset()
    add()
    if way is eager:
        gradient_of_first, _ = second.average()
        assert gradient_of_first is None
    else:  # a trace cannot return None now and a tensor then
        rejected = pytest.raises(
            tf.errors.InvalidArgumentError, match="must be zero, not None"
        )
        with rejected:
            average()


@pytest.mark.parametrize("way", [eager, traced])
def test_momentum_leaves_a_variable_without_a_gradient(float64, way):
    """In the second update `a` has no gradient, but `b` has.

    Plain Keras leaves `a` at 0.9 as well; a gradient of zero would move it to 0.81.
    """
    a, b = pair()
    optimizer = AccumulatingOptimizer(sgd(), 2)
    optimizer.build([a, b])
    both = way(partial(apply, optimizer, [a, b], "ab"))
    only_b = way(partial(apply, optimizer, [a, b], "b"))
    for step in (both, both, only_b, only_b):
        step()
    assert a.numpy() == pytest.approx([0.9, 0.9])
    # The second step is 0.1 and 0.9 times the first one.
    assert b.numpy() == pytest.approx([0.71, 0.71])

    for step in (only_b, both):
        step()
    # Now `a` had one in the second part: its mean is a half.
    by_momentum = 0.9 * 0.1
    by_gradient = 0.1 * 0.5
    assert a.numpy() == pytest.approx([0.9 - by_momentum - by_gradient] * 2)


@pytest.mark.parametrize("way", [eager, traced])
def test_losses_of_different_variables_share_an_optimizer_in_any_order(float64, way):
    """Of three parts, the loss of two depends on `a`, and that of one on `b`."""
    a, b = pair()
    optimizer = AccumulatingOptimizer(keras.optimizers.SGD(1.0), 3)
    optimizer.build([a, b])
    only_a = way(partial(apply, optimizer, [a, b], "a"))
    only_b = way(partial(apply, optimizer, [a, b], "b"))
    for step in (only_a, only_b, only_a):
        step()
    assert a.numpy() == pytest.approx([1 / 3] * 2)
    assert b.numpy() == pytest.approx([2 / 3] * 2)


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
        with pytest.raises(error, match="grads must have a gradient for at least one"):
            nothing()
    assert int(optimizer.parts.numpy()) == 1
    apply(optimizer, variables, "a")  # which counts for a half
    assert int(optimizer.iterations.numpy()) == 1
    assert variables[0].numpy() == pytest.approx([0.95, 0.95])

    nothing()
    with pytest.raises(ValueError, match="Received: only None"):
        optimizer.flush()


def test_a_traced_step_that_does_not_fit_the_sums_changes_nothing(float64):
    """The step by `c` was traced when `a` and `b` had no gradients apart."""
    a, b = pair()
    c, _ = pair()
    optimizer = AccumulatingOptimizer(keras.optimizers.SGD(1.0), 2)
    optimizer.build([a, b, c])
    only_a = traced(partial(apply_to_one, optimizer, a))
    only_c = traced(partial(apply_to_one, optimizer, c))

    only_c()
    only_c()
    only_a()
    before = sums_of(optimizer.accumulator)
    for _ in range(2):
        rejected = pytest.raises(
            tf.errors.InvalidArgumentError, match="None for some variables of a traced"
        )
        with rejected:
            only_c()
    assert int(optimizer.parts.numpy()) == 1
    assert sums_of(optimizer.accumulator) == before

    only_a()
    assert int(optimizer.iterations.numpy()) == 2
    assert a.numpy().tolist() == [0, 0]
    assert b.numpy().tolist() == [1, 1]
    assert c.numpy().tolist() == [0, 0]


def test_a_traced_step_with_a_sixth_set_of_variables_is_rejected(float64):
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

    # The second variable has the shape (2, 3); each of these is of another one.
    rows = tf.IndexedSlices(tf.ones((1, 3)), tf.constant([0]), tf.constant([5, 3]))
    wrong_gradients = [
        tf.ones(3),
        tf.ones(()),
        tf.ones((2, 1)),
        tf.ones((1, 2, 3)),
        rows,
    ]
    rule = r"gradients must have the shapes of their variables\."
    for gradient in wrong_gradients:
        with pytest.raises(ValueError, match=rule) as error:
            accumulator.add([tf.ones(2), gradient])
        assert f"{tuple(gradient.shape)} for variable 1" in str(error.value)

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
    first_row_twice = tf.IndexedSlices(tf.ones((2, 2)), tf.constant([0, 0]))
    accumulator.add([first_row_twice])
    (average,) = accumulator.average()
    assert average.numpy().tolist() == [[2, 2], [0, 0], [0, 0]]


@pytest.mark.slow
def test_a_layer_that_is_frozen_between_two_fits(float64):
    """And unfrozen again: as plain Keras trains it on batches of 16."""

    def weights_of(optimizer: keras.optimizers.Optimizer, batch: int) -> np.ndarray:
        model = network()
        trained(model, optimizer, 48, batch, True)
        for trainable in (False, True):
            model.layers[0].trainable = trainable
            last = trained(model, optimizer, 48, batch, True)
        return last.weights

    expected = weights_of(sgd(), batch=16)
    weights = weights_of(AccumulatingOptimizer(sgd(), 4), batch=4)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=CLOSE)


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

    weights = weights_of(AccumulatingOptimizer(sgd(), 1))
    expected = weights_of(sgd())
    np.testing.assert_allclose(weights, expected, rtol=1e-15)


def test_variables_that_it_was_not_built_for():
    one = tf.ones(2)
    variables = pair()
    optimizer = AccumulatingOptimizer(sgd(), 2)
    with pytest.raises(ValueError, match="trainable_variables must be given if"):
        optimizer.apply([one])
    optimizer.build(variables)
    other = keras.Variable(np.ones(2), name="other")
    rule = "trainable_variables must be the .* that the optimizer was built for"
    received = ", or some of them, each only once. Received: other"
    with pytest.raises(ValueError, match=rule + received):
        optimizer.apply([one, one], [variables[0], other])
    with pytest.raises(ValueError, match=rule):
        optimizer.apply([one, one], [variables[0], variables[0]])
    with pytest.raises(
        ValueError, match=r"grads must have as many .* Received: 1 for 2"
    ):
        optimizer.apply([one], variables)
    with pytest.raises(ValueError, match="there must be 2 gradients, one per variable"):
        optimizer.apply([one])
