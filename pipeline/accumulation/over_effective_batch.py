"""Losses over the whole effective batch, by gradient caching (Gao et al., arXiv 2101.06983, 2021).

    for each micro-batch k:  oₖ = f(xₖ; θ)             # first pass, without a tape: its activations are freed
    L = loss(y, o);  g = ∂L/∂o                         # over the effective batch, o = (o₁, …, o_K)
    for each micro-batch k:  S += gₖᵀ · ∂f(xₖ; θ)/∂θ   # second pass, with a tape

Both passes draw the same noise (`same_noise`), and no layer may mix the examples of a micro-batch or move a state that
the second pass would find changed. What the first pass assigns, such as a layer's metrics, is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from .batch import (
    Nest,
    Share,
    examples_in,
    of_first_replica,
    parts_of,
    reduce,
    share_of,
    slice_specs,
)
from .forward_effects import Forward, batch_dependent_layers, unknown_to_keras
from .gradient_sums import sum_over_micro_batches
from .keras_internals import logits_of, mask_of, with_mask_and_logits
from .loss_sums import LossSum, LossSums, divide, weighted_sum
from .objective import Objective, by_name
from .same_noise import Key, drawn, noisy_layers
from .xla import compiled_by_xla, without_cudnn


class Kept(NamedTuple):
    """One output of the model and what Keras keeps on it, `()` if nothing, with the examples on axis 0."""

    output: tf.Tensor
    mask: Any  # 0 or 1, in float32: what is gathered is summed
    logits: Any


Outputs = dict[str, Kept]  # by name


def not_supported(model: keras.Model, forward: Forward) -> Iterator[tuple[str, str]]:
    """Yield what a model must not have if its loss is over the effective batch, and the layers that have it."""
    if names := forward.cut_dependent_noise:
        rule = "same_noise must be True, and layers must be able to draw for each example, as both passes need the"
        yield f"{rule} same noise where loss_over is effective_batch", ", ".join(names)
    if names := [
        *batch_dependent_layers(model, forward),
        *(name for name, _ in unknown_to_keras(model)),
    ]:
        rule = "loss_over must be example for layers that move a state in training, such as BatchNormalization"
        yield rule, ", ".join(names)


def kept(outputs: Mapping[str, Nest]) -> Outputs:
    """Return the outputs of a forward pass as they are kept."""
    found: Outputs = {}
    for name, output in outputs.items():
        if not isinstance(output, tf.Tensor) or not output.shape.rank:
            rule = "loss_over must be example for outputs that are no dense tensors with the examples on axis 0"
            raise ValueError(f"{rule}. Received: {name or type(output).__name__}")
        mask, logits = mask_of(output), logits_of(output)
        mask = () if mask is None else tf.cast(mask, tf.float32)
        found[name] = Kept(output, mask, () if logits is None else logits)
    return found


@tf.autograph.experimental.do_not_convert
def kept_outputs(
    model: keras.Model,
    batch: Nest,
    micro_batch_size: int,
    noise_keys: Sequence[tf.Tensor],
    jit_compile: bool | str,
) -> Outputs:
    """Return the outputs for this replica's share of `batch`, as the first pass; arguments as for an `Update`."""
    share, place = share_of(batch)
    by_xla = compiled_by_xla(jit_compile, model, share)
    noisy = noisy_layers(model, share[0]) if noise_keys else []
    keys = [Key.of(seed) for seed in noise_keys]

    def micro_step(start: tf.Tensor, x: Nest, *_: Nest) -> Outputs:
        drawing = drawn(noisy, keys, place + start, examples_in(x), by_xla)
        with (
            keras.StatelessScope(),
            without_cudnn(model, by_xla),
            drawing,
        ):  # what it assigns is dropped
            return kept(by_name(model, model(x, training=True)))

    return sum_over_micro_batches(micro_step, share, micro_batch_size, by_xla)


