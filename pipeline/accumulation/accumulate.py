"""Gradient accumulation: micro-batches → weighted gradient sum.

    W = Σᵢ dᵢ                                       # over the effective batch
    for each micro-batch k of the effective batch:  # on every replica, over its share
        Lₖ = Σᵢ wᵢ·lossᵢ                            # sums, never means
        S += ∇(Lₖ / W);  L += Lₖ                    # divided by the update's weight
    optimizer.apply(S)                              # once, after the sum over replicas

A loss has one value per example, or per element of an example. wᵢ is the weight of
value i: its sample weight, or 0 if it is masked. dᵢ is what the value adds to the
divisor of the mean. With the reduction `mean_with_sample_weight`, dᵢ is wᵢ. With Keras'
default reduction, dᵢ is 1, or 0 if the value is masked, whatever its sample weight. The
reduction `sum` does not divide.

W is computed before the first forward pass. If that is impossible, for example because
the model computes a mask, each micro-batch adds S += ∇Lₖ and W += Wₖ, where Wₖ is Σᵢ dᵢ
over micro-batch k, and S is divided by W at the end.

In both cases, S is the gradient of the mean over the effective batch, whatever the
sizes of the micro-batches, the sample weights and the masks. The mean of the
micro-batch means, Σₖ (∇Lₖ/Wₖ) / K, equals S only if all Wₖ are equal.

`Update` runs the last line; this module runs the others.
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
    position_of,
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
from .micro_batches import MicroBatchLoop
from .moving_statistics import normalizing_layers, statistics_held
from .noise_scale import gradient_noise_of_micro_batch
from .objective import Losses, Metrics, Objective, by_name
from .padding import padded_inputs
from .padding_checks import prepared_for_tokens
from .ragged_checks import check_takes_ragged
from .same_noise import Key, noise_by_position, noisy_layers
from .token_cut import TokenLimit, micro_batch_limit
from .xla import without_cudnn


# Do not convert with autograph, which `fit` does not use either: the conversion of all
# called functions took most of the tracing time. The parameters are those that users
# know from `compile` and from a gradient tape.
@tf.autograph.experimental.do_not_convert
def accumulate_gradients(  # noqa: PLR0913  the public interface
    model: keras.Model | None,
    loss: Losses | Objective | Callable[..., Any],
    batch: Nest | Batches,
    micro_batch_size: int | None = None,
    *,
    micro_batch_tokens: int | None = None,
    pad_multiple: int = 1,
    variables: Sequence[keras.Variable | tf.Variable] | None = None,
    loss_weights: Any = None,
    metrics: Metrics = (),
    weighted_metrics: Metrics = (),
    scale_loss: Callable[[tf.Tensor], tf.Tensor] | None = None,
) -> GradientSums:
    """Return the losses and the gradients of `batch`, computed in micro-batches.

    Besides `batch` itself, the peak memory is that of one micro-batch plus one
    gradient, whatever the size of `batch`. With several losses, each loss whose weight
    is known only after the forward pass, such as one with a mask that the model
    computes, needs a gradient of its own. Call this function inside a `tf.function`,
    because each call traces the model.

    Args:
        model: a built model, or None if `loss` is a function of a micro-batch. Do not
            change afterwards which of its variables are trainable.
        loss: a loss as in `compile`: a Keras loss, its name, a function of labels and
            outputs, or a dict or list with one of these per output. Its reduction must
            not be `none`, and its value for one example must not depend on other
            examples. Pass None for a model that learns from `add_loss` alone. An
            `Objective` includes loss weights and metrics. Without a model: a function
            of the parts of a micro-batch, which are x, y and the sample weights, as far
            as `batch` has them. It returns the mean loss over the examples, or a tuple
            of a weighted mean and its divisor, the total weight. If the divisor of a
            micro-batch is 0, its mean and its gradient do not count, even if NaN.
        batch: `(x, y)` or `(x, y, sample_weight)`, each a nest of dense or ragged
            tensors with the examples on axis 0, or x alone if there is no loss. The
            number of examples may be zero, and unknown during tracing. Inside
            `strategy.run`, pass the share of the replica: it is not divided among
            replicas again, and the result is that of this share alone.
        micro_batch_size: examples per forward and backward pass; the last slice may be
            smaller. With `micro_batch_tokens`, the maximum number of examples.
        micro_batch_tokens: maximum number of positions per forward and backward pass,
            in place of a number of examples, for ragged inputs. A longer example is a
            micro-batch of its own. The examples are sorted by length and cut, and each
            micro-batch is padded with zeros to its longest example. Each position of
            ragged labels gets a sample weight. Models, losses and metrics whose results
            would depend on padding are rejected.
        pad_multiple: with `micro_batch_tokens`, lengths are rounded up to a multiple of
            it.
        variables: the variables to differentiate with respect to; by default, the
            trainable variables of the model. Without a model, they are required.
        loss_weights: a number per output, by name or in order.
        metrics: metrics to update with every micro-batch; see `Objective`.
        weighted_metrics: weighted metrics to update likewise; see `Objective`.
        scale_loss: a function that is applied to the loss of each micro-batch before
            the backward pass. It scales the gradients, but not the returned losses.

    Returns:
        The sums over the batch. `sums.gradients()` returns the gradients that one large
        batch would have given, in the order of the variables. With
        `micro_batch_tokens`, `sums.cut` has the numbers of micro-batches, tokens and
        computed positions.

    Raises:
        ValueError: the loss has no reduction, the loss does not fit the outputs or the
            labels, there is neither `micro_batch_size` nor `micro_batch_tokens`, one of
            them is not a positive integer, `pad_multiple` is set without `micro_batch_tokens`, a
            part of the batch is sparse, a part of the model cannot be computed in
            micro-batches, there is neither a model nor `variables`, loss weights or
            metrics are given without a model or beside an `Objective`, the `Objective`
            has losses over the effective batch, with `micro_batch_tokens` the result
            would depend on padding, or without it the inputs are ragged but the model
            takes only dense ones.
    """
    if model is None:
        if variables is None or not callable(loss):
            rule = "without a model, variables must be given, and loss must be"
            raise ValueError(f"{rule} a function of a micro-batch")
        _check_left_out("without a model", loss_weights, metrics, weighted_metrics)
    if isinstance(loss, Objective):
        where = "with an Objective, which has its own"
        _check_left_out(where, loss_weights, metrics, weighted_metrics)
        objective = loss
    else:
        objective = Objective(loss, loss_weights, metrics, weighted_metrics)
    if objective.over_batch:
        rule = (
            "loss_over must be example for accumulate_gradients; for effective_batch, "
            "use Update or AccumulatingModel"
        )
        raise ValueError(f"{rule}. Received: 'effective_batch'")
    limit = micro_batch_limit(micro_batch_size, micro_batch_tokens, pad_multiple)
    if isinstance(limit, TokenLimit):
        batch = prepared_for_tokens(model, batch)
    else:
        check_takes_ragged(model, batch)
    settings = MicroBatchSettings(
        model,
        objective,
        limit,
        variables=variables,
        scale_loss=scale_loss,
    )
    return accumulate_share(settings, batch, BatchContext(batch_totals(batch)))


def _check_left_out(
    where: str, loss_weights: Any, metrics: Metrics, weighted_metrics: Metrics
) -> None:
    """Reject loss weights and metrics where they would not be used."""
    named_values = (
        ("loss_weights", loss_weights),
        ("metrics", metrics),
        ("weighted_metrics", weighted_metrics),
    )
    for name, value in named_values:
        if value is not None and tf.nest.flatten(value):
            rule = f"{name} must be left out {where}"
            raise ValueError(f"{rule}. Received: {value!r}")


@dataclass(frozen=True)
class MicroBatchSettings:
    """The settings for computing the gradient of a micro-batch.

    Attributes:
        model: see `accumulate_gradients`.
        objective: the losses and metrics. Without a model, the loss of the objective is
            a function of a micro-batch.
        micro_batch_size: examples per forward and backward pass, or the limit of a cut
            by tokens.
        variables: see `accumulate_gradients`.
        scale_loss: see `accumulate_gradients`.
        hold_statistics: whether a micro-batch leaves the moving statistics of
            BatchNormalization unchanged, so that `assign_moving_statistics` can update
            them.
        jit_compile: whether XLA compiles each forward and backward pass. A smaller last
            micro-batch is not compiled.
        fused_attention: whether compiled passes compute attention by `attention_fused`.
        dense_rows: whether the gradients of embeddings are summed as dense tensors, up
            to a limit in size.
    """

    model: keras.Model | None
    objective: Objective
    micro_batch_size: int | TokenLimit
    variables: Sequence[keras.Variable | tf.Variable] | None = None
    scale_loss: Callable[[tf.Tensor], tf.Tensor] | None = None
    hold_statistics: bool = False
    jit_compile: bool = False
    fused_attention: bool = False
    dense_rows: bool = False

    @property
    def padded(self) -> bool:
        """Whether micro-batches are padded, each to its own length."""
        return isinstance(self.micro_batch_size, TokenLimit)

    def tf_variables(self) -> list[tf.Variable]:
        """Return the TensorFlow variables to differentiate with respect to."""
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
    """Data about an effective batch that the micro-steps on each share need.

    Attributes:
        totals: the totals of the effective batch.
        measure_gradient_noise: whether to measure the gradient noise, which takes a
            pass over the gradient per micro-batch.
        noise_seeds: the result of `draw_noise_seeds(noisy_layers(model, x))`, computed
            once per effective batch. The noise for an example then does not depend on
            the cut. If empty, Keras draws the noise for each micro-batch.
        output_gradients: gradients of losses over the effective batch with respect to
            the outputs, in the order of `over_effective_batch.differentiable`. The
            micro-steps backpropagate them to the variables, and compute only the losses
            that the model adds.
    """

    totals: BatchTotals
    measure_gradient_noise: tf.Tensor | bool = False
    noise_seeds: Sequence[tf.Tensor] = ()
    output_gradients: Sequence[tf.Tensor | None] = ()


@tf.autograph.experimental.do_not_convert
def accumulate_share(
    settings: MicroBatchSettings,
    share: Nest | Batches,
    context: BatchContext,
    position: tf.Tensor | int = 0,
) -> GradientSums:
    """Return the sums over a share of an effective batch; see `loop_over_share`."""
    return run_loop(loop_over_share(settings, share, context, position))


def run_loop(loop: MicroBatchLoop) -> GradientSums:
    """Run a loop over a share; return its sums, with the counts of a cut by tokens."""
    return loop.run().with_cut(loop.counts)


@tf.autograph.experimental.do_not_convert
def loop_over_share(
    settings: MicroBatchSettings,
    share: Nest | Batches,
    context: BatchContext,
    position: tf.Tensor | int = 0,
) -> MicroBatchLoop:
    """Return the loop that computes the sums over a share of an effective batch.

    Args:
        settings: the settings for computing the gradient of a micro-batch.
        share: one replica's part of the effective batch, or all of it.
        context: data about the effective batch. The output gradients must be those of
            the share alone.
        position: position of the share's first example in the effective batch; see
            `positions_for_noise`.

    Raises:
        ValueError: see `accumulate_gradients`.
    """
    step = _MicroStep.for_share(settings, share, context)

    def micro_step(
        start: tf.Tensor, x: Nest, y_and_gradients: Nest, sample_weight: Nest
    ) -> GradientSums:
        y, output_gradients = y_and_gradients
        micro_batch = MicroBatch(x, y, sample_weight, output_gradients)
        return step.sums(position_of(start, position), micro_batch)

    # Pack the output gradients with the labels, so that both are cut alike.
    x, y, sample_weight = parts_of(share)
    parts: Nest = (x, (y, tuple(context.output_gradients)), sample_weight)
    if isinstance(share, Batches):
        parts = share._replace(batch=parts)
    return MicroBatchLoop(
        micro_step,
        parts,
        settings.micro_batch_size,
        settings.jit_compile,
        settings.fused_attention,
        settings.dense_rows,
    )


class MicroBatch(NamedTuple):
    """The parts of a micro-batch, each with its examples on axis 0."""

    x: Nest
    y: Nest
    sample_weight: Nest
    output_gradients: Sequence[tf.Tensor | None]  # see `BatchContext`


@dataclass(frozen=True)
class _MicroStep:
    """The forward and backward pass on each micro-batch of a share.

    Attributes:
        settings: the settings for computing the gradient.
        context: data about the effective batch.
        variables: the variables to differentiate with respect to.
        noisy: layers that draw their noise from `keys`, one key per layer.
        keys: keys made from the seeds in the context, once for all micro-batches.
        wide: dense layers whose input gradients are computed by
            `transposed_gradients`.
        normalizing: layers whose moving statistics a micro-step does not update.
    """

    settings: MicroBatchSettings
    context: BatchContext
    variables: list[tf.Variable]
    noisy: list[keras.Layer]
    keys: list[Key]
    wide: list[keras.layers.Dense]
    normalizing: list[keras.layers.BatchNormalization]

    @classmethod
    def for_share(
        cls, settings: MicroBatchSettings, share: Nest | Batches, context: BatchContext
    ) -> _MicroStep:
        """Return the micro-step for a share. Without a model, it has no layers.

        Raises:
            ValueError: the model cannot be trained in micro-batches.
        """
        model = settings.model
        noisy: list[keras.Layer] = []
        wide: list[keras.layers.Dense] = []
        normalizing: list[keras.layers.BatchNormalization] = []
        if model is not None:
            for rule, received in unsupported(model):
                raise ValueError(f"model {rule}. Received: {received}")
            size = settings.micro_batch_size
            if context.noise_seeds:
                inputs = inputs_of(share)
                if isinstance(size, TokenLimit):
                    inputs = padded_inputs(share)
                noisy = noisy_layers(model, inputs)
            if not settings.jit_compile and not isinstance(size, TokenLimit):
                wide = wide_layers(model, size)
            if settings.hold_statistics:
                normalizing = normalizing_layers(model)
        return cls(
            settings=settings,
            context=context,
            keys=[Key.from_seed(seed) for seed in context.noise_seeds],
            variables=settings.tf_variables(),
            noisy=noisy,
            wide=wide,
            normalizing=normalizing,
        )

    def sums(self, position: tf.Tensor | int, micro_batch: MicroBatch) -> GradientSums:
        """Return the sums over a micro-batch.

        `position` is the position of the micro-batch's first example in the effective
        batch; in a cut by tokens, that of each example.
        """
        settings = self.settings
        model = settings.model
        jit_compile = settings.jit_compile
        x, y, sample_weight, output_gradients = micro_batch
        examples = examples_in(x)
        # Use a persistent tape, because each target is differentiated separately.
        with tf.GradientTape(persistent=True) as tape:
            with (
                noise_by_position(
                    self.noisy, self.keys, position, examples, jit_compile
                ),
                transposed_gradients(self.wide),
                without_cudnn(model, jit_compile),
                statistics_held(self.normalizing) as statistics_steps,
            ):
                outputs, losses = _forward(settings, micro_batch, self.context.totals)
            targets = _targets(losses.minimized, settings.scale_loss)
        if model is not None:
            settings.objective.update_metrics(
                y, outputs, sample_weight, settings.padded
            )

        gradients_by_outputs = []
        if output_gradients:
            # `gradients_by` adds the backpropagated output gradients to the gradients
            # of each target, so there must be only one target: the losses that the
            # model adds. All other losses are in the output gradients.
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
    settings: MicroBatchSettings, micro_batch: MicroBatch, totals: BatchTotals
) -> tuple[dict[str, Nest], MicroBatchLosses]:
    """Return the outputs of the model by name, and the losses of a micro-batch."""
    x, y, sample_weight, _ = micro_batch
    parts = (x, y, sample_weight)
    model = settings.model
    if model is None:
        return {}, function_losses(settings.objective.loss, parts, totals)
    outputs = by_name(model, model(x, training=True))
    losses = micro_batch_losses(
        model, settings.objective, outputs, parts, totals, settings.padded
    )
    return outputs, losses


class _Target(NamedTuple):
    """A scalar to differentiate."""

    value: tf.Tensor  # scalar
    times: Any  # scalar factor for the gradient, or `ABSENT` for 1


def _targets(
    minimized: Sequence[LossPart], scale_loss: Callable[..., tf.Tensor] | None
) -> list[_Target]:
    """Return the scalar to differentiate for each part.

    A loss scale is applied to means, as in `fit`, because scaled sums over a
    micro-batch would overflow float16. The gradient of a mean is then multiplied by the
    weight that the sum was divided by.

    The gradient of a function's loss is multiplied by 0 if the weight is 0, because it
    is NaN where the function divides by the weight.
    """
    targets = []
    for part in minimized:
        value = part.total
        times: Any = ABSENT
        if part.of_function:
            times = tf.cast(part.weight != 0, value.dtype)
        if scale_loss is not None:
            weight = part.nonzero_divisor
            value = scale_loss(divide(value, weight))
            times = part.weight if part.of_function else weight
        targets.append(_Target(value, times))
    return targets


def _with_gradients(
    outputs: dict[str, Nest], gradients: Sequence[tf.Tensor | None]
) -> list[OutputGradient]:
    """Return the tensors that have a gradient, each with its gradient.

    The tensors are those of `over_effective_batch.differentiable` for the outputs.
    """
    kept = over_effective_batch.kept(outputs)
    tensors = over_effective_batch.differentiable(kept)
    output_gradients = []
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if gradient is not None:
            output_gradients.append(OutputGradient(tensor, gradient))
    return output_gradients
