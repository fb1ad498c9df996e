"""The losses of a micro-batch as sums and weights, and which of them share a gradient sum.

A mean is divided by its own weight: elements, unmasked elements, sample weights, or examples for what the model adds
(regularisation, `add_loss`). Losses whose weight over the whole effective batch is known before the forward pass are
divided by it before they are differentiated, as in `fit`, and share one gradient in memory:

    gradient = Σₖ ∇(L₁ₖ/W₁ + L₂ₖ/W₂ + …)

A loss whose weight is known only after the forward pass (a mask that the model computes, ragged outputs, an axis of
unknown length) has a gradient sum of its own, which is divided at the end. Layers then see the gradient of a sum, which
makes a difference where their backward pass is not linear: to one that clips its gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from .batch import BatchTotals, Nest, examples_in, spread
from .keras_internals import mask_of
from .objective import Objective, couples_examples


class LossSum(NamedTuple):
    """Σ wᵢ·lossᵢ of one output, the same times its entry of `loss_weights`, and Σ wᵢ; scalars."""

    total: tf.Tensor
    scaled: tf.Tensor
    weight: tf.Tensor


LossSums = dict[str, LossSum]  # by output


class Part(NamedTuple):
    """What is minimised over a micro-batch and divided by one weight; scalars."""

    total: tf.Tensor  # its part of the effective batch's mean, where `known`; else the sum over the micro-batch
    share: tf.Tensor  # of the micro-batch in the effective batch's weight, where `known`; else its weight
    examples: tf.Tensor  # that count in the micro-batch: see `WeightedSum`
    known: bool  # whether the weight of the effective batch is, before the forward pass


def micro_batch_losses(
    model: keras.Model,
    objective: Objective,
    outputs: Mapping[str, Nest],
    micro_batch: Nest,
    totals: BatchTotals,
) -> tuple[LossSums, tf.Tensor, list[Part]]:
    """Return the loss of each output, what the model adds, and both as parts of what is minimised.

    Call it after the forward pass that gave `outputs`; `totals` are of the effective batch.
    """
    x, y, sample_weight = micro_batch
    dtype = tf.as_dtype(keras.config.floatx())
    count, examples = tf.cast(examples_in(x), dtype), tf.cast(totals.examples, dtype)
    losses, parts = {}, []
    weights = spread(totals.weights, list(outputs), to_all=True)
    for term in objective.terms(y, outputs, sample_weight):
        if not objective.over_batch and couples_examples(
            term.loss
        ):  # a micro-batch has not all of them
            rule = "loss_over must be effective_batch for a loss of several examples at once"
            raise ValueError(f"{rule}, {term.loss.name}. Received: 'example'")
        made = weighted_sum(
            term.loss,
            term.y,
            term.output,
            term.sample_weight,
            (examples, weights.get(term.name)),
        )
        scaled = made.total if term.scale is None else made.total * term.scale
        losses[term.name] = LossSum(made.total, scaled, made.weight)
        if made.batch_weight is None:
            parts.append(Part(scaled, made.weight, made.examples, False))
        else:
            share = (
                count / examples
                if term.loss.reduction == "sum"
                else divide(made.weight, made.batch_weight)
            )
            parts.append(
                Part(divide(scaled, made.batch_weight), share, made.examples, True)
            )
    added = tf.zeros((), parts[0].total.dtype if parts else dtype)
    scalars, of_layers = objective.added_losses == "sum", len(added_losses(model))
    for index, value in enumerate(
        model.losses
    ):  # those of layers, then those of weights
        per_example = value.shape.rank and value.shape[0] is None
        sums = per_example or (scalars and index < of_layers)
        added += tf.reduce_sum(tf.cast(value, added.dtype)) * tf.cast(
            examples if sums else count, added.dtype
        )
    if model.losses or not parts:
        parts.append(Part(divide(added, examples), count / examples, count, True))
    return losses, added, _merged(parts)


def function_losses(
    function: Any, micro_batch: Nest, totals: BatchTotals
) -> tuple[LossSums, tf.Tensor, list[Part]]:
    """Return what `micro_batch_losses` does, of a function that returns a mean loss, or one with its weight."""
    made = function(*(part for part in micro_batch if part is not None))
    mean, weight = made if isinstance(made, tuple | list) else (made, None)
    mean = tf.convert_to_tensor(mean)
    if mean.shape.rank:
        raise ValueError(
            f"loss must return a scalar, or a tuple of one and its weight. Received: shape {mean.shape}"
        )
    mean = (
        tf.cast(mean, tf.float32) if mean.dtype in (tf.float16, tf.bfloat16) else mean
    )
    count, examples = (
        tf.cast(number, mean.dtype)
        for number in (examples_in(micro_batch), totals.examples)
    )
    divisor = count if weight is None else tf.cast(weight, mean.dtype)
    total, known = mean * divisor, weight is None
    part = (
        Part(total / examples, count / examples, count, True)
        if known
        else Part(total, divisor, count, False)
    )
    return {"": LossSum(total, total, divisor)}, tf.zeros_like(mean), [part]


def _merged(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with those whose weight is known ahead as one, which has the share of the first."""
    known = [part for part in parts if part.known]
    if not known:
        return list(parts)
    total = sum(tf.cast(part.total, known[0].total.dtype) for part in known)
    first = known[0]._replace(
        total=total
    )  # in its place: the noise is measured by the first of all parts
    return [
        first if part is known[0] else part
        for part in parts
        if part is known[0] or not part.known
    ]


