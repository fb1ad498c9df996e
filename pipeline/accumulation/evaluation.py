"""Evaluates the loss and the metrics over a split, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from .batch import (
    ABSENT,
    Nest,
    Share,
    batch_totals,
    examples_in,
    of_first_replica,
    reduce,
    share_of,
)
from .gradient_sums import GradientSums
from .loss_sums import LossValues, micro_batch_losses
from .micro_batches import run_micro_batches
from .objective import Losses, Objective, by_name
from .over_effective_batch import Outputs, batch_losses, gathered, kept
from .xla import check_jit_compile, compiled_by_xla, without_cudnn

# Returns measurements of a micro-batch from `(x, y, sample_weight)`, the outputs by
# name and the values of the losses by output name: a nest of tensors with the examples
# on axis 0.
Observe = Callable[
    [tuple[Nest, Nest, Nest], Mapping[str, Nest], Mapping[str, LossValues]], Any
]


class Evaluation:
    """Evaluates the loss and the metrics; each example has its exact weight.

    For the arguments that are not listed, see `Update`.

    Args:
        observe: measures each micro-batch, see `observed`. None measures nothing.
    """

    def __init__(
        self,
        model: keras.Model,
        objective: Losses | Objective,
        micro_batch_size: int,
        *,
        strategy: tf.distribute.Strategy | None = None,
        jit_compile: bool | str = False,
        fused_attention: bool = False,
        reductions_ready: tf.Variable | None = None,
        observe: Observe | None = None,
    ):
        check_jit_compile(jit_compile)
        self.model = model
        self.objective = Objective.from_loss(objective)
        self.micro_batch_size = micro_batch_size
        self.strategy = strategy or tf.distribute.get_strategy()
        self.jit_compile = jit_compile
        self.fused_attention = fused_attention
        self.reductions_ready = reductions_ready
        self.observe = observe
        self.measured = self.objective.measured()

    @tf.autograph.experimental.do_not_convert
    def __call__(self, batch: Nest | Share) -> GradientSums:
        """Update the metrics with one batch; return the sums of its losses.

        The sums have no gradients.

        Args:
            batch: the batch, or the `Share` of it that this process has read.
        """
        sums, _ = self.observed(batch)
        return sums

    @tf.autograph.experimental.do_not_convert
    def observed(self, batch: Nest | Share) -> tuple[GradientSums, Any]:
        """Do as `__call__`; also return what `observe` has measured.

        The measurements of all micro-batches are joined in the order of the examples
        that this process has read. They are `ABSENT` without `observe`.
        """
        sums, outputs, observations = self.strategy.run(self._evaluate, args=(batch,))
        sums = reduce(self.strategy, sums, self.reductions_ready)
        sums = of_first_replica(self.strategy, sums)
        if self.objective.over_batch:
            effective_batch = gathered(
                self.strategy, batch, outputs, self.reductions_ready
            )
            losses = batch_losses(self.objective, effective_batch).losses
            sums = sums.with_losses(losses)
        return sums, tf.nest.map_structure(self._of_all_replicas, observations)

    def _of_all_replicas(self, observation: Any) -> tf.Tensor:
        """Return a measurement of all replicas in this process, on the host."""
        parts = self.strategy.experimental_local_results(observation)
        with tf.device("CPU:0"):
            return tf.concat(parts, 0)

    def _evaluate(self, batch: Nest | Share) -> tuple[GradientSums, Outputs, Any]:
        """Return the sums over this replica's share, the outputs and observations.

        The outputs are needed if the losses are over the effective batch. Otherwise the
        dict of outputs is empty.
        """
        share, _ = share_of(batch)
        totals = batch_totals(batch)
        compiled = compiled_by_xla(self.jit_compile, self.model, share)

        def micro_step(
            start: tf.Tensor, x: Nest, y: Nest, sample_weight: Nest
        ) -> tuple[GradientSums, Outputs, Any]:
            with without_cudnn(self.model, compiled):
                outputs = by_name(self.model, self.model(x, training=False))
            losses, added, _, values = micro_batch_losses(
                self.model, self.objective, outputs, (x, y, sample_weight), totals
            )
            self.objective.update_metrics(y, outputs, sample_weight)
            sums = GradientSums(losses, added, tf.cast(examples_in(x), added.dtype))
            observations: Any = ABSENT
            if self.observe is not None:
                observations = self.observe((x, y, sample_weight), outputs, values)
            if self.objective.over_batch:
                return sums, kept(outputs), observations
            return sums, {}, observations

        return run_micro_batches(
            micro_step, share, self.micro_batch_size, compiled, self.fused_attention
        )
