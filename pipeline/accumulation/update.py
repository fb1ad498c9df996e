"""The update: slices → weighted gradient sum → one apply.

    for each micro-batch k of the effective batch:      # on every replica, over its share
        Lₖ, Wₖ = Σᵢ wᵢ·lossᵢ, Σᵢ wᵢ                     # sums, never means
        S += ∇Lₖ;  L += Lₖ;  W += Wₖ
    gradient = S / W                                    # divided once, by the weight of the whole update
    optimizer.apply(gradient)                           # once, after the reduction over replicas

Σₖ ∇Lₖ / Σₖ Wₖ is the gradient of the mean over the effective batch, whatever the sizes of the micro-batches,
the sample weights and the masks. The mean of the micro-batches' means, Σₖ (∇Lₖ/Wₖ) / K, equals it only where
all Wₖ are equal.

This module knows nothing of configs, trackers or datasets, so that it can be lifted into any project.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from . import noise_scale
from .slicing import Nest, examples_in, share_of, sum_over_micro_batches
from .weighting import mask_of, weighted_sum


class GradientSums(NamedTuple):
    """The sums over one effective batch, or over one replica's share of it.

    Two sums are kept apart because they are divided by different totals: the loss by the weight of its
    elements, and what the model adds to it (regularisation, `add_loss`) by the number of examples. A total of
    zero divides by one: its sum is zero too, or the loss' reduction is `sum`, which divides by nothing.

    Attributes:
        loss: Σ wᵢ·lossᵢ, scalar.
        weight: Σ wᵢ, scalar: elements, unmasked elements or summed sample weights, as the loss' reduction says.
        sums: ∇ Σ wᵢ·lossᵢ for each trainable variable; `()` for one that the loss does not depend on.
        added_loss: Σₖ nₖ·Aₖ, scalar: the model's own losses on micro-batch k times its examples; of those that have
            one value per example, N·Σᵢ aᵢ, because Keras sums them over the batch.
        added_sums: its gradient, as in `sums`.
        examples: Σₖ nₖ, scalar.
        squares, parts: Σₖ Wₖ|gₖ|² and the number of micro-batches, for `noise_scale`; zero where not measured.
    """

    loss: tf.Tensor
    weight: tf.Tensor
    sums: tuple[tf.Tensor | tuple[()], ...]
    added_loss: tf.Tensor
    added_sums: tuple[tf.Tensor | tuple[()], ...]
    examples: tf.Tensor
    squares: tf.Tensor
    parts: tf.Tensor

    def mean_loss(self) -> tf.Tensor:
        """Return the loss that one large batch would have shown, scalar."""
        return _divide(self.loss, self.weight) + _divide(self.added_loss, self.examples)

    def gradients(self) -> list[tf.Tensor | None]:
        """Return the gradients of one large batch, in the order of `model.trainable_variables`.

        Returns:
            One gradient of its variable's shape for each; None where the loss does not depend on it.
        """
        return _means(self.sums, self.weight, self.added_sums, self.examples)


@tf.autograph.experimental.do_not_convert  # as in `fit`; converting all that follows took most of the tracing
def accumulate_gradients(
    model: keras.Model,
    loss: keras.losses.Loss,
    batch: Nest,
    micro_batch_size: int,
    *,
    metrics: Sequence[keras.metrics.Metric] = (),
    scale_loss: Callable[[tf.Tensor], tf.Tensor] | None = None,
    examples: tf.Tensor | None = None,
    measure_noise: tf.Tensor | bool = False,
    jit_compile: bool = False,
) -> GradientSums:
    """Run `batch` forward and backward in micro-batches and sum their losses, weights and gradients.

    Peak memory is that of one micro-batch and one gradient, whatever the size of `batch`. Call it inside a
    `tf.function`: it traces the model once a call.

    Args:
        model: built, with its trainable variables fixed.
        loss: any Keras loss whose reduction is not `none` and whose value for one example does not depend on
            the other ones (in `keras.losses.Circle` it does: that is a loss of the micro-batch).
        batch: `(x, y)` or `(x, y, sample_weight)`, each a nest of dense or ragged tensors with the examples on
            axis 0. The number of examples need not be known when traced, and may be zero.
        micro_batch_size: examples per forward+backward; the last slice may be smaller.
        metrics: updated with every micro-batch's outputs; the mask of the outputs weighs them.
        scale_loss: applied to each micro-batch's loss before the backward pass, as a `LossScaleOptimizer`
            wants it; the sums then hold scaled gradients and `loss` is unscaled.
        examples: of the whole effective batch, where `batch` is one replica's share of it.
        measure_noise: whether `squares` and `parts` are wanted: a pass over the gradient for each micro-batch.
        jit_compile: compile each forward+backward with XLA.

    Returns:
        The sums; `sums.gradients()` is what one large batch would have given.

    Raises:
        ValueError: the loss reduces nothing, the batch has no labels, or the micro-batch size is not positive.
    """
    variables = [_tensor_variable(variable) for variable in model.trainable_variables]
    whole = examples_in(batch) if examples is None else examples

    def micro_step(x: Nest, y: Nest, sample_weight: Nest) -> GradientSums:
        with tf.GradientTape(persistent=True) as tape:
            outputs = model(x, training=True)
            total, weight = weighted_sum(loss, y, outputs, sample_weight)
            count = tf.cast(examples_in(x), total.dtype)
            whole_count = tf.cast(whole, total.dtype)
            added_total = added_loss(model.losses, count, whole_count)
            # Mean-sized, as `fit` scales it: the sum over a micro-batch would overflow float16.
            per = _nonzero(count if loss.reduction == "sum" else weight)
            scaled = total if scale_loss is None else scale_loss(total / per)
            added_scaled = added_total if scale_loss is None else scale_loss(added_total / whole_count)
        update_metrics(metrics, y, outputs)
        sums = _gradient_sums(tape, scaled, variables, None if scale_loss is None else per)
        added_sums = _gradient_sums(tape, added_scaled, variables, None if scale_loss is None else whole_count)
        zero = tf.zeros((), total.dtype)
        made = GradientSums(total, weight, sums, added_total, added_sums, count, zero, zero)
        squares, parts = _noise_parts(measure_noise, loss, made, whole_count)
        return made._replace(squares=squares, parts=parts)

    return sum_over_micro_batches(micro_step, batch, micro_batch_size, jit_compile)


class Update:
    """One effective batch in, one optimizer step out, under the current or the given strategy.

    Args:
        model, loss, optimizer: as Keras has them; the optimizer is built for the model's variables.
        micro_batch_size: examples per forward+backward on one replica.
        metrics: reset at each update, so that their results are over exactly its examples.
        strategy: the strategy in whose scope the model was built; the default one where it is not given.
        noise_every: updates from one measurement of the gradient noise to the next; 0 measures none.
        jit_compile: compile each forward+backward with XLA.
    """

    def __init__(
        self,
        model: keras.Model,
        loss: keras.losses.Loss,
        optimizer: keras.optimizers.Optimizer,
        micro_batch_size: int,
        *,
        metrics: Sequence[keras.metrics.Metric] = (),
        strategy: tf.distribute.Strategy | None = None,
        noise_every: int = 0,
        jit_compile: bool = False,
    ):
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.micro_batch_size, self.metrics, self.jit_compile = micro_batch_size, list(metrics), jit_compile
        self.strategy = strategy or tf.distribute.get_strategy()
        self.noise_every = noise_every
        # Keras' `apply` divides by the factor of any optimizer that has one.
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor is not None
        self._scale_loss = optimizer.scale_loss if scales else None

    @tf.autograph.experimental.do_not_convert
    def __call__(self, batch: Nest) -> dict[str, tf.Tensor]:
        """Apply the gradient of `batch` once. Call it inside a `tf.function`.

        Args:
            batch: the effective batch, as `accumulate_gradients` takes it; every replica gets its share.

        Returns:
            Scalars: `loss`, one entry for each metric, `learning_rate` as this update used it, and
            `gradient_norm`, the global L2 norm of the averaged gradient before clipping; where the noise is
            measured `gradient_variance` and `gradient_square`, as `noise_scale.estimate` gives them.
        """
        for metric in self.metrics:
            metric.reset_state()
        sums = reduce(self.strategy, self.strategy.run(self._accumulate, args=(batch, self._measures())))
        variables = self.model.trainable_variables
        gradients = sums.gradients()
        learning_rate = tf.identity(tf.convert_to_tensor(self.optimizer.learning_rate))  # before apply moves on
        norm = tf.linalg.global_norm([gradient for gradient in gradients if gradient is not None])
        scale = tf.ones((), norm.dtype)
        if self._scale_loss is not None:
            scale = tf.cast(self._scale_loss(tf.ones(())), norm.dtype)
            norm /= scale
        with tf.control_dependencies([learning_rate]):
            self.optimizer.apply(gradients, variables)
        results = {metric.name: metric.result() for metric in self.metrics}
        results |= self._noise(sums, tf.square(norm), tf.square(scale))
        return {"loss": sums.mean_loss(), **results, "learning_rate": learning_rate, "gradient_norm": norm}

    def _measures(self) -> tf.Tensor | bool:
        if not self.noise_every:
            return False
        return tf.convert_to_tensor(self.optimizer.iterations) % self.noise_every == 0

    def _noise(self, sums: GradientSums, square: tf.Tensor, scale: tf.Tensor) -> dict[str, tf.Tensor]:
        if not self.noise_every:
            return {}
        weight = _noise_weight(self.loss, sums.weight, sums.examples)
        square = tf.cast(square, sums.squares.dtype)
        if self.loss.reduction == "sum":  # the gradient of the mean, as of any other loss
            square /= tf.square(sums.examples)
        squares = sums.squares / tf.cast(scale, sums.squares.dtype)
        variance, square = noise_scale.estimate(squares, sums.parts, square, weight, sums.examples)
        return {"gradient_variance": variance, "gradient_square": square}

    def _accumulate(self, batch: Nest, measure_noise: tf.Tensor | bool) -> GradientSums:
        share = share_of(batch, self.strategy.num_replicas_in_sync)
        return accumulate_gradients(
            self.model,
            self.loss,
            share,
            self.micro_batch_size,
            metrics=self.metrics,
            scale_loss=self._scale_loss,
            examples=examples_in(batch),
            measure_noise=measure_noise,
            jit_compile=self.jit_compile,
        )


def _gradient_sums(
    tape: tf.GradientTape, target: tf.Tensor, variables: Sequence[tf.Variable], times: tf.Tensor | None
) -> tuple[tf.Tensor | tuple[()], ...]:
    def full(gradient: Any, variable: tf.Variable) -> tf.Tensor | tuple[()]:
        if gradient is None:
            return ()
        gradient = tf.convert_to_tensor(gradient)  # an embedding's slices have another length every micro-batch
        gradient.set_shape(variable.shape)  # not known where it was summed over an axis of unknown length
        if gradient.dtype in (tf.float16, tf.bfloat16):
            gradient = tf.cast(gradient, tf.float32)
        return gradient if times is None else gradient * tf.cast(times, gradient.dtype)

    return tuple(map(full, tape.gradient(target, variables), variables))


def _noise_weight(loss: keras.losses.Loss, weight: tf.Tensor, examples: tf.Tensor) -> tf.Tensor:
    return examples if loss.reduction == "sum" else weight


def _noise_parts(
    measure: tf.Tensor | bool, loss: keras.losses.Loss, sums: GradientSums, whole: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return W|g|² and 1 for one micro-batch; both are 0 where they are not wanted or nothing in it counts.

    g is its own mean gradient, with what the model adds: the mean of all gₖ is then the gradient that is applied.
    """
    if measure is False:
        return sums.squares, sums.parts
    weight = _noise_weight(loss, sums.weight, sums.examples)
    per = sums.examples * whole if loss.reduction == "sum" else sums.examples  # Σ∇L + ∇A, divided by N as a whole

    def parts() -> tuple[tf.Tensor, tf.Tensor]:
        if all(isinstance(value, tuple) for value in sums.added_sums):  # a pass over the gradient less
            square = tf.math.divide_no_nan(tf.cast(noise_scale.square(sums.sums), weight.dtype), weight)
        else:
            square = tf.cast(noise_scale.square(_means(sums.sums, weight, sums.added_sums, per)), weight.dtype) * weight
        return square, tf.cast(weight > 0, weight.dtype)

    return tf.cond(measure, parts, lambda: (sums.squares, sums.parts))


