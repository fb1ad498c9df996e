"""Measures each example of a micro-batch, on the device that evaluates it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipeline.accumulation.internals import LossValues, Objective, Term
from pipeline.shown.class_form import ClassForm

MOST_NUMBERS = 8  # of a label or an output that is not a class


class OutputView(NamedTuple):
    """One output of the model, as it is shown. Axis 0 of each tensor has the examples.

    Attributes:
        label: the class at each position, int32; or the first numbers of the label; or
            an empty tuple if the output has no labels.
        predicted: the most probable class at each position, or the output's first
            numbers.
        confidence: the probability of the predicted class. An empty tuple without
            classes.
        counted: whether a position counts in the loss. An empty tuple without classes.
    """

    label: Any
    predicted: Any
    confidence: Any = ()
    counted: Any = ()

    @property
    def has_classes(self) -> bool:
        """Whether the labels are classes."""
        return not isinstance(self.confidence, tuple)


class Observation(NamedTuple):
    """The losses and predictions of the examples in a batch.

    Attributes:
        losses: the loss of each example, (examples,): the sum over outputs of the mean
            over the positions that count. −∞ for an example without such positions. An
            empty tuple if a single example has no loss.
        views: one view for each output, by its name.
    """

    losses: Any
    views: dict[str, OutputView]


class Observer:
    """Observes micro-batches; see `accumulation.Evaluation`.

    Args:
        objective: the losses.
        has_losses: whether a single example has a loss.
    """

    def __init__(self, objective: Objective, has_losses: bool):
        self._objective = objective
        self._has_losses = has_losses

    def __call__(
        self,
        micro_batch: tuple[Any, Any, Any],
        outputs: Mapping[str, Any],
        values: Mapping[str, LossValues],
    ) -> Observation:
        """Return the observation of a micro-batch `(x, y, sample_weight)`.

        Args:
            micro_batch: the micro-batch.
            outputs: the model's outputs by name.
            values: the values of the losses by output name.
        """
        _, y, sample_weight = micro_batch
        terms = self._objective.terms(y, outputs, sample_weight)
        losses_and_weights = []
        views = {}
        for term in terms:
            weights = None
            if self._has_losses:
                weights = values[term.name].weights
                losses_and_weights.append(_loss_of_examples(term, values[term.name]))
            views[term.name] = _view(term, weights)
        for name, output in outputs.items():
            if name not in views and isinstance(output, tf.Tensor):
                views[name] = OutputView((), _first_numbers(output))
        losses: Any = ()
        if losses_and_weights:
            losses = _sum_of_outputs(losses_and_weights)
        return Observation(losses, views)


class _ExampleLosses(NamedTuple):
    """The loss of one output for each example, and the weight of its positions."""

    losses: tf.Tensor
    weights: tf.Tensor


def _loss_of_examples(term: Term, loss_values: LossValues) -> _ExampleLosses:
    values = loss_values.values
    weights = tf.ones_like(values)
    if loss_values.weights is not None:
        weights = tf.broadcast_to(loss_values.weights, tf.shape(values))
    axes = list(range(1, values.shape.rank))
    weight_sums = tf.reduce_sum(weights, axes)
    sums = tf.reduce_sum(values * weights, axes)
    losses = tf.cast(tf.math.divide_no_nan(sums, weight_sums), tf.float32)
    if term.scale is not None:
        losses *= term.scale
    return _ExampleLosses(losses, tf.cast(weight_sums, tf.float32))


def _sum_of_outputs(parts: Sequence[_ExampleLosses]) -> tf.Tensor:
    losses = tf.add_n([part.losses for part in parts])
    weights = tf.add_n([part.weights for part in parts])
    return tf.where(weights > 0, losses, float("-inf"))


def _view(term: Term, weights: tf.Tensor | None) -> OutputView:
    form = ClassForm.of_term(term)
    if form is None:
        return OutputView(_first_numbers(term.y), _first_numbers(term.output))
    probabilities = form.probabilities(term.output)
    predicted = tf.argmax(probabilities, -1, tf.int32)
    shape = tf.shape(predicted)
    label = tf.ensure_shape(tf.reshape(form.labels_of(term.y), shape), predicted.shape)
    return OutputView(
        label=label,
        predicted=predicted,
        confidence=tf.reduce_max(probabilities, -1),
        counted=_counted(weights, predicted),
    )


def _counted(weights: tf.Tensor | None, predicted: tf.Tensor) -> tf.Tensor:
    """Return whether each position has a weight other than 0."""
    if weights is None or weights.shape.rank > predicted.shape.rank:
        return tf.ones_like(predicted, tf.bool)
    while weights.shape.rank < predicted.shape.rank:
        weights = tf.expand_dims(weights, -1)
    counted = tf.broadcast_to(tf.not_equal(weights, 0), tf.shape(predicted))
    return tf.ensure_shape(counted, predicted.shape)


def _first_numbers(part: Any) -> Any:
    """Return the first `MOST_NUMBERS` numbers of each example, in float32.

    The result is an empty tuple if the argument is not a dense tensor of numbers.
    """
    is_dense = isinstance(part, tf.Tensor) and part.shape.rank
    if not is_dense or part.dtype in (tf.string, tf.resource, tf.variant):
        return ()
    if part.shape.rank == 1:
        part = tf.expand_dims(part, -1)
    # The shape must contain the number of examples, since the batch may be empty.
    size = tf.reduce_prod(tf.shape(part)[1:])
    flat = tf.reshape(part, tf.stack([tf.shape(part)[0], size]))
    return tf.cast(flat[:, :MOST_NUMBERS], tf.float32)
