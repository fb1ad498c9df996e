"""Gradient accumulation: micro-batches → weighted gradient sum.

    W = Σᵢ wᵢ                                       # over the effective batch, ahead
    for each micro-batch k of the effective batch:  # on every replica, over its share
        Lₖ = Σᵢ wᵢ·lossᵢ                            # sums, never means
        S += ∇(Lₖ / W);  L += Lₖ                    # divided by the update's weight
    optimizer.apply(S)                              # once, after the sum over replicas

Where W is known only after the forward passes, because the model computes a mask, S +=
∇Lₖ and W += Σᵢ wᵢ, and S is divided by W at the end. Σₖ ∇Lₖ / Σₖ Wₖ is the gradient of
the mean over the effective batch, whatever the sizes, the sample weights and the masks.
The mean of the micro-batches' means, Σₖ (∇Lₖ/Wₖ) / K, equals it only for equal Wₖ.

`Update` has the last line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from . import over_effective_batch
from .batch import (
    ABSENT,
    Batches,
    BatchTotals,
    Nest,
    batch_totals,
    examples_in,
    inputs_of,
    parts_of,
)
from .dense import transposed_gradients, wide_layers
from .forward_effects import unsupported
from .gradient_sums import GradientSums, OutputGradient, gradients_by
from .loss_sums import (
    LossPart,
    MicroBatchLosses,
    divide,
    function_losses,
    micro_batch_losses,
)
from .micro_batches import run_micro_batches
from .moving_statistics import normalizing_layers, statistics_held
from .noise_scale import gradient_noise_of_micro_batch
from .objective import Losses, Metrics, Objective, by_name
from .same_noise import Key, drawn, noisy_layers
from .xla import without_cudnn


# Without autograph, as in `fit`: converting all that follows took most of the tracing.
# It has nine parameters, as users know them from `compile` and from a tape.
@tf.autograph.experimental.do_not_convert
def accumulate_gradients(  # noqa: PLR0913  as the interface has it
    model: keras.Model | None,
    loss: Losses | Objective | Callable[..., Any],
    batch: Nest | Batches,
    micro_batch_size: int,
    *,
    variables: Sequence[keras.Variable | tf.Variable] | None = None,
    loss_weights: Any = None,
    metrics: Metrics = (),
    weighted_metrics: Metrics = (),
    scale_loss: Callable[[tf.Tensor], tf.Tensor] | None = None,
) -> GradientSums:
    """Run `batch` forward and backward in micro-batches; return losses and gradients.

    Peak memory is that of one micro-batch and one gradient, whatever the size of
    `batch`; `GradientSums` says which models need a second gradient. Call it inside a
    `tf.function`: it traces the model once a call.

    Args:
        model: built, with its trainable variables fixed. None where `loss` computes the
            loss from a micro-batch.
        loss: as `compile` takes it: any Keras loss, its name or a function of labels
            and outputs, or a dict or list of one for each output, whose reduction is
            not `none` and whose value for one example does not depend on the other
            ones. None for a model that learns from `add_loss` alone. Or an `Objective`,
            which has weights and metrics. Without a model: a function of x, y and the
            sample weights of a micro-batch, as many as `batch` has, that returns the
            mean loss of its examples; or a tuple of a mean and the weight that it was
            divided by.
        batch: `(x, y)` or `(x, y, sample_weight)`, each a nest of dense or ragged
            tensors with the examples on axis 0; x alone where there is no loss. The
            number of examples may be unknown when traced, and zero.
        micro_batch_size: examples per forward and backward pass; the last slice may be
            smaller.
        variables: those to differentiate by; the model's trainable ones by default.
        loss_weights: a number for each output, by name or in order.
        metrics: updated with every micro-batch, as an `Objective` has them.
        weighted_metrics: updated with every micro-batch, as an `Objective` has them.
        scale_loss: applied to each micro-batch's loss before the backward pass;
            gradients are then scaled, losses are not.

    Returns:
        The sums; `sums.gradients()` is what one large batch would have given, in the
        order of the variables.

    Raises:
        ValueError: the loss reduces nothing, does not fit the outputs or the labels,
            the micro-batch size is not positive, an input is sparse, or the model has a
            part that cannot be computed in micro-batches.
    """
    if model is None and (variables is None or not callable(loss)):
        rule = "without a model there must be variables, and a loss"
        raise ValueError(f"{rule} that is a function of a micro-batch")
    if isinstance(loss, Objective):
        objective = loss
    else:
        objective = Objective(loss, loss_weights, metrics, weighted_metrics)
    if objective.over_batch:
        rule = "loss_over must be example without an Update"
        raise ValueError(f"{rule}. Received: 'effective_batch'")
    kernel = Kernel(
        model, objective, micro_batch_size, variables=variables, scale_loss=scale_loss
    )
    return accumulate_share(kernel, batch, BatchContext(batch_totals(batch)))


@dataclass(frozen=True)
class Kernel:
    """How the gradient of a micro-batch is computed.

    Attributes:
        model: as `accumulate_gradients` takes it.
        objective: without a model, its loss is the function of a micro-batch.
        micro_batch_size: examples per forward and backward pass.
        variables: as `accumulate_gradients` takes them.
        scale_loss: as `accumulate_gradients` takes it.
        hold_statistics: leave the moving statistics of BatchNormalization to
            `assign_moving_statistics`.
        jit_compile: compile each forward and backward pass with XLA, but not that of a
            last micro-batch of fewer examples.
        fused_attention: whether what is compiled computes attention by
            `attention_fused`.
    """

    model: keras.Model | None
    objective: Objective
    micro_batch_size: int
    variables: Sequence[keras.Variable | tf.Variable] | None = None
    scale_loss: Callable[[tf.Tensor], tf.Tensor] | None = None
    hold_statistics: bool = False
    jit_compile: bool = False
    fused_attention: bool = False

    def tf_variables(self) -> list[tf.Variable]:
        """Return TensorFlow's variables to differentiate by."""
        variables = self.variables
        if variables is None:
            assert self.model is not None
            variables = self.model.trainable_variables
        tf_variables = []
        for variable in variables:
            if isinstance(variable, keras.Variable):
                variable = variable.value
            tf_variables.append(variable)
        return tf_variables


