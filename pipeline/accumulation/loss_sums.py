"""The losses of a micro-batch as sums and weights, grouped by their divisors.

Each mean is divided by its own weight: the number of elements or unmasked elements, the
sum of the sample weights, or the number of examples for losses that the model adds
(regularization, `add_loss`). If the weight over the effective batch is known before the
forward pass, a loss is divided by it before the differentiation, as in `fit`. All these
losses share one gradient in memory:

    gradient = Σₖ ∇(L₁ₖ/W₁ + L₂ₖ/W₂ + …)

A loss whose weight is known only after the forward pass (because of a mask that the
model computes, ragged outputs or an axis of unknown length) has a gradient sum of its
own, which is divided at the end. The layers then receive the gradient of a sum. This
makes a difference for a layer whose backward pass is not linear, such as one that clips
its gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from .batch import (
    ABSENT,
    BatchTotals,
    Nest,
    examples_in,
    first_leaf,
    is_absent,
    spread,
)
from .keras_internals import mask_of
from .objective import Objective, Term, couples_examples
from .padding import check_loss


class LossSum(NamedTuple):
    """The loss of one output over some examples, as a sum and its weight; scalars.

    For wᵢ and dᵢ, see `accumulate`. The reduction `sum`, which does not divide, has the
    weight `ABSENT`.
    """

    total: tf.Tensor  # Σ wᵢ·lossᵢ
    scaled: tf.Tensor  # `total` × the output's entry of `loss_weights`
    weight: Any  # Σ dᵢ


class LossPart(NamedTuple):
    """The part of a micro-batch's losses that has one divisor; scalars.

    `total` is already divided if the weight W of the effective batch is known before
    the forward pass. `weight` is then the micro-batch's share of W. For the reduction
    `sum`, which has no divisor, `weight` is the micro-batch's share of the examples.
    `of_function` is whether a function computed the loss as a mean, whose gradient may
    be NaN if the weight is 0.
    """

    total: tf.Tensor  # Σ wᵢ·lossᵢ over the micro-batch, ÷ W if `divided`
    weight: tf.Tensor  # Σ dᵢ over the micro-batch, ÷ W if `divided`
    effective_examples: tf.Tensor  # of the micro-batch: see `WeightedSum`
    divided: bool  # whether `total` is already divided by W, or has no divisor
    of_function: bool = False

    @property
    def divisor(self) -> Any:
        """The weight to divide the sum by at the end, or `ABSENT` if `divided`."""
        return ABSENT if self.divided else self.weight

    @property
    def nonzero_divisor(self) -> Any:
        """The divisor, with 0 replaced by 1."""
        return ABSENT if self.divided else nonzero(self.weight)


class LossValues(NamedTuple):
    """The values of one output's loss, with the examples on axis 0."""

    values: tf.Tensor
    weights: tf.Tensor | None  # mask × sample weights, in a shape that fits the values


class MicroBatchLosses(NamedTuple):
    """The losses of one micro-batch."""

    losses: dict[str, LossSum]  # by output name
    added: tf.Tensor  # the losses that the model adds × examples, scalar: see `_added`
    minimized: list[LossPart]  # the sum of all losses, in one part per divisor
    values: dict[str, LossValues]  # by output name, for the losses that have them


class WeightedSum(NamedTuple):
    """The numerator and the denominator of a mean, over a part of a batch.

    All are scalars, in float32 at least. For wᵢ and dᵢ, see `accumulate`. The reduction
    `sum`, which does not divide, has weights of `ABSENT`.
    """

    total: tf.Tensor  # Σ wᵢ·lossᵢ
    weight: Any  # Σ dᵢ
    batch_weight: (
        Any  # W of the batch, or None if it is not known before a forward pass
    )
    # (Σ D)² / Σ D², where D is Σ dᵢ of an example: Kish, Survey Sampling, 1965.
    effective_examples: tf.Tensor
    values: LossValues | None = None  # None if they are ragged, or not of examples


