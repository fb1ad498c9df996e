"""The losses of a micro-batch as sums and weights, and which of them share a gradient sum.

A mean is divided by its own weight: elements, unmasked elements, sample weights, or examples for what the model adds
(regularisation, `add_loss`). Losses whose weight over the whole effective batch is known before the forward pass are
brought to one weight as they are summed, so that they share one gradient in memory,

    S = Σₖ ∇(L₁ₖ + L₂ₖ·W₁/W₂ + …)        gradient = S / W₁

and a single loss needs no more either. A loss whose weight is known only after the forward pass (a mask that the model
computes, ragged outputs, an axis of unknown length) has a gradient sum of its own beside the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from .batch import Nest, examples_in
from .loss_reduction import divide, nonzero, weighted_sum
from .objective import Objective
from .outputs import spread
from .replicas import BatchTotals


class LossSum(NamedTuple):
    """Σ wᵢ·lossᵢ of one output, the same times its entry of `loss_weights`, and Σ wᵢ; scalars."""

    total: tf.Tensor
    scaled: tf.Tensor
    weight: tf.Tensor


class Part(NamedTuple):
    """What is minimised over a micro-batch and divided by one weight.

    Attributes:
        total: the sum over the micro-batch.
        weight: of the micro-batch; 0 divides by nothing.
        batch_weight: `weight` of the whole effective batch, where it is known before the forward pass; else None.
        size: of the micro-batch, not zero: `total / size` is mean-sized.
        unit: what turns the gradient of `total / size` into that of the whole effective batch; None for 1.
    """

    total: tf.Tensor
    weight: tf.Tensor
    batch_weight: tf.Tensor | None
    size: tf.Tensor
    unit: tf.Tensor | None


def micro_batch_losses(
    model: keras.Model, objective: Objective, outputs: Mapping[str, Nest], micro_batch: Nest, totals: BatchTotals
) -> tuple[dict[str, LossSum], tf.Tensor, list[Part]]:
    """Return the loss of each output, what the model adds, and both as parts of what is minimised.

    Args:
        model: after its forward pass.
        objective: what is minimised.
        outputs: of the micro-batch, by name.
        micro_batch: `(x, y, sample_weight)`.
        totals: of the effective batch that it is a part of.
    """
    x, y, sample_weight = micro_batch
    dtype = tf.as_dtype(keras.config.floatx())
    count, examples = tf.cast(examples_in(x), dtype), tf.cast(totals.examples, dtype)
    losses, parts = {}, []
    weights = spread(totals.weights, list(outputs), to_all=True)
    terms = objective.terms(y, outputs, sample_weight)
    alone = len(terms) + bool(model.losses) == 1  # then no weight has to be known ahead
    for term in terms:
        known = None if alone else (examples, weights.get(term.name))
        made = weighted_sum(term.loss, term.y, term.output, term.sample_weight, known)
        scaled = made.total if term.scale is None else made.total * term.scale
        losses[term.name] = LossSum(made.total, scaled, made.weight)
        summed = term.loss.reduction == "sum"
        size = tf.cast(count, scaled.dtype) if summed else nonzero(made.weight)
        unit = tf.cast(examples, scaled.dtype) if summed else None
        parts.append(Part(scaled, made.weight, made.batch_weight, size, unit))
    added = tf.zeros((), parts[0].total.dtype if parts else dtype)
    for value in model.losses:
        per_example = value.shape.rank and value.shape[0] is None  # else it is the same of every micro-batch
        added += tf.reduce_sum(tf.cast(value, added.dtype)) * tf.cast(examples if per_example else count, added.dtype)
    if model.losses or not parts:
        count, examples = tf.cast(count, added.dtype), tf.cast(examples, added.dtype)
        parts.append(Part(added, count, examples, count, None))
    return losses, added, _merged(parts, count / examples)


def _merged(parts: Sequence[Part], share: tf.Tensor) -> list[Part]:
    """Return the parts with those whose weight is known ahead merged into one.

    Args:
        share: of the effective batch's examples that are in this micro-batch.
    """
    known = [part for part in parts if part.batch_weight is not None]
    if len(known) < 2:
        return list(parts)
    first = next((part for part in known if part.unit is None), known[0])
    weight = nonzero(first.batch_weight)
    total = sum(divide(tf.cast(part.total, weight.dtype) * weight, part.batch_weight) for part in known)
    merged = Part(total, first.weight, weight, weight * tf.cast(share, weight.dtype), None)
    return [merged, *(part for part in parts if part.batch_weight is None)]
