"""All that a batch, a model and an optimizer may have at once, crossed pairwise.

Each row of `pairwise.py` is trained for two updates, of 40 and 23 examples: by plain
Keras on whole batches, and in micro-batches of 16 by an `Update`, a loop over
`accumulate_gradients` and the `fit` of an `AccumulatingModel`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline import accumulation
from pipeline.accumulation import internals
from pipeline.accumulation.accumulate import (
    BatchContext,
    MicroBatchSettings,
    accumulate_share,
)
from tests.accumulation import reference
from tests.accumulation.pairwise import (
    MICRO,
    ROWS,
    SIZES,
    Row,
    at_start,
    batches,
    objective_of,
)
from tests.accumulation.replicas import strategy_on

pytestmark = [
    pytest.mark.slow,
    # `fit` says so of BatchNormalization. Here, no weight depends on its outputs.
    pytest.mark.filterwarnings("ignore:If fit cuts a batch:UserWarning"),
]

assert 3 * len(ROWS) >= 100  # cases


class Trained(NamedTuple):
    """What a way to train leaves.

    Attributes:
        others: moving statistics, metrics and seeds.
        loss: the mean over all examples.
    """

    weights: list[np.ndarray]
    others: list[np.ndarray]
    loss: float


def result(model: keras.Model, loss: float) -> Trained:
    others = list(model.non_trainable_variables)
    for layer in model.layers:
        others += layer.metrics_variables
    return Trained(
        [variable.numpy() for variable in model.trainable_variables],
        [variable.numpy() for variable in others],
        loss,
    )


def trained(
    row: Row, model: keras.Model, step: Callable[[tuple], Any], traced: bool = True
) -> Trained:
    """Return what the model is after a step for each batch."""
    if traced:
        spec = internals.slice_specs(next(batches(row)))
        step = tf.function(step, input_signature=[spec], autograph=False)
    means = [float(step(batch)) for batch in batches(row)]
    return result(model, float(np.average(means, weights=SIZES)))


def loss_of(model: keras.Model, batch: tuple, training: bool = True) -> tf.Tensor:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    return model.compute_loss(x, y, model(x, training=training), sample_weight)


@functools.cache
def by_keras(row: Row, size: int | None = None) -> tuple[Trained, Trained]:
    """Return the model before and after the updates of plain Keras.

    With a size it minimizes the mean over parts of that size, which is wrong.
    """
    model, optimizer = at_start(row)
    model.compile(optimizer, **objective_of(row))
    noisy = internals.noisy_layers(model, next(batches(row))[0])
    variables = model.trainable_variables
    before = result(model, 0.0)

    def step(batch: tuple) -> tf.Tensor:
        count = internals.examples_in(batch)
        parts = [batch]
        if size is not None:
            parts = []
            for start in range(0, int(count), size):
                parts.append(internals.slice_of(batch, start, start + size))

        drawing = internals.noise_by_position(
            noisy, internals.draw_noise_seeds(noisy), 0, count
        )
        with drawing, tf.GradientTape() as tape:
            value = tf.add_n([loss_of(model, part) for part in parts]) / len(parts)
            scaled = optimizer.scale_loss(value)
        gradients = reference.gradients_of(tape, scaled, variables)
        optimizer.apply(reference.dense(gradients), variables)
        return value

    return before, trained(row, model, step, traced=bool(noisy))


def by_an_update(row: Row, strategy: tf.distribute.Strategy) -> Trained:
    with strategy.scope():
        model, optimizer = at_start(row)
    update = accumulation.Update(
        model,
        internals.Objective(**objective_of(row)),
        optimizer,
        MICRO,
        strategy=strategy,
        same_noise=row.noise != "quiet",
    )
    return trained(row, model, lambda batch: update(batch)["loss"])


def by_a_loop(row: Row, strategy: tf.distribute.Strategy) -> Trained:
    """Train in a loop; in place of two replicas it sums over two halves of a batch."""
    model, optimizer = at_start(row)
    scale_loss = None
    if row.optimizer == "loss scale":
        scale_loss = optimizer.scale_loss
    settings = MicroBatchSettings(
        model,
        internals.Objective(**objective_of(row)),
        MICRO,
        scale_loss=scale_loss,
        hold_statistics=True,
    )

    def step(batch: tuple) -> tf.Tensor:
        replicas = strategy.num_replicas_in_sync
        keys = internals.draw_noise_seeds(internals.noisy_layers(model, batch[0]))
        context = BatchContext(internals.batch_totals(batch), noise_seeds=keys)
        share = -(-internals.examples_in(batch) // replicas)

        def sums_from(position: Any) -> accumulation.GradientSums:
            part = internals.slice_of(batch, position, position + share)
            return accumulate_share(settings, part, context, position)

        sums = sums_from(0)
        if replicas == 2:
            sums = tf.nest.map_structure(
                lambda *values: tf.add_n(values), sums, sums_from(share)
            )
        with accumulation.fused_adam(optimizer):
            optimizer.apply(sums.gradients(), model.trainable_variables)
        internals.assign_moving_statistics(model, sums.statistics_steps)
        return sums.mean_loss()

    return trained(row, model, step)


def by_fit(row: Row, strategy: tf.distribute.Strategy) -> Trained:
    with strategy.scope():
        model, optimizer = at_start(row)
    same_noise = row.noise != "quiet"
    accumulating = accumulation.AccumulatingModel(model, MICRO, same_noise=same_noise)
    accumulating.compile(optimizer, **objective_of(row))
    if row.inputs == "ragged":
        # Else, under a strategy, Keras sees a dense batch when it builds the loss.
        loss_of(accumulating, next(batches(row)), training=False)

    specs = internals.slice_specs(next(batches(row)))
    data = tf.data.Dataset.from_generator(lambda: batches(row), output_signature=specs)
    # Without a number of steps TensorFlow finds the end in one step more, in which a
    # seed may move; it does so in a plain `fit`, too.
    fitted = accumulating.fit(data, steps_per_epoch=len(SIZES), verbose=0)
    return result(model, fitted.history["loss"][0])


USES = {"update": by_an_update, "loop": by_a_loop, "fit": by_fit}


class Bound(NamedTuple):
    """How far apart two values of a variable may be.

    Attributes:
        of_way: times the norm of the way that the variable has gone.
        of_value: times the norm of its value.
    """

    of_way: float
    of_value: float


# Gradients are sums over 200 tokens in another order: 200 · 2⁻⁵³ is 2e-14, and 1e-12 as
# they cancel to a few hundredths; 200 · 2⁻²⁴ is 1e-5. In bfloat16 four layers round by
# 2⁻⁸ forward and backward, in each cut anew. In float32 decay, step and average round a
# stored weight by 2⁻²⁴ of itself, twice.
BOUNDS = {
    "float64": Bound(1e-12, 0.0),
    "float32": Bound(200 * 2**-24, 6 * 2**-24),
    "mixed_bfloat16": Bound(8 * 2**-8, 6 * 2**-24),
}


def worst_ratio(
    values: list[np.ndarray],
    expected_values: list[np.ndarray],
    before: list[np.ndarray],
    bound: Bound,
) -> float:
    """Return the distance ÷ its bound, of the worst variable.

    What has not moved must be equal, and so must what is no floating-point number, such
    as seeds; else the ratio is infinite.
    """
    ratios = [0.0]
    for value, expected, start in zip(values, expected_values, before, strict=True):
        exact = value.dtype.kind != "f" or (expected == start).all()
        value = value.astype("float64")
        expected = expected.astype("float64")
        start = start.astype("float64")
        allowed = 0.0
        if not exact:
            allowed = bound.of_way * np.linalg.norm(expected - start)
            allowed += bound.of_value * np.linalg.norm(expected)

        if (value == expected).all():
            ratios.append(0.0)
        elif allowed:
            ratios.append(np.linalg.norm(value - expected) / allowed)
        else:
            ratios.append(math.inf)
    return max(ratios)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_updates_are_those_of_whole_batches(precision, monkeypatch, row, use):
    precision(row.precision)
    before, expected = by_keras(row)

    fused = []
    operation = tf.raw_ops.ResourceApplyAdam
    monkeypatch.setattr(
        tf.raw_ops,
        "ResourceApplyAdam",
        lambda **arguments: fused.append(operation(**arguments)),
    )
    ours = USES[use](row, strategy_on(int(row.replicas)))
    assert bool(fused) == (row.wide and row.optimizer != "amsgrad")

    bound = BOUNDS[row.precision]
    assert worst_ratio(ours.weights, expected.weights, before.weights, bound) < 1
    # Keras adds 1e-7 to the number of values that are not masked.
    if row.state == "statistics" and row.masked:
        bound = bound._replace(of_way=max(bound.of_way, 1e-7))
    assert worst_ratio(ours.others, expected.others, before.others, bound) < 1
    # A tenth of the gradients' bound: the loss is a sum of terms ≥ 0, none of which
    # cancel.
    rel = BOUNDS[row.precision].of_way / 10
    assert ours.loss == pytest.approx(expected.loss, rel=rel)


def controls() -> list[Row]:
    """Return the rows in which the mean of means is seen to be wrong.

    With `sum` the mean is a third, which clipping and Adam undo; the noise of a part is
    not that of its place.
    """
    rows = []
    for row in ROWS:
        quiet = row.precision == "float64" and row.noise == "quiet"
        if quiet and row.reduction != "sum":
            rows.append(row)
    return rows


@pytest.mark.parametrize("row", controls(), ids="-".join)
def test_the_mean_of_means_is_another_update(precision, row):
    precision(row.precision)
    before, expected = by_keras(row)
    _, wrong = by_keras(row, MICRO)
    bound = BOUNDS["float64"]
    assert worst_ratio(wrong.weights, expected.weights, before.weights, bound) > 1e6