def micro_batch_losses(
    model: keras.Model,
    objective: Objective,
    outputs: Mapping[str, Nest],
    micro_batch: Nest,
    totals: BatchTotals,
    padded: bool = False,
) -> MicroBatchLosses:
    """Return the loss of each output, and the losses that the model adds.

    Call this right after the forward pass that computed `outputs`. `totals` are the
    totals of the effective batch. If the losses of the objective are over the effective
    batch, only the losses that the model adds are returned: see `over_effective_batch`.
    `padded` is whether micro-batches are padded, each to its own length.

    Raises:
        ValueError: see `weighted_sum`; or a loss compares several examples.
    """
    objective = objective.of_micro_batch()
    x, y, sample_weight = micro_batch
    # The number of examples must be exact: see `weighted_sum`.
    dtype = float32_at_least(tf.as_dtype(keras.config.floatx()))
    micro_batch_examples = tf.cast(examples_in(x), dtype)
    batch_examples = tf.cast(totals.examples, dtype)

    losses = {}
    values = {}
    parts = []
    weights = spread(totals.weights, list(outputs), "sample_weight", to_all=True)
    for term in objective.terms(y, outputs, sample_weight):
        if couples_examples(term.loss):
            # A micro-batch contains only some of the examples that the loss compares.
            rule = f"loss_over must be effective_batch for {term.loss.name}, a loss"
            raise ValueError(f"{rule} that compares examples. Received: 'example'")
        totals_of_output = BatchTotals(batch_examples, weights.get(term.name))
        sums = weighted_sum(
            term.loss,
            term.y,
            term.output,
            term.sample_weight,
            totals_of_output,
            padded=padded,
        )
        loss = scaled_sum(term, sums)
        losses[term.name] = loss
        if sums.values is not None:
            values[term.name] = sums.values
        parts.append(
            _part(term, loss.scaled, sums, micro_batch_examples, batch_examples)
        )

    added_dtype = parts[0].total.dtype if parts else dtype
    added = _added(model, objective, micro_batch_examples, batch_examples, added_dtype)
    if model.losses or not parts:
        parts.append(
            LossPart(
                total=divide(added, batch_examples),
                weight=micro_batch_examples / batch_examples,
                effective_examples=micro_batch_examples,
                divided=True,
            )
        )
    return MicroBatchLosses(losses, added, _merged(parts), values)


def scaled_sum(term: Term, sums: WeightedSum) -> LossSum:
    """Return the loss of one output, scaled by its entry of `loss_weights`."""
    scaled = sums.total if term.scale is None else sums.total * term.scale
    return LossSum(sums.total, scaled, sums.weight)


def _part(
    term: Term,
    scaled: tf.Tensor,
    sums: WeightedSum,
    micro_batch_examples: tf.Tensor,
    batch_examples: tf.Tensor,
) -> LossPart:
    if sums.batch_weight is None:
        return LossPart(scaled, sums.weight, sums.effective_examples, divided=False)
    total = divide(scaled, sums.batch_weight)
    if term.loss.reduction == "sum":
        weight = micro_batch_examples / batch_examples
    else:
        weight = divide(sums.weight, sums.batch_weight)
    return LossPart(total, weight, sums.effective_examples, divided=True)


def _added(
    model: keras.Model,
    objective: Objective,
    micro_batch_examples: tf.Tensor,
    batch_examples: tf.Tensor,
    dtype: tf.DType,
) -> tf.Tensor:
    """Return the sum of the losses that the model adds, each × a number of examples.

    A mean over the micro-batch is multiplied by the number of examples in the
    micro-batch. A sum over examples is multiplied by the number of examples in the
    effective batch. The sums are the losses with one value per example, which Keras
    sums over the batch, and, if `objective.added_losses` is "sum", the scalars that
    layers add.
    """
    added = tf.zeros((), dtype)
    scalars_are_sums = objective.added_losses == "sum"
    count_of_layers = len(losses_from_add_loss(model))
    for index, value in enumerate(model.losses):  # regularization comes last
        is_of_examples = value.shape.rank and value.shape[0] is None
        is_of_layer = index < count_of_layers
        if is_of_examples or (scalars_are_sums and is_of_layer):
            times = batch_examples
        else:
            times = micro_batch_examples
        added += tf.reduce_sum(tf.cast(value, dtype)) * tf.cast(times, dtype)
    return added


