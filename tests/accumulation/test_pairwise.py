"""All that a batch, a model and an optimizer may have at once, crossed pairwise, in each use of the update.

Each of `ROWS` is trained for two updates, of 40 and 23 examples: by plain Keras on whole batches, and in micro-batches
of 16 by an `Update`, an own loop over `accumulate_gradients` and the `fit` of an `AccumulatingModel`.
"""

from __future__ import annotations

import functools
import math
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

from pipeline import accumulation
from pipeline.accumulation import internals
from tests.accumulation.matrix import CLASSES, FEATURES, TOKENS, WORDS, crossed

pytestmark = pytest.mark.slow

SIZES, MICRO = (
    (40, 23),
    16,
)  # 16, 16, 8 and 16, 7; on each of two replicas 16, 4 and 12 or 11
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "decay": {"weight_decay": 0.1},
    "amsgrad": {"amsgrad": True},  # which is not fused
    "schedule": {
        "learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    },
    "average": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "loss scale": {},
}
# Where it makes no difference to the pairs, the first of an axis is taken: what is traced fastest.
AXES = {
    "inputs": ("numbers", "dict", "embedding", "mask_zero", "Masking", "ragged"),
    "optimizer": OPTIMIZERS,
    "weights": ("unweighted", "uneven", "zeros", "of classes", "of outputs"),
    "regulariser": ("free", "L2", "activity", "add_loss"),
    "clipping": ("unclipped", "clipvalue", "clipnorm", "global_clipnorm"),
    "labels": ("sparse", "one-hot", "squares"),
    "reduction": ("sum_over_batch_size", "sum", "mean_with_sample_weight"),
    "outputs": ("one", "two", "one without a loss"),
    "state": ("stateless", "statistics", "metric"),
    "noise": ("quiet", "Dropout", "GaussianNoise"),
    "precision": ("float64", "float32", "mixed_bfloat16"),
    "replicas": ("1", "2"),
    "width": ("small", "wide"),
}
Row = namedtuple("Row", AXES)
# The noise of ragged examples is refused, as one needs as much as the longest; Keras cannot add bfloat16 to float32.
IMPOSSIBLE = (
    ("ragged", "Dropout"),
    ("ragged", "GaussianNoise"),
    ("activity", "mixed_bfloat16"),
    ("one", "of outputs"),
)
ROWS = [Row(*row) for row in crossed(AXES.values(), IMPOSSIBLE)]
assert 3 * len(ROWS) >= 100  # cases


class Kept(layers.Layer):
    """Passes its inputs on; keeps statistics of them that no weight depends on, or adds the loss of a mean."""

    def __init__(self, row: Row):
        super().__init__()
        self.supports_masking, self.adds = True, row.regulariser == "add_loss"
        self.statistics = (
            layers.BatchNormalization(momentum=0.5)
            if row.state == "statistics"
            else None
        )
        self.mean = keras.metrics.Mean() if row.state == "metric" else None

    def call(self, x, training=None, mask=None):
        if self.statistics is not None:
            self.statistics(x, training=training, mask=mask)
        if self.mean is not None:
            self.mean.update_state(tf.reduce_mean(x, -1))
        if self.adds:
            self.add_loss(
                0.3 * tf.reduce_mean(tf.square(tf.cast(x, keras.config.floatx())))
            )
        return x


class Bags(layers.Embedding):
    """The mean of the embeddings of each example's tokens, which are ragged."""

    def call(self, tokens):
        return tf.math.segment_mean(
            super().call(tokens.flat_values), tokens.value_rowids()
        )

    def compute_output_spec(self, tokens):
        return keras.KerasTensor((tokens.shape[0], self.output_dim), self.compute_dtype)