class BatchContext(NamedTuple):
    """What is known of an effective batch before the micro-steps over its shares.

    Attributes:
        totals: of the effective batch.
        measure_gradient_noise: whether the sums are to have it, which is a pass over
            the gradient for each micro-batch.
        dropout_keys: as `keys_of(noisy_layers(model, x))` gives them, once for the
            effective batch: these layers then draw for each example what they draw for
            it in any other cut. Without keys Keras draws for each micro-batch.
        output_gradients: gradients of losses over the effective batch by the outputs,
            one for each of `over_effective_batch.differentiable`. They are brought to
            the variables, and the sums have no losses.
    """

    totals: BatchTotals
    measure_gradient_noise: tf.Tensor | bool = False
    dropout_keys: Sequence[tf.Tensor] = ()
    output_gradients: Sequence[tf.Tensor | None] = ()


@tf.autograph.experimental.do_not_convert
def accumulate_share(
    kernel: Kernel,
    share: Nest | Batches,
    context: BatchContext,
    position: tf.Tensor | int = 0,
) -> GradientSums:
    """Return the sums over a share of an effective batch.

    Args:
        kernel: how the gradient of a micro-batch is computed.
        share: one replica's part of the effective batch, or all of it.
        context: of the effective batch, with the output gradients of the share alone.
        position: of the share's first example in the effective batch.

    Raises:
        ValueError: as `accumulate_gradients` does.
    """
    step = _MicroStep.for_share(kernel, share, context)

    def micro_step(
        start: tf.Tensor, x: Nest, y_and_gradients: Nest, sample_weight: Nest
    ) -> GradientSums:
        y, output_gradients = y_and_gradients
        micro_batch = MicroBatch(x, y, sample_weight, output_gradients)
        return step.sums(position + start, micro_batch)

    # The gradients by outputs are cut as the labels are.
    x, y, sample_weight = parts_of(share)
    parts: Nest = (x, (y, tuple(context.output_gradients)), sample_weight)
    if isinstance(share, Batches):
        parts = share._replace(batch=parts)
    return run_micro_batches(
        micro_step,
        parts,
        kernel.micro_batch_size,
        kernel.jit_compile,
        kernel.fused_attention,
    )


class MicroBatch(NamedTuple):
    """The parts of a micro-batch, each with its examples on axis 0."""

    x: Nest
    y: Nest
    sample_weight: Nest
    output_gradients: Sequence[tf.Tensor | None]  # as a `BatchContext` has them