def _merged(parts: Sequence[LossPart]) -> list[LossPart]:
    """Merge the divided parts into one, which takes the place of the first of them.

    The merged part has the weight of that first part, because the gradient noise is
    measured with the weight of the first part in the result.
    """
    divided = [part for part in parts if part.divided]
    if not divided:
        return list(parts)
    first = divided[0]
    total = sum(tf.cast(part.total, first.total.dtype) for part in divided)

    merged = []
    for part in parts:
        if part is first:
            merged.append(first._replace(total=total))
        elif not part.divided:
            merged.append(part)
    return merged


def function_losses(
    function: Callable[..., Any], micro_batch: Nest, totals: BatchTotals
) -> MicroBatchLosses:
    """Return the loss that a function computes from a micro-batch.

    The function takes the parts of the micro-batch that are not None. It returns the
    mean loss over the examples, or a tuple of a weighted mean and its divisor, the
    total weight.

    Raises:
        ValueError: the mean is not a scalar.
    """
    result = function(*(part for part in micro_batch if part is not None))
    if isinstance(result, tuple | list):
        mean, weight = result
    else:
        mean = result
        weight = None
    mean = tf.convert_to_tensor(mean)
    if mean.shape.rank:
        rule = "loss must return a scalar, or a tuple of a scalar and its weight"
        raise ValueError(f"{rule}. Received: shape {mean.shape}")

    mean = tf.cast(mean, float32_at_least(mean.dtype))
    micro_batch_examples = tf.cast(examples_in(micro_batch), mean.dtype)
    batch_examples = tf.cast(totals.examples, mean.dtype)
    if weight is None:
        divisor = micro_batch_examples
        total = mean * divisor
        part = LossPart(
            total=total / batch_examples,
            weight=micro_batch_examples / batch_examples,
            effective_examples=micro_batch_examples,
            divided=True,
        )
    else:
        divisor = tf.cast(weight, mean.dtype)
        # Multiply without NaN: a mean with the weight 0 is often 0/0.
        total = tf.math.multiply_no_nan(mean, divisor)
        part = LossPart(
            total, divisor, micro_batch_examples, divided=False, of_function=True
        )
    losses = {"": LossSum(total, total, divisor)}
    return MicroBatchLosses(losses, tf.zeros_like(mean), [part], {})


def losses_from_add_loss(layer: keras.Layer) -> list[tf.Tensor]:
    """Return the losses that a layer and its nested layers added in their last call.

    Weight regularization, which Keras lists last, is left out.
    """
    weights = layer.trainable_variables
    regularized = [weight for weight in weights if weight.regularizer is not None]
    return layer.losses[: len(layer.losses) - len(regularized)]


def weighted_sum(
    loss: keras.losses.Loss,
    y_true: Nest,
    outputs: Nest,
    sample_weight: tf.Tensor | None = None,
    totals: BatchTotals | None = None,
    over_batch: bool = False,
    padded: bool = False,
) -> WeightedSum:
    """Return numerator and denominator of `loss(y_true, outputs, sample_weight)`.

    The computation follows `keras.losses.Loss.__call__` of Keras 3.15. The reductions
    `mean` and `sum_over_batch_size` divide by the number of unmasked loss elements, and
    `mean_with_sample_weight` by the sum of the weights. `sum` does not divide.

    Args:
        loss: a loss whose `call` returns one value per example, or per element of an
            example.
        y_true: labels, with the examples on axis 0.
        outputs: outputs of the model, with the examples on axis 0.
        sample_weight: sample weights, (examples,) or in the shape of the loss values.
        totals: totals of the batch, with the weights of this output alone. Without
            them, `batch_weight` is None or, for the reduction `sum`, `ABSENT`.
        over_batch: whether these are all examples of the effective batch. If so, `call`
            may also return a scalar, or values of another number.
        padded: whether micro-batches are padded, each to its own length.

    Raises:
        ValueError: the loss has no reduction, its `call` returns a scalar or values
            without the examples on axis 0 where it must not, the sample weights do not
            fit the loss values, or the loss counts padded positions.
    """
    if loss.reduction in (None, "none"):
        rule = "The loss must have a reduction"
        received = f"{loss.name} with reduction={loss.reduction!r}"
        raise ValueError(f"{rule}. Received: {received}")
    loss_dtype = tf.as_dtype(loss.dtype)
    dtype = float32_at_least(loss_dtype)  # a count in bfloat16 stops at 256
    output_mask = mask_of(outputs)
    outputs = tf.nest.map_structure(lambda leaf: tf.cast(leaf, loss_dtype), outputs)
    y_true = tf.nest.map_structure(lambda leaf: tf.cast(leaf, loss_dtype), y_true)

    # Do this first: it traces the loss, which may keep a tensor of its last call.
    values_per_example = None
    if totals is not None and output_mask is None:
        values_per_example = _values_per_example(loss, y_true, outputs)
    result = loss.call(y_true, outputs)
    values = _flat_values(result, dtype)
    micro_batch_examples = tf.cast(examples_in(outputs), dtype)
    _check_has_examples(loss, y_true, values, over_batch, sample_weight is not None)
    if values.shape.rank == 0:
        return _sum_of_scalar(loss, values, micro_batch_examples)

    masks = [mask for mask in (output_mask, mask_of(result)) if mask is not None]
    if padded:
        check_loss(loss, (y_true, outputs, sample_weight), result, bool(masks))
    weighting = _weighting(values, masks, sample_weight)
    weighted_values = values
    if weighting.weights is not None:
        weighted_values = values * weighting.weights

    by_weights = loss.reduction == "mean_with_sample_weight"
    if loss.reduction == "sum":
        sums = _sum_reduction(weighted_values, micro_batch_examples)
    elif by_weights and weighting.weights is not None:
        sums = _by_sample_weights(result, weighted_values, weighting, totals)
    else:
        batch_elements = None
        if totals is not None and values_per_example is not None:
            batch_elements = tf.cast(totals.examples, dtype) * values_per_example
        sums = _by_elements(
            result, weighted_values, weighting, micro_batch_examples, batch_elements
        )
    if isinstance(result, tf.RaggedTensor):
        return sums
    return sums._replace(values=LossValues(values, weighting.weights))


