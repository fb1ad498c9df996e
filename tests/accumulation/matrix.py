"""The cases of `test_matrix.py`: what is trained, by an `Update` and by plain Keras.

Plain Keras takes whole batches. `wrong_ways.py` has the mistakes that the tests have to
notice. Nothing is built at import, so that a process that has its devices to set up
first can import this too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses

from pipeline.accumulation import Update
from pipeline.accumulation.internals import Objective
from tests.accumulation import reference
from tests.accumulation.matrix_workers import weights_after
from tests.accumulation.replicas import strategy_on

FEATURES = 6
CLASSES = 3
TOKENS = 5
WORDS = 12
EXAMPLES = 48

# A smaller batch, and a micro-batch size that divides neither. On two replicas it is 15
# and 14 examples, in micro-batches of 7, 7, 1 and 7, 7.
TAIL = 29
RAGGED = 7

Weights = list[np.ndarray]
Minimized = Callable[["Kind", keras.Model, tuple], tf.Tensor]
Step = Callable[[tuple], Any]


class Case(NamedTuple):
    """One cell of the matrix: a key of `OPTIMIZERS`, `KINDS`, `CUTS` and `DEVICES`."""

    optimizer: str
    kind: str
    cut: str
    devices: str


class Run(NamedTuple):
    """For how many updates, and how near plain Keras is.

    Attributes:
        slower: the learning rate is divided by it.
        tolerance: of `deviation`.
        options: of optimizers, by name.
    """

    precision: str
    updates: int
    slower: float
    tolerance: float
    options: dict[str, dict[str, Any]]


# A stored weight is rounded by 2⁻²⁴ = 6e-8 of itself, and `deviation` divides by the
# way that the weights have gone: so the one update in float32 goes about as far as the
# weights are. The rest of 1e-6 is for the gradient: 48 examples or 120 tokens in
# another order, of which much cancels, 5e-7 at most. Muon stretches what is small of a
# gradient in five iterations 3.4445⁵ = 485 times, and the rounding with it; one
# iteration of slope 1.5 leaves it as it is.
ONE_ITERATION = {"ns_steps": 1, "muon_a": 1.5, "muon_b": -0.5, "muon_c": 0.0}
FLOAT32 = Run("float32", 1, 1.0, 1e-6, {"Muon": ONE_ITERATION})

# 2⁻⁵³ = 1e-16 an update, by Muon 485 times; the smaller rates see to it that 20 updates
# amplify it no further.
FLOAT64 = Run("float64", 20, 10.0, 1e-12, {})


class Kind(NamedTuple):
    """A model, its batches, and the losses of its outputs with their weights.

    Attributes:
        batch: returns `(x, y)` or `(x, y, sample_weight)` for a number of examples.
        seed: of the batches. It is one of those where no element of the first gradient
            is near zero: from there on sign-like optimizers go ±1 by its rounding. A
            test checks it.
    """

    model: Callable[[], keras.Model]
    batch: Callable[[int, np.random.Generator], tuple]
    losses: Callable[[], list[losses.Loss]]
    seed: int
    loss_weights: tuple[float, ...] = (1.0,)


def _features(count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x = random.normal(size=(count, FEATURES)).astype(keras.config.floatx())
    y = np.argmax(x[:, :CLASSES] + [1, 0, 0], axis=1)
    return x, y


def _weighted(count: int, random: np.random.Generator) -> tuple[np.ndarray, ...]:
    x, y = _features(count, random)
    sample_weight = np.linspace(3, 0.1, count).astype(keras.config.floatx())
    return x, y, sample_weight


def _two(
    count: int, random: np.random.Generator
) -> tuple[np.ndarray, list[np.ndarray]]:
    x, y = _features(count, random)
    return x, [y, x[:, 3:4] - 2 * x[:, 4:5] + 1]


def _tokens(count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens of which 0 is padding: most of the first examples, none at the end.

    The last examples have other labels than the first ones, too.
    """
    x = random.integers(1, WORDS, (count, TOKENS))
    place = np.linspace(0, 1, count)[:, None]
    x[np.arange(TOKENS) > TOKENS * place] = 0
    in_second_half = place > 0.5
    y = np.minimum((x + in_second_half) % 5, CLASSES - 1)
    return x, y