def model_of(row: Row) -> keras.Model:
    """Return a model with what is in the row; wide ones have the fused step, and in float32 the package's gradient."""
    wide = row.width == "wide"
    table, tokens = (
        {"input_dim": 1 << 14 if wide else WORDS, "output_dim": 4},
        keras.Input((TOKENS,), dtype="int64"),
    )
    both = {
        "left": keras.Input((FEATURES,), name="left"),
        "right": keras.Input((2,), name="right"),
    }
    inputs, read = {
        "numbers": (keras.Input((FEATURES,)), lambda x: x),
        "dict": (both, lambda x: layers.Concatenate()(list(x.values()))),
        "embedding": (tokens, lambda x: layers.Flatten()(layers.Embedding(**table)(x))),
        "mask_zero": (tokens, layers.Embedding(**table, mask_zero=True)),
        "Masking": (keras.Input((TOKENS, FEATURES)), layers.Masking()),
        "ragged": (keras.Input((None,), dtype="int64", ragged=True), Bags(**table)),
    }[row.inputs]
    x = layers.Dense(1024, "tanh")(read(inputs)) if wide else read(inputs)
    by = {
        "L2": {"kernel_regularizer": "l2"},
        "activity": {"activity_regularizer": keras.regularizers.L2(1e-2)},
    }
    x = Kept(row)(
        layers.Dense(512 if wide else 8, "tanh", **by.get(row.regulariser, {}))(x)
    )
    x = x if row.noise == "quiet" else getattr(layers, row.noise)(0.3)(x)
    first = layers.Dense(CLASSES)(x)
    return keras.Model(
        inputs,
        first
        if row.outputs == "one"
        else {"first": first, "second": layers.Dense(1)(x)},
    )


def goal_of(row: Row) -> dict[str, Any]:
    """Return the loss and the loss weights, as `compile` takes them."""
    kind, more = {
        "sparse": (losses.SparseCategoricalCrossentropy, {"from_logits": True}),
        "one-hot": (
            losses.CategoricalCrossentropy,
            {"from_logits": True, "label_smoothing": 0.1},
        ),
        "squares": (losses.MeanSquaredError, {}),
    }[row.labels]
    first, second = (
        kind(reduction=row.reduction, **more),
        losses.Huber() if row.outputs == "two" else None,
    )
    if row.outputs == "one":
        return {"loss": first}
    return {
        "loss": {"first": first, "second": second},
        "loss_weights": {"first": 1.0, "second": 0.3},
    }


def batches(row: Row) -> Iterator[tuple]:
    """Yield batches whose first examples have other labels, weights and numbers of tokens than the last ones."""
    draw, floatx = np.random.default_rng(0), keras.config.floatx()
    for count in SIZES:
        place = np.linspace(0, 1, count)[:, None]
        tokens, there = (
            draw.integers(1, WORDS, (count, TOKENS)),
            np.arange(TOKENS) <= TOKENS * place,
        )
        numbers = (
            draw.normal(size=(count, TOKENS, FEATURES)) + place[..., None]
        ).astype(floatx)
        x: Any = {
            "numbers": numbers[:, 0],
            "dict": {"left": numbers[:, 0], "right": numbers[:, 1, :2]},
            "embedding": tokens,
            "mask_zero": tokens * there,
            "Masking": numbers * there[..., None],
            "ragged": tf.RaggedTensor.from_row_lengths(tokens[there], there.sum(-1)),
        }[row.inputs]
        y, size = (
            np.minimum((tokens + (place > 0.5)) % 5, CLASSES - 1),
            numbers[..., :1],
        )
        uneven, last = (
            np.linspace(3, 0.1, count)[:, None],
            np.arange(count)[:, None] >= MICRO,
        )
        if row.inputs not in (
            "mask_zero",
            "Masking",
        ):  # else Keras takes weights that have the mask's axis
            y, size, uneven, last = y[:, 0], size[:, 0], uneven[:, 0], last[:, 0]
        labels = y if row.labels == "sparse" else np.eye(CLASSES, dtype=floatx)[y]
        weights: Any = {
            "unweighted": None,
            "uneven": uneven,
            "zeros": last,  # in all of a micro-batch
            "of classes": np.array([0.3, 1, 4])[y],
            "of outputs": {"first": uneven, "second": uneven[::-1]},
        }[row.weights]
        batch = x, labels if row.outputs == "one" else {"first": labels, "second": size}
        if weights is not None:
            batch += (tf.nest.map_structure(lambda leaf: leaf.astype(floatx), weights),)
        yield tf.nest.map_structure(
            lambda leaf: leaf if tf.is_tensor(leaf) else tf.constant(leaf), batch
        )


class Trained(NamedTuple):
    weights: list[np.ndarray]
    others: list[np.ndarray]  # moving statistics, metrics and seeds
    loss: float  # the mean over all examples