def example_losses(
    loss: keras.losses.Loss,
    y_true: Nest,
    outputs: Nest,
    sample_weight: tf.Tensor | None = None,
) -> tf.Tensor:
    """Return the loss that each example has alone, (examples,), float32 at least.

    For the arguments and the errors, see `weighted_sum`.
    """
    loss_dtype = tf.as_dtype(loss.dtype)
    dtype = float32_at_least(loss_dtype)
    output_mask = mask_of(outputs)
    outputs = tf.nest.map_structure(lambda leaf: tf.cast(leaf, loss_dtype), outputs)
    y_true = tf.nest.map_structure(lambda leaf: tf.cast(leaf, loss_dtype), y_true)
    result = loss.call(y_true, outputs)
    values = _flat_values(result, dtype)
    _check_has_examples(loss, y_true, values)

    masks = [mask for mask in (output_mask, mask_of(result)) if mask is not None]
    weighting = _weighting(values, masks, sample_weight)
    counted = tf.ones_like(values)
    if weighting.mask is not None:
        counted *= _product([weighting.mask], values)
    if weighting.weights is not None:
        values *= weighting.weights
    totals = _sums_of_examples(values, result, values)
    if loss.reduction == "sum":
        return totals
    if loss.reduction == "mean_with_sample_weight" and weighting.weights is not None:
        return divide(totals, _sums_of_examples(weighting.weights, result, values))
    return divide(totals, _sums_of_examples(counted, result, values))


def _check_has_examples(
    loss: keras.losses.Loss,
    y_true: Nest,
    values: tf.Tensor,
    over_batch: bool = False,
    is_weighted: bool = False,
) -> None:
    """Reject the values of a loss if the examples are not on their axis 0.

    In a traced micro-step, the number of examples is unknown, and so must be the size
    of this axis. Where the number is known, as in an eager call, only scalars are
    rejected. With `over_batch`, everything is accepted but a scalar that sample weights
    would have to weight.
    """
    if values.shape.rank == 0 and (is_weighted or not over_batch):
        exception = 'unless loss_over is "effective_batch"'
        if over_batch:
            exception = "if there are sample weights"
        rule = f"The loss must give one value per example, not a scalar, {exception}"
        raise ValueError(f"{rule}. Received: {loss.name}")

    labels = first_leaf(y_true)
    has_unknown_size = labels.shape.rank is None or labels.shape[0] is None
    if over_batch or not has_unknown_size or not values.shape.rank:
        return
    if values.shape[0] is not None:
        rule = (
            "The loss must have the examples on axis 0 of its values, unless loss_over "
            'is "effective_batch"'
        )
        received = f"{loss.name} with values of shape {values.shape}"
        raise ValueError(f"{rule}. Received: {received}")


