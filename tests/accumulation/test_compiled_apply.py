"""The optimizer's step as one program of XLA: what it computes, where, and in place.

Plain Keras takes the step of each whole batch, without XLA and without micro-batches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers

from pipeline.accumulation import Update, compiled_apply
from pipeline.accumulation.compiled_apply import ApplyProgram
from tests.accumulation import matrix, reference
from tests.accumulation.matrix import KINDS, Case, Weights, deviation, pieces
from tests.accumulation.replicas import strategy_on
from tests.parameters import mostly_slow

# As in `matrix.FLOAT64`: rounding of 1e-16 an update, which Muon stretches 485 times.
TOLERANCE = 1e-12
UPDATES = 7
CUTS = ("factor 1", "factor 3", "factor 8", "ragged")
SCOPES = ("apply", "update")

Built = Callable[[], keras.optimizers.Optimizer]


class Variant(NamedTuple):
    """An optimizer, and what plain Keras applies in its place.

    Attributes:
        optimizer: returns a new one, not built.
        plain: returns the optimizer of the loop to compare with; the same by default.
        constrained: whether the weights of a layer have a largest norm.
    """

    optimizer: Built
    plain: Built | None = None
    constrained: bool = False


def of_keras(name: str, **more: Any) -> Built:
    """Return an optimizer of the matrix at a tenth of its rate, as in float64 there."""

    def built() -> keras.optimizers.Optimizer:
        options = matrix.OPTIMIZERS[name] | more
        options["learning_rate"] /= matrix.FLOAT64.slower
        return getattr(optimizers, name)(**options)

    return built


def by_kernels() -> keras.optimizers.Optimizer:
    """Return Adam for kernels and SGD for biases."""
    inner = {".*kernel": of_keras("Adam")()}
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(of_keras("SGD")(), inner))


def without_decay_of_biases() -> keras.optimizers.Optimizer:
    optimizer = of_keras("AdamW", weight_decay=0.5)()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


VARIANTS = {name: Variant(of_keras(name)) for name in matrix.OPTIMIZERS} | {
    "average": Variant(
        of_keras("AdamW", use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3)
    ),
    "decay": Variant(of_keras("SGD", weight_decay=0.1)),
    "decay of kernels": Variant(without_decay_of_biases),
    "clipnorm": Variant(of_keras("Adam", clipnorm=0.05)),
    "clipvalue": Variant(of_keras("Adam", clipvalue=0.01)),
    "global clipnorm": Variant(of_keras("AdamW", global_clipnorm=0.05)),
    "amsgrad": Variant(of_keras("Adam", amsgrad=True)),
    "constraint": Variant(of_keras("Adam"), constrained=True),
    "schedule": Variant(
        lambda: optimizers.RMSprop(optimizers.schedules.ExponentialDecay(0.01, 2, 0.5))
    ),
    # By powers of two, so that scaling rounds nothing.
    "loss scale": Variant(of_keras("Adam", loss_scale_factor=256.0), of_keras("Adam")),
    "LossScaleOptimizer": Variant(
        lambda: optimizers.LossScaleOptimizer(
            of_keras("AdamW", clipnorm=0.05)(), 1024.0, dynamic_growth_steps=2
        ),
        of_keras("AdamW", clipnorm=0.05),
    ),
    "MultiOptimizer": Variant(by_kernels),
}
# These count their steps, as a bias correction or a schedule needs it.
COUNTING = ("Adam", "Adamax", "Nadam", "Adafactor", "LossScaleOptimizer", "schedule")


def built(variant: Variant, make: Built) -> tuple[keras.Model, Any]:
    keras.utils.set_random_seed(0)
    arguments = {}
    if variant.constrained:
        arguments["kernel_constraint"] = keras.constraints.MaxNorm(0.5)
    model = matrix._dense(**arguments)
    optimizer = make()
    optimizer.build(model.trainable_variables)
    return model, optimizer


def batches(cut: str) -> Iterator[tuple]:
    run = matrix.FLOAT64._replace(updates=UPDATES)
    return matrix.batches(case_of(cut), run)


def case_of(cut: str) -> Case:
    return Case("Adam", "dense", cut, "one device")


def by_keras(
    variant: Variant, cut: str, dropped: bool = False
) -> tuple[Weights, Weights]:
    """Return the weights before and after the updates of a plain loop.

    With `dropped` it loses the last micro-batch of each batch, or of one micro-batch
    the last example.
    """
    model, optimizer = built(variant, variant.plain or variant.optimizer)
    before = matrix._weights(model)

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            value = matrix.loss_of(KINDS["dense"], model, (x, y))
        gradients = reference.dense(reference.gradients_of(tape, value, model))
        optimizer.apply(gradients, model.trainable_variables)

    step = tf.function(step, autograph=False, reduce_retracing=True)
    for x, y in batches(cut):
        stop = len(x)
        if dropped:
            stop = pieces(case_of(cut), len(x))[-1].start or len(x) - 1
        step(x[:stop], y[:stop])
    return before, matrix._weights(model)


def traced(update: Update) -> Callable[..., dict[str, tf.Tensor]]:
    """Return one trace for batches of every size."""
    specs = (
        tf.TensorSpec([None, matrix.FEATURES], keras.config.floatx()),
        tf.TensorSpec([None], tf.int64),
    )
    return tf.function(lambda *batch: update(batch), specs, autograph=False)


def compiled_update(variant: Variant, cut: str, **options: Any) -> Update:
    """Return an update that XLA compiles."""
    model, optimizer = built(variant, variant.optimizer)
    (loss,) = KINDS["dense"].losses()
    size = matrix.micro_batch_size(case_of(cut))
    options = {"xla_scope": "apply"} | options
    return Update(model, loss, optimizer, size, jit_compile=True, **options)


def weights_after(update: Update, cut: str) -> Weights:
    """Return the weights that an update has trained."""
    step = traced(update)
    for batch in batches(cut):
        step(*batch)
    return matrix._weights(update.model)


def cases() -> list[Any]:
    """Return every variant with every cut and scope.

    Most are soak tests. A variant of Keras' options has one cut and one scope that is
    tested more often, and so has every other optimizer.
    """
    fast = [
        ("AdamW", "ragged", "apply"),
        ("SGD", "factor 3", "update"),
    ]
    slow = [
        ("AdamW", "ragged", "update"),
        ("global clipnorm", "factor 8", "apply"),
        ("constraint", "factor 1", "apply"),
    ]
    for index, name in enumerate(VARIANTS):
        case = (name, CUTS[index % len(CUTS)], SCOPES[index // 4 % 2])
        is_chosen = name not in matrix.OPTIMIZERS or index % 2 == 0
        if is_chosen and case not in fast + slow:
            slow.append(case)
    every = list(product(VARIANTS, CUTS, SCOPES))
    return mostly_slow(every, fast, slow)


@pytest.mark.parametrize(("name", "cut", "scope"), cases())
def test_updates_are_those_of_whole_batches(float64, name, cut, scope):
    variant = VARIANTS[name]
    before, expected = by_keras(variant, cut)
    update = compiled_update(variant, cut, xla_scope=scope)
    trained = weights_after(update, cut)
    assert update.apply_compiled
    assert update.update_compiled is (scope == "update")
    assert deviation(trained, expected, before) < TOLERANCE
    assert int(update.optimizer.iterations.numpy()) == UPDATES

    # The control: a loop that loses examples is seen.
    _, wrong = by_keras(variant, cut, dropped=True)
    assert deviation(wrong, expected, before) > 100 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTING)
def test_a_count_that_stands_still_is_seen(float64, monkeypatch, name):
    """The control of the counts, which are advanced outside of the program."""
    variant = VARIANTS[name]
    before, expected = by_keras(variant, "factor 3")
    monkeypatch.setattr(ApplyProgram, "advance_counts", lambda *arguments: None)
    update = compiled_update(variant, "factor 3")
    trained = weights_after(update, "factor 3")
    assert update.apply_compiled
    assert deviation(trained, expected, before) > 1e-3


def on_second_device(variant: Variant) -> Update:
    """Return an update with its weights on CPU:1 and its counts on CPU:0.

    So has a GPU its weights and the host the counts.
    """

    def make() -> keras.optimizers.Optimizer:
        with tf.device("CPU:0"):
            return variant.optimizer()

    with tf.device("CPU:1"):
        return compiled_update(variant._replace(optimizer=make), "ragged")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["AdamW", "LossScaleOptimizer", "MultiOptimizer", "schedule"]
)
def test_counts_may_be_on_the_host(float64, name):
    variant = VARIANTS[name]
    before, expected = by_keras(variant, "ragged")
    update = on_second_device(variant)
    with tf.device("CPU:1"):
        trained = weights_after(update, "ragged")
    assert update.apply_compiled
    counter = update.counters[0]
    assert counter.device.endswith("CPU:0")
    assert update.model.weights[0].value.device.endswith("CPU:1")
    assert deviation(trained, expected, before) < TOLERANCE


def operations_before(operation: tf.Operation) -> set[tf.Operation]:
    """Return the operations of a graph that one operation waits for."""
    waited_for: set[tf.Operation] = set()
    pending = [operation]
    while pending:
        latest = pending.pop()
        inputs = [tensor.op for tensor in latest.inputs]
        for earlier in (*inputs, *latest.control_inputs):
            if earlier not in waited_for:
                waited_for.add(earlier)
                pending.append(earlier)
    return waited_for


def test_a_count_is_advanced_without_waiting_for_the_passes():
    """So the host of a GPU can begin the next update while this one is computed."""
    update = on_second_device(VARIANTS["AdamW"])
    graph = traced(update).get_concrete_function().graph
    handle = update.counters[0].handle
    (place,) = [inner for outer, inner in graph.captures if outer is handle]
    advances = []
    for operation in graph.get_operations():
        adds = operation.type == "AssignAddVariableOp"
        if adds and operation.inputs[0] is place:
            advances.append(operation)
    (advance,) = advances
    kinds = {operation.type for operation in operations_before(advance)}
    assert not kinds & {"While", "StatelessWhile", "StatefulPartitionedCall"}

    # The control: the weights wait for the passes.
    calls = []
    for operation in graph.get_operations():
        if operation.type == "StatefulPartitionedCall":
            calls.append(operation)
    kinds = {operation.type for operation in operations_before(calls[-1])}
    assert kinds & {"While", "StatelessWhile"}


@pytest.mark.slow
def test_variables_of_two_devices_are_not_compiled_together(float64, monkeypatch):
    """Where the counts stay variables of the host, XLA would reject them."""
    monkeypatch.setattr(
        compiled_apply, "constant_counts", lambda *arguments: nullcontext()
    )
    before, expected = by_keras(VARIANTS["AdamW"], "ragged")
    update = on_second_device(VARIANTS["AdamW"])
    with tf.device("CPU:1"):
        trained = weights_after(update, "ragged")
    assert update.compiled
    assert not update.apply_compiled
    assert deviation(trained, expected, before) < TOLERANCE


def hlo_of_apply(optimizer: keras.optimizers.Optimizer) -> tuple[Update, str]:
    """Return an update, and the optimized HLO of its step."""
    keras.utils.set_random_seed(0)
    model = matrix._dense()
    optimizer.build(model.trainable_variables)
    (loss,) = KINDS["dense"].losses()
    update = Update(model, loss, optimizer, 8, jit_compile=True, xla_scope="apply")
    batch = (np.ones((16, matrix.FEATURES)), np.zeros(16, "int64"))
    sums = tf.function(lambda: update.sums(batch), autograph=False)()
    program = ApplyProgram.traced(optimizer, lambda: update._applied(sums))
    assert program is not None
    compiled = tf.function(program.run, jit_compile=True, autograph=False)
    return update, compiled.experimental_get_compiler_ir()(stage="optimized_hlo")


@pytest.mark.parametrize("kind", mostly_slow(["AdamW", "SGD"], ["AdamW"]))
def test_norm_and_step_are_one_program_that_updates_in_place(float64, kind):
    update, hlo = hlo_of_apply(VARIANTS[kind].optimizer())
    variables = [*update.model.trainable_variables]
    for variable in update.optimizer.variables:
        if variable.ndim:
            variables.append(variable)
    slots = {"AdamW": 2, "SGD": 1}[kind]
    assert len(variables) == (1 + slots) * len(update.model.trainable_variables)

    # Each weight and moment is an output that takes the memory of its input, and what
    # else comes out are scalars: the norm and the loss scale.
    (aliases,) = re.findall(r"input_output_alias=\{ (.*?) \}, \w+=", hlo)
    inputs = re.findall(r"\{\d+\}: \((\d+), \{\}, may-alias\)", aliases)
    assert len(set(inputs)) == len(variables)
    (outputs,) = re.findall(r"entry_computation_layout=\{.*->\((.*?)\)\}", hlo)
    shapes = re.findall(r"f64\[([\d,]*)\]", outputs)
    assert len([shape for shape in shapes if shape]) == len(variables)
    assert len([shape for shape in shapes if not shape]) == 2
    # The sums are read where they are.
    entry = hlo[hlo.index("\nENTRY") :]
    assert not re.findall(r"= f64\[\d[\d,]*\]\S* copy\(", entry)
    # The norm is of this program.
    assert "global_norm" in hlo


def test_what_is_not_updated_has_no_alias(float64):
    """The control: without a momentum the weights alone are updated."""
    update, hlo = hlo_of_apply(optimizers.SGD(0.1))
    assert hlo.count("may-alias") == len(update.model.trainable_variables)


def update_on_words(optimizer: keras.optimizers.Optimizer, **options: Any) -> Update:
    keras.utils.set_random_seed(0)
    kind = KINDS["embedding"]
    model = kind.model()
    optimizer.build(model.trainable_variables)
    (loss,) = kind.losses()
    return Update(model, loss, optimizer, 8, **options)


@pytest.mark.parametrize(
    ("name", "compiled"),
    mostly_slow([("AdamW", True), ("SGD", False)], [("SGD", False)]),
)
def test_rows_are_compiled_where_they_become_dense_anyway(float64, name, compiled):
    """SGD touches the rows that were looked up, and no others."""
    weights = []
    for options in ({"jit_compile": True, "xla_scope": "apply"}, {}):
        update = update_on_words(of_keras(name)(), **options)
        step = tf.function(lambda *batch, update=update: update(batch))
        random = np.random.default_rng(0)
        for _ in range(3):
            step(*map(tf.constant, KINDS["embedding"].batch(20, random)))
        assert update.apply_compiled is (compiled and bool(options))
        weights.append(update.model.get_weights())
    for by_xla, plain in zip(*weights, strict=True):
        np.testing.assert_allclose(by_xla, plain, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.slow
def test_the_results_are_those_without_xla(float64):
    results = []
    for jit_compile in (True, False):
        variant = VARIANTS["LossScaleOptimizer"]
        model, optimizer = built(variant, variant.optimizer)
        (loss,) = KINDS["dense"].losses()
        update = Update(
            model,
            loss,
            optimizer,
            7,
            noise_every=1,
            jit_compile=jit_compile,
            xla_scope="apply",
        )
        step = traced(update)
        results.append([step(*batch) for batch in batches("ragged")])
    for by_xla, plain in zip(*results, strict=True):
        assert by_xla.keys() == plain.keys() >= {"gradient_norm", "gradient_variance"}
        for key, value in plain.items():
            assert float(by_xla[key]) == pytest.approx(float(value), rel=1e-11), key


def test_a_gradient_that_is_not_finite_is_not_counted():
    variant = VARIANTS["LossScaleOptimizer"]
    model, optimizer = built(variant, variant.optimizer)
    (loss,) = KINDS["dense"].losses()
    update = Update(model, loss, optimizer, 4, jit_compile=True, xla_scope="apply")
    step = traced(update)
    x = np.ones((8, matrix.FEATURES), "float32")
    y = np.zeros(8, "int64")
    before = model.get_weights()
    step(tf.constant(x * np.inf), tf.constant(y))
    assert update.apply_compiled
    assert int(optimizer.iterations.numpy()) == 0
    assert float(optimizer.dynamic_scale.numpy()) == 512
    for weight, start in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, start)
    step(tf.constant(x), tf.constant(y))
    assert int(optimizer.iterations.numpy()) == 1


def test_the_passes_alone_are_compiled_by_default(float64):
    model, optimizer = built(VARIANTS["Adam"], of_keras("Adam"))
    (loss,) = KINDS["dense"].losses()
    update = Update(model, loss, optimizer, 4, jit_compile=True)
    traced(update).get_concrete_function()
    assert update.compiled
    assert not update.apply_compiled
    assert not update.counters


def test_several_replicas_apply_as_before(precision):
    precision("float32")
    strategy = strategy_on(2)
    with strategy.scope():
        model, optimizer = built(VARIANTS["Adam"], of_keras("Adam"))
    (loss,) = KINDS["dense"].losses()
    options = {"jit_compile": True, "xla_scope": "apply"}
    update = Update(model, loss, optimizer, 4, strategy=strategy, **options)
    assert not update.counters


def test_an_unknown_scope_is_rejected():
    model, optimizer = built(VARIANTS["SGD"], of_keras("SGD"))
    with pytest.raises(
        ValueError, match=r"xla_scope must be step, apply or update\. Received: 'all'"
    ):
        Update(model, "mse", optimizer, 4, xla_scope="all")


@pytest.mark.slow
@pytest.mark.parametrize("scope", SCOPES)
def test_each_update_is_counted_once_where_data_of_unknown_length_end(scope):
    """A traced step starts once more there, without a batch.

    What does not depend on the batch runs before its end is known.
    """

    def examples() -> Iterator[tuple]:
        for _ in range(3):
            yield np.ones((8, matrix.FEATURES), "float32"), np.zeros(8, "int64")

    specs = (
        tf.TensorSpec([None, matrix.FEATURES], tf.float32),
        tf.TensorSpec([None], tf.int64),
    )
    data = iter(tf.data.Dataset.from_generator(examples, output_signature=specs))
    model, optimizer = built(VARIANTS["Adam"], of_keras("Adam"))
    (loss,) = KINDS["dense"].losses()
    options = {"jit_compile": True, "xla_scope": scope, "noise_every": 2}
    update = Update(model, loss, optimizer, 4, **options)
    step = tf.function(lambda batches: update(next(batches)), autograph=False)
    for _ in range(3):
        step(data)
    with pytest.raises(tf.errors.OutOfRangeError):
        step(data)
    assert update.apply_compiled
    counts = [optimizer.iterations, update.begun, update.applying]
    assert [int(count.numpy()) for count in counts] == [3, 3, 3]
