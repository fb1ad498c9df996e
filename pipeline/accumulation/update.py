"""The update: micro-batches → weighted gradient sum → one apply.

    W = Σᵢ wᵢ                                           # over the effective batch, before any forward pass
    for each micro-batch k of the effective batch:      # on every replica, over its share
        Lₖ = Σᵢ wᵢ·lossᵢ                                # sums, never means
        S += ∇(Lₖ / W);  L += Lₖ                        # divided by the weight of the whole update
    optimizer.apply(S)                                  # once, after the reduction over replicas

Where W is known only after the forward passes, because the model computes a mask, S += ∇Lₖ and W += Σᵢ wᵢ, and S is
divided by W at the end. Σₖ ∇Lₖ / Σₖ Wₖ is the gradient of the mean over the effective batch, whatever the sizes, the
sample weights and the masks. The mean of the micro-batches' means, Σₖ (∇Lₖ/Wₖ) / K, equals it only for equal Wₖ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from . import noise_scale
from . import over_effective_batch as over
from .adam import fused_adam
from .batch import (
    Batches,
    BatchTotals,
    Nest,
    Share,
    batch_totals,
    examples_in,
    global_batch_totals,
    inputs_of,
    parts_of,
    share_of,
    slice_of,
)
from .dense import transposed_gradients, wide_layers
from .forward_effects import trace_forward, unsupported
from .gradient_sums import (
    GradientSums,
    gradients_by,
    over_replicas,
    sum_over_micro_batches,
)
from .keras_internals import applying_sums
from .loss_sums import LossSum, divide, function_losses, micro_batch_losses, nonzero
from .moving_statistics import assign_moving_statistics, normalising_layers, observed
from .objective import Losses, Metrics, Objective, by_name
from .same_noise import Key, drawn, keys_of, noisy_layers
from .xla import compiled_by_xla, without_cudnn


@tf.autograph.experimental.do_not_convert  # as in `fit`; converting all that follows took most of the tracing
def accumulate_gradients(
    model: keras.Model | None,
    loss: Losses | Objective | Callable[..., Any],
    batch: Nest,
    micro_batch_size: int,
    *,
    variables: Sequence[keras.Variable | tf.Variable] | None = None,
    loss_weights: Any = None,
    metrics: Metrics = (),
    weighted_metrics: Metrics = (),
    scale_loss: Callable[[tf.Tensor], tf.Tensor] | None = None,
    whole: BatchTotals | None = None,
    place: tf.Tensor | int = 0,
    measure_noise: tf.Tensor | bool = False,
    noise_keys: Sequence[tf.Tensor] = (),
    hold_statistics: bool = False,
    jit_compile: bool = False,
    output_gradients: Sequence[tf.Tensor | None] = (),
) -> GradientSums:
    """Run `batch` forward and backward in micro-batches and sum their losses, weights and gradients.

    Peak memory is that of one micro-batch and one gradient, whatever the size of `batch`; `GradientSums` says which
    models need a second gradient. Call it inside a `tf.function`: it traces the model once a call.

    Args:
        model: built, with its trainable variables fixed. None where `loss` computes the loss from a micro-batch.
        loss: as `compile` takes it: any Keras loss, its name or a function of labels and outputs, or a dict or list of
            one for each output, whose reduction is not `none` and whose value for one example does not depend on the
            other ones. None for a model that learns from `add_loss` alone. Or an `Objective`, with weights and metrics.
            Without a model: a function of x, y and the sample weights of a micro-batch, as many as `batch` has, that
            returns the mean loss of its examples; or a tuple of a mean and the weight that it was divided by.
        batch: `(x, y)` or `(x, y, sample_weight)`, each a nest of dense or ragged tensors with the examples on axis 0;
            x alone where there is no loss. The number of examples may be unknown when traced, and zero.
        micro_batch_size: examples per forward+backward; the last slice may be smaller.
        variables: those to differentiate by; the model's trainable ones by default.
        loss_weights: a number for each output, by name or in order.
        metrics, weighted_metrics: updated with every micro-batch, as an `Objective` has them.
        scale_loss: applied to each micro-batch's loss before the backward pass; gradients are then scaled, losses not.
        whole: what is known of the effective batch, where `batch` is one replica's share of it.
        place: position of the share's first example in the effective batch.
        measure_noise: whether `noise` is wanted: a pass over the gradient for each micro-batch.
        noise_keys: as `keys_of(noisy_layers(model, x))` gives them, once for the effective batch: these layers then
            draw for each example what they draw for it in any other cut. Else Keras draws for each micro-batch.
        hold_statistics: leave the moving statistics of BatchNormalization to `assign_moving_statistics`.
        jit_compile: compile each forward+backward with XLA, but for a last one of fewer examples.
        output_gradients: of losses over the whole effective batch, which an `Update` computes before: those by the
            outputs for `batch`. They are brought to the variables, and the sums have no losses.

    Returns:
        The sums; `sums.gradients()` is what one large batch would have given, in the order of the variables.

    Raises:
        ValueError: the loss reduces nothing, does not fit the outputs or the labels, the micro-batch size is not
            positive, an input is sparse, or the model has a part that cannot be computed in micro-batches.
    """
    if model is None and (variables is None or not callable(loss)):
        raise ValueError(
            "without a model there must be variables, and a loss that is a function of a micro-batch"
        )
    for rule, received in () if model is None else unsupported(model):
        raise ValueError(f"model {rule}. Received: {received}")
    goal = (
        loss
        if isinstance(loss, Objective)
        else Objective(loss, loss_weights, metrics, weighted_metrics)
    )
    if goal.over_batch and not output_gradients:
        raise ValueError(
            "loss_over must be example without an Update. Received: 'effective_batch'"
        )
    totals = batch_totals(batch) if whole is None else whole
    noisy = noisy_layers(model, inputs_of(batch)) if noise_keys else []
    keys = [Key.of(seed) for seed in noise_keys]  # for all micro-batches
    wide = [] if jit_compile or model is None else wide_layers(model, micro_batch_size)
    held = normalising_layers(model) if hold_statistics else []
    asked = (
        model.trainable_variables
        if variables is None and model is not None
        else variables or ()
    )
    values = [
        variable.value if isinstance(variable, keras.Variable) else variable
        for variable in asked
    ]

    def micro_step(start: tf.Tensor, *parts: Nest) -> GradientSums:
        x, (y, by_outputs), sample_weight = parts
        parts, examples = (x, y, sample_weight), examples_in(x)
        with tf.GradientTape(persistent=True) as tape:
            drawing = drawn(noisy, keys, place + start, examples, jit_compile)
            with (
                transposed_gradients(wide),
                without_cudnn(model, jit_compile),
                drawing,
                observed(held) as moves,
            ):
                if model is None:
                    losses, added, minimised = function_losses(loss, parts, totals)
                else:
                    outputs = by_name(model, model(x, training=True))
                    losses, added, minimised = micro_batch_losses(
                        model, goal.of_micro_batch(), outputs, parts, totals
                    )
            # Mean-sized, as `fit` scales it: the sum over a micro-batch would overflow float16.
            sizes = [
                () if part.known or scale_loss is None else nonzero(part.share)
                for part in minimised
            ]
            targets = [
                divide(part.total, size)
                for part, size in zip(minimised, sizes, strict=True)
            ]
            targets = (
                targets
                if scale_loss is None
                else [scale_loss(target) for target in targets]
            )
        if model is not None:
            goal.update_metrics(y, outputs, sample_weight)
        pairs = (
            zip(over.differentiable(over.kept(outputs)), by_outputs, strict=True)
            if by_outputs
            else ()
        )
        whole_losses = [
            (output, gradient) for output, gradient in pairs if gradient is not None
        ]
        sums = tuple(
            gradients_by(tape, *each, values, whole_losses)
            for each in zip(targets, sizes, strict=True)
        )
        weights = tuple(() if part.known else part.share for part in minimised)
        noise = noise_scale.of_micro_batch(measure_noise, sums, minimised)
        return GradientSums(
            losses, added, tf.cast(examples, added.dtype), sums, weights, noise, moves()
        )

    x, y, sample_weight = parts_of(batch)
    of_steps: Nest = x, (y, tuple(output_gradients)), sample_weight
    of_steps = (
        batch._replace(batch=of_steps) if isinstance(batch, Batches) else of_steps
    )
    return sum_over_micro_batches(micro_step, of_steps, micro_batch_size, jit_compile)


class Update:
    """One effective batch in, one optimizer step out, under the current or the given strategy.

    Args:
        model: as `accumulate_gradients` takes it.
        objective: a loss or an `Objective`. Its metrics are reset at each update: they are over exactly its examples.
        optimizer: built for the model's variables.
        micro_batch_size: examples per forward+backward on one replica.
        strategy: the strategy in whose scope the model was built; the current one by default.
        noise_every: updates from one measurement of the gradient noise to the next; 0 measures none. They are counted
            in `begun`, a variable, which is to be set where training resumes from a checkpoint.
        same_noise: have Keras' dropout and noise layers draw for each example what they draw in any other cut. True
            refuses layers that can only draw for each micro-batch; "auto" leaves them to Keras.
        hold_statistics: move BatchNormalization's statistics once an update, by the effective batch, not by each part.
        jit_compile: compile each forward+backward with XLA, but for a last one of fewer examples; "auto" as
            `compiled_by_xla` says. `compiled` is what became of it, once an update was traced.
        reductions_ready: counts the reductions that this process had its sums ready for, where there are several.
        loss_over: "effective_batch" computes the losses over all examples of an update, on all replicas, as losses of
            several examples at once need it: see `Objective`, whose own it is by default. It costs a second forward
            pass, and memory for the outputs of the effective batch. It needs `same_noise` where there is noise.
    """

    def __init__(
        self,
        model: keras.Model,
        objective: Losses | Objective,
        optimizer: keras.optimizers.Optimizer,
        micro_batch_size: int,
        *,
        strategy: tf.distribute.Strategy | None = None,
        noise_every: int = 0,
        same_noise: bool | str = False,
        hold_statistics: bool = True,
        jit_compile: bool | str = False,
        reductions_ready: tf.Variable | None = None,
        loss_over: str | None = None,
    ):
        self.model, self.objective, self.optimizer = (
            model,
            Objective.of(objective, loss_over),
            optimizer,
        )
        if self.objective.over_batch and noise_every:
            rule = "noise_every must be 0 where loss_over is effective_batch: no example has a gradient of its own"
            raise ValueError(f"{rule}. Received: {noise_every}")
        self.measured = self.objective.measured()
        self.micro_batch_size, self.jit_compile, self.compiled = (
            micro_batch_size,
            jit_compile,
            False,
        )
        self.strategy, self.reductions_ready = (
            strategy or tf.distribute.get_strategy(),
            reductions_ready,
        )
        self.noise_every, self.same_noise, self.hold_statistics = (
            noise_every,
            same_noise,
            hold_statistics,
        )
        # Read on the host: from a GPU, the host would wait for the update before.
        with tf.device("CPU:0"):
            self.begun = tf.Variable(0, dtype=tf.int64, trainable=False)
        # Updates whose gradient was complete, so that it may have been applied: such an update cannot be retried.
        self.applying = tf.Variable(0, dtype=tf.int64, trainable=False)
        # Keras' `apply` divides by the factor of any optimizer that has one.
        scales = (
            isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
            or optimizer.loss_scale_factor is not None
        )
        self._scale_loss = optimizer.scale_loss if scales else None

    @tf.autograph.experimental.do_not_convert
    def __call__(self, batch: Nest | Share) -> dict[str, tf.Tensor]:
        """Apply the gradient of `batch` once. Call it inside a `tf.function`.

        Args:
            batch: the effective batch, the `Batches` that make it, or the `Share` of it that this process has read.

        Returns:
            Scalars: `loss`, that of each of several outputs as `<output>_loss`, one entry for each metric,
            `learning_rate` as this update used it, and `gradient_norm`, the global L2 norm of the averaged gradient
            before clipping; where the noise is measured also `gradient_variance` and `gradient_square`, estimates
            of tr(Σ), per example, and of the squared norm of the true gradient; NaN with one micro-batch.

        Raises:
            ValueError: it is called in a strategy's scope.
        """
        built = [len(metric.variables) for metric in self.measured.values()]
        for metric in self.measured.values():
            metric.reset_state()
        measure: tf.Tensor | bool = False
        if self.noise_every:
            with tf.device("CPU:0"):
                measure = (self.begun.assign_add(1) - 1) % self.noise_every == 0
        sums = self.sums(batch, measure)
        gradients = sums.gradients()
        norm = tf.linalg.global_norm(
            [gradient for gradient in gradients if gradient is not None]
        )
        scale = tf.ones((), norm.dtype)
        if self._scale_loss is not None:
            scale = tf.cast(self._scale_loss(tf.ones(())), norm.dtype)
            norm /= scale
        with tf.control_dependencies([norm]):
            applying = self.applying.assign_add(1)
        with tf.control_dependencies([applying]):
            learning_rate = self.apply(gradients, sums)
        results = sums.results(self.measured)
        for metric, count in zip(self.measured.values(), built, strict=True):
            if (
                len(metric.variables) > count
            ):  # built in this trace: the reset above left out what was not there yet
                metric.reset_state()
        if self.noise_every:
            results |= noise_scale.estimates(sums, tf.square(norm), tf.square(scale))
        return {**results, "learning_rate": learning_rate, "gradient_norm": norm}

    def sums(
        self, batch: Nest | Share, measure_noise: tf.Tensor | bool = False
    ) -> GradientSums:
        """Return the sums over all replicas without applying them; the metrics are updated and not reset."""
        if tf.distribute.has_strategy():  # Keras would apply as inside of a replica
            raise ValueError(
                "an update must be outside of its strategy's scope; the model is made inside of it"
            )
        x = inputs_of(batch)
        if self.same_noise is True and (
            layers := trace_forward(self.model, x, True).cut_dependent_noise
        ):
            rule = 'same_noise must be "auto" or False: some layers can only draw for each micro-batch'
            raise ValueError(f"{rule}. Received: True, {', '.join(layers)}")
        if self.objective.over_batch:
            if isinstance(batch, Batches):
                raise ValueError(
                    "loss_over must be example for Batches. Received: 'effective_batch'"
                )
            for rule, received in over.not_supported(
                self.model, trace_forward(self.model, x, bool(self.same_noise))
            ):
                raise ValueError(f"{rule}. Received: {received}")
        # Here, where all copies of a seed get the same value: they may have diverged.
        keys = keys_of(noisy_layers(self.model, x)) if self.same_noise else []
        totals = global_batch_totals(
            self.strategy, batch, self.objective.loss, self.reductions_ready
        )
        of_batch = {"whole": totals, "measure_noise": measure_noise, "noise_keys": keys}
        losses: dict[str, LossSum] = {}
        if self.objective.over_batch:
            given = self.model, batch, self.micro_batch_size, keys, self.jit_compile
            outputs = self.strategy.run(lambda: over.kept_outputs(*given))
            whole = over.gathered(self.strategy, batch, outputs, self.reductions_ready)
            losses, of_batch["output_gradients"] = over.output_gradients(
                self.objective, *whole, self._scale_loss
            )
        sums = self.strategy.run(self._accumulate, (batch,), of_batch)
        sums = over_replicas(
            self.strategy, sums, self.model.trainable_variables, self.reductions_ready
        )
        return sums.with_losses(losses) if losses else sums

    def apply(
        self, gradients: Sequence[tf.Tensor | None], sums: GradientSums
    ) -> tf.Tensor:
        """Take one step of the optimizer, and one of the moving statistics; return the learning rate of that step."""
        with applying_sums(self.optimizer), fused_adam(self.optimizer) as learning_rate:
            self.optimizer.apply(gradients, self.model.trainable_variables)
        if self.hold_statistics:
            assign_moving_statistics(self.model, sums.moves)
        return learning_rate

    def _accumulate(self, batch: Nest | Share, **given: Any) -> GradientSums:
        share, place = share_of(batch)
        given |= {"place": place, "scale_loss": self._scale_loss}
        if gradients := given.get("output_gradients"):
            given["output_gradients"] = slice_of(
                gradients, place, place + examples_in(share)
            )
        if isinstance(batch, Batches):
            share = batch._replace(batch=share)
        else:  # XLA compiles for each size
            self.compiled = compiled_by_xla(self.jit_compile, self.model, share)
        given |= {"hold_statistics": self.hold_statistics, "jit_compile": self.compiled}
        sums = accumulate_gradients(
            self.model, self.objective, share, self.micro_batch_size, **given
        )
        if self._scale_loss is None and (
            self.strategy.num_replicas_in_sync == 1 or not isinstance(batch, Share)
        ):
            return sums
        # Keras divides no rows by a scale. Workers would add rows of one index in different orders, and weights differ.
        return tf.nest.map_structure(tf.convert_to_tensor, sums)