def _words(count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return a batch that has some words many times, and two never."""
    x = random.integers(0, WORDS - 2, (count, TOKENS))
    y = np.minimum(x[:, 0] % 5, CLASSES - 1)
    return x, y


def _dense(**arguments: Any) -> keras.Model:
    hidden = layers.Dense(5, "tanh", **arguments)
    outputs = layers.Dense(CLASSES, **arguments)
    return keras.Sequential([keras.Input((FEATURES,)), hidden, outputs])


def _regularized(factor: float = 0.1) -> keras.Model:
    return _dense(kernel_regularizer=keras.regularizers.L2(factor))


def _two_heads() -> keras.Model:
    inputs = keras.Input((FEATURES,))
    hidden = layers.Dense(5, "tanh")(inputs)
    return keras.Model(inputs, [layers.Dense(CLASSES)(hidden), layers.Dense(1)(hidden)])


def _on_words(*more: layers.Layer, **arguments: Any) -> keras.Model:
    inputs = keras.Input((TOKENS,), dtype="int64")
    initializer = keras.initializers.RandomUniform(-0.5, 1)
    embedding = layers.Embedding(WORDS, 4, initializer, **arguments)
    return keras.Sequential([inputs, embedding, *more, layers.Dense(CLASSES)])


def _cross_entropy(**arguments: Any) -> list[losses.Loss]:
    return [losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)]


KINDS = {
    "dense": Kind(
        model=_dense,
        batch=_features,
        losses=_cross_entropy,
        seed=37,
    ),
    "masked tokens": Kind(
        model=lambda: _on_words(mask_zero=True),
        batch=_tokens,
        losses=_cross_entropy,
        seed=42,
    ),
    # Regularized, so that what the sample weights add up to has to be known before the
    # forward pass.
    "sample weights": Kind(
        model=lambda: _regularized(1e-3),
        batch=_weighted,
        losses=lambda: _cross_entropy(reduction="mean_with_sample_weight"),
        seed=38,
    ),
    "two outputs": Kind(
        model=_two_heads,
        batch=_two,
        losses=lambda: [*_cross_entropy(), losses.MeanSquaredError()],
        seed=8,
        loss_weights=(1.0, 0.3),
    ),
    "embedding": Kind(
        model=lambda: _on_words(layers.Flatten()),
        batch=_words,
        losses=_cross_entropy,
        seed=221,
    ),
    "regularised": Kind(
        model=_regularized,
        batch=_features,
        losses=_cross_entropy,
        seed=40,
    ),
}

# All optimizers that Keras has, without those that wrap others, at rates at which the
# first update goes about as far as the weights are.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adadelta": {"learning_rate": 100.0},  # its first steps are √ε of the others'
    "Adafactor": {"learning_rate": 1.0},
    "Adagrad": {"learning_rate": 1.0},
    "Adam": {"learning_rate": 0.3},
    "AdamW": {"learning_rate": 0.3, "weight_decay": 0.1},
    "Adamax": {"learning_rate": 0.3},
    "Ftrl": {"learning_rate": 1.0},
    "Lamb": {"learning_rate": 0.3},
    "Lion": {"learning_rate": 0.3},
    "Muon": {"learning_rate": 2.0, "adam_lr_ratio": 0.1},
    "Nadam": {"learning_rate": 0.3},
    "RMSprop": {"learning_rate": 0.1},
    "SGD": {"learning_rate": 3.0, "momentum": 0.9, "nesterov": True},
    "ScheduleFreeAdamW": {"learning_rate": 0.3},
}

# Factors. Ragged: every other batch is smaller and no micro-batch size divides it.
CUTS: dict[str, int | None] = {
    "factor 1": 1,
    "factor 3": 3,
    "factor 8": 8,
    "ragged": None,
}


def _one_device(case: Case, run: Run) -> Weights:
    return accumulated(case, run, strategy_on(1))


def _two_replicas(case: Case, run: Run) -> Weights:
    return accumulated(case, run, strategy_on(2))


class Devices(NamedTuple):
    """Where an update is computed.

    Attributes:
        weights_after: trains a case; in other processes, where they are workers.
    """

    replicas: int
    weights_after: Callable[[Case, Run], Weights]


DEVICES = {
    "one device": Devices(1, _one_device),
    "two replicas": Devices(2, _two_replicas),
    "two workers": Devices(2, weights_after),
}


def micro_batch_size(case: Case) -> int:
    factor = CUTS[case.cut]
    if factor is None:
        return RAGGED
    return EXAMPLES // DEVICES[case.devices].replicas // factor


def pieces(case: Case, examples: int) -> list[slice]:
    """Return the micro-batches of all replicas."""
    share = -(-examples // DEVICES[case.devices].replicas)
    size = micro_batch_size(case)
    micro_batches = []
    for share_start in range(0, examples, share):
        share_stop = min(share_start + share, examples)
        for start in range(share_start, share_stop, size):
            micro_batches.append(slice(start, min(start + size, share_stop)))
    return micro_batches


def accumulated(
    case: Case,
    run: Run,
    strategy: tf.distribute.Strategy,
    read: Callable[[tuple], Any] = lambda batch: batch,
) -> Weights:
    """Return the trained weights after the updates of an `Update`.

    The update takes what `read` returns for each batch.
    """
    kind = KINDS[case.kind]
    with strategy.scope():
        model, optimizer = at_start(case, run)
    losses_of_outputs = kind.losses()
    if len(losses_of_outputs) == 1:
        objective = Objective(losses_of_outputs[0])
    else:
        objective = Objective(losses_of_outputs, list(kind.loss_weights))
    size = micro_batch_size(case)
    update = Update(model, objective, optimizer, size, strategy=strategy)

    step = _traced(lambda batch: update(read(batch)), case, run)
    for batch in batches(case, run):
        step(batch)
    return _weights(model)


def loss_of(kind: Kind, model: keras.Model, batch: tuple) -> tf.Tensor:
    """Return Keras' loss of a whole batch."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    outputs = tf.nest.flatten(model(x, training=True))
    labels = tf.nest.flatten(y)
    total = 0.0
    for index, loss in enumerate(kind.losses()):
        value = loss(labels[index], outputs[index], sample_weight)
        total += kind.loss_weights[index] * value
    return total + sum(model.losses)


def gradients_of(
    case: Case, model: keras.Model, batch: tuple, minimized: Minimized = loss_of
) -> list[tf.Tensor]:
    """Return the gradient by a plain tape, dense."""
    with tf.GradientTape() as tape:
        value = minimized(KINDS[case.kind], model, batch)
    return reference.dense(reference.gradients_of(tape, value, model))


def by_keras(case: Case, run: Run, minimized: Minimized = loss_of) -> list[Weights]:
    """Return the weights before, between and after the updates of a plain loop.

    It has no micro-batches and no replicas.
    """
    model, optimizer = at_start(case, run)
    trajectory = [_weights(model)]

    def step(batch: tuple) -> None:
        gradients = gradients_of(case, model, batch, minimized)
        optimizer.apply(gradients, model.trainable_variables)

    if run.updates > 1:
        step = _traced(step, case, run)
    for batch in batches(case, run):
        step(batch)
        trajectory.append(_weights(model))
    return trajectory


def _traced(step: Step, case: Case, run: Run) -> Step:
    """Return one trace for batches of every size."""
    first = next(batches(case, run))
    specs = tf.nest.map_structure(
        lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), first
    )
    return tf.function(step, input_signature=[specs], autograph=False)