class _Weighting(NamedTuple):
    """The weights of the values of a loss."""

    unmasked_values: tf.Tensor  # number of unmasked values, scalar
    mask: tf.Tensor | None  # product of all masks, 0 or 1
    weights: tf.Tensor | None  # mask × sample weights, in a shape that fits the values


def _weighting(
    values: tf.Tensor, masks: Sequence[tf.Tensor], sample_weight: tf.Tensor | None
) -> _Weighting:
    """Return the weights of the values of a loss.

    A mask may have fewer axes than the values, so that one of its entries masks several
    values. Therefore the number of unmasked values is the number of values × the
    unmasked share of the mask, as in `keras.losses.Loss.__call__`.
    """
    dtype = values.dtype
    unmasked_values = tf.cast(tf.size(values), dtype)
    factors = []
    if sample_weight is not None:
        factors.append(_flat_values(sample_weight, dtype))
    mask = None
    if masks:
        mask = tf.cast(functools.reduce(tf.logical_and, masks), dtype)
        unmasked = tf.reduce_sum(mask)
        unmasked_values *= tf.math.divide_no_nan(
            unmasked, tf.cast(tf.size(mask), dtype)
        )
        factors.insert(0, mask)
    weights = _product(factors, values) if factors else None
    return _Weighting(unmasked_values, mask, weights)


def _sum_reduction(
    weighted_values: tf.Tensor, micro_batch_examples: tf.Tensor
) -> WeightedSum:
    """Return the sum of a loss with the reduction `sum`, which is never divided."""
    return WeightedSum(
        total=tf.reduce_sum(weighted_values),
        weight=ABSENT,
        batch_weight=ABSENT,
        effective_examples=micro_batch_examples,
    )


def _by_sample_weights(
    result: Any,
    weighted_values: tf.Tensor,
    weighting: _Weighting,
    totals: BatchTotals | None,
) -> WeightedSum:
    """Return the sum for a loss that divides by the sum of the weights.

    `result` is the return value of the loss.
    """
    weights = weighting.weights
    assert weights is not None
    batch_weight = None
    # `totals.weights` is the divisor only without a mask, which it does not include.
    if totals is not None and weighting.mask is None:
        batch_weight = tf.cast(totals.weights, weights.dtype)
    return WeightedSum(
        total=tf.reduce_sum(weighted_values),
        weight=tf.reduce_sum(weights),
        batch_weight=batch_weight,
        effective_examples=_effective_examples(weights, result, weighted_values),
    )


def _by_elements(
    result: Any,
    weighted_values: tf.Tensor,
    weighting: _Weighting,
    micro_batch_examples: tf.Tensor,
    batch_elements: tf.Tensor | None,
) -> WeightedSum:
    """Return the sum for a loss that divides by the number of its unmasked elements.

    `result` is the return value of the loss. `batch_elements` is the number of elements
    in the batch before masking, or None if it is unknown.
    """
    batch_weight = batch_elements
    if weighting.mask is not None:
        batch_weight = None
        effective = _effective_examples(weighting.mask, result, weighted_values)
    elif isinstance(result, tf.RaggedTensor):
        ones = tf.ones_like(weighted_values)
        effective = _effective_examples(ones, result, weighted_values)
    else:
        effective = micro_batch_examples
    return WeightedSum(
        total=tf.reduce_sum(weighted_values),
        weight=weighting.unmasked_values,
        batch_weight=batch_weight,
        effective_examples=effective,
    )


def _sum_of_scalar(
    loss: keras.losses.Loss, value: tf.Tensor, batch_examples: tf.Tensor
) -> WeightedSum:
    """Return the sum for a loss that returns one scalar for all examples of a batch.

    Unless the reduction is `sum`, the scalar is weighted by the number of examples, so
    that an evaluation averages it over batches.
    """
    if loss.reduction == "sum":
        return WeightedSum(value, ABSENT, None, batch_examples)
    return WeightedSum(value * batch_examples, batch_examples, None, batch_examples)


