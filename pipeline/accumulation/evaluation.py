"""The loss and the metrics over a split, micro-batch by micro-batch, with the sums of an update."""

from __future__ import annotations

import keras
import tensorflow as tf

from .batch import (
    Nest,
    Share,
    batch_totals,
    examples_in,
    of_first_replica,
    reduce,
    share_of,
)
from .gradient_sums import GradientSums, sum_over_micro_batches
from .loss_sums import micro_batch_losses
from .objective import Losses, Objective, by_name
from .over_effective_batch import Outputs, batch_losses, gathered, kept
from .xla import compiled_by_xla, without_cudnn


class Evaluation:
    """The loss and the metrics over a whole split, each example weighted exactly. Arguments as for an `Update`."""

    def __init__(
        self,
        model: keras.Model,
        objective: Losses | Objective,
        micro_batch_size: int,
        *,
        strategy: tf.distribute.Strategy | None = None,
        jit_compile: bool | str = False,
        reductions_ready: tf.Variable | None = None,
    ):
        self.model, self.objective, self.micro_batch_size = (
            model,
            Objective.of(objective),
            micro_batch_size,
        )
        self.measured, self.jit_compile = self.objective.measured(), jit_compile
        self.strategy, self.reductions_ready = (
            strategy or tf.distribute.get_strategy(),
            reductions_ready,
        )

    @tf.autograph.experimental.do_not_convert
    def __call__(self, batch: Nest | Share) -> GradientSums:
        """Add `batch`, as an `Update` takes it, to the metrics; return its loss and weight, without gradients."""
        sums, outputs = self.strategy.run(self._evaluate, args=(batch,))
        sums = of_first_replica(
            self.strategy, reduce(self.strategy, sums, self.reductions_ready)
        )
        if not self.objective.over_batch:
            return sums
        whole = gathered(self.strategy, batch, outputs, self.reductions_ready)
        return sums.with_losses(batch_losses(self.objective, *whole)[0])

    def _evaluate(self, batch: Nest | Share) -> tuple[GradientSums, Outputs]:
        share, _ = share_of(batch)
        totals, compiled = (
            batch_totals(batch),
            compiled_by_xla(self.jit_compile, self.model, share),
        )

        def micro_step(_: tf.Tensor, *parts: Nest) -> tuple[GradientSums, Outputs]:
            x, y, sample_weight = parts
            with without_cudnn(self.model, compiled):
                outputs = by_name(self.model, self.model(x, training=False))
            losses, added, _ = micro_batch_losses(
                self.model, self.objective.of_micro_batch(), outputs, parts, totals
            )
            self.objective.update_metrics(y, outputs, sample_weight)
            sums = GradientSums(losses, added, tf.cast(examples_in(x), added.dtype))
            return sums, kept(outputs) if self.objective.over_batch else {}

        return sum_over_micro_batches(
            micro_step, share, self.micro_batch_size, compiled
        )
