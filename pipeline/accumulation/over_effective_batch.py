"""Losses over the effective batch, by gradient caching.

    for each micro-batch k:  oₖ = f(xₖ; θ)             # first pass, without a tape
    L = loss(y, o);  g = ∂L/∂o                         # over all o = (o₁, …, o_K)
    for each micro-batch k:  S += gₖᵀ · ∂f(xₖ; θ)/∂θ   # second pass, with a tape

This is the method of Gao et al. 2021 (arXiv:2101.06983). The first pass keeps no
activations. Both passes must draw the same noise (see `same_noise`). No layer may mix
the examples of a micro-batch, or change a state on which the second pass depends. Other
assignments in the first pass, such as to a layer's metrics, are discarded.
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
    position_of,
    positions_for_noise,
    reduce,
    share_of,
    slice_specs,
)
from .forward_effects import Forward, batch_dependent_layers, untracked_variables
from .keras_internals import logits_of, mask_of, with_mask_and_logits
from .loss_sums import LossSum, divide, scaled_sum, weighted_sum
from .micro_batches import run_micro_batches
from .objective import Objective, by_name
from .padding import has_padded_axis, padded_inputs
from .same_noise import Key, noise_by_position, noisy_layers
from .token_cut import TokenLimit
from .xla import compiled_by_xla, without_cudnn


class KeptOutput(NamedTuple):
    """One output of the model with its mask and logits, which may be `ABSENT`.

    All of them have the examples on axis 0.
    """

    output: tf.Tensor
    mask: Any  # 0 or 1 in float32, because tensors are gathered by a sum
    logits: Any


Outputs = dict[str, KeptOutput]  # by name


class GatheredBatch(NamedTuple):
    """The outputs, labels and sample weights of the whole effective batch."""

    outputs: Outputs
    y: Nest
    sample_weight: Nest


class BatchLosses(NamedTuple):
    """The losses over the effective batch."""

    losses: dict[str, LossSum]  # by output name
    minimized: tf.Tensor  # the sum of their scaled means, scalar


def not_supported(model: keras.Model, forward: Forward) -> Iterator[tuple[str, str]]:
    """Yield the reasons why a model's loss cannot be over the effective batch.

    Yields:
        A rule that the model breaks, and the layers that break it.
    """
    noisy = forward.cut_dependent_noise
    if noisy:
        rule = (
            "same_noise must be True if loss_over is effective_batch, and layers must "
            "be able to draw noise for each example, because both passes over the "
            "batch need the same noise"
        )
        yield rule, ", ".join(noisy)

    moved = batch_dependent_layers(model, forward)
    moved += [name for name, _ in untracked_variables(model)]
    if moved:
        rule = (
            "loss_over must be example for layers that update their state in "
            "training, such as BatchNormalization"
        )
        yield rule, ", ".join(moved)


def without_examples(
    outputs: Mapping[str, Nest], examples: int | None = None
) -> Iterator[str]:
    """Yield descriptions of outputs that do not have the examples on axis 0.

    Ragged outputs are among the results.

    Args:
        outputs: the outputs by name.
        examples: the static number of examples; None if it is unknown, as it is while a
            micro-step is traced.
    """
    for name, output in outputs.items():
        if not isinstance(output, tf.Tensor):
            yield name or type(output).__name__
        elif not output.shape.rank or output.shape[0] != examples:
            yield f"{name or 'an output'} of shape {output.shape}"


def kept(outputs: Mapping[str, Nest], examples: int | None = None) -> Outputs:
    """Return the outputs of a forward pass with the masks and logits stored on them.

    Args:
        outputs: the outputs by name.
        examples: see `without_examples`.

    Raises:
        ValueError: an output is not a dense tensor with the examples on axis 0.
    """
    for received in without_examples(outputs, examples):
        rule = (
            "loss_over must be example for outputs that are not dense tensors with the "
            "examples on axis 0"
        )
        raise ValueError(f"{rule}. Received: {received}")
    kept_by_name: Outputs = {}
    for name, output in outputs.items():
        mask = mask_of(output)
        mask = ABSENT if mask is None else tf.cast(mask, tf.float32)
        logits = logits_of(output)
        logits = ABSENT if logits is None else logits
        kept_by_name[name] = KeptOutput(output, mask, logits)
    return kept_by_name


def check_rows(outputs: Outputs) -> None:
    """Reject outputs with padded positions, because micro-batches differ in length.

    Raises:
        ValueError: an output or its mask has an axis without a fixed size, besides that
            of the examples.
    """
    for name, output in outputs.items():
        if has_padded_axis(tuple(output)):
            rule = (
                "loss_over must be example with micro_batch_tokens, for outputs that "
                "do not have one row per example"
            )
            raise ValueError(f"{rule}. Received: {name or output.output.shape}")


@tf.autograph.experimental.do_not_convert
def kept_outputs(
    model: keras.Model,
    batch: Nest | Share,
    micro_batch_size: int | TokenLimit,
    noise_seeds: Sequence[tf.Tensor],
    jit_compile: bool | str,
    fused_attention: bool = False,
) -> Outputs:
    """Run the first pass on this replica's share of `batch`; return the outputs.

    For `noise_seeds`, see `BatchContext`; for the other arguments, see `Update`.
    """
    share, position = share_of(batch)
    by_tokens = isinstance(micro_batch_size, TokenLimit)
    compiled = compiled_by_xla(jit_compile, model, share, micro_batch_size)
    noisy: list[keras.Layer] = []
    if noise_seeds:
        inputs = padded_inputs(share) if by_tokens else share[0]
        noisy = noisy_layers(model, inputs)
    keys = [Key.from_seed(seed) for seed in noise_seeds]
    positions = positions_for_noise(batch, position)

    def micro_step(start: tf.Tensor, x: Nest, *_: Nest) -> Outputs:
        drawing = noise_by_position(
            noisy, keys, position_of(start, positions), examples_in(x), compiled
        )
        # The scope discards all assignments in the pass.
        with keras.StatelessScope(), without_cudnn(model, compiled), drawing:
            outputs = kept(by_name(model, model(x, training=True)))
        if by_tokens:
            check_rows(outputs)
        return outputs

    return run_micro_batches(
        micro_step, share, micro_batch_size, compiled, fused_attention
    )


def differentiable(outputs: Outputs) -> list[tf.Tensor]:
    """Return the tensors with respect to which a loss may have a gradient.

    They are the floating-point outputs, and the logits that Keras stores on outputs.
    """
    tensors = []
    for kept_output in outputs.values():
        for tensor in (kept_output.output, kept_output.logits):
            if not is_absent(tensor) and tensor.dtype.is_floating:
                tensors.append(tensor)
    return tensors


def batch_losses(objective: Objective, batch: GatheredBatch) -> BatchLosses:
    """Return the losses over the effective batch, except those that the model adds."""
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
    """Return the losses over the batch, and the output gradients of their sum.

    There is one gradient per tensor of `differentiable(batch.outputs)`, in this order.
    If `scale_loss` is given, the gradients are those of the scaled loss. A gradient is
    None if no loss depends on the tensor.
    """
    sources = differentiable(batch.outputs)
    with tf.GradientTape() as tape:
        tape.watch(sources)
        losses, target = batch_losses(objective, batch)
        if scale_loss is not None:
            target = scale_loss(target)
    on_host: list[tf.Tensor | None] = []
    gradients = tape.gradient(target, sources)
    with tf.device("CPU:0"):  # where they are cut into micro-batches
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

    Call this in the cross-replica context, with the outputs of each replica's share.
    Each replica pads its tensors with zeros for the examples of the other replicas, and
    one sum over replicas gathers them. The result is on the first replica's device. For
    `reductions_ready`, see `reduce`.
    """
    _, y, sample_weight = parts_of(batch)  # in a `Share`, those of this process
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
            "loss_over must be example with several replicas, for outputs or labels "
            "of unknown shape"
        )
        raise ValueError(f"{rule}. Received: {slice_specs(leaf)}")
    # Send integers as float64, which is exact up to 2⁵³: collectives do not support all
    # integer dtypes.
    if not leaf.dtype.is_floating:
        leaf = tf.cast(leaf, tf.float64)
    other_axes = [[0, 0]] * (leaf.shape.rank - 1)
    return tf.pad(leaf, [[before, after], *other_axes])
