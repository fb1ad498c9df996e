"""The cases of `test_matrix.py`: what is trained, by an `Update`, by plain Keras on whole batches, and in wrong ways.

Nothing is built at import, so that a process that has its devices to set up first can import this too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses

from pipeline.accumulation import Update
from pipeline.accumulation.internals import Objective
from tests.accumulation.matrix_workers import weights_after

FEATURES, CLASSES, TOKENS, WORDS = 6, 3, 5, 12
EXAMPLES = 48
TAIL, RAGGED = (
    29,
    7,
)  # on two replicas 15 and 14 examples, in micro-batches of 7, 7, 1 and 7, 7

Weights = list[np.ndarray]
Minimised = Callable[["Kind", keras.Model, tuple], tf.Tensor]


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


# A stored weight is rounded by 2⁻²⁴ = 6e-8 of itself, and `deviation` divides by the way that the weights have gone: so
# the one update in float32 goes about as far as the weights are. The rest of 1e-6 is for the gradient: 48 examples or
# 120 tokens in another order, of which much cancels, 5e-7 at most. Muon stretches what is small of a gradient in five
# iterations 3.4445⁵ = 485 times, and the rounding with it; one iteration of slope 1.5 leaves it as it is.
ONE_ITERATION = {"ns_steps": 1, "muon_a": 1.5, "muon_b": -0.5, "muon_c": 0.0}
FLOAT32 = Run("float32", 1, 1.0, 1e-6, {"Muon": ONE_ITERATION})
# 2⁻⁵³ = 1e-16 an update, by Muon 485 times; the smaller rates see to it that 20 updates amplify it no further.
FLOAT64 = Run("float64", 20, 10.0, 1e-12, {})


class Kind(NamedTuple):
    """A model, its batches of `(x, y)` or `(x, y, sample_weight)`, and the losses of its outputs with their weights.

    Attributes:
        seed: of the batches, one of those where no element of the first gradient is near zero: from there on sign-like
            optimizers go ±1 by its rounding. A test looks.
    """

    model: Callable[[], keras.Model]
    batch: Callable[[int, np.random.Generator], tuple]
    losses: Callable[[], list[losses.Loss]]
    seed: int
    loss_weights: tuple[float, ...] = (1.0,)


def _features(count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x = random.normal(size=(count, FEATURES)).astype(keras.config.floatx())
    return x, np.argmax(x[:, :CLASSES] + [1, 0, 0], axis=1)


def _weighted(count: int, random: np.random.Generator) -> tuple[np.ndarray, ...]:
    return *_features(count, random), np.linspace(3, 0.1, count).astype(
        keras.config.floatx()
    )


def _two(
    count: int, random: np.random.Generator
) -> tuple[np.ndarray, list[np.ndarray]]:
    x, y = _features(count, random)
    return x, [y, x[:, 3:4] - 2 * x[:, 4:5] + 1]


def _tokens(count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Most tokens of the first examples are 0, which is padding, and none of the last ones, which have other labels."""
    x, place = (
        random.integers(1, WORDS, (count, TOKENS)),
        np.linspace(0, 1, count)[:, None],
    )
    x[np.arange(TOKENS) > TOKENS * place] = 0
    return x, np.minimum((x + (place > 0.5)) % 5, CLASSES - 1)


