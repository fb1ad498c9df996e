"""The loss and the metrics over a split, micro-batch by micro-batch, with the sums of `pipeline.accumulation`."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from .slicing import Nest, examples_in, share_of, sum_over_micro_batches
from .update import GradientSums, added_loss, reduce, update_metrics
from .weighting import weighted_sum


class Evaluation:
    """The loss and the metrics over a whole split, each example weighted exactly. Arguments as for an `Update`."""

    def __init__(
        self,
        model: keras.Model,
        loss: keras.losses.Loss,
        micro_batch_size: int,
        *,
        metrics: Sequence[keras.metrics.Metric] = (),
        strategy: tf.distribute.Strategy | None = None,
    ):
        self.model, self.loss, self.metrics = model, loss, list(metrics)
        self.micro_batch_size = micro_batch_size
        self.strategy = strategy or tf.distribute.get_strategy()

    @tf.autograph.experimental.do_not_convert
    def __call__(self, batch: Nest) -> GradientSums:
        """Add `batch` to the metrics; return its loss and weight, without gradients."""
        return reduce(self.strategy, self.strategy.run(self._evaluate, args=(batch,)))

    def _evaluate(self, batch: Nest) -> GradientSums:
        share = share_of(batch, self.strategy.num_replicas_in_sync)

        def micro_step(x: Nest, y: Nest, sample_weight: Nest) -> GradientSums:
            outputs = self.model(x, training=False)
            total, weight = weighted_sum(self.loss, y, outputs, sample_weight)
            examples = tf.cast(examples_in(x), total.dtype)
            added_total = added_loss(self.model.losses, examples, tf.cast(examples_in(batch), total.dtype))
            update_metrics(self.metrics, y, outputs)
            zero = tf.zeros((), total.dtype)
            return GradientSums(total, weight, (), added_total, (), examples, zero, zero)

        return sum_over_micro_batches(micro_step, share, self.micro_batch_size)
