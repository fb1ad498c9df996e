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
from typing import Any

import keras
import tensorflow as tf

from . import noise_scale
from .adam import fused_adam
from .dense import transposed_gradients, wide_layers
from .moving_statistics import assign_moving_statistics, normalising_layers, observed
from .outputs import Losses, Metrics, by_name, labels_by_name, measured, update_metrics
from .replicas import known_of_all, reduce
from .same_noise import drawn, keys_of, noisy_layers
from .slicing import Nest, Share, examples_in, parts_of, share_of, sum_over_micro_batches
from .sums import Gradients, GradientSums, Known, known_of, micro_batch_losses


@tf.autograph.experimental.do_not_convert  # as in `fit`; converting all that follows took most of the tracing
def accumulate_gradients(
    model: keras.Model,
    loss: Losses,
    batch: Nest,
    micro_batch_size: int,
    *,
    loss_weights: Any = None,
    metrics: Metrics = (),
    weighted_metrics: Metrics = (),
    scale_loss: Callable[[tf.Tensor], tf.Tensor] | None = None,
    whole: Known | None = None,
    place: tf.Tensor | int = 0,
    measure_noise: tf.Tensor | bool = False,
    noise_keys: Sequence[tf.Tensor] = (),
    hold_statistics: bool = False,
    jit_compile: bool = False,
) -> GradientSums:
    """Run `batch` forward and backward in micro-batches and sum their losses, weights and gradients.

    Peak memory is that of one micro-batch and one gradient, whatever the size of `batch`; `GradientSums` says which
    models need a second gradient. Call it inside a `tf.function`: it traces the model once a call.

    Args:
        model: built, with its trainable variables fixed.
        loss: as `compile` takes it: any Keras loss, or a dict or list of one for each output, whose reduction is not
            `none` and whose value for one example does not depend on the other ones (in `keras.losses.Circle` it
            does: that is a loss of the micro-batch). None for a model that learns from `add_loss` alone.
        batch: `(x, y)` or `(x, y, sample_weight)`, each a nest of dense or ragged tensors with the examples on
            axis 0; x alone where there is no loss. The number of examples need not be known when traced, and may be
            zero.
        micro_batch_size: examples per forward+backward; the last slice may be smaller.
        loss_weights: a number for each output, by name or in order.
        metrics, weighted_metrics: updated with every micro-batch's outputs; of a model with several outputs by the
            name of the output. The mask of the outputs weighs the former, the sample weights weigh the latter.
        scale_loss: applied to each micro-batch's loss before the backward pass, as a `LossScaleOptimizer`
            wants it; the sums then hold scaled gradients and the losses are unscaled.
        whole: what is known of the effective batch, where `batch` is one replica's share of it.
        place: of the share's first example in the effective batch.
        measure_noise: whether `noise` is wanted: a pass over the gradient for each micro-batch.
        noise_keys: as `keys_of(noisy_layers(model, x))` gives them, once for the effective batch: these layers then
            draw for each example what they draw for it in any other cut. Without, Keras draws for each micro-batch.
        hold_statistics: leave the moving statistics of BatchNormalization as they are; `assign_moving_statistics`
            moves them by those of the effective batch, which an `Update` does.
        jit_compile: compile each forward+backward with XLA.

    Returns:
        The sums; `sums.gradients()` is what one large batch would have given.

    Raises:
        ValueError: the loss reduces nothing, does not fit the outputs or the labels, or the micro-batch size is not
            positive.
    """
    variables = [variable.value for variable in model.trainable_variables]
    effective = known_of(batch) if whole is None else whole
    noisy = noisy_layers(model, parts_of(batch)[0]) if noise_keys else []
    wide = [] if jit_compile else wide_layers(model, micro_batch_size)

    def micro_step(start: tf.Tensor, *parts: Nest) -> GradientSums:
        x, y, sample_weight = parts
        with tf.GradientTape(persistent=True) as tape:
            held = normalising_layers(model) if hold_statistics else []
            drawing = drawn(noisy, noise_keys, place + start, examples_in(x))
            with transposed_gradients(wide), drawing, observed(held) as moves:
                outputs = by_name(model, model(x, training=True))
            losses, added, minimised = micro_batch_losses(model, loss, loss_weights, outputs, parts, effective)
            # Mean-sized, as `fit` scales it: the sum over a micro-batch would overflow float16.
            targets = [part.total if scale_loss is None else scale_loss(part.total / part.size) for part in minimised]
        labels = labels_by_name(loss, y, outputs)
        update_metrics(metrics, labels, outputs)
        update_metrics(weighted_metrics, labels, outputs, sample_weight)
        sums = tuple(
            _gradients(tape, target, variables, None if scale_loss is None else part.size)
            for target, part in zip(targets, minimised, strict=True)
        )
        weights = tuple(part.weight for part in minimised)
        noise = noise_scale.of_micro_batch(measure_noise, sums, minimised)
        return GradientSums(losses, added, tf.cast(examples_in(x), added.dtype), sums, weights, noise, moves())

    return sum_over_micro_batches(micro_step, batch, micro_batch_size, jit_compile)