def _words(count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A batch has some words many times, and two never."""
    x = random.integers(0, WORDS - 2, (count, TOKENS))
    return x, np.minimum(x[:, 0] % 5, CLASSES - 1)


def _dense(**arguments: Any) -> keras.Model:
    hidden = layers.Dense(5, "tanh", **arguments)
    return keras.Sequential(
        [keras.Input((FEATURES,)), hidden, layers.Dense(CLASSES, **arguments)]
    )


def _regularised(by: float = 0.1) -> keras.Model:
    return _dense(kernel_regularizer=keras.regularizers.L2(by))


def _two_heads() -> keras.Model:
    inputs = keras.Input((FEATURES,))
    hidden = layers.Dense(5, "tanh")(inputs)
    return keras.Model(inputs, [layers.Dense(CLASSES)(hidden), layers.Dense(1)(hidden)])


def _of_words(*more: layers.Layer, **arguments: Any) -> keras.Model:
    embedding = layers.Embedding(
        WORDS, 4, keras.initializers.RandomUniform(-0.5, 1), **arguments
    )
    return keras.Sequential(
        [keras.Input((TOKENS,), dtype="int64"), embedding, *more, layers.Dense(CLASSES)]
    )


def _cross_entropy(**arguments: Any) -> list[losses.Loss]:
    return [losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)]


KINDS = {
    "dense": Kind(_dense, _features, _cross_entropy, 37),
    "masked tokens": Kind(
        lambda: _of_words(mask_zero=True), _tokens, _cross_entropy, 42
    ),
    # Regularised, so that what the sample weights add up to has to be known before the forward pass.
    "sample weights": Kind(
        lambda: _regularised(1e-3),
        _weighted,
        lambda: _cross_entropy(reduction="mean_with_sample_weight"),
        38,
    ),
    "two outputs": Kind(
        _two_heads,
        _two,
        lambda: [*_cross_entropy(), losses.MeanSquaredError()],
        8,
        (1.0, 0.3),
    ),
    "embedding": Kind(lambda: _of_words(layers.Flatten()), _words, _cross_entropy, 221),
    "regularised": Kind(_regularised, _features, _cross_entropy, 40),
}
# All that Keras has but those around others, at rates at which the first update goes about as far as the weights are.
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
    return accumulated(case, run, tf.distribute.get_strategy())


def _two_replicas(case: Case, run: Run) -> Weights:
    return accumulated(case, run, tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))


class Devices(NamedTuple):
    replicas: int
    weights_after: Callable[[Case, Run], Weights]  # may be of another process


DEVICES = {
    "one device": Devices(1, _one_device),
    "two replicas": Devices(2, _two_replicas),
    "two workers": Devices(2, weights_after),
}


def pairs_of(row: Sequence[str]) -> set[tuple]:
    """Return the pairs of values in a row, each value with its axis."""
    return set(combinations(enumerate(row), 2))


def covering(*axes: Iterable[str]) -> list[Case]:
    """Return rows that have each pair of values of two axes: always one with most new pairs, of rarely used values."""
    pairs = {row: pairs_of(row) for row in product(*axes)}
    left, used, rows = set().union(*pairs.values()), Counter(), []
    while left:
        row = max(
            pairs,
            key=lambda row: (
                len(pairs[row] & left),
                -sum(used[value] for value in row),
            ),
        )
        rows.append(Case(*row))
        used.update(row)
        left -= pairs[row]
    return rows


def crossed(
    axes: Iterable[Iterable[str]], impossible: Sequence[tuple[str, str]]
) -> list[tuple[str, ...]]:
    """Return rows that have every possible pair of values, of many axes: always the best of 40, filled axis by axis.

    Where several values of an axis give as many new pairs, the first one is taken.
    """

    def possible(*values: tuple[int, str]) -> bool:
        return not any(
            set(pair) <= {value for _, value in values} for pair in impossible
        )

    draw, rows, of_axes = (
        random.Random(0),
        [],
        [[(index, value) for value in axis] for index, axis in enumerate(axes)],
    )
    missing = {
        pair
        for two in combinations(of_axes, 2)
        for pair in product(*two)
        if possible(*pair)
    }

    def filled() -> tuple[str, ...]:
        row = list(draw.choice(sorted(missing)))
        for index in draw.sample(range(len(of_axes)), len(of_axes)):
            if index not in dict(row):
                values = [one for one in of_axes[index] if possible(*row, one)]
                row.append(
                    max(
                        values,
                        key=lambda one: sum(
                            tuple(sorted((one, other))) in missing for other in row
                        ),
                    )
                )
        return tuple(value for _, value in sorted(row))

    while missing:
        rows.append(
            max(
                (filled() for _ in range(40)),
                key=lambda row: len(pairs_of(row) & missing),
            )
        )
        missing -= pairs_of(rows[-1])
    return rows


def pieces(case: Case, examples: int) -> list[slice]:
    """Return the micro-batches of all replicas."""
    share, size = -(-examples // DEVICES[case.devices].replicas), micro_batch_size(case)
    starts = [
        (start, begin + share)
        for begin in range(0, examples, share)
        for start in range(begin, begin + share, size)
    ]
    return [
        slice(start, min(start + size, stop, examples))
        for start, stop in starts
        if start < examples
    ]


def micro_batch_size(case: Case) -> int:
    factor = CUTS[case.cut]
    return (
        RAGGED
        if factor is None
        else EXAMPLES // DEVICES[case.devices].replicas // factor
    )


def accumulated(
    case: Case,
    run: Run,
    strategy: tf.distribute.Strategy,
    read: Callable[[tuple], Any] = lambda batch: batch,
) -> Weights:
    """Return the trained weights after the updates of an `Update`, which takes what is `read` of each batch."""
    kind = KINDS[case.kind]
    with strategy.scope():
        model, optimizer = at_start(case, run)
    loss: Any = kind.losses()
    given: dict[str, Any] = (
        {"loss_weights": list(kind.loss_weights)} if len(loss) > 1 else {}
    )
    loss = loss if len(loss) > 1 else loss[0]
    update = Update(
        model,
        Objective(loss, **given),
        optimizer,
        micro_batch_size(case),
        strategy=strategy,
    )
    step = _traced(lambda batch: update(read(batch)), case, run)
    for batch in batches(case, run):
        step(batch)
    return _weights(model)


def loss_of(kind: Kind, model: keras.Model, batch: tuple) -> tf.Tensor:
    """Return Keras' loss of a whole batch."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    outputs = tf.nest.flatten(model(x, training=True))
    of_outputs = zip(
        kind.losses(), kind.loss_weights, tf.nest.flatten(y), outputs, strict=True
    )
    return sum(
        scale * loss(labels, out, sample_weight)
        for loss, scale, labels, out in of_outputs
    ) + sum(model.losses)


def gradients_of(
    case: Case, model: keras.Model, batch: tuple, minimised: Minimised = loss_of
) -> list[tf.Tensor]:
    """Return the gradient by a plain tape, dense.

    From rows of an embedding that were looked up twice Keras' optimizers make another step.
    """
    with tf.GradientTape() as tape:
        value = minimised(KINDS[case.kind], model, batch)
    found = tape.gradient(
        value, [variable.value for variable in model.trainable_variables]
    )
    return [tf.convert_to_tensor(gradient) for gradient in found]


def by_keras(case: Case, run: Run, minimised: Minimised = loss_of) -> list[Weights]:
    """Return the weights before, between and after the updates of a plain loop, without micro-batches and replicas."""
    model, optimizer = at_start(case, run)
    found = [_weights(model)]

    def step(batch: tuple) -> None:
        optimizer.apply(
            gradients_of(case, model, batch, minimised), model.trainable_variables
        )

    step = step if run.updates == 1 else _traced(step, case, run)
    for batch in batches(case, run):
        step(batch)
        found.append(_weights(model))
    return found


def _traced(
    step: Callable[[tuple], Any], case: Case, run: Run
) -> Callable[[tuple], Any]:
    """Return one trace for batches of every size."""
    first = next(batches(case, run))
    specs = tf.nest.map_structure(
        lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), first
    )
    return tf.function(step, input_signature=[specs], autograph=False)