def batches(case: Case, run: Run) -> Iterator[tuple]:
    """Yield the batches of a run; every other one is smaller if the cut is ragged."""
    kind = KINDS[case.kind]
    random = np.random.default_rng(kind.seed)
    for update in range(run.updates):
        count = EXAMPLES
        if CUTS[case.cut] is None and update % 2 == 0:
            count = TAIL
        yield tf.nest.map_structure(tf.constant, kind.batch(count, random))


def at_start(case: Case, run: Run) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    keras.utils.set_random_seed(0)
    model = KINDS[case.kind].model()
    options = OPTIMIZERS[case.optimizer] | run.options.get(case.optimizer, {})
    options["learning_rate"] /= run.slower
    optimizer = getattr(keras.optimizers, case.optimizer)(**options)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def _weights(model: keras.Model) -> Weights:
    return [variable.numpy() for variable in model.trainable_variables]


def deviation(trained: Weights, expected: Weights, before: Weights) -> float:
    """Return the distance between trained weights ÷ the way that they have gone.

    It is that of the worst variable.
    """
    deviations = []
    for ours, theirs, start in zip(trained, expected, before, strict=True):
        distance = np.linalg.norm(ours - theirs)
        deviations.append(float(distance / np.linalg.norm(theirs - start)))
    return max(deviations)
