"""Evaluates the loss and the metrics over a split, and predicts, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
from .loss_sums import LossValues, example_losses, micro_batch_losses
from .micro_batches import MicroBatchLoop, run_micro_batches
from .objective import Losses, Objective, by_name
from .over_effective_batch import (
    Outputs,
    batch_losses,
    check_rows,
    gathered,
    kept,
    without_examples,
)
from .padding_checks import prepared_for_tokens
from .ragged_checks import check_takes_ragged
from .token_cut import TokenLimit, check_lengths_for_xla, dealt, micro_batch_limit
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

    Raises:
        ValueError: an argument is wrong, see `Update`; or `observe` is given with
            `micro_batch_tokens`.
    """

    def __init__(  # noqa: PLR0913  options of an evaluation
        self,
        model: keras.Model,
        objective: Losses | Objective,
        micro_batch_size: int | None = None,
        *,
        micro_batch_tokens: int | None = None,
        pad_multiple: int = 1,
        xla_lengths: Sequence[int] = (),
        strategy: tf.distribute.Strategy | None = None,
        jit_compile: bool | str = False,
        fused_attention: bool = False,
        reductions_ready: tf.Variable | None = None,
        observe: Observe | None = None,
    ):
        check_jit_compile(jit_compile)
        self.model = model
        self.objective = Objective.from_loss(objective)
        limit = micro_batch_limit(
            micro_batch_size, micro_batch_tokens, pad_multiple, xla_lengths
        )
        # A loop may halve it after memory ran out. None only with `micro_batch_tokens`.
        self.micro_batch_size: Any = micro_batch_size
        self.token_limit = limit if isinstance(limit, TokenLimit) else None
        if self.token_limit is not None:
            check_lengths_for_xla(self.token_limit, jit_compile)
            if observe is not None:
                rule = (
                    "observe must be None with micro_batch_tokens, which sorts examples"
                )
                raise ValueError(rule)
        self.strategy = strategy or tf.distribute.get_strategy()
        self.jit_compile = jit_compile
        self.fused_attention = fused_attention
        self.reductions_ready = reductions_ready
        self.observe = observe
        self.measured = self.objective.measured()

    @tf.autograph.experimental.do_not_convert
    def __call__(self, batch: Nest | Share) -> GradientSums:
        """Update the metrics with one batch; return the sums of its losses.

        The metrics are not reset before. The sums have no gradients.

        Args:
            batch: the batch, or the `Share` of it that this process has read.

        Raises:
            ValueError: the losses or metrics do not fit the outputs or the labels, with
                `micro_batch_tokens` the result would depend on padding, or without it
                the inputs are ragged but the model takes only dense ones.
        """
        sums, _ = self.observed(batch)
        return sums

    @tf.autograph.experimental.do_not_convert
    def observed(self, batch: Nest | Share) -> tuple[GradientSums, Any]:
        """Compute the sums as `__call__` does; also return the results of `observe`.

        The results of all micro-batches are joined in the order of the examples
        that this process has read. They are `ABSENT` without `observe`.
        """
        limit = self.token_limit
        if limit is not None:
            batch = prepared_for_tokens(self.model, batch, training=False)
            # A loss over the batch may depend on the order of the examples.
            if not self.objective.over_batch:
                replicas = self.strategy.num_replicas_in_sync
                batch = dealt(batch, replicas, limit.pad_multiple)
        else:
            check_takes_ragged(self.model, batch)
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
        by_tokens = self.token_limit is not None
        limit = self.token_limit or self.micro_batch_size
        compiled = compiled_by_xla(self.jit_compile, self.model, share, limit)

        def micro_step(
            start: tf.Tensor, x: Nest, y: Nest, sample_weight: Nest
        ) -> tuple[GradientSums, Outputs, Any]:
            with without_cudnn(self.model, compiled):
                outputs = by_name(self.model, self.model(x, training=False))
            losses, added, _, values = micro_batch_losses(
                self.model,
                self.objective,
                outputs,
                (x, y, sample_weight),
                totals,
                by_tokens,
            )
            self.objective.update_metrics(y, outputs, sample_weight, by_tokens)
            sums = GradientSums(losses, added, tf.cast(examples_in(x), added.dtype))
            observations: Any = ABSENT
            if self.observe is not None:
                observations = self.observe((x, y, sample_weight), outputs, values)
            if not self.objective.over_batch:
                return sums, {}, observations
            kept_outputs = kept(outputs)
            if by_tokens:
                check_rows(kept_outputs)
            return sums, kept_outputs, observations

        if self.token_limit is None:
            return run_micro_batches(
                micro_step, share, self.micro_batch_size, compiled, self.fused_attention
            )
        loop = MicroBatchLoop(micro_step, share, self.token_limit, compiled)
        sums, kept_outputs, observations = loop.run()
        return sums.with_cut(loop.counts), kept_outputs, observations


class Predicted(NamedTuple):
    """The predictions for a batch.

    Attributes:
        outputs: the outputs by name, with the examples on axis 0.
        losses: the loss that each example has alone, (examples,); `ABSENT` if there is
            no loss, if it compares several examples, or without labels.
    """

    outputs: dict[str, tf.Tensor]
    losses: Any


class Prediction:
    """Computes the outputs and the loss of each example, on one replica.

    For the arguments, see `Update`.
    """

    def __init__(
        self,
        model: keras.Model,
        objective: Losses | Objective,
        micro_batch_size: int,
        *,
        jit_compile: bool | str = False,
        fused_attention: bool = False,
    ):
        check_jit_compile(jit_compile)
        self.model = model
        self.objective = Objective.from_loss(objective)
        self.micro_batch_size = micro_batch_size
        self.jit_compile = jit_compile
        self.fused_attention = fused_attention

    @tf.autograph.experimental.do_not_convert
    def __call__(self, batch: Nest) -> Predicted:
        """Return the predictions for a batch.

        Raises:
            ValueError: an output is not a dense tensor with the examples on axis 0.
        """
        compiled = compiled_by_xla(self.jit_compile, self.model, batch)

        def micro_step(
            start: tf.Tensor, x: Nest, y: Nest, sample_weight: Nest
        ) -> Predicted:
            with without_cudnn(self.model, compiled):
                outputs = by_name(self.model, self.model(x, training=False))
            for received in without_examples(outputs):
                rule = "outputs must be dense tensors with the examples on axis 0"
                raise ValueError(f"{rule}. Received: {received}")
            has_loss = self.objective.loss is not None and y is not None
            if self.objective.over_batch or not has_loss:
                return Predicted(outputs, ABSENT)

            losses: Any = 0.0
            for term in self.objective.terms(y, outputs, sample_weight):
                values = example_losses(
                    term.loss, term.y, term.output, term.sample_weight
                )
                scale = 1.0 if term.scale is None else term.scale
                losses += values * tf.cast(scale, values.dtype)
            return Predicted(outputs, losses)

        return run_micro_batches(
            micro_step, batch, self.micro_batch_size, compiled, self.fused_attention
        )
