"""The sums over an effective batch: losses, gradients and other data for an update.

Gradients in half precision are summed in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from .batch import ABSENT, is_absent, of_first_replica, reduce
from .loss_sums import LossSum, divide, float32_at_least
from .micro_batches import rows_once
from .moving_statistics import StatisticsSteps
from .token_cut import CutCounts

# One entry per variable: a tensor or `tf.IndexedSlices`, or `ABSENT` if the losses do
# not depend on the variable.
Gradients = tuple[Any, ...]


class GradientNoiseSums(NamedTuple):
    """The scalar sums over micro-batches that `noise_scale.estimates` needs.

    ωₖ is the weight of micro-batch k, gₖ its gradient, and nₖ its effective number of
    examples; see `noise_scale`.
    """

    squares: tf.Tensor  # Σₖ ωₖ|gₖ|²
    inverse: tf.Tensor  # Σₖ ωₖ/nₖ
    inverse_of_batch: tf.Tensor  # Σₖ ωₖ²/nₖ
    weight: tf.Tensor  # Σₖ ωₖ


class GradientSums(NamedTuple):
    """The sums over one effective batch, or over one replica's share of it.

    An evaluation sets only the first three attributes, and `cut`. If the weight of a sum
    is 0, its mean is 0, as in Keras.

    Attributes:
        losses: the loss of each output that has one, by output name.
        added: Σₖ nₖ·Aₖ, scalar, where Aₖ is the sum of the losses that the model adds
            for the nₖ examples of micro-batch k. A loss that is a sum over examples is
            multiplied by the size of the effective batch instead: see `_added` in
            `loss_sums`.
        examples: number of examples, Σₖ nₖ, scalar.
        gradient_sums: the gradients of each group of losses that have a common divisor.
        weights: the divisor of each group, scalar; `ABSENT` if the losses were divided
            before they were differentiated.
        gradient_noise: the sums for the gradient noise; `ABSENT` if the noise is never
            measured.
        statistics_steps: the steps by which the micro-batches would have moved the
            statistics of BatchNormalization; empty if they have moved them.
        cut: the number of micro-batches, tokens and positions of a cut by tokens;
            `ABSENT` for another cut.
    """

    losses: dict[str, LossSum]
    added: tf.Tensor
    examples: tf.Tensor
    gradient_sums: tuple[Gradients, ...] = ()
    weights: tuple[Any, ...] = ()
    gradient_noise: GradientNoiseSums | tuple[()] = ABSENT
    statistics_steps: StatisticsSteps = ()
    cut: CutCounts | tuple[()] = ABSENT

    def with_cut(self, counts: CutCounts | tuple[()]) -> GradientSums:
        """Return a copy with the counts of a cut, in the dtype of `examples`."""
        cast = tf.nest.map_structure(self._as_count, counts)
        return self._replace(cut=cast)

    def _as_count(self, count: tf.Tensor) -> tf.Tensor:
        # Collectives do not support all integer dtypes.
        return tf.cast(count, self.examples.dtype)

    def with_losses(self, losses: dict[str, LossSum]) -> GradientSums:
        """Return a copy with losses that were computed over the effective batch."""
        first = next(iter(losses.values()))
        added = tf.cast(self.added, first.total.dtype)
        return self._replace(losses=losses, added=added)

    def mean_loss(self) -> tf.Tensor:
        """Return the loss that one large batch would have given, scalar."""
        means = [divide(loss.scaled, loss.weight) for loss in self.losses.values()]
        return sum(means, divide(self.added, self.examples))

    def output_losses(self) -> dict[str, tf.Tensor]:
        """Return the loss of each output, before `loss_weights` are applied.

        The names are `<output>_loss`. If only one output has a loss, the dict is empty.
        """
        means = {}
        for name, loss in self.losses.items():
            means[f"{name}_loss"] = divide(loss.total, loss.weight)
        return means if len(means) > 1 else {}

    def results(
        self, measured: Mapping[str, keras.metrics.Metric]
    ) -> dict[str, tf.Tensor]:
        """Return the losses and the results of the metrics in `measured`, scalars."""
        results = {"loss": self.mean_loss(), **self.output_losses()}
        for name, metric in measured.items():
            results[name] = metric.result()
        return results

    def gradients(self) -> list[tf.Tensor | None]:
        """Return the gradients that one large batch would have given.

        They have the order and shapes of the variables, by default
        `model.trainable_variables`. The gradient of an embedding may be a
        `tf.IndexedSlices`, which contains each looked-up row once; it is dense if
        something else uses the table, such as a regularizer. The gradient of a variable
        that no loss depends on is None.
        """
        return means(self.gradient_sums, self.weights)

    def divided(self, weights: tuple[Any, ...]) -> GradientSums:
        """Divide each group's gradients by its weight, and add up the groups."""
        gradients: list[Any] = []
        for gradient in means(self.gradient_sums, weights):
            if gradient is None:
                gradients.append(ABSENT)
            else:
                gradients.append(gradient)
        return self._replace(gradient_sums=(tuple(gradients),), weights=(ABSENT,))


