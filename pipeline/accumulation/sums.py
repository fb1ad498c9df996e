"""The sums over an effective batch, and which of its losses share a gradient sum.

A mean is divided by its own weight: elements, unmasked elements, sample weights, or examples for what the model adds
(regularisation, `add_loss`). Those whose weight over the whole effective batch is known before the forward pass are
brought to one weight as they are summed, so that they share one gradient in memory,

    S = Σₖ ∇(L₁ₖ + L₂ₖ·W₁/W₂ + …)        gradient = S / W₁

and a loss that is alone needs no more either. One whose weight shows in the forward pass only (a mask that the model
computes, ragged outputs, an axis of unknown length) has, beside others, a gradient sum of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from .moving_statistics import Moves
from .outputs import Losses, spread, terms
from .slicing import Share, examples_in, parts_of
from .weighting import Nest, weighted_sum

Gradients = tuple[Any, ...]  # of each variable a tensor; `()` for one that the losses do not depend on


class LossSum(NamedTuple):
    """Σ wᵢ·lossᵢ of one output, the same times its entry of `loss_weights`, and Σ wᵢ; scalars."""

    total: tf.Tensor
    scaled: tf.Tensor
    weight: tf.Tensor


class Known(NamedTuple):
    """What is known of a whole effective batch before any forward pass.

    Attributes:
        examples: their number, scalar.
        weights: Σ wᵢ, scalar, of the sample weights of each output, as `fit` takes them; None where there are none.
    """

    examples: tf.Tensor
    weights: Nest


def known_of(batch: Nest | Share) -> Known:
    """Return what is known of an effective batch; on the host, so that no device receives all of it.

    The weights of a `Share` are of its own examples alone.
    """
    x, _, weights = parts_of(batch)

    def total(leaf: Any) -> tf.Tensor | None:
        if leaf is None:
            return None
        if not leaf.dtype.is_floating:
            return tf.reduce_sum(tf.cast(leaf, tf.float64))
        return tf.reduce_sum(tf.cast(leaf, tf.float32) if leaf.dtype.size < 4 else leaf)

    with tf.device("CPU:0"):
        examples = batch.examples if isinstance(batch, Share) else examples_in(x)
        return Known(examples, tf.nest.map_structure(total, weights))


class GradientSums(NamedTuple):
    """The sums over one effective batch, or over one replica's share of it.

    A weight of zero divides by one: its sum is zero too, or the loss' reduction is `sum`, which divides by nothing.

    Attributes:
        losses: of each output that has a loss, by its name.
        added: Σₖ nₖ·Aₖ, scalar: the model's own losses on micro-batch k times its examples; of those that have one
            value per example, N·Σᵢ aᵢ, because Keras sums them over the batch.
        examples: Σₖ nₖ, scalar.
        gradient_sums: the gradient of each group of losses that are divided by one weight.
        weights: that weight, scalar, of each group.
        noise: what `noise_scale.estimate` takes of the micro-batches: Σₖ Wₖ|gₖ|², their number, Σₖ Wₖ; zeros where
            it was not measured.
        moves: by how much BatchNormalization would have moved its statistics; empty where it has moved them itself.
    """

    losses: dict[str, LossSum]
    added: tf.Tensor
    examples: tf.Tensor
    gradient_sums: tuple[Gradients, ...]
    weights: tuple[tf.Tensor, ...]
    noise: tuple[tf.Tensor, tf.Tensor, tf.Tensor]
    moves: Moves

    def mean_loss(self) -> tf.Tensor:
        """Return the loss that one large batch would have shown, scalar."""
        means = [_divide(loss.scaled, loss.weight) for loss in self.losses.values()]
        return sum(means, _divide(self.added, self.examples))

    def output_losses(self) -> dict[str, tf.Tensor]:
        """Return the loss of each of several outputs, as `<output>_loss`, before `loss_weights` scale it."""
        means = {f"{name}_loss": _divide(loss.total, loss.weight) for name, loss in self.losses.items()}
        return means if len(means) > 1 else {}

    def gradients(self) -> list[tf.Tensor | None]:
        """Return the gradients of one large batch, in the order of `model.trainable_variables`.

        Returns:
            One gradient of its variable's shape for each; of an embedding `tf.IndexedSlices` with each row that was
            looked up once; None where the loss does not depend on it.
        """
        return means(self.gradient_sums, self.weights)


class Part(NamedTuple):
    """What is minimised over a micro-batch and divided by one weight.

    Attributes:
        total: the sum over the micro-batch.
        weight: of the micro-batch; 0 divides by nothing.
        whole: `weight` of the whole effective batch, where it is known before the forward pass; else None.
        size: of the micro-batch, not zero: `total / size` is mean-sized.
        unit: what turns the gradient of `total / size` into that of the whole effective batch; None for 1.
    """

    total: tf.Tensor
    weight: tf.Tensor
    whole: tf.Tensor | None
    size: tf.Tensor
    unit: tf.Tensor | None


def micro_batch_losses(
    model: keras.Model, loss: Losses, loss_weights: Any, outputs: Mapping[str, Nest], batch: Nest, whole: Known
) -> tuple[dict[str, LossSum], tf.Tensor, list[Part]]:
    """Return the loss of each output, what the model adds, and both as parts of what is minimised.

    Args:
        model: after its forward pass.
        loss, loss_weights: as `outputs.terms` takes them.
        outputs: of the micro-batch, by name.
        batch: `(x, y, sample_weight)` of the micro-batch.
        whole: of the effective batch that it is a part of.
    """
    x, y, sample_weight = batch
    dtype = tf.as_dtype(keras.config.floatx())
    count, examples = tf.cast(examples_in(x), dtype), tf.cast(whole.examples, dtype)
    losses, parts = {}, []
    weights = spread(whole.weights, list(outputs), to_all=True)
    found = terms(loss, loss_weights, y, outputs, sample_weight) if loss is not None else []
    alone = len(found) + bool(model.losses) == 1  # then no weight has to be known ahead
    for term in found:
        known = None if alone else (examples, weights.get(term.name))
        made = weighted_sum(term.loss, term.y, term.output, term.sample_weight, known)
        scaled = made.total if term.scale is None else made.total * term.scale
        losses[term.name] = LossSum(made.total, scaled, made.weight)
        summed = term.loss.reduction == "sum"
        size = tf.cast(count, scaled.dtype) if summed else nonzero(made.weight)
        parts.append(Part(scaled, made.weight, made.whole, size, tf.cast(examples, scaled.dtype) if summed else None))
    added = tf.zeros((), parts[0].total.dtype if parts else dtype)
    for value in model.losses:
        per_example = value.shape.rank and value.shape[0] is None  # else it is the same of every micro-batch
        added += tf.reduce_sum(tf.cast(value, added.dtype)) * tf.cast(examples if per_example else count, added.dtype)
    if model.losses or not parts:
        count, examples = tf.cast(count, added.dtype), tf.cast(examples, added.dtype)
        parts.append(Part(added, count, examples, count, None))
    return losses, added, _sharing(parts, count / examples)


def _sharing(parts: Sequence[Part], share: tf.Tensor) -> list[Part]:
    """Return the parts with those whose weight is known ahead as one.

    Args:
        share: of the effective batch's examples that are in this micro-batch.
    """
    known = [part for part in parts if part.whole is not None]
    if len(known) < 2:
        return list(parts)
    first = next((part for part in known if part.unit is None), known[0])
    whole = nonzero(first.whole)
    total = sum(_divide(tf.cast(part.total, whole.dtype) * whole, part.whole) for part in known)
    both = Part(total, first.weight, whole, whole * tf.cast(share, whole.dtype), None)
    return [both, *(part for part in parts if part.whole is None)]


def means(sums: Sequence[Gradients], weights: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
    """Return Σ sum/weight for each variable; None where no sum depends on it."""
    found: list[tf.Tensor | None] = []
    for of_variable in zip(*sums, strict=True):
        both = zip(of_variable, weights, strict=True)
        terms_of = [_divide(value, weight) for value, weight in both if not isinstance(value, tuple)]
        found.append(tf.add_n(terms_of) if len(terms_of) > 1 else next(iter(terms_of), None))
    return found


def nonzero(total: tf.Tensor) -> tf.Tensor:
    return tf.where(total == 0, tf.ones_like(total), total)


def _divide(value: Any, total: tf.Tensor) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(_divide(value.values, total), value.indices, value.dense_shape)
    return value / tf.cast(nonzero(total), value.dtype)
