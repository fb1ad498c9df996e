"""The update: one optimizer step per effective batch.

sums = Σ over replicas, Σ over micro-batches       # see `accumulate`
optimizer.apply(sums.gradients())                  # once
assign_moving_statistics(sums.statistics_steps)    # once
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from . import noise_scale
from . import over_effective_batch as over
from .accumulate import BatchContext, MicroBatchSettings, loop_over_share, run_loop
from .adam import fused_adam
from .batch import (
    Batches,
    Nest,
    Share,
    examples_in,
    global_batch_totals,
    inputs_of,
    positions_for_noise,
    share_of,
    slice_of,
    tensors_of,
)
from .choices import check_choice
from .compiled_apply import Applied, ApplyProgram, dense_sums, makes_dense
from .forward_effects import trace_forward
from .gradient_sums import GradientNoiseSums, GradientSums, sum_over_replicas
from .keras_internals import applying_sums, constant_counts, step_counters
from .loss_sums import LossSum
from .micro_batches import MicroBatchLoop
from .moving_statistics import assign_moving_statistics
from .objective import Losses, Objective
from .padding import padded_inputs
from .padding_checks import check_noise, prepared_for_tokens
from .ragged_checks import check_takes_ragged
from .same_noise import draw_noise_seeds, noisy_layers
from .token_cut import (
    CutCounts,
    TokenLimit,
    check_lengths_for_xla,
    dealt,
    micro_batch_limit,
)
from .xla import check_jit_compile, compiled_by_xla

# Values of `xla_scope`. `step`: XLA compiles the forward and backward passes. `apply`:
# it also compiles the optimizer's step. `update`: it compiles all of these as one
# program.
SCOPES = ("step", "apply", "update")


class _Step(NamedTuple):
    """The values from which the results of an update are made."""

    sums: GradientSums  # without the gradients
    norm: tf.Tensor  # global L2 norm of the averaged gradient before clipping
    loss_scale: tf.Tensor
    learning_rate: tf.Tensor


class Update:
    """Applies one effective batch in one optimizer step, under a strategy.

    Args:
        model: a built model; see `accumulate_gradients`.
        objective: a loss or an `Objective`. Its metrics are reset at each update, so
            their results cover exactly the examples of the update.
        optimizer: an optimizer that was built for the model's trainable variables.
        micro_batch_size: examples per forward and backward pass on one replica. With
            `micro_batch_tokens`, the maximum number of examples, or None.
        micro_batch_tokens: maximum number of positions per pass, in place of a number
            of examples, for ragged inputs; see `accumulate_gradients`. The replicas get
            shares with about equal numbers of tokens, and each cuts its own. The
            gradient noise is then not measured, because sorted micro-batches are not
            random samples.
        pad_multiple: with `micro_batch_tokens`, lengths are rounded up to a multiple of
            it.
        xla_lengths: with `micro_batch_tokens`, the lengths for which XLA compiles the
            passes, in increasing order; see `choose_xla_lengths`. A compiled
            micro-batch is padded to one of them, and has as many examples as the limit
            allows at this length. XLA does not compile a smaller last micro-batch, nor
            those of longer examples. Without lengths, XLA compiles nothing, and
            `jit_compile` must not be True.
        strategy: the strategy in whose scope the model was built; the current one by
            default.
        noise_every: number of updates from one measurement of the gradient noise to the
            next; 0 for no measurements. The variable `begun` counts the updates for it.
            Set this variable when training resumes from a checkpoint.
        same_noise: whether Keras' dropout and noise layers draw the same noise for an
            example, however the effective batch is cut. True rejects layers that can
            only draw for a whole micro-batch; "auto" leaves these layers to Keras.
        hold_statistics: whether the moving statistics of BatchNormalization are updated
            once per update, from the effective batch, instead of in each micro-batch.
            It has no effect with `renorm`, in a subclass with its own `call`, or where
            a layer calls BatchNormalization in a loop.
        jit_compile: whether XLA compiles each forward and backward pass. A smaller last
            micro-batch is not compiled, nor are `Batches`, because XLA would compile
            once per size. For "auto", see `compiled_by_xla`. After an update was
            traced, the attribute `compiled` holds the decision. In a cut by tokens, the
            attribute `compiled_lengths` is then a scalar tensor of the same trace, or
            None: bit i is set if XLA computed a micro-batch of the length
            `xla_lengths[i]`.
        xla_scope: what XLA compiles if it compiles the passes. "step" compiles the
            passes alone. On one device, "apply" also compiles the norm and the
            optimizer's step, as one program. If the gradient of an embedding is sparse,
            this is done only with Keras' Adam and AdamW, without `amsgrad`. The
            attribute `apply_compiled` holds the decision. "update" compiles the passes
            and the optimizer's step as a single program, under the same conditions. It
            is for small models, whose time goes into starting operations. It is used
            for effective batches of at most 64 MiB, all of whose micro-batches are
            full; the others are computed as with "apply". The program is compiled again
            for each further size of an effective batch. An update that runs out of
            memory in this program cannot be retried. The attribute `update_compiled`
            holds the decision.
        fused_attention: whether compiled passes compute attention with cuDNN where this
            is possible; see `attention_fused`. This needs an NVIDIA GPU of the Hopper
            generation, and is not deterministic. It has no effect in a cut by tokens.
        reductions_ready: a variable that counts the reductions for which this process
            had its summands ready. It is needed only with several processes.
        loss_over: "effective_batch" computes the losses over all examples of an update,
            on all replicas, for losses that compare several examples. This costs a
            second forward pass, and memory for the outputs of the effective batch. If
            layers draw noise, `same_noise` is required. By default, the attribute of
            the `Objective` is used.

    Raises:
        ValueError: an argument is not one of its choices, there is neither
            `micro_batch_size` nor `micro_batch_tokens`, one of them is not a positive
            integer, `pad_multiple` or `xla_lengths` is wrong or has no effect,
            `jit_compile` is True with `micro_batch_tokens` but without `xla_lengths`,
            or the noise is to be measured with losses over the effective batch.
    """

    def __init__(  # noqa: PLR0913  options of an update
        self,
        model: keras.Model,
        objective: Losses | Objective,
        optimizer: keras.optimizers.Optimizer,
        micro_batch_size: int | None = None,
        *,
        micro_batch_tokens: int | None = None,
        pad_multiple: int = 1,
        xla_lengths: Sequence[int] = (),
        strategy: tf.distribute.Strategy | None = None,
        noise_every: int = 0,
        same_noise: bool | str = False,
        hold_statistics: bool = True,
        jit_compile: bool | str = False,
        xla_scope: str = "step",
        fused_attention: bool = False,
        reductions_ready: tf.Variable | None = None,
        loss_over: str | None = None,
    ):
        check_choice("same_noise", same_noise, (True, False, "auto"))
        check_jit_compile(jit_compile)
        check_choice("xla_scope", xla_scope, SCOPES)
        self.model = model
        self.objective = Objective.from_loss(objective, loss_over)
        if self.objective.over_batch and noise_every:
            rule = (
                "noise_every must be 0 if loss_over is effective_batch, because "
                "no example has a gradient of its own"
            )
            raise ValueError(f"{rule}. Received: {noise_every}")
        self.optimizer = optimizer
        limit = micro_batch_limit(
            micro_batch_size, micro_batch_tokens, pad_multiple, xla_lengths
        )
        # A loop may halve it after memory ran out. None only with `micro_batch_tokens`.
        self.micro_batch_size: Any = micro_batch_size
        self.token_limit = limit if isinstance(limit, TokenLimit) else None
        if self.token_limit is not None:
            check_lengths_for_xla(self.token_limit, jit_compile)
        self.strategy = strategy or tf.distribute.get_strategy()
        self.noise_every = noise_every
        self.same_noise = same_noise
        self.hold_statistics = hold_statistics
        self.jit_compile = jit_compile
        self.fused_attention = fused_attention
        self.reductions_ready = reductions_ready
        self.compiled = False
        self.apply_compiled = False
        self.update_compiled = False
        self.compiled_lengths: tf.Tensor | None = None
        self.measured = self.objective.measured()

        # Keep this variable on the host. To read it from a GPU, the host would have to
        # wait for the previous update.
        with tf.device("CPU:0"):
            self.begun = tf.Variable(0, dtype=tf.int64, trainable=False)
        # The number of updates whose optimizer step may have begun. Such an update
        # cannot be retried, since its gradient may have been applied.
        self.applying = tf.Variable(0, dtype=tf.int64, trainable=False)

        # The optimizer's counters that may advance before the gradient is complete. To
        # retry an update, restore their values first.
        self.counters: list[tf.Variable] = []
        self._one_program = xla_scope == "update"
        on_one_device = self.strategy is tf.distribute.get_strategy()
        if jit_compile and xla_scope != "step" and on_one_device:
            self.counters = step_counters(optimizer)

        # Scale the loss for any optimizer with a scale factor: Keras' `apply` divides
        # the gradients by it.
        has_loss_scale = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if has_loss_scale or optimizer.loss_scale_factor is not None:
            self._scale_loss = optimizer.scale_loss
        else:
            self._scale_loss = None

    @property
    def _limit(self) -> int | TokenLimit:
        """The limit of a micro-batch: a number of examples, or of tokens."""
        if self.token_limit is not None:
            return self.token_limit
        size: int = self.micro_batch_size
        return size

    @tf.autograph.experimental.do_not_convert
    def __call__(self, batch: Nest | Share | Batches) -> dict[str, tf.Tensor]:
        """Apply the gradient of `batch` once. Call it inside a `tf.function`.

        Args:
            batch: the effective batch, the `Batches` that it consists of, or the
                `Share` of it that this process has read.

        Returns:
            Scalars by name: `loss`; `<output>_loss` for each output, if several have a
            loss; the metrics; `learning_rate`, the rate of this update; and
            `gradient_norm`, the global L2 norm of the averaged gradient before
            clipping. With `noise_every`, also `gradient_variance`, an estimate of
            tr(Σ) per example, and `gradient_square`, an estimate of the squared norm of
            the true gradient. Both are NaN in an update without a measurement, and with
            a single micro-batch. With `micro_batch_tokens`, these two are absent.
            Instead, there are the sums over all replicas of `micro_steps`, the number
            of micro-batches; `tokens`, the positions in ragged inputs that are not
            padding; and `positions`, those that are computed.

        Raises:
            ValueError: the call is in a strategy's scope, no variable has a gradient,
                the model or the batch does not allow `same_noise` or `loss_over`,
                `Batches` come with several replicas or with `jit_compile=True`, or
                `accumulate_gradients` would reject the model, the losses or the batch.
        """
        batch = self._prepared(batch)
        metrics = list(self.measured.values())
        variable_counts = [len(metric.variables) for metric in metrics]
        measure_gradient_noise: tf.Tensor | bool = False
        with tf.control_dependencies(tensors_of(batch)):
            for metric in metrics:
                metric.reset_state()
            if self.noise_every and self.token_limit is None:
                with tf.device("CPU:0"):
                    begun = self.begun.assign_add(1) - 1
                    measure_gradient_noise = begun % self.noise_every == 0

        context = self._context(batch, measure_gradient_noise)
        loop = None
        step = None
        if self._one_program and self.counters and not self.objective.over_batch:
            loop = self._loop_of_replica(batch, context)
            step = self._in_one_program(batch, loop)
        self.update_compiled = step is not None
        if step is None and loop is not None:
            step = self._in_steps(batch, self._made_dense(batch, run_loop(loop)))
        elif step is None:
            step = self._in_steps(batch, self._sums(batch, context))

        sums = step.sums
        results = sums.results(self.measured)
        for metric, count in zip(metrics, variable_counts, strict=True):
            # The metric was built in this trace, after the reset above: reset it for
            # the next update.
            if len(metric.variables) > count:
                metric.reset_state()
        if isinstance(sums.gradient_noise, GradientNoiseSums):
            estimates = noise_scale.estimates(
                sums.gradient_noise, tf.square(step.norm), step.loss_scale
            )
            results["gradient_variance"] = estimates.variance
            results["gradient_square"] = estimates.square
        if isinstance(sums.cut, CutCounts):
            results["micro_steps"] = sums.cut.micro_batches
            results["tokens"] = sums.cut.tokens
            results["positions"] = sums.cut.positions
            self.compiled_lengths = _bits(sums.cut.compiled)
        results["learning_rate"] = step.learning_rate
        results["gradient_norm"] = step.norm
        return results

    def sums(
        self,
        batch: Nest | Share | Batches,
        measure_gradient_noise: tf.Tensor | bool = False,
    ) -> GradientSums:
        """Return the sums over all replicas without applying them.

        The metrics are updated without being reset first. With `micro_batch_tokens`,
        `measure_gradient_noise` has no effect.
        """
        batch = self._prepared(batch)
        if self.token_limit is not None:
            measure_gradient_noise = False
        return self._sums(batch, self._context(batch, measure_gradient_noise))

    def _prepared(self, batch: Nest | Share | Batches) -> Nest | Share | Batches:
        """Check the batch; if it is cut by tokens, weigh its positions and deal it."""
        limit = self.token_limit
        if limit is None:
            check_takes_ragged(self.model, batch)
            return batch
        batch = prepared_for_tokens(self.model, batch)
        if self.objective.over_batch:
            return batch  # The loss may depend on the order of the examples.
        return dealt(batch, self.strategy.num_replicas_in_sync, limit.pad_multiple)

    def _context(
        self, batch: Nest | Share | Batches, measure_gradient_noise: tf.Tensor | bool
    ) -> BatchContext:
        """Check the batch; return the data about it that the micro-steps need."""
        # In the scope of a strategy, Keras would act as it does within a replica.
        if tf.distribute.has_strategy():
            rule = "an update must be called outside its strategy's scope"
            raise ValueError(f"{rule}; only the model must be created in that scope")
        if self.token_limit is None:
            x = inputs_of(batch)
        else:
            x = padded_inputs(batch, self.token_limit.pad_multiple)
        self._check(batch, x)

        # Draw the seeds outside of the replicas, where all copies of a seed get the
        # same value: the copies may have diverged.
        noise_seeds: list[tf.Tensor] = []
        if self.same_noise:
            with tf.control_dependencies(tensors_of(batch)):
                noise_seeds = draw_noise_seeds(noisy_layers(self.model, x))
        totals = global_batch_totals(
            self.strategy, batch, self.objective.loss, self.reductions_ready
        )
        return BatchContext(totals, measure_gradient_noise, noise_seeds)

    def _sums(
        self, batch: Nest | Share | Batches, context: BatchContext
    ) -> GradientSums:
        if not self.objective.over_batch:
            return self._sums_over_replicas(batch, context)

        losses, output_gradients = self._losses_over_batch(batch, context.noise_seeds)
        context = context._replace(output_gradients=output_gradients)
        return self._sums_over_replicas(batch, context).with_losses(losses)

    def apply(
        self, gradients: Sequence[tf.Tensor | None], sums: GradientSums
    ) -> tf.Tensor:
        """Apply the gradients. With `hold_statistics`, also update the statistics once.

        Returns:
            The learning rate of this step, scalar.
        """
        with (
            constant_counts(self.optimizer),
            applying_sums(self.optimizer),
            fused_adam(self.optimizer) as learning_rate,
        ):
            self.optimizer.apply(gradients, self.model.trainable_variables)
        if self.hold_statistics:
            assign_moving_statistics(self.model, sums.statistics_steps)
        return learning_rate

    def _in_one_program(
        self, batch: Nest | Share | Batches, loop: MicroBatchLoop
    ) -> _Step | None:
        """Run the update as one compiled program; in steps if the batch does not fit.

        Return None, without running anything, if no batch can be run as one program.
        """
        fits_program = loop.fits_program()
        if fits_program is None:
            return None
        if loop.has_rows() and not makes_dense(self.optimizer):
            return None

        def update() -> Applied:
            sums = loop.run_in_program()
            return self._applied(sums)._replace(sums=_without_gradients(sums))

        program = ApplyProgram.traced(self.optimizer, update)
        if program is None:
            return None
        return tf.cond(
            fits_program,
            lambda: self._run(program, batch),
            lambda: self._in_steps(batch, self._made_dense(batch, run_loop(loop))),
        )

    def _in_steps(self, batch: Nest | Share | Batches, sums: GradientSums) -> _Step:
        """Take the step of the optimizer, after the passes."""
        step = self._step_by_xla(batch, sums)
        self.apply_compiled = step is not None
        if step is None:
            step = self._step(sums)
        return step

    def _step(self, sums: GradientSums) -> _Step:
        gradients = sums.gradients()
        norm, loss_scale = self._norm(gradients)
        # The norm has three uses: it is logged, its square is |g|² of the noise scale,
        # and once it is known the gradient is complete, so the update is counted.
        with tf.control_dependencies([norm]):
            applying = self.applying.assign_add(1)
        with tf.control_dependencies([applying]):
            learning_rate = self.apply(gradients, sums)
        return _Step(_without_gradients(sums), norm, loss_scale, learning_rate)

    def _step_by_xla(
        self, batch: Nest | Share | Batches, sums: GradientSums
    ) -> _Step | None:
        """Take the step as one compiled program. Return None if this is impossible."""
        if not self.compiled or not self.counters:
            return None
        gradient_sums = dense_sums(self.optimizer, sums.gradient_sums)
        if gradient_sums is None:
            return None
        sums = sums._replace(gradient_sums=gradient_sums)
        program = ApplyProgram.traced(self.optimizer, lambda: self._applied(sums))
        if program is None:
            return None

        return self._run(program, batch, sums)

    def _run(
        self,
        program: ApplyProgram,
        batch: Nest | Share | Batches,
        sums: GradientSums | None = None,
    ) -> _Step:
        """Run a program that applies the gradient.

        `sums` are the sums of the update, or None if the program computes them.
        """
        # Count the update as soon as all sums are computed, and before the program: if
        # memory runs out in the program, the update may be applied in part.
        summed = () if sums is None else sums.gradient_sums
        with tf.control_dependencies(tf.nest.flatten(summed)):
            applying = self.applying.assign_add(1)
        with tf.control_dependencies([applying]):
            applied = program.run()
        with tf.control_dependencies(tensors_of(batch)):
            program.advance_counts(applied.finite)
        if sums is None:
            sums = applied.sums
        assert sums is not None
        return _Step(
            _without_gradients(sums),
            applied.norm,
            applied.loss_scale,
            program.learning_rate,
        )

    def _applied(self, sums: GradientSums) -> Applied:
        """Apply the gradient. XLA compiles this function."""
        gradients = sums.gradients()
        norm, loss_scale = self._norm(gradients)
        finite = None
        if isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
            finite = self.optimizer.check_finite(gradients)
        with applying_sums(self.optimizer):
            self.optimizer.apply(gradients, self.model.trainable_variables)
        if self.hold_statistics:
            assign_moving_statistics(self.model, sums.statistics_steps)
        return Applied(norm, loss_scale, finite)

    def _norm(
        self, gradients: Sequence[tf.Tensor | None]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the norm of the unscaled gradient, and the loss scale."""
        present = [gradient for gradient in gradients if gradient is not None]
        if not present:
            raise ValueError(
                f"no gradient reaches any trainable variable of {self.model.name!r}: "
                "the loss depends on none of them"
            )
        # Keras' LoRA has variables in float32 whatever the precision of their layer.
        widest = max((gradient.dtype for gradient in present), key=_bytes_of)
        norm = tf.linalg.global_norm(
            [tf.cast(gradient, widest) for gradient in present]
        )
        if self._scale_loss is None:
            return norm, tf.ones((), norm.dtype)
        scale = tf.cast(self._scale_loss(tf.ones(())), norm.dtype)
        return norm / scale, scale

    def _check(self, batch: Nest | Share | Batches, x: Nest) -> None:
        """Reject a model or a batch that the settings do not allow."""
        if isinstance(batch, Batches):
            replicas = self.strategy.num_replicas_in_sync
            if replicas > 1:
                rule = "the strategy must have one replica for Batches"
                raise ValueError(f"{rule}. Received: {replicas} replicas")
            if self.jit_compile is True:
                rule = "jit_compile must be False or auto for Batches"
                raise ValueError(f"{rule}, because their sizes vary. Received: True")
        by_tokens = self.token_limit is not None
        if self.same_noise is True:
            forward = trace_forward(self.model, x, True, by_tokens)
            noisy = forward.cut_dependent_noise
            if noisy:
                rule = 'same_noise must be "auto" or False'
                received = f"True, {', '.join(noisy)}"
                raise ValueError(
                    f"{rule}, because some layers can only draw noise per micro-batch. "
                    f"Received: {received}"
                )
        if self.same_noise and by_tokens:
            check_noise(self.model, inputs_of(batch))
        if self.objective.over_batch:
            if isinstance(batch, Batches):
                rule = "loss_over must be example for Batches"
                raise ValueError(f"{rule}. Received: 'effective_batch'")
            forward = trace_forward(self.model, x, bool(self.same_noise), by_tokens)
            for rule, received in over.not_supported(self.model, forward):
                raise ValueError(f"{rule}. Received: {received}")

    def _losses_over_batch(
        self, batch: Nest | Share, noise_seeds: Sequence[tf.Tensor]
    ) -> tuple[dict[str, LossSum], list[tf.Tensor | None]]:
        """Return the losses over the effective batch, and their output gradients.

        This runs the first of two forward passes: see `over_effective_batch`.
        """

        def first_pass() -> over.Outputs:
            return over.kept_outputs(
                self.model,
                batch,
                self._limit,
                noise_seeds,
                self.jit_compile,
                self.fused_attention,
            )

        outputs = self.strategy.run(first_pass)
        gathered = over.gathered(self.strategy, batch, outputs, self.reductions_ready)
        return over.output_gradients(self.objective, gathered, self._scale_loss)

    def _sums_over_replicas(
        self, batch: Nest | Share | Batches, context: BatchContext
    ) -> GradientSums:
        sums = self.strategy.run(self._sums_of_replica, (batch, context))
        return sum_over_replicas(
            self.strategy, sums, self.model.trainable_variables, self.reductions_ready
        )

    def _sums_of_replica(
        self, batch: Nest | Share | Batches, context: BatchContext
    ) -> GradientSums:
        """Return the sums over this replica's share of the effective batch."""
        loop = self._loop_of_replica(batch, context)
        return self._made_dense(batch, run_loop(loop))

    def _loop_of_replica(
        self, batch: Nest | Share | Batches, context: BatchContext
    ) -> MicroBatchLoop:
        """Return the loop over this replica's share of the effective batch."""
        share, position = share_of(batch)
        if context.output_gradients:
            stop = position + examples_in(share)
            gradients = slice_of(context.output_gradients, position, stop)
            context = context._replace(output_gradients=gradients)
        if isinstance(batch, Batches):
            share = batch._replace(batch=share)
            self.compiled = False
        else:
            self.compiled = compiled_by_xla(
                self.jit_compile, self.model, share, self._limit
            )
        settings = MicroBatchSettings(
            self.model,
            self.objective,
            self._limit,
            scale_loss=self._scale_loss,
            hold_statistics=self.hold_statistics,
            jit_compile=self.compiled,
            fused_attention=self.fused_attention and self.token_limit is None,
            dense_rows=self._sums_dense_rows(),
        )
        positions = positions_for_noise(batch, position)
        return loop_over_share(settings, share, context, positions)

    def _sums_dense_rows(self) -> bool:
        """Return whether the loop sums the gradients of embeddings as dense tensors.

        It does on a GPU, for an optimizer that makes them dense in any case.
        """
        if not self.compiled or not makes_dense(self.optimizer):
            return False
        variables = self.model.trainable_variables
        devices = [variable.value.device for variable in variables]
        return any("GPU" in device for device in devices)

    def _made_dense(
        self, batch: Nest | Share | Batches, sums: GradientSums
    ) -> GradientSums:
        # Make embedding gradients dense in two cases. With a loss scale, Keras cannot
        # divide `tf.IndexedSlices`. Several processes would add the rows of an index in
        # different orders, so that their weights would differ.
        replicas = self.strategy.num_replicas_in_sync
        several_processes = isinstance(batch, Share) and replicas > 1
        if self._scale_loss is not None or several_processes:
            return tf.nest.map_structure(tf.convert_to_tensor, sums)
        return sums


def _bits(counts: tf.Tensor | tuple[()]) -> tf.Tensor | None:
    """Return an integer whose bit i is set if `counts[i]` is positive, or None."""
    if isinstance(counts, tuple):
        return None
    bits = tf.constant([2**i for i in range(counts.shape[0])], tf.int64)
    return tf.reduce_sum(tf.where(counts > 0, bits, tf.zeros_like(bits)))


def _without_gradients(sums: GradientSums) -> GradientSums:
    return sums._replace(gradient_sums=(), weights=(), statistics_steps=())


def _bytes_of(dtype: tf.DType) -> int:
    return dtype.size
