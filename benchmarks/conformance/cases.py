"""The catalogue: what is trained in each case.

The data are NumPy's, so that every library gets the same numbers. The network is dense,
tanh, dense; the loss is the cross-entropy of three classes. The optimizer is plain SGD,
whose change of the weights is the gradient times the rate: a gradient that is wrong by
a factor shows as that factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

Arrays = tuple[np.ndarray, ...]

FACTOR = 4  # micro-batches of an update
MICRO = 4  # examples of a micro-batch
RATE = 0.5
FEATURES = 6
HIDDEN = 8
CLASSES = 3
TIME = 8  # tokens of a padded text
IGNORED = -100  # the label of a token that does not count; PyTorch's default


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        name: the name in the JSON.
        title: the title in the table.
        trap: what goes wrong in a library that falls into the trap.
        sizes: the number of examples of each update of an epoch.
        epochs: the number of epochs.
        tokens: whether an example is a text of 1 to TIME tokens, and each token has a
            label.
        divided_by: of examples with weights, `count` for Σwl / N and `weights` for
            Σwl / Σw; empty if they have no weights.
        decay: update n, from 0, has the rate RATE · decayⁿ.
        clip: the largest norm of a gradient.
        penalty: this times the sum of all squared weights is added to the loss.
        logged: whether the logged losses are compared, not the weights.
        devices: the number of devices that share a micro-batch.
    """

    name: str
    title: str
    trap: str
    sizes: tuple[int, ...] = (16, 16, 16)
    epochs: int = 1
    tokens: bool = False
    divided_by: str = ""
    decay: float = 1.0
    clip: float | None = None
    penalty: float = 0.0
    logged: bool = False
    devices: int = 1

    @property
    def updates(self) -> int:
        return len(self.sizes) * self.epochs


CASES = (
    Case(
        "equal",
        "equal micro-batches",
        "nothing; this is the control, which all should get right",
    ),
    Case(
        "ragged",
        "a smaller last micro-batch",
        "14 examples are cut into 4 + 4 + 4 + 2; in the mean of the four means, "
        "the last two examples count double",
        sizes=(14,),
        epochs=3,
    ),
    Case(
        "tail",
        "the tail of an epoch",
        "24 examples are one update of 16 and one of 8; the gradient of the last 8 "
        "waits for the next epoch, or is divided by four although there are only two "
        "micro-batches",
        sizes=(16, 8),
        epochs=2,
    ),
    Case(
        "tokens",
        "texts of unequal length",
        "a text has 1 to 8 tokens; the mean over the tokens of each micro-batch gives "
        "tokens of short texts more weight",
        tokens=True,
    ),
    Case(
        "weights_by_count",
        "sample weights, Σwl / N",
        "the mean that Keras takes by default; the mean over micro-batches is right if "
        "all of them are of equal size",
        divided_by="count",
    ),
    Case(
        "weights_by_sum",
        "sample weights, Σwl / Σw",
        "the mean that PyTorch takes with class weights; each micro-batch is divided "
        "by its own Σw",
        divided_by="weights",
    ),
    Case(
        "schedule",
        "a learning-rate schedule",
        "the rate of update n is 0.5 · 0.75ⁿ; a schedule that counts micro-batches "
        "advances four times as fast",
        sizes=(16,) * 6,
        decay=0.75,
    ),
    Case(
        "clipping",
        "clipping by the global norm",
        "each micro-batch's gradient is clipped, instead of the mean of the gradients",
        clip=0.05,
    ),
    Case(
        "penalty",
        "a term added to the loss",
        "Σw² / 16, which should count once; if it is added to each micro-batch's part "
        "of a sum, it counts four times",
        penalty=0.0625,
    ),
    Case(
        "logs",
        "the log: one row per update",
        "four rows at one step, or one row with the loss of the last micro-batch, or a "
        "mean over the epoch",
        logged=True,
    ),
    Case(
        "devices",
        "two devices",
        "equal micro-batches again, each split into 2 + 2 examples on two devices",
        devices=2,
    ),
    Case(
        "devices_tokens",
        "two devices, texts of unequal length",
        "the mean of the devices' means gives tokens of short texts more weight, as "
        "the mean of the micro-batches' means does",
        tokens=True,
        devices=2,
    ),
)


def examples(case: Case) -> Arrays:
    """Return x, y and, if the examples have weights, their weights.

    The shapes are (examples, …, FEATURES), (examples, …) and (examples,).
    """
    random = np.random.default_rng(0)
    count = sum(case.sizes)
    shape = (count, TIME) if case.tokens else (count,)
    x = random.normal(size=(*shape, FEATURES))
    noise = random.normal(size=(*shape, CLASSES))
    y = np.argmax(x[..., :CLASSES] + 0.5 * noise, -1)
    if case.tokens:
        lengths = random.integers(1, TIME + 1, (count, 1))
        y[np.arange(TIME) >= lengths] = IGNORED
    if case.divided_by:
        return x, y, random.uniform(0.1, 3, count)
    return x, y


def effective_batches(case: Case) -> Iterator[Arrays]:
    """Yield what each update should train on."""
    yield from _cut(case, list(case.sizes))


def micro_batches(case: Case) -> Iterator[Arrays]:
    """Yield the micro-batches of each epoch, the last of which may be smaller."""
    full, rest = divmod(sum(case.sizes), MICRO)
    sizes = [MICRO] * full
    if rest:
        sizes.append(rest)
    yield from _cut(case, sizes)


def initial_weights() -> Arrays:
    """Return kernel and bias of both layers; a kernel is (inputs, outputs)."""
    random = np.random.default_rng(1)
    shapes = ((FEATURES, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))
    return tuple(random.normal(0, 0.5, shape) for shape in shapes)


def _cut(case: Case, sizes: list[int]) -> Iterator[Arrays]:
    """Yield consecutive batches of the examples, epoch after epoch."""
    stops = np.cumsum(sizes)[:-1]
    for _ in range(case.epochs):
        arrays = [np.split(array, stops) for array in examples(case)]
        yield from zip(*arrays, strict=True)
