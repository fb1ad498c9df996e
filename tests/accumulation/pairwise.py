"""The cases of `test_pairwise.py`: models, losses, batches and optimizers, crossed.

Each of `ROWS` has one value of each of `AXES`, and all rows together have every
possible pair of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses

from tests.accumulation.covering import crossed
from tests.accumulation.matrix import CLASSES, FEATURES, TOKENS, WORDS

# Micro-batches of 16, 16, 8 and 16, 7; on each of two replicas 16, 4 and 12 or 11.
SIZES = (40, 23)
MICRO = 16

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "decay": {"weight_decay": 0.1},
    "amsgrad": {"amsgrad": True},  # which is not fused
    "schedule": {
        "learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    },
    "average": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "loss scale": {},
}
# Where it makes no difference to the pairs, the first value of an axis is taken: what
# is traced fastest.
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
# The noise of ragged examples is rejected, as one needs as much as the longest; Keras
# cannot add bfloat16 to float32.
IMPOSSIBLE = (
    ("ragged", "Dropout"),
    ("ragged", "GaussianNoise"),
    ("activity", "mixed_bfloat16"),
    ("one", "of outputs"),
)


class Row(NamedTuple):
    """One value of each axis, in the order of `AXES`."""

    inputs: str
    optimizer: str
    weights: str
    regulariser: str
    clipping: str
    labels: str
    reduction: str
    outputs: str
    state: str
    noise: str
    precision: str
    replicas: str
    width: str

    @property
    def masked(self) -> bool:
        return self.inputs in ("mask_zero", "Masking")

    @property
    def wide(self) -> bool:
        return self.width == "wide"


assert Row._fields == tuple(AXES)
ROWS = [Row(*row) for row in crossed(AXES.values(), IMPOSSIBLE)]


class PassThrough(layers.Layer):
    """Returns its inputs, and does besides what the row has.

    It keeps statistics of its inputs that no weight depends on, in a layer or in a
    metric, or adds the loss of a mean.
    """

    def __init__(self, row: Row):
        super().__init__()
        self.supports_masking = True
        self.adds_loss = row.regulariser == "add_loss"
        self.statistics = None
        self.mean = None
        if row.state == "statistics":
            self.statistics = layers.BatchNormalization(momentum=0.5)
        if row.state == "metric":
            self.mean = keras.metrics.Mean()

    def call(self, x, training=None, mask=None):
        if self.statistics is not None:
            self.statistics(x, training=training, mask=mask)
        if self.mean is not None:
            self.mean.update_state(tf.reduce_mean(x, -1))
        if self.adds_loss:
            squares = tf.square(tf.cast(x, keras.config.floatx()))
            self.add_loss(0.3 * tf.reduce_mean(squares))
        return x


class Bags(layers.Embedding):
    """The mean of the embeddings of each example's tokens, which are ragged."""

    def call(self, tokens):
        embedded = super().call(tokens.flat_values)
        return tf.math.segment_mean(embedded, tokens.value_rowids())

    def compute_output_spec(self, tokens):
        return keras.KerasTensor((tokens.shape[0], self.output_dim), self.compute_dtype)


class Entry(NamedTuple):
    """What a model begins with."""

    inputs: Any
    read: Callable[[Any], Any]


def _entry(row: Row) -> Entry:
    words = 1 << 14 if row.wide else WORDS
    table = {"input_dim": words, "output_dim": 4}
    tokens = keras.Input((TOKENS,), dtype="int64")
    both = {
        "left": keras.Input((FEATURES,), name="left"),
        "right": keras.Input((2,), name="right"),
    }

    def embedded(x: Any) -> Any:
        return layers.Flatten()(layers.Embedding(**table)(x))

    ragged = keras.Input((None,), dtype="int64", ragged=True)
    return {
        "numbers": Entry(keras.Input((FEATURES,)), lambda x: x),
        "dict": Entry(both, lambda x: layers.Concatenate()(list(x.values()))),
        "embedding": Entry(tokens, embedded),
        "mask_zero": Entry(tokens, layers.Embedding(**table, mask_zero=True)),
        "Masking": Entry(keras.Input((TOKENS, FEATURES)), layers.Masking()),
        "ragged": Entry(ragged, Bags(**table)),
    }[row.inputs]


