"""The sums of an effective batch: losses, gradients and what else an update needs.

The sum of gradients in half precision is in float32.
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

# For each variable a tensor, or `ABSENT` if the losses do not depend on it.
Gradients = tuple[Any, ...]


class GradientNoiseSums(NamedTuple):
    """What `noise_scale.estimates` takes of the micro-batches, scalars.

    ωₖ is the weight of micro-batch k, gₖ its gradient, nₖ its number of examples that
    count.
    """

    squares: tf.Tensor  # Σₖ ωₖ|gₖ|²
    inverse: tf.Tensor  # Σₖ ωₖ/nₖ
    inverse_of_batch: tf.Tensor  # Σₖ ωₖ²/nₖ
    weight: tf.Tensor  # Σₖ ωₖ


class GradientSums(NamedTuple):
    """The sums over one effective batch, or over one replica's share of it.

    An evaluation has the first three alone. A weight of zero divides by one: its sum is
    zero too, or the loss' reduction is `sum`, which divides by nothing.

    Attributes:
        losses: of each output that has a loss, by its name.
        added: Σₖ nₖ·Aₖ, scalar: the model's own losses on micro-batch k times its nₖ
            examples; of those that have one value per example, N·Σᵢ aᵢ over all N
            examples, because Keras sums them over the batch.
        examples: Σₖ nₖ, scalar.
        gradient_sums: the gradient of each group of losses that are divided by one
            weight.
        weights: that weight, scalar, of each group; `ABSENT` where the losses were
            divided by it before.
        gradient_noise: what the micro-batches tell of it; `ABSENT` if it is never
            measured.
        statistics_steps: by how much BatchNormalization would have moved its
            statistics; empty where it has moved them itself.
    """

    losses: dict[str, LossSum]
    added: tf.Tensor
    examples: tf.Tensor
    gradient_sums: tuple[Gradients, ...] = ()
    weights: tuple[Any, ...] = ()
    gradient_noise: GradientNoiseSums | tuple[()] = ABSENT
    statistics_steps: StatisticsSteps = ()

    def with_losses(self, losses: dict[str, LossSum]) -> GradientSums:
        """Return the sums with losses that are known for the effective batch."""
        first = next(iter(losses.values()))
        added = tf.cast(self.added, first.total.dtype)
        return self._replace(losses=losses, added=added)

    def mean_loss(self) -> tf.Tensor:
        """Return the loss that one large batch would have shown, scalar."""
        means = [divide(loss.scaled, loss.weight) for loss in self.losses.values()]
        return sum(means, divide(self.added, self.examples))

    def output_losses(self) -> dict[str, tf.Tensor]:
        """Return the loss of each of several outputs, before `loss_weights` scale it.

        The names are `<output>_loss`. The result is empty for a single output.
        """
        means = {}
        for name, loss in self.losses.items():
            means[f"{name}_loss"] = divide(loss.total, loss.weight)
        return means if len(means) > 1 else {}

    def results(
        self, measured: Mapping[str, keras.metrics.Metric]
    ) -> dict[str, tf.Tensor]:
        """Return the losses, and the results of the metrics `measured`; scalars."""
        results = {"loss": self.mean_loss(), **self.output_losses()}
        for name, metric in measured.items():
            results[name] = metric.result()
        return results

    def gradients(self) -> list[tf.Tensor | None]:
        """Return the gradients of one large batch.

        They have the order and shapes of `model.trainable_variables`. The gradient of
        an embedding is `tf.IndexedSlices`, with each row that was looked up once; it is
        None for a variable that no loss depends on.
        """
        return means(self.gradient_sums, self.weights)

    def divided(self, weights: tuple[Any, ...]) -> GradientSums:
        """Return the sums with the groups' gradients as one, divided by `weights`."""
        gradients: list[Any] = []
        for gradient in means(self.gradient_sums, weights):
            if gradient is None:
                gradients.append(ABSENT)
            else:
                gradients.append(gradient)
        return self._replace(gradient_sums=(tuple(gradients),), weights=(ABSENT,))


def means(sums: Sequence[Gradients], weights: Sequence[Any]) -> list[tf.Tensor | None]:
    """Return Σ sum/weight over the groups, for each variable.

    A weight that is `ABSENT` divides by nothing. The mean of a variable that no sum
    depends on is None.
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
    """An output of the model, and the gradient of a loss by it."""

    output: tf.Tensor
    gradient: tf.Tensor


def gradients_by(
    tape: tf.GradientTape,
    target: tf.Tensor,
    times: Any,
    variables: Sequence[tf.Variable],
    output_gradients: Sequence[OutputGradient] = (),
) -> Gradients:
    """Return the gradient of `target` by each variable, in float32 at least.

    Args:
        tape: on which the target was computed.
        target: what is differentiated, scalar.
        times: a scalar that multiplies the gradients, or `ABSENT` for 1.
        variables: by which it is differentiated.
        output_gradients: of another loss, by outputs of the model. The gradients of
            that loss by the variables are added.
    """
    targets = [target]
    gradients_by_targets = [tf.ones_like(target)]  # None would count for zero
    for output, gradient in output_gradients:
        targets.append(output)
        gradients_by_targets.append(gradient)
    gradients = tape.gradient(targets, variables, output_gradients=gradients_by_targets)

    def scaled(gradient: tf.Tensor) -> tf.Tensor:
        gradient = tf.cast(gradient, float32_at_least(gradient.dtype))
        if is_absent(times):
            return gradient
        return gradient * tf.cast(times, gradient.dtype)

    def summand(gradient: Any, variable: tf.Variable) -> Any:
        if gradient is None:
            return ABSENT
        if isinstance(gradient, tf.IndexedSlices):
            rows = scaled(gradient.values)
            shape = tf.constant(variable.shape.as_list())
            return tf.IndexedSlices(rows, gradient.indices, shape)
        # Not known where it was summed over an axis of unknown length.
        gradient.set_shape(variable.shape)
        return scaled(gradient)

    return tuple(map(summand, gradients, variables))


def sum_over_replicas(
    strategy: tf.distribute.Strategy,
    sums: GradientSums,
    variables: Sequence[Any],
    reductions_ready: tf.Variable | None,
) -> GradientSums:
    """Return the sums over replicas, with the gradients on each of them.

    Call it in the cross-replica context; the arguments are as for `reduce`.
    """
    if strategy.num_replicas_in_sync == 1:
        return reduce(strategy, sums, reductions_ready)
    if tf.nest.flatten(sums.weights):
        # The weights first: each replica divides by them, so the gradients of all
        # groups are sent once.
        weights = reduce(strategy, sums.weights, reductions_ready)
        sums = strategy.run(GradientSums.divided, (sums, weights))
    sums = reduce(strategy, sums, reductions_ready)
    first = of_first_replica(strategy, sums)

    def gradient(
        on_each: Any, on_first: Any, variable: keras.Variable | tf.Variable
    ) -> Any:
        """Return what each replica applies, of rows those that the first has added."""
        if not isinstance(on_first, tf.IndexedSlices):
            return on_each
        rows, indices = rows_once(on_first.values, on_first.indices)
        rows = tf.ensure_shape(rows, [None, *variable.shape[1:]])
        return tf.IndexedSlices(rows, indices, tf.constant(list(variable.shape)))

    gradient_sums = []
    for group in zip(sums.gradient_sums, first.gradient_sums, strict=True):
        gradient_sums.append(tuple(map(gradient, *group, variables)))
    return first._replace(gradient_sums=tuple(gradient_sums))