def _effective_examples(
    weights: tf.Tensor, result: Any, values: tf.Tensor
) -> tf.Tensor:
    """Return (Σ wᵢ)² / Σ wᵢ² over examples; 0 if all weights are 0.

    The weight wᵢ of an example is the sum of `weights` over all axes but the first.
    `result` is the return value of the loss, and `values` are its flat values.
    """
    of_examples = _sums_of_examples(weights, result, values)
    square_of_sum = tf.square(tf.reduce_sum(of_examples))
    sum_of_squares = tf.reduce_sum(tf.square(of_examples))
    return tf.math.divide_no_nan(square_of_sum, sum_of_squares)


def _sums_of_examples(weights: tf.Tensor, result: Any, values: tf.Tensor) -> tf.Tensor:
    """Return the sum of `weights` over all axes but the first, (examples,).

    `result` is the return value of the loss, and `values` are its flat values, which
    the weights fit.
    """
    if isinstance(result, tf.RaggedTensor):
        flat_weights = tf.broadcast_to(weights, tf.shape(values))
        weights = tf.cast(result, values.dtype).with_flat_values(flat_weights)
    return tf.reduce_sum(weights, list(range(1, weights.shape.rank)))


def float32_at_least(dtype: tf.DType) -> tf.DType:
    """Return the dtype for sums of `dtype` values: float32 for half precision."""
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def nonzero(weight: tf.Tensor) -> tf.Tensor:
    """Return the weight, with 0 replaced by 1."""
    return tf.where(weight == 0, tf.ones_like(weight), weight)


def divide(value: Any, weight: Any) -> Any:
    """Return a tensor or `tf.IndexedSlices` divided by a weight.

    If the weight is `ABSENT`, the value is returned undivided. If it is 0, the result is
    0, as in Keras.
    """
    if is_absent(weight):
        return value
    if isinstance(value, tf.IndexedSlices):
        rows = divide(value.values, weight)
        return tf.IndexedSlices(rows, value.indices, value.dense_shape)
    return tf.math.divide_no_nan(value, tf.cast(weight, value.dtype))


def _values_per_example(
    loss: keras.losses.Loss, y_true: Nest, outputs: Nest
) -> int | None:
    """Return the number of loss values per example, or None if it is not fixed.

    The number follows from the static shapes of the loss for three examples.
    """
    for leaf in tf.nest.flatten((y_true, outputs)):
        if isinstance(leaf, tf.RaggedTensor) or leaf.shape.rank is None:
            return None
    specs = [
        tf.TensorSpec([3, *leaf.shape[1:]], leaf.dtype) for leaf in (y_true, outputs)
    ]
    try:
        traced = tf.function(loss.call, autograph=False).get_concrete_function(*specs)
    except Exception:  # the loss does not take three examples
        return None
    count = tf.TensorShape(traced.structured_outputs.shape).num_elements()
    if count is None or count % 3:
        return None
    return count // 3


def _flat_values(values: Any, dtype: tf.DType) -> tf.Tensor:
    values = tf.cast(values, dtype)
    if isinstance(values, tf.RaggedTensor):
        return values.flat_values
    return values


def _product(factors: Sequence[tf.Tensor], values: tf.Tensor) -> tf.Tensor:
    """Return the product of a mask and weights, in a shape that fits `values`."""
    rank = max(factor.shape.rank for factor in factors)
    aligned = [_aligned(factor, rank) for factor in factors]
    weights = _aligned(functools.reduce(tf.multiply, aligned), values.shape.rank)
    if not _fits(weights.shape, values.shape):
        subject = f"sample weights of shape {weights.shape}"
        raise ValueError(f"{subject} do not fit values of shape {values.shape}")
    return weights


def _fits(weights: tf.TensorShape, values: tf.TensorShape) -> bool:
    """Return whether weights broadcast to values, as far as static shapes tell."""
    if weights.rank > values.rank:
        return False
    for weights_size, values_size in zip(weights[1:], values[1:], strict=False):
        if weights_size not in (1, None) and values_size:
            if weights_size != values_size:
                return False
    return True


def _aligned(weights: tf.Tensor, rank: int) -> tf.Tensor:
    """Add or remove last axes of size 1 until `weights` has `rank` axes.

    Weights of shape (examples,) then apply to every element of an example.
    """
    while weights.shape.rank < rank:
        weights = tf.expand_dims(weights, -1)
    while weights.shape.rank > rank and weights.shape[-1] == 1:
        weights = tf.squeeze(weights, -1)
    return weights