def model_of(row: Row) -> keras.Model:
    """Return a model with what is in the row.

    Wide ones have the fused step, and in float32 the package's gradient.
    """
    inputs, read = _entry(row)
    x = read(inputs)
    if row.wide:
        x = layers.Dense(1024, "tanh")(x)

    options: dict[str, Any] = {}
    if row.regulariser == "L2":
        options = {"kernel_regularizer": "l2"}
    elif row.regulariser == "activity":
        options = {"activity_regularizer": keras.regularizers.L2(1e-2)}
    units = 512 if row.wide else 8
    x = PassThrough(row)(layers.Dense(units, "tanh", **options)(x))
    if row.noise != "quiet":
        x = getattr(layers, row.noise)(0.3)(x)

    first = layers.Dense(CLASSES)(x)
    if row.outputs == "one":
        return keras.Model(inputs, first)
    return keras.Model(inputs, {"first": first, "second": layers.Dense(1)(x)})


def objective_of(row: Row) -> dict[str, Any]:
    """Return the loss and the loss weights, as `compile` takes them."""
    first: losses.Loss
    if row.labels == "sparse":
        first = losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=row.reduction
        )
    elif row.labels == "one-hot":
        first = losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=0.1, reduction=row.reduction
        )
    else:
        first = losses.MeanSquaredError(reduction=row.reduction)
    if row.outputs == "one":
        return {"loss": first}

    second = None
    if row.outputs == "two":
        second = losses.Huber()
    return {
        "loss": {"first": first, "second": second},
        "loss_weights": {"first": 1.0, "second": 0.3},
    }


def batches(row: Row) -> Iterator[tuple]:
    """Yield the batches of the row.

    Their first examples have other labels, weights and numbers of tokens than the last
    ones.
    """
    draw = np.random.default_rng(0)
    floatx = keras.config.floatx()

    def as_tensor(leaf: Any) -> tf.Tensor:
        return leaf if tf.is_tensor(leaf) else tf.constant(leaf)

    for count in SIZES:
        place = np.linspace(0, 1, count)[:, None]
        tokens = draw.integers(1, WORDS, (count, TOKENS))
        is_token = np.arange(TOKENS) <= TOKENS * place
        numbers = draw.normal(size=(count, TOKENS, FEATURES)) + place[..., None]
        numbers = numbers.astype(floatx)
        x: Any = {
            "numbers": numbers[:, 0],
            "dict": {"left": numbers[:, 0], "right": numbers[:, 1, :2]},
            "embedding": tokens,
            "mask_zero": tokens * is_token,
            "Masking": numbers * is_token[..., None],
            "ragged": tf.RaggedTensor.from_row_lengths(
                tokens[is_token], is_token.sum(-1)
            ),
        }[row.inputs]

        in_second_half = place > 0.5
        y = np.minimum((tokens + in_second_half) % 5, CLASSES - 1)
        size = numbers[..., :1]
        uneven = np.linspace(3, 0.1, count)[:, None]
        in_later_micro_batch = np.arange(count)[:, None] >= MICRO
        # Weights keep the axis of a mask: Keras takes them so.
        if not row.masked:
            y = y[:, 0]
            size = size[:, 0]
            uneven = uneven[:, 0]
            in_later_micro_batch = in_later_micro_batch[:, 0]
        labels = y
        if row.labels != "sparse":
            labels = np.eye(CLASSES, dtype=floatx)[y]
        batch: tuple = (x, labels)
        if row.outputs != "one":
            batch = (x, {"first": labels, "second": size})

        weights: Any = {
            "unweighted": None,
            "uneven": uneven,
            "zeros": in_later_micro_batch,  # 0 in all of the first one
            "of classes": np.array([0.3, 1, 4])[y],
            "of outputs": {"first": uneven, "second": uneven[::-1]},
        }[row.weights]
        if weights is not None:
            weights = tf.nest.map_structure(lambda leaf: leaf.astype(floatx), weights)
            batch = (*batch, weights)
        yield tf.nest.map_structure(as_tensor, batch)


def at_start(row: Row) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    keras.utils.set_random_seed(0)
    # ε of the size of gradients: else the rounding of those near zero turns a step.
    options = {"learning_rate": 0.1, "epsilon": 1e-2} | OPTIMIZERS[row.optimizer]
    if row.clipping != "unclipped":
        options[row.clipping] = 0.05
    model = model_of(row)
    optimizer = keras.optimizers.Adam(**options)
    if row.optimizer == "loss scale":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
    optimizer.build(model.trainable_variables)
    return model, optimizer
