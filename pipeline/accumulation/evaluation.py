"""The loss and the metrics over a split, micro-batch by micro-batch, with the sums of `pipeline.accumulation`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from .outputs import Losses, Metrics, by_name, labels_by_name, measured, update_metrics
from .replicas import reduce
from .slicing import Nest, Share, examples_in, share_of, sum_over_micro_batches
from .sums import GradientSums, known_of, micro_batch_losses


class Evaluation:
    """The loss and the metrics over a whole split, each example weighted exactly. Arguments as for an `Update`."""

    def __init__(
        self,
        model: keras.Model,
        loss: Losses,
        micro_batch_size: int,
        *,
        loss_weights: Any = None,
        metrics: Metrics = (),
        weighted_metrics: Metrics = (),
        layer_metrics: Sequence[keras.metrics.Metric] = (),
        strategy: tf.distribute.Strategy | None = None,
        arrived: tf.Variable | None = None,
    ):
        self.model, self.loss, self.loss_weights = model, loss, loss_weights
        self.metrics, self.weighted_metrics = metrics, weighted_metrics
        self.measured = measured(metrics, weighted_metrics, layer_metrics)
        self.micro_batch_size = micro_batch_size
        self.strategy, self.arrived = strategy or tf.distribute.get_strategy(), arrived

    @tf.autograph.experimental.do_not_convert
    def __call__(self, batch: Nest | Share) -> GradientSums:
        """Add `batch`, as an `Update` takes it, to the metrics; return its loss and weight, without gradients."""
        return reduce(self.strategy, self.strategy.run(self._evaluate, args=(batch,)), self.arrived)

    def _evaluate(self, batch: Nest | Share) -> GradientSums:
        share, _ = share_of(batch, self.strategy.num_replicas_in_sync)
        whole = known_of(batch)

        def micro_step(_: tf.Tensor, *parts: Nest) -> GradientSums:
            x, y, sample_weight = parts
            outputs = by_name(self.model, self.model(x, training=False))
            losses, added, _ = micro_batch_losses(self.model, self.loss, self.loss_weights, outputs, parts, whole)
            labels = labels_by_name(self.loss, y, outputs)
            update_metrics(self.metrics, labels, outputs)
            update_metrics(self.weighted_metrics, labels, outputs, sample_weight)
            zero = tf.zeros((), added.dtype)
            return GradientSums(losses, added, tf.cast(examples_in(x), added.dtype), (), (), (zero, zero, zero), ())

        return sum_over_micro_batches(micro_step, share, self.micro_batch_size)