def added_losses(layer: keras.Layer) -> list[tf.Tensor]:
    """Return what a layer and those inside of it have added in their last call, without what regularises weights."""
    of_weights = sum(
        variable.regularizer is not None for variable in layer.trainable_variables
    )
    return layer.losses[: len(layer.losses) - of_weights]


class WeightedSum(NamedTuple):
    """The numerator and the denominator of a mean, over a part of a batch; scalars, in float32 at least."""

    total: tf.Tensor  # Σ wᵢ·lossᵢ
    weight: tf.Tensor  # Σ wᵢ; 0 for the reduction `sum`, to be read as 1
    batch_weight: (
        tf.Tensor | None
    )  # `weight` of the whole batch, where it is known before a forward pass
    examples: tf.Tensor  # that count, (Σ wᵢ)² / Σ wᵢ² with the weights of examples (Kish, Survey Sampling, 1965)


def weighted_sum(
    loss: keras.losses.Loss,
    y_true: Nest,
    outputs: Nest,
    sample_weight: tf.Tensor | None = None,
    totals: tuple[tf.Tensor, tf.Tensor | None] | None = None,
    over_batch: bool = False,
) -> WeightedSum:
    """Return the numerator and the denominator of the mean `loss(y_true, outputs, sample_weight)`.

    Follows `keras.losses.Loss.__call__` of Keras 3.15: the reductions `mean` and `sum_over_batch_size` divide by the
    number of loss elements, or of unmasked ones; `mean_with_sample_weight` by the sum of the weights; `sum` by nothing.

    Args:
        loss: its `call` gives one value per example, or per element of an example.
        y_true, outputs: as `loss` takes them, with the examples on axis 0.
        sample_weight: (examples,) or of the values' shape.
        totals: examples, and sum of the sample weights, of the whole batch where `batch_weight` is wanted.
        over_batch: whether these are all examples of the effective batch; `call` may then give a scalar.

    Raises:
        ValueError: the loss reduces nothing, or to a scalar in its `call`, or the sample weights do not fit its values.
    """
    if loss.reduction in (None, "none"):
        raise ValueError(
            f"The loss must have a reduction. Received: {loss.name} with reduction={loss.reduction!r}"
        )
    dtype, mask = tf.as_dtype(loss.dtype), mask_of(outputs)
    outputs, y_true = tf.nest.map_structure(
        lambda leaf: tf.cast(leaf, dtype), (outputs, y_true)
    )
    # Before the call, of which a loss may keep a tensor.
    per_example = (
        None
        if totals is None or mask is not None
        else _values_per_example(loss, y_true, outputs)
    )
    found = loss.call(y_true, outputs)
    masks = [each for each in (mask, mask_of(found)) if each is not None]
    dtype = (
        tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype
    )  # a bfloat16 that counts stops at 256
    values = _dense(found, dtype)
    if values.shape.rank == 0:
        if not over_batch or sample_weight is not None:
            where = " where there are sample weights" if over_batch else ""
            raise ValueError(
                f"The loss must give one value per example{where}, not a scalar. Received: {loss.name}"
            )
        examples = tf.cast(
            examples_in(outputs), dtype
        )  # by which an evaluation weighs the batches
        by = (
            (values, tf.zeros((), dtype))
            if loss.reduction == "sum"
            else (values * examples, examples)
        )
        return WeightedSum(*by, None, examples)
    count = tf.cast(tf.size(values), dtype)
    factors = [] if sample_weight is None else [_dense(sample_weight, dtype)]
    if masks:
        mask = tf.cast(functools.reduce(tf.logical_and, masks), dtype)
        count *= tf.math.divide_no_nan(
            tf.reduce_sum(mask), tf.cast(tf.size(mask), dtype)
        )
        factors = [mask, *factors]
    if factors:
        rank = max(factor.shape.rank for factor in factors)
        weights = _fitted(
            functools.reduce(
                tf.multiply, [_aligned(factor, rank) for factor in factors]
            ),
            values,
        )
        values *= weights
    total, examples, ahead = (
        tf.reduce_sum(values),
        tf.cast(examples_in(outputs), dtype),
        None,
    )
    if loss.reduction == "sum":
        return WeightedSum(total, tf.zeros((), dtype), tf.zeros((), dtype), examples)
    by_weights = loss.reduction == "mean_with_sample_weight" and bool(factors)
    if totals is not None and not masks and (by_weights or per_example is not None):
        ahead = (
            tf.cast(totals[1], dtype)
            if by_weights
            else tf.cast(totals[0], dtype) * per_example
        )
    if by_weights or masks or isinstance(found, tf.RaggedTensor):
        counting = weights if by_weights else mask if masks else tf.ones_like(values)
        examples = _effective(counting, found, values)
    return WeightedSum(
        total, tf.reduce_sum(weights) if by_weights else count, ahead, examples
    )