def differentiable(outputs: Outputs) -> list[tf.Tensor]:
    """Return what a loss may have a gradient by: the outputs, and the logits that Keras keeps on them."""
    found = [
        tensor for each in outputs.values() for tensor in (each.output, each.logits)
    ]
    return [
        tensor for tensor in found if tf.is_tensor(tensor) and tensor.dtype.is_floating
    ]


def batch_losses(
    objective: Objective, outputs: Outputs, y: Nest, sample_weight: Nest
) -> tuple[LossSums, tf.Tensor]:
    """Return the loss of each output over the batch, and what is minimised, without what the model adds; scalars."""
    losses, means = LossSums(), list[tf.Tensor]()
    given = {name: with_mask_and_logits(*each) for name, each in outputs.items()}
    for term in objective.terms(y, given, sample_weight):
        made = weighted_sum(
            term.loss, term.y, term.output, term.sample_weight, over_batch=True
        )
        scaled = made.total if term.scale is None else made.total * term.scale
        losses[term.name] = LossSum(made.total, scaled, made.weight)
        means.append(divide(scaled, made.weight))
    return losses, tf.add_n([tf.cast(mean, means[0].dtype) for mean in means])


def output_gradients(
    objective: Objective,
    outputs: Outputs,
    y: Nest,
    sample_weight: Nest,
    scale_loss: Callable[..., tf.Tensor] | None,
) -> tuple[LossSums, list[tf.Tensor | None]]:
    """Return the losses over the batch and the gradient of their sum by each of `differentiable(outputs)`.

    A gradient is scaled by `scale_loss`, and None where the loss does not depend on the tensor.
    """
    sources = differentiable(outputs)
    with tf.GradientTape() as tape:
        tape.watch(sources)
        losses, target = batch_losses(objective, outputs, y, sample_weight)
        target = target if scale_loss is None else scale_loss(target)
    gradients = tape.gradient(target, sources)
    with tf.device("CPU:0"):  # from where each micro-batch takes its slice
        return losses, [
            None if each is None else tf.identity(tf.convert_to_tensor(each))
            for each in gradients
        ]


def gathered(
    strategy: tf.distribute.Strategy,
    batch: Nest | Share,
    outputs: Outputs,
    ready: tf.Variable | None = None,
) -> tuple[Outputs, Nest, Nest]:
    """Return the outputs, labels and sample weights of the effective batch, once every replica has its outputs.

    One sum over replicas, in which each has zeros in place of the others' examples. Call it in the cross-replica
    context, with the outputs of each replica's share; the first replica's device gets them all.
    """
    _, *labels = parts_of(batch)  # of a `Share`, only those that this process has read
    if strategy.num_replicas_in_sync == 1:
        return outputs, *labels

    def placed(own: Outputs) -> list[tf.Tensor]:
        (x, *own_labels), place = share_of(batch)
        examples = (
            batch.examples if isinstance(batch, Share) else examples_in(parts_of(batch))
        )
        place = tf.minimum(place, examples)
        after = examples - place - examples_in(x)
        return [
            _padded(leaf, place, after)
            for leaf in tf.nest.flatten((own, *own_labels))
            if leaf is not None
        ]

    whole = iter(
        of_first_replica(
            strategy, reduce(strategy, strategy.run(placed, (outputs,)), ready)
        )
    )
    own = of_first_replica(strategy, outputs), *labels
    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else tf.cast(next(whole), leaf.dtype), own
    )


def _padded(leaf: tf.Tensor, before: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor) or None in leaf.shape[1:]:
        rule = "loss_over must be example under replicas, for outputs or labels of an unknown shape"
        raise ValueError(f"{rule}. Received: {slice_specs(leaf)}")
    # Integers travel as float64, exact up to 2⁵³: collectives do not take all of them.
    dense = leaf if leaf.dtype.is_floating else tf.cast(leaf, tf.float64)
    return tf.pad(dense, [[before, after], *[[0, 0]] * (leaf.shape.rank - 1)])