@dataclass(frozen=True)
class _MicroStep:
    """The forward and backward pass on each micro-batch of a share.

    Attributes:
        kernel: how the gradient is computed.
        context: of the effective batch.
        variables: what is differentiated by.
        noisy: layers that draw by the keys, one for each.
        keys: made of the seeds in the context, once for all micro-batches.
        wide: layers whose gradients are computed transposed.
        normalizing: layers whose moving statistics are held.
    """

    kernel: Kernel
    context: BatchContext
    variables: list[tf.Variable]
    noisy: list[keras.Layer]
    keys: list[Key]
    wide: list[keras.layers.Dense]
    normalizing: list[keras.layers.BatchNormalization]

    @classmethod
    def for_share(
        cls, kernel: Kernel, share: Nest | Batches, context: BatchContext
    ) -> _MicroStep:
        """Return the step for the model of a kernel, if it has one.

        Raises:
            ValueError: the model cannot be trained in micro-batches.
        """
        model = kernel.model
        noisy: list[keras.Layer] = []
        wide: list[keras.layers.Dense] = []
        normalizing: list[keras.layers.BatchNormalization] = []
        if model is not None:
            for rule, received in unsupported(model):
                raise ValueError(f"model {rule}. Received: {received}")
            if context.dropout_keys:
                noisy = noisy_layers(model, inputs_of(share))
            if not kernel.jit_compile:
                wide = wide_layers(model, kernel.micro_batch_size)
            if kernel.hold_statistics:
                normalizing = normalizing_layers(model)
        return cls(
            kernel=kernel,
            context=context,
            keys=[Key.from_seed(seed) for seed in context.dropout_keys],
            variables=kernel.tf_variables(),
            noisy=noisy,
            wide=wide,
            normalizing=normalizing,
        )

    def sums(self, position: tf.Tensor | int, micro_batch: MicroBatch) -> GradientSums:
        """Return the sums over a micro-batch.

        `position` is that of its first example in the effective batch.
        """
        kernel = self.kernel
        model = kernel.model
        jit_compile = kernel.jit_compile
        x, y, sample_weight, output_gradients = micro_batch
        examples = examples_in(x)
        # Persistent, as each target is differentiated by itself.
        with tf.GradientTape(persistent=True) as tape:
            with (
                drawn(self.noisy, self.keys, position, examples, jit_compile),
                transposed_gradients(self.wide),
                without_cudnn(model, jit_compile),
                statistics_held(self.normalizing) as statistics_steps,
            ):
                outputs, losses = _forward(kernel, micro_batch, self.context.totals)
            targets = _targets(losses.minimized, kernel.scale_loss)
        if model is not None:
            kernel.objective.update_metrics(y, outputs, sample_weight)

        gradients_by_outputs = []
        if output_gradients:
            # Their gradients by the variables are added to those of each target. Here
            # there is one, what the model adds: the losses are in the gradients.
            assert len(targets) == 1
            gradients_by_outputs = _with_gradients(outputs, output_gradients)
        gradients = tuple(
            gradients_by(
                tape, target.value, target.times, self.variables, gradients_by_outputs
            )
            for target in targets
        )
        gradient_noise = gradient_noise_of_micro_batch(
            self.context.measure_gradient_noise, gradients, losses.minimized
        )
        return GradientSums(
            losses=losses.losses,
            added=losses.added,
            examples=tf.cast(examples, losses.added.dtype),
            gradient_sums=gradients,
            weights=tuple(part.divisor for part in losses.minimized),
            gradient_noise=gradient_noise,
            statistics_steps=statistics_steps(),
        )


def _forward(
    kernel: Kernel, micro_batch: MicroBatch, totals: BatchTotals
) -> tuple[dict[str, Nest], MicroBatchLosses]:
    """Return the outputs of the model by name, and the losses of a micro-batch."""
    x, y, sample_weight, _ = micro_batch
    parts = (x, y, sample_weight)
    model = kernel.model
    if model is None:
        return {}, function_losses(kernel.objective.loss, parts, totals)
    outputs = by_name(model, model(x, training=True))
    objective = kernel.objective.of_micro_batch()
    return outputs, micro_batch_losses(model, objective, outputs, parts, totals)


class _Target(NamedTuple):
    """What is differentiated."""

    value: tf.Tensor  # scalar
    times: Any  # a scalar by which its gradient is multiplied, or `ABSENT` for 1


def _targets(
    minimized: Sequence[LossPart], scale_loss: Callable[..., tf.Tensor] | None
) -> list[_Target]:
    """Return what is differentiated for each part.

    A loss scale applies to means, as in `fit`: the sum over a micro-batch would
    overflow float16. The gradient of such a mean is multiplied by its weight.
    """
    if scale_loss is None:
        return [_Target(part.total, ABSENT) for part in minimized]
    weights = [part.nonzero_divisor for part in minimized]
    pairs = zip(minimized, weights, strict=True)
    means = [divide(part.total, weight) for part, weight in pairs]
    scaled = [scale_loss(mean) for mean in means]
    return list(map(_Target, scaled, weights))


def _with_gradients(
    outputs: dict[str, Nest], gradients: Sequence[tf.Tensor | None]
) -> list[OutputGradient]:
    """Return each output that a loss depends on, with the loss' gradient by it."""
    kept = over_effective_batch.kept(outputs)
    tensors = over_effective_batch.differentiable(kept)
    output_gradients = []
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if gradient is not None:
            output_gradients.append(OutputGradient(tensor, gradient))
    return output_gradients