def _effective(weights: tf.Tensor, found: Any, values: tf.Tensor) -> tf.Tensor:
    """Return (Σ wᵢ)² / Σ wᵢ² over examples, whose weights are sums over all axes but the first; 0 if all are 0."""
    if isinstance(found, tf.RaggedTensor):
        weights = tf.cast(found, values.dtype).with_flat_values(
            tf.broadcast_to(weights, tf.shape(values))
        )
    of_examples = tf.reduce_sum(weights, list(range(1, weights.shape.rank)))
    return tf.math.divide_no_nan(
        tf.square(tf.reduce_sum(of_examples)), tf.reduce_sum(tf.square(of_examples))
    )


def nonzero(weight: tf.Tensor) -> tf.Tensor:
    """Return the weight, 1 where it is 0."""
    return tf.where(weight == 0, tf.ones_like(weight), weight)


def divide(value: Any, weight: Any) -> Any:
    """Return a tensor or `tf.IndexedSlices` divided by a weight, of which 0 and `()` divide by nothing."""
    if isinstance(weight, tuple):
        return value
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(
            divide(value.values, weight), value.indices, value.dense_shape
        )
    return value / tf.cast(nonzero(weight), value.dtype)


def _values_per_example(
    loss: keras.losses.Loss, y_true: Nest, outputs: Nest
) -> int | None:
    """Return how many values the loss has for an example, as its shapes for three show; None where it depends."""
    if any(
        isinstance(leaf, tf.RaggedTensor) or leaf.shape.rank is None
        for leaf in tf.nest.flatten((y_true, outputs))
    ):
        return None
    three = [
        tf.TensorSpec([3, *leaf.shape[1:]], leaf.dtype) for leaf in (y_true, outputs)
    ]
    try:
        made = tf.function(loss.call, autograph=False).get_concrete_function(*three)
    except Exception:  # takes no three
        return None
    count = tf.TensorShape(made.structured_outputs.shape).num_elements()
    return None if count is None or count % 3 else count // 3


def _dense(values: Any, dtype: tf.DType) -> tf.Tensor:
    values = tf.cast(values, dtype)
    return values.flat_values if isinstance(values, tf.RaggedTensor) else values


def _fitted(weights: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    weights = _aligned(weights, values.shape.rank)
    pairs = zip(weights.shape[1:], values.shape[1:], strict=False)
    if weights.shape.rank > values.shape.rank or any(
        size not in (1, None, of or size) for size, of in pairs
    ):
        raise ValueError(
            f"sample weights of shape {weights.shape} do not fit values of shape {values.shape}"
        )
    return weights


def _aligned(weights: tf.Tensor, rank: int) -> tf.Tensor:
    """Add or remove last axes of size 1 until `weights` has `rank` axes: (examples,) weighs every element."""
    while weights.shape.rank < rank:
        weights = tf.expand_dims(weights, -1)
    while weights.shape.rank > rank and weights.shape[-1] == 1:
        weights = tf.squeeze(weights, -1)
    return weights