def result(model: keras.Model, loss: float) -> Trained:
    others = [
        *model.non_trainable_variables,
        *(each for layer in model.layers for each in layer.metrics_variables),
    ]
    return Trained(
        *(
            [each.numpy() for each in kind]
            for kind in (model.trainable_variables, others)
        ),
        loss,
    )


def trained(
    row: Row, model: keras.Model, step: Callable[[tuple], Any], traced: bool = True
) -> Trained:
    spec = internals.slice_specs(next(batches(row)))
    step = (
        tf.function(step, input_signature=[spec], autograph=False) if traced else step
    )
    means = [float(step(batch)) for batch in batches(row)]
    return result(model, float(np.average(means, weights=SIZES)))


def at_start(row: Row) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    keras.utils.set_random_seed(0)
    clipping = {} if row.clipping == "unclipped" else {row.clipping: 0.05}
    # ε of the size of gradients: else the rounding of those near zero turns a step.
    options = (
        {"learning_rate": 0.1, "epsilon": 1e-2} | OPTIMIZERS[row.optimizer] | clipping
    )
    model, optimizer = model_of(row), keras.optimizers.Adam(**options)
    if row.optimizer == "loss scale":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
    optimizer.build(model.trainable_variables)
    return model, optimizer


@functools.cache
def by_keras(row: Row, size: int | None = None) -> tuple[Trained, Trained]:
    """Return what is there before and after; where there is a size, of the mean over parts of it, which is wrong."""
    model, optimizer = at_start(row)
    model.compile(optimizer, **goal_of(row))
    noisy, variables = (
        internals.noisy_layers(model, next(batches(row))[0]),
        model.trainable_variables,
    )
    before = result(model, 0.0)

    def step(batch: tuple) -> tf.Tensor:
        count, of = internals.examples_in(batch), internals.slice_of
        parts = (
            [of(batch, start, start + size) for start in range(0, int(count), size)]
            if size
            else [batch]
        )
        drawing = internals.drawn(noisy, internals.keys_of(noisy), 0, count)
        with drawing, tf.GradientTape() as tape:
            value = tf.add_n([loss_of(model, part) for part in parts]) / len(parts)
            scaled = optimizer.scale_loss(value)
        found = tape.gradient(scaled, [variable.value for variable in variables])
        # Dense: with rows that are looked up twice Keras' Adam takes another step.
        optimizer.apply(
            [each if each is None else tf.convert_to_tensor(each) for each in found],
            variables,
        )
        return value

    return before, trained(row, model, step, traced=bool(noisy))


def loss_of(model: keras.Model, batch: tuple, training: bool = True) -> tf.Tensor:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    return model.compute_loss(x, y, model(x, training=training), sample_weight)


def by_an_update(row: Row, strategy: tf.distribute.Strategy) -> Trained:
    with strategy.scope():
        model, optimizer = at_start(row)
    by: dict[str, Any] = {"strategy": strategy, "same_noise": row.noise != "quiet"}
    update = accumulation.Update(
        model, internals.Objective(**goal_of(row)), optimizer, MICRO, **by
    )
    return trained(row, model, lambda batch: update(batch)["loss"])