def batches(case: Case, run: Run) -> Iterator[tuple]:
    random = np.random.default_rng(KINDS[case.kind].seed)
    for update in range(run.updates):
        count = TAIL if CUTS[case.cut] is None and update % 2 == 0 else EXAMPLES
        yield tf.nest.map_structure(tf.constant, KINDS[case.kind].batch(count, random))


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


def deviation(found: Weights, expected: Weights, before: Weights) -> float:
    """Return how far apart two trained weights are, relative to the way from the start, of the worst variable."""
    of_variables = zip(found, expected, before, strict=True)
    return max(
        float(np.linalg.norm(a - b) / np.linalg.norm(b - start))
        for a, b, start in of_variables
    )


# Wrong ways


def mean_of_means(parts: Sequence[slice]) -> Minimised:
    """Each micro-batch has the same weight, whatever it holds."""
    return lambda kind, model, batch: (
        sum(loss_of(kind, model, _part(batch, part)) for part in parts) / len(parts)
    )


def last_one_dropped(parts: Sequence[slice]) -> Minimised:
    """The last micro-batch is lost, as the rest of an epoch is in a loop that counts to K."""
    return lambda kind, model, batch: loss_of(
        kind, model, _part(batch, slice(parts[-1].start))
    )


def regularised_in_each(parts: Sequence[slice]) -> Minimised:
    """Regularisation is added in every micro-batch, so K times."""
    return lambda kind, model, batch: (
        loss_of(kind, model, batch) + (len(parts) - 1) * sum(model.losses)
    )


def half_left_out(parts: Sequence[slice]) -> Minimised:
    """Where there is one micro-batch alone: not all of its examples are used."""
    return lambda kind, model, batch: loss_of(
        kind, model, _part(batch, slice(EXAMPLES // 2))
    )


def unregularised(parts: Sequence[slice]) -> Minimised:
    """Where there is one micro-batch alone: regularisation is forgotten."""
    return lambda kind, model, batch: loss_of(kind, model, batch) - sum(model.losses)


def _part(batch: tuple, part: slice) -> tuple:
    return tf.nest.map_structure(lambda leaf: leaf[part], batch)


def wrong_way(case: Case) -> Callable[[Sequence[slice]], Minimised]:
    """Return a mistake that shows in this case."""
    if case.cut == "factor 1" and DEVICES[case.devices].replicas == 1:
        return unregularised if case.kind == "regularised" else half_left_out
    if case.kind == "regularised":
        return regularised_in_each
    # Where all micro-batches weigh the same, the mean of their means is right.
    same = CUTS[case.cut] is not None and case.kind not in (
        "masked tokens",
        "sample weights",
    )
    return last_one_dropped if same else mean_of_means


def after_a_wrong_update(case: Case, run: Run) -> Weights:
    """Return the weights after one update of the plain loop with the mistake of `wrong_way` in it."""
    make = wrong_way(case)

    def minimised(kind: Kind, model: keras.Model, batch: tuple) -> tf.Tensor:
        return make(pieces(case, tf.nest.flatten(batch)[0].shape[0]))(
            kind, model, batch
        )

    return by_keras(case, run._replace(updates=1), minimised)[1]