def means(sums: Sequence[Gradients], weights: Sequence[Any]) -> list[tf.Tensor | None]:
    """Return Σ sum/weight over the groups, for each variable.

    If a weight is `ABSENT`, the sum is not divided. The result is None for a variable
    that has no gradient in any group.
    """
    gradients: list[tf.Tensor | None] = []
    for sums_of_variable in zip(*sums, strict=True):
        terms = []
        for value, weight in zip(sums_of_variable, weights, strict=True):
            if not is_absent(value):
                terms.append(divide(value, weight))

        if len(terms) > 1:
            gradients.append(tf.add_n(terms))
        elif terms:
            gradients.append(terms[0])
        else:
            gradients.append(None)
    return gradients


class OutputGradient(NamedTuple):
    """An output of the model, and the gradient of a loss with respect to it."""

    output: tf.Tensor
    gradient: tf.Tensor


def gradients_by(
    tape: tf.GradientTape,
    target: tf.Tensor,
    times: Any,
    variables: Sequence[tf.Variable],
    output_gradients: Sequence[OutputGradient] = (),
) -> Gradients:
    """Return the gradient of `target` for each variable, in float32 at least.

    Args:
        tape: the tape that recorded the computation of the target.
        target: the scalar to differentiate.
        times: scalar factor for the gradients, or `ABSENT` for 1. A factor of 0 gives 0
            even if a gradient is NaN.
        variables: the variables to differentiate with respect to.
        output_gradients: gradients of another loss with respect to outputs of the
            model. They are backpropagated to the variables and added.
    """
    targets = [target]
    gradients_by_targets = [tf.ones_like(target)]  # None would count as zero
    for output, gradient in output_gradients:
        targets.append(output)
        gradients_by_targets.append(gradient)
    gradients = tape.gradient(targets, variables, output_gradients=gradients_by_targets)

    def scaled(gradient: tf.Tensor) -> tf.Tensor:
        gradient = tf.cast(gradient, float32_at_least(gradient.dtype))
        if is_absent(times):
            return gradient
        return tf.math.multiply_no_nan(gradient, tf.cast(times, gradient.dtype))

    def summand(gradient: Any, variable: tf.Variable) -> Any:
        if gradient is None:
            return ABSENT
        if isinstance(gradient, tf.IndexedSlices):
            rows = scaled(gradient.values)
            shape = tf.constant(variable.shape.as_list())
            return tf.IndexedSlices(rows, gradient.indices, shape)
        # Set the static shape, which a sum over an axis of unknown length has lost.
        gradient.set_shape(variable.shape)
        return scaled(gradient)

    return tuple(map(summand, gradients, variables))


def sum_over_replicas(
    strategy: tf.distribute.Strategy,
    sums: GradientSums,
    variables: Sequence[Any],
    reductions_ready: tf.Variable | None,
) -> GradientSums:
    """Return the sums over replicas; every replica gets the gradients.

    Call this in the cross-replica context. For `reductions_ready`, see `reduce`.
    """
    if strategy.num_replicas_in_sync == 1:
        return reduce(strategy, sums, reductions_ready)
    if tf.nest.flatten(sums.weights):
        # Sum the weights first. Each replica divides its groups by them and adds the
        # groups up, so that only one gradient is sent.
        weights = reduce(strategy, sums.weights, reductions_ready)
        sums = strategy.run(GradientSums.divided, (sums, weights))
    sums = reduce(strategy, sums, reductions_ready)
    first = of_first_replica(strategy, sums)

    def gradient(
        on_each: Any, on_first: Any, variable: keras.Variable | tf.Variable
    ) -> Any:
        """Return the gradient to apply, with the rows of equal index added up."""
        if not isinstance(on_first, tf.IndexedSlices):
            return on_each
        rows, indices = rows_once(on_first.values, on_first.indices)
        rows = tf.ensure_shape(rows, [None, *variable.shape[1:]])
        return tf.IndexedSlices(rows, indices, tf.constant(list(variable.shape)))

    gradient_sums = []
    for group in zip(sums.gradient_sums, first.gradient_sums, strict=True):
        gradient_sums.append(tuple(map(gradient, *group, variables)))
    return first._replace(gradient_sums=tuple(gradient_sums))
