"""Collects the examples that are shown, during an evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from pipeline.accumulation.internals import Share, examples_in, parts_of
from pipeline.shown.observer import Observation, OutputView
from pipeline.shown.plan import ShownPlan

BINS = 10  # of the reliability curve


@dataclass(frozen=True)
class Example:
    """One example, with what was observed of it.

    Attributes:
        index: its position in the split.
        loss: its loss, or None if it has none.
        shown_input: the part of its input that is shown.
        views: what is shown of each output, by name; see `OutputView`.
    """

    index: int
    loss: float | None
    shown_input: np.ndarray
    views: Mapping[str, OutputView]

    @property
    def badness(self) -> float:
        """The loss, with NaN as the worst."""
        if self.loss is None or math.isnan(self.loss):
            return math.inf
        return self.loss


@dataclass
class Reliability:
    """Sums over the positions whose confidence falls into each of `BINS` bins."""

    positions: np.ndarray = field(default_factory=lambda: np.zeros(BINS))
    confidence: np.ndarray = field(default_factory=lambda: np.zeros(BINS))
    correct: np.ndarray = field(default_factory=lambda: np.zeros(BINS))

    def add(self, confidence: np.ndarray, correct: np.ndarray) -> None:
        """Add positions, given the confidence of each and whether it is correct."""
        bins = np.clip((confidence * BINS).astype(int), 0, BINS - 1)
        self.positions += np.bincount(bins, minlength=BINS)
        self.confidence += np.bincount(bins, confidence, BINS)
        self.correct += np.bincount(bins, correct, BINS)

    def calibration_error(self) -> float:
        """Return the expected calibration error of Guo et al. 2017 (arXiv:1706.04599).

        It is Σ |correct − confidence| over the bins, per position.
        """
        difference = np.abs(self.correct - self.confidence).sum()
        return float(difference / max(self.positions.sum(), 1))


@dataclass
class Collected:
    """The examples and counts of an evaluation that are shown.

    Attributes:
        fixed: the first examples of the split.
        worst: the examples with the highest losses, the worst first.
        confusion: how many positions of each class (rows) were predicted to be of each
            class (columns). None if it is not shown.
        reliability: the sums for the reliability curve. None if it is not shown.
    """

    fixed: list[Example] = field(default_factory=list)
    worst: list[Example] = field(default_factory=list)
    confusion: np.ndarray | None = None
    reliability: Reliability | None = None


class Collector:
    """Collects the examples and counts of an evaluation that are shown.

    Call `start`, then `add` for each batch. With several workers, the collector sees
    only this worker's share.

    Attributes:
        collected: what was collected since `start`.
    """

    def __init__(self, plan: ShownPlan):
        self.plan = plan
        self.start()

    def start(self) -> None:
        """Begin a new evaluation."""
        self.collected = Collected()
        self._seen = 0
        if self.plan.form is None:
            return
        if self.plan.settings.confusion:
            classes = self.plan.form.classes
            self.collected.confusion = np.zeros((classes, classes), np.int64)
        if self.plan.settings.reliability:
            self.collected.reliability = Reliability()

    def add(self, batch: Any, observation: Observation) -> None:
        """Add a batch of the evaluation."""
        inputs = tf.nest.flatten(parts_of(batch)[0])[self.plan.shown_input.position]
        first = self._seen
        if isinstance(batch, Share):
            first += int(batch.start)
            self._seen += int(batch.examples)
        else:
            self._seen += int(examples_in(inputs))

        observation = tf.nest.map_structure(lambda leaf: leaf.numpy(), observation)
        self._count(observation)
        if self.plan.settings.examples:
            # If examples differ in shape or are padded, a worker reads whole batches,
            # but observes only its share of them.
            rows = [len(leaf) for leaf in tf.nest.flatten(observation)]
            count = min([int(examples_in(inputs)), *rows])
            self._keep(first, count, inputs, observation)

    def _count(self, observation: Observation) -> None:
        """Add the positions of a batch to the matrix and the curve."""
        collected = self.collected
        if collected.confusion is None and collected.reliability is None:
            return
        (view,) = [view for view in observation.views.values() if view.has_classes]
        label = view.label[view.counted]
        predicted = view.predicted[view.counted]
        if collected.confusion is not None:
            classes = len(collected.confusion)
            is_class = (label >= 0) & (label < classes)
            pairs = label[is_class] * classes + predicted[is_class]
            counts = np.bincount(pairs, minlength=classes * classes)
            collected.confusion += counts.reshape(classes, classes)
        if collected.reliability is not None:
            confidence = view.confidence[view.counted]
            is_finite = np.isfinite(confidence)
            correct = (label == predicted)[is_finite]
            collected.reliability.add(confidence[is_finite], correct)

    def _keep(
        self, first: int, count: int, inputs: Any, observation: Observation
    ) -> None:
        """Keep the examples of a batch that belong to the fixed set or to the worst."""
        most = self.plan.settings.examples
        fixed_rows = list(range(min(count, max(0, most - first))))
        worst_rows = self._worst_rows(observation.losses)
        rows = sorted({*fixed_rows, *worst_rows})
        examples = _examples(rows, first, inputs, observation)
        self.collected.fixed += [examples[row] for row in fixed_rows]

        worst = [*self.collected.worst, *(examples[row] for row in worst_rows)]
        worst.sort(key=lambda example: (-example.badness, example.index))
        self.collected.worst = worst[:most]

    def _worst_rows(self, losses: Any) -> list[int]:
        """Return the rows of a batch that may be among the worst examples."""
        if not len(losses):
            return []
        most = self.plan.settings.examples
        badness = np.where(np.isnan(losses), np.inf, losses)
        rows = np.argsort(-badness, kind="stable")[:most]
        limit = -np.inf  # the loss of an example without a position that counts
        if len(self.collected.worst) == most:
            limit = self.collected.worst[-1].badness
        return [int(row) for row in rows if badness[row] > limit]


def _examples(
    rows: Sequence[int], first: int, inputs: Any, observation: Observation
) -> dict[int, Example]:
    """Return some examples of a batch, by row."""
    if not rows:
        return {}
    chosen = tf.gather(inputs, rows)
    if not isinstance(chosen, tf.RaggedTensor):
        chosen = chosen.numpy()
    examples = {}
    for number, row in enumerate(rows):
        loss = None
        if len(observation.losses) and observation.losses[row] != -np.inf:
            loss = float(observation.losses[row])
        views = {}
        for name, view in observation.views.items():
            views[name] = OutputView(*(_row(part, row) for part in view))
        shown_input = chosen[number]
        if isinstance(shown_input, tf.RaggedTensor):
            shown_input = shown_input.to_tensor()
        array = np.asarray(shown_input)
        examples[row] = Example(first + row, loss, array, views)
    return examples


def _row(part: Any, row: int) -> Any:
    """Return an example's row in a part of a view; an empty tuple stays as it is."""
    return part if isinstance(part, tuple) else part[row]