def added_loss(losses: Sequence[tf.Tensor], examples: tf.Tensor, whole: tf.Tensor) -> tf.Tensor:
    """Return the sum of what `add_loss` and regularisation add, as Keras sums it, to be divided by `whole` examples."""
    total = tf.zeros((), examples.dtype)
    for value in losses:
        per_example = value.shape.rank and value.shape[0] is None  # else it is the same of every micro-batch
        total += tf.reduce_sum(tf.cast(value, total.dtype)) * (whole if per_example else examples)
    return total


def _means(
    sums: Sequence[tf.Tensor | tuple[()]],
    weight: tf.Tensor,
    added_sums: Sequence[tf.Tensor | tuple[()]],
    examples: tf.Tensor,
) -> list[tf.Tensor | None]:
    means = []
    for of_loss, of_added in zip(sums, added_sums, strict=True):
        both = ((of_loss, weight), (of_added, examples))
        parts = [_divide(value, total) for value, total in both if not isinstance(value, tuple)]
        means.append(tf.add_n(parts) if parts else None)
    return means


def reduce(strategy: tf.distribute.Strategy, sums: GradientSums) -> GradientSums:
    """Sum over replicas; every replica gets the result."""
    return tf.nest.map_structure(lambda value: strategy.reduce("SUM", value, axis=None), sums)


def _divide(value: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    return value / tf.cast(_nonzero(total), value.dtype)


def _nonzero(total: tf.Tensor) -> tf.Tensor:
    return tf.where(total == 0, tf.ones_like(total), total)


def update_metrics(metrics: Sequence[keras.metrics.Metric], y: Nest, outputs: Nest) -> None:
    """Update the metrics with one micro-batch, weighted by the mask of the outputs where there is one."""
    mask = mask_of(outputs)
    weighing = {} if mask is None else {"sample_weight": mask}  # as in `fit`, a metric may have no such argument
    for metric in metrics:
        metric.update_state(y, outputs, **weighing)


def _tensor_variable(variable: Any) -> tf.Variable:
    return variable.value