def by_a_loop(row: Row, strategy: tf.distribute.Strategy) -> Trained:
    """An own loop; in place of two replicas it sums over the two halves of a batch."""
    model, optimizer = at_start(row)
    scale_loss = optimizer.scale_loss if row.optimizer == "loss scale" else None
    kernel = internals.Kernel(
        model,
        internals.Objective(**goal_of(row)),
        MICRO,
        scale_loss=scale_loss,
        hold_statistics=True,
    )

    def step(batch: tuple) -> tf.Tensor:
        replicas = strategy.num_replicas_in_sync
        keys = internals.keys_of(internals.noisy_layers(model, batch[0]))
        context = internals.BatchContext(internals.batch_totals(batch), noise_keys=keys)
        share = -(-internals.examples_in(batch) // replicas)

        def sums_from(place: Any) -> accumulation.GradientSums:
            part = internals.slice_of(batch, place, place + share)
            return internals.accumulate_share(kernel, part, context, place)

        found = [sums_from(replica * share) for replica in range(replicas)]
        sums = (
            tf.nest.map_structure(lambda *each: tf.add_n(each), *found)
            if replicas > 1
            else found[0]
        )
        with accumulation.fused_adam(optimizer):
            optimizer.apply(sums.gradients(), model.trainable_variables)
        internals.assign_moving_statistics(model, sums.moves)
        return sums.mean_loss()

    return trained(row, model, step)


def by_fit(row: Row, strategy: tf.distribute.Strategy) -> Trained:
    with strategy.scope():
        model, optimizer = at_start(row)
    accumulating = accumulation.AccumulatingModel(
        model, MICRO, same_noise=row.noise != "quiet"
    )
    accumulating.compile(optimizer, **goal_of(row))
    if (
        row.inputs == "ragged"
    ):  # else, under a strategy, Keras sees a dense batch when it builds the loss
        loss_of(accumulating, next(batches(row)), training=False)
    specs = internals.slice_specs(next(batches(row)))
    data = tf.data.Dataset.from_generator(lambda: batches(row), output_signature=specs)
    # So many: else TensorFlow, also in a plain `fit`, finds the end in one step more, in which a seed may move.
    return result(
        model,
        accumulating.fit(data, steps_per_epoch=len(SIZES), verbose=0).history["loss"][
            0
        ],
    )


USES = {"update": by_an_update, "loop": by_a_loop, "fit": by_fit}
# Of how far a variable has gone, and of its size. Gradients are sums over 200 tokens in another order: 200 · 2⁻⁵³ is
# 2e-14, and 1e-12 as they cancel to a few hundredths; 200 · 2⁻²⁴ is 1e-5. In bfloat16 four layers round by 2⁻⁸ forward
# and backward, in each cut anew. In float32 decay, step and average round a stored weight by 2⁻²⁴ of itself, twice.
BOUNDS = {
    "float64": (1e-12, 0.0),
    "float32": (200 * 2**-24, 6 * 2**-24),
    "mixed_bfloat16": (8 * 2**-8, 6 * 2**-24),
}


def apart(
    found: list[np.ndarray],
    expected: list[np.ndarray],
    before: list[np.ndarray],
    *bounds: float,
) -> float:
    """Return the distance ÷ its bound, of the worst variable; what has not moved, and seeds, must be equal."""
    ratios = [0.0]
    for a, b, start in zip(found, expected, before, strict=True):
        exact = a.dtype.kind != "f" or (b == start).all()
        a, b, start = (each.astype("float64") for each in (a, b, start))
        bound = (
            0.0
            if exact
            else bounds[0] * np.linalg.norm(b - start) + bounds[1] * np.linalg.norm(b)
        )
        ratios.append(
            0.0
            if (a == b).all()
            else np.linalg.norm(a - b) / bound
            if bound
            else math.inf
        )
    return max(ratios)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_updates_are_those_of_whole_batches(precision, monkeypatch, row, use):
    precision(row.precision)
    before, expected = by_keras(row)
    fused, operation = [], tf.raw_ops.ResourceApplyAdam
    monkeypatch.setattr(
        tf.raw_ops,
        "ResourceApplyAdam",
        lambda **given: fused.append(operation(**given)),
    )
    made = (
        tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        if row.replicas == "2"
        else tf.distribute.get_strategy()
    )
    found = USES[use](row, made)
    assert bool(fused) == (row.width == "wide" and row.optimizer != "amsgrad")
    of_step, of_value = BOUNDS[row.precision]
    assert apart(found.weights, expected.weights, before.weights, of_step, of_value) < 1
    if row.state == "statistics" and row.inputs in ("mask_zero", "Masking"):
        of_step = max(
            of_step, 1e-7
        )  # which Keras adds to the number of values that are not masked
    assert apart(found.others, expected.others, before.others, of_step, of_value) < 1
    assert found.loss == pytest.approx(
        expected.loss, rel=BOUNDS[row.precision][0] / 10
    )  # of terms ≥ 0


# Of `sum` the mean is a third, which clipping and Adam undo; the noise of a part is not that of its place.
CONTROLS = [
    row
    for row in ROWS
    if (row.precision, row.noise) == ("float64", "quiet") and row.reduction != "sum"
]


@pytest.mark.parametrize("row", CONTROLS, ids="-".join)
def test_the_mean_of_means_is_another_update(precision, row):
    precision(row.precision)
    (before, expected), (_, found) = by_keras(row), by_keras(row, MICRO)
    assert (
        apart(found.weights, expected.weights, before.weights, *BOUNDS["float64"]) > 1e6
    )