class Update:
    """One effective batch in, one optimizer step out, under the current or the given strategy.

    Args:
        model, loss, loss_weights: as `accumulate_gradients` takes them.
        optimizer: built for the model's variables.
        micro_batch_size: examples per forward+backward on one replica.
        metrics, weighted_metrics: reset at each update, so that their results are over exactly its examples.
        layer_metrics: those that the model's layers update in their calls, reset likewise.
        strategy: the strategy in whose scope the model was built; the default one where it is not given.
        noise_every: updates from one measurement of the gradient noise to the next; 0 measures none. They are counted
            in `begun`, a variable, which is to be set where training goes on from a checkpoint.
        same_noise: have Keras' dropout and noise layers draw for each example what they draw for it in any other cut,
            over all replicas.
        hold_statistics: move the statistics of BatchNormalization once an update, by those of the effective batch,
            and not by those of each micro-batch, which differ between replicas.
        jit_compile: compile each forward+backward with XLA.
        arrived: counts the sums that this process had ready for the other ones, where there are several.
    """

    def __init__(
        self,
        model: keras.Model,
        loss: Losses,
        optimizer: keras.optimizers.Optimizer,
        micro_batch_size: int,
        *,
        loss_weights: Any = None,
        metrics: Metrics = (),
        weighted_metrics: Metrics = (),
        layer_metrics: Sequence[keras.metrics.Metric] = (),
        strategy: tf.distribute.Strategy | None = None,
        noise_every: int = 0,
        same_noise: bool = False,
        hold_statistics: bool = True,
        jit_compile: bool = False,
        arrived: tf.Variable | None = None,
    ):
        self.model, self.loss, self.optimizer, self.arrived = model, loss, optimizer, arrived
        self.micro_batch_size, self.jit_compile = micro_batch_size, jit_compile
        self.loss_weights, self.metrics, self.weighted_metrics = loss_weights, metrics, weighted_metrics
        self.measured = measured(metrics, weighted_metrics, layer_metrics)
        self.strategy = strategy or tf.distribute.get_strategy()
        self.noise_every, self.same_noise, self.hold_statistics = noise_every, same_noise, hold_statistics
        # On the host, where it decides: read from a GPU it would let the host wait for the update before.
        with tf.device("CPU:0"):
            self.begun = tf.Variable(0, dtype=tf.int64, trainable=False)
        # Updates whose gradient was whole, so that applying it may have begun: such a one cannot be tried again.
        self.applying = tf.Variable(0, dtype=tf.int64, trainable=False)
        # Keras' `apply` divides by the factor of any optimizer that has one.
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor is not None
        self._scale_loss = optimizer.scale_loss if scales else None

    @tf.autograph.experimental.do_not_convert
    def __call__(self, batch: Nest | Share) -> dict[str, tf.Tensor]:
        """Apply the gradient of `batch` once. Call it inside a `tf.function`.

        Args:
            batch: the effective batch, as `accumulate_gradients` takes it, or of several processes the `Share` that
                each has read of it; every replica gets its share.

        Returns:
            Scalars: `loss`, that of each of several outputs as `<output>_loss`, one entry for each metric,
            `learning_rate` as this update used it, and `gradient_norm`, the global L2 norm of the averaged gradient
            before clipping; where the noise is measured `gradient_variance` and `gradient_square`, as
            `noise_scale.estimate` gives them.

        Raises:
            ValueError: it is called in a strategy's scope.
        """
        known = [len(metric.variables) for metric in self.measured.values()]
        for metric in self.measured.values():
            metric.reset_state()
        sums = self.sums(batch, self._measures())
        gradients = sums.gradients()
        learning_rate = tf.identity(tf.convert_to_tensor(self.optimizer.learning_rate))  # before apply moves on
        norm = tf.linalg.global_norm([gradient for gradient in gradients if gradient is not None])
        scale = tf.ones((), norm.dtype)
        if self._scale_loss is not None:
            scale = tf.cast(self._scale_loss(tf.ones(())), norm.dtype)
            norm /= scale
        with tf.control_dependencies([learning_rate, norm]):
            applying = self.applying.assign_add(1)
        with tf.control_dependencies([applying]):
            self.apply(gradients, sums)
        results = {"loss": sums.mean_loss(), **sums.output_losses()}
        results |= {name: metric.result() for name, metric in self.measured.items()}
        for metric, count in zip(self.measured.values(), known, strict=True):
            if len(metric.variables) > count:  # built in this trace: the reset above left out what was not there yet
                metric.reset_state()
        if self.noise_every:
            results |= noise_scale.estimates(sums, tf.square(norm), tf.square(scale))
        return {**results, "learning_rate": learning_rate, "gradient_norm": norm}

    def sums(self, batch: Nest | Share, measure_noise: tf.Tensor | bool = False) -> GradientSums:
        """Return the sums over all replicas, applying nothing; the metrics go on from where they are."""
        if tf.distribute.has_strategy():  # Keras would apply as inside of a replica
            raise ValueError("an update must be outside of its strategy's scope; the model is made inside of it")
        # Here, where all copies of a seed get the same value: they may have parted.
        keys = keys_of(noisy_layers(self.model, parts_of(batch)[0])) if self.same_noise else []
        known = known_of_all(self.strategy, batch, self.loss, self.arrived)
        sums = self.strategy.run(self._accumulate, args=(batch, known, measure_noise, keys))
        return reduce(self.strategy, sums, self.arrived)

    def apply(self, gradients: Sequence[tf.Tensor | None], sums: GradientSums) -> None:
        """Take one step of the optimizer, and one of the moving statistics by those of the effective batch."""
        with fused_adam(self.optimizer):
            self.optimizer.apply(gradients, self.model.trainable_variables)
        if self.hold_statistics:
            assign_moving_statistics(self.model, sums.moves)

    def _measures(self) -> tf.Tensor | bool:
        if not self.noise_every:
            return False
        with tf.device("CPU:0"):
            return (self.begun.assign_add(1) - 1) % self.noise_every == 0

    def _accumulate(
        self, batch: Nest | Share, whole: Known, measure_noise: tf.Tensor | bool, noise_keys: Sequence[tf.Tensor]
    ) -> GradientSums:
        replicas = self.strategy.num_replicas_in_sync
        share, place = share_of(batch, replicas)
        sums = accumulate_gradients(
            self.model,
            self.loss,
            share,
            self.micro_batch_size,
            loss_weights=self.loss_weights,
            metrics=self.metrics,
            weighted_metrics=self.weighted_metrics,
            scale_loss=self._scale_loss,
            whole=whole,
            place=place,
            measure_noise=measure_noise,
            noise_keys=noise_keys,
            hold_statistics=self.hold_statistics,
            jit_compile=self.jit_compile,
        )
        if replicas == 1 and self._scale_loss is None:
            return sums
        # Mirrored variables take no rows from outside of a replica, and Keras divides no rows by a scale.
        return tf.nest.map_structure(tf.convert_to_tensor, sums)


def _gradients(
    tape: tf.GradientTape, target: tf.Tensor, variables: Sequence[tf.Variable], times: tf.Tensor | None
) -> Gradients:
    def scaled(gradient: tf.Tensor) -> tf.Tensor:
        if gradient.dtype in (tf.float16, tf.bfloat16):
            gradient = tf.cast(gradient, tf.float32)
        return gradient if times is None else gradient * tf.cast(times, gradient.dtype)

    def shaped(gradient: Any, variable: tf.Variable) -> Any:
        if gradient is None:
            return ()
        if isinstance(gradient, tf.IndexedSlices):  # the rows of an embedding that the micro-batch has looked up
            return tf.IndexedSlices(scaled(gradient.values), gradient.indices, tf.constant(variable.shape.as_list()))
        gradient.set_shape(variable.shape)  # not known where it was summed over an axis of unknown length
        return scaled(gradient)

    return tuple(map(shaped, tape.gradient(target, variables), variables))
