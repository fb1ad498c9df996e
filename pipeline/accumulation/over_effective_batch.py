"""Losses over the effective batch, by gradient caching.

    for each micro-batch k:  oₖ = f(xₖ; θ)             # first pass, without a tape
    L = loss(y, o);  g = ∂L/∂o                         # over all o = (o₁, …, o_K)
    for each micro-batch k:  S += gₖᵀ · ∂f(xₖ; θ)/∂θ   # second pass, with a tape

The method is that of Gao et al., arXiv 2101.06983, 2021. The first pass frees its
activations. Both passes draw the same noise (`same_noise`), and no layer may mix the
examples of a micro-batch or move a state that the second pass would find changed. What
the first pass assigns, such as a layer's metrics, is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from .batch import (
    ABSENT,
    Nest,
    Share,
    examples_in,
    is_absent,
    of_first_replica,
    parts_of,
    reduce,
    share_of,
    slice_specs,
)
from .forward_effects import Forward, batch_dependent_layers, untracked_variables
from .keras_internals import logits_of, mask_of, with_mask_and_logits
from .loss_sums import LossSum, divide, scaled_sum, weighted_sum
from .micro_batches import run_micro_batches
from .objective import Objective, by_name
from .same_noise import Key, drawn, noisy_layers
from .xla import compiled_by_xla, without_cudnn


class KeptOutput(NamedTuple):
    """One output of the model and what Keras keeps on it, or `ABSENT`.

    All have the examples on axis 0.
    """

    output: tf.Tensor
    mask: Any  # 0 or 1, in float32: what is gathered is summed
    logits: Any


Outputs = dict[str, KeptOutput]  # by name


class GatheredBatch(NamedTuple):
    """What a loss over the effective batch is computed from."""

    outputs: Outputs
    y: Nest
    sample_weight: Nest


class BatchLosses(NamedTuple):
    """The losses over the effective batch."""

    losses: dict[str, LossSum]  # by output
    minimized: tf.Tensor  # their scaled means, summed; scalar


def not_supported(model: keras.Model, forward: Forward) -> Iterator[tuple[str, str]]:
    """Yield why the loss of a model cannot be over the effective batch.

    Yields:
        The rule that it breaks, and the layers that break it.
    """
    noisy = forward.cut_dependent_noise
    if noisy:
        rule = (
            "same_noise must be True, and layers must be able to draw for each "
            "example, as both passes need the same noise where loss_over is "
            "effective_batch"
        )
        yield rule, ", ".join(noisy)

    moved = batch_dependent_layers(model, forward)
    moved += [name for name, _ in untracked_variables(model)]
    if moved:
        rule = (
            "loss_over must be example for layers that move a state in training, "
            "such as BatchNormalization"
        )
        yield rule, ", ".join(moved)


def kept(outputs: Mapping[str, Nest]) -> Outputs:
    """Return the outputs of a forward pass with what Keras keeps on them.

    Raises:
        ValueError: an output is no dense tensor with the examples on axis 0.
    """
    kept_by_name: Outputs = {}
    for name, output in outputs.items():
        if not isinstance(output, tf.Tensor) or not output.shape.rank:
            rule = (
                "loss_over must be example for outputs that are no dense tensors "
                "with the examples on axis 0"
            )
            raise ValueError(f"{rule}. Received: {name or type(output).__name__}")
        mask = mask_of(output)
        mask = ABSENT if mask is None else tf.cast(mask, tf.float32)
        logits = logits_of(output)
        logits = ABSENT if logits is None else logits
        kept_by_name[name] = KeptOutput(output, mask, logits)
    return kept_by_name


@tf.autograph.experimental.do_not_convert
def kept_outputs(
    model: keras.Model,
    batch: Nest | Share,
    micro_batch_size: int,
    dropout_keys: Sequence[tf.Tensor],
    jit_compile: bool | str,
    fused_attention: bool = False,
) -> Outputs:
    """Return the outputs for this replica's share of `batch`, by the first pass.

    The arguments are as for an `Update`, `dropout_keys` as for `accumulate_share`.
    """
    share, position = share_of(batch)
    compiled = compiled_by_xla(jit_compile, model, share)
    noisy = noisy_layers(model, share[0]) if dropout_keys else []
    keys = [Key.from_seed(seed) for seed in dropout_keys]

    def micro_step(start: tf.Tensor, x: Nest, *_: Nest) -> Outputs:
        drawing = drawn(noisy, keys, position + start, examples_in(x), compiled)
        # The scope drops what the pass assigns.
        with keras.StatelessScope(), without_cudnn(model, compiled), drawing:
            return kept(by_name(model, model(x, training=True)))

    return run_micro_batches(
        micro_step, share, micro_batch_size, compiled, fused_attention
    )


def differentiable(outputs: Outputs) -> list[tf.Tensor]:
    """Return the tensors by which a loss may have a gradient.

    They are the outputs, and the logits that Keras keeps on them.
    """
    tensors = []
    for kept_output in outputs.values():
        for tensor in (kept_output.output, kept_output.logits):
            if not is_absent(tensor) and tensor.dtype.is_floating:
                tensors.append(tensor)
    return tensors


def batch_losses(objective: Objective, batch: GatheredBatch) -> BatchLosses:
    """Return the losses over the effective batch, without what the model adds."""
    outputs = {}
    for name, kept_output in batch.outputs.items():
        outputs[name] = with_mask_and_logits(*kept_output)

    losses = {}
    means = []
    for term in objective.terms(batch.y, outputs, batch.sample_weight):
        sums = weighted_sum(
            term.loss, term.y, term.output, term.sample_weight, over_batch=True
        )
        loss = scaled_sum(term, sums)
        losses[term.name] = loss
        means.append(divide(loss.scaled, loss.weight))
    minimized = tf.add_n([tf.cast(mean, means[0].dtype) for mean in means])
    return BatchLosses(losses, minimized)


def output_gradients(
    objective: Objective,
    batch: GatheredBatch,
    scale_loss: Callable[..., tf.Tensor] | None,
) -> tuple[dict[str, LossSum], list[tf.Tensor | None]]:
    """Return the losses over the batch, and the gradients of their sum by the outputs.

    There is a gradient by each of `differentiable(batch.outputs)`. It is scaled by
    `scale_loss`, and None where the loss does not depend on the tensor.
    """
    sources = differentiable(batch.outputs)
    with tf.GradientTape() as tape:
        tape.watch(sources)
        losses, target = batch_losses(objective, batch)
        if scale_loss is not None:
            target = scale_loss(target)
    on_host: list[tf.Tensor | None] = []
    gradients = tape.gradient(target, sources)
    with tf.device("CPU:0"):  # from where each micro-batch takes its slice
        for gradient in gradients:
            if gradient is not None:
                gradient = tf.identity(tf.convert_to_tensor(gradient))
            on_host.append(gradient)
    return losses, on_host


def gathered(
    strategy: tf.distribute.Strategy,
    batch: Nest | Share,
    outputs: Outputs,
    reductions_ready: tf.Variable | None = None,
) -> GatheredBatch:
    """Return the outputs, labels and sample weights of the effective batch.

    Call it in the cross-replica context, with the outputs of each replica's share. They
    are gathered by one sum over replicas, in which each has zeros in place of the
    others' examples; the first replica's device gets all of them. `reductions_ready` is
    as for `reduce`.
    """
    _, y, sample_weight = parts_of(batch)  # of a `Share`, what this process has read
    if strategy.num_replicas_in_sync == 1:
        return GatheredBatch(outputs, y, sample_weight)

    def padded_leaves(outputs_of_share: Outputs) -> list[tf.Tensor]:
        (x, *labels), position = share_of(batch)
        if isinstance(batch, Share):
            examples = batch.examples
        else:
            examples = examples_in(parts_of(batch))
        before = tf.minimum(position, examples)
        after = examples - before - examples_in(x)
        leaves = tf.nest.flatten((outputs_of_share, *labels))
        return [_padded(leaf, before, after) for leaf in leaves if leaf is not None]

    sums = reduce(strategy, strategy.run(padded_leaves, (outputs,)), reductions_ready)
    remaining = iter(of_first_replica(strategy, sums))

    def gathered_leaf(leaf: Any) -> Any:
        return None if leaf is None else tf.cast(next(remaining), leaf.dtype)

    local = GatheredBatch(of_first_replica(strategy, outputs), y, sample_weight)
    return tf.nest.map_structure(gathered_leaf, local)


def _padded(leaf: tf.Tensor, before: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor) or None in leaf.shape[1:]:
        rule = (
            "loss_over must be example under replicas, "
            "for outputs or labels of an unknown shape"
        )
        raise ValueError(f"{rule}. Received: {slice_specs(leaf)}")
    # Integers travel as float64, exact up to 2⁵³: collectives do not take all of them.
    if not leaf.dtype.is_floating:
        leaf = tf.cast(leaf, tf.float64)
    other_axes = [[0, 0]] * (leaf.shape.rank - 1)
    return tf.pad(leaf, [[before, after], *other_axes])
