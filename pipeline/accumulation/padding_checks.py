"""Rejects models whose outputs depend on how long a micro-batch is padded.

How a layer treats padding cannot be read from the layer, so it is tried: made-up
examples are computed as they are, and with more padding. Their outputs, and the losses
that the layers add, must be the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .batch import Batches, Nest, Share, examples_in, parts_of
from .forward_effects import outermost_layers
from .keras_internals import calling, layers_of, mask_of
from .loss_sums import losses_from_add_loss
from .padding import check_ragged, with_position_weights
from .same_noise import noise_by_position, noisy_layers

_LENGTHS = (1, 5)  # positions of the made-up examples
_DRAWS = 6  # examples of each length: in a single one, a maximum may hide padding
_PADDING = 3  # more positions, at the end of an example

# Largest difference, relative to the largest value, that counts as rounding, by the
# least precise dtype in which a layer computes. Padding changes outputs by much more.
_ROUNDING = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


@tf.autograph.experimental.do_not_convert
def prepared_for_tokens(
    model: keras.Model | None, batch: Nest | Share | Batches, training: bool = True
) -> Nest | Share:
    """Check a batch that is to be cut by tokens, and its model; return the batch.

    With a model, the positions of ragged labels get sample weights. Without one, the
    loss is a function of a micro-batch, which must ignore padding itself.

    Raises:
        ValueError: the batch cannot be cut by tokens, or outputs or losses of the model
            depend on padding.
    """
    check_ragged(batch)
    if model is None:
        return batch
    if training:
        _check_normalization(model)
    _check_outputs(model, parts_of(batch)[0])
    return with_position_weights(batch)


@tf.autograph.experimental.do_not_convert
def check_noise(model: keras.Model, x: Nest) -> None:
    """Reject a model whose noise by position changes with more padding.

    The noise of an example is drawn from its first position on, so padding must be at
    the end where a layer draws. A model is not checked if some of its noise depends on
    the cut anyway, or if its weights are not finite.

    Args:
        model: the model.
        x: its inputs, with ragged sequences.

    Raises:
        ValueError: the outputs in training change with more padding.
    """
    with tf.init_scope():
        if not tf.executing_eagerly():
            return
        if not _has_finite_weights(model):
            return
        noisy = noisy_layers(model, None)
        for length in _LENGTHS:
            with tf.device("CPU:0"):
                try:
                    alone = _noisy_outputs(model, noisy, x, length, 0)
                    longer = _noisy_outputs(model, noisy, x, length, _PADDING)
                except Exception:  # as in `_check_outputs`
                    continue
            if alone is None or longer is None:
                continue
            pairs = zip(alone, longer, strict=True)
            if not all(_close(*pair, _rounding(model)) for pair in pairs):
                rule = "with micro_batch_tokens, same_noise must be False if a layer"
                case = "draws noise on inputs whose padding is not at their end"
                raise ValueError(f"{rule} {case}. Received: {model.name}")


def _noisy_outputs(
    model: keras.Model,
    noisy: list[keras.Layer],
    x: Nest,
    length: int,
    padding: int,
) -> list[np.ndarray] | None:
    """Compute a made-up example in training, with noise of fixed seeds.

    Return None as `_trial` does, or if some noise depends on the cut anyway.
    """
    numbers = np.random.default_rng(0)
    leaves = [_example(leaf, length, padding, numbers) for leaf in tf.nest.flatten(x)]
    if any(leaf is None for leaf in leaves):
        return None
    example = tf.nest.pack_sequence_as(x, leaves)
    specs = []
    for leaf, made_up in zip(tf.nest.flatten(x), leaves, strict=True):
        assert made_up is not None
        sizes = [None, *made_up.shape[1:]]
        if isinstance(leaf, tf.RaggedTensor):
            sizes[1] = None
        specs.append(tf.TensorSpec(sizes, made_up.dtype))
    signature = tf.nest.pack_sequence_as(x, specs)
    seeds = [tf.constant([1, number], tf.int64) for number in range(len(noisy))]

    @tf.function(input_signature=[signature], autograph=False)
    def call(inputs: Nest) -> list[tf.Tensor]:
        examples = examples_in(inputs)
        with noise_by_position(noisy, seeds, tf.range(examples), examples):
            return tf.nest.flatten(model(inputs, training=True))

    with keras.StatelessScope(state_mapping=_varied(model, numbers)) as scope:
        traced = call.get_concrete_function()
    states = [layer.seed_generator.state for layer in noisy]
    drawn = [scope.get_current_value(state) is not None for state in states]
    if any(drawn):
        return None
    return _arrays(traced(*tf.nest.flatten(example)))


def _check_normalization(model: keras.Model) -> None:
    """Reject BatchNormalization, which would see examples of similar length."""
    names = []
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            names.append(layer.name)
    if names:
        rule = (
            "with micro_batch_tokens, model must have no trainable BatchNormalization"
        )
        reason = "because its statistics would be those of examples of similar length"
        raise ValueError(f"{rule}, {reason}. Received: {', '.join(names)}")


def _check_outputs(model: keras.Model, x: Nest) -> None:
    """Reject a model whose outputs or added losses change with more padding.

    A model that does not take made-up examples is not tried. Neither is one whose
    weights are not finite, as after a divergence: its outputs say nothing about
    padding, and the training loop reports that they are not finite.
    """
    with tf.init_scope():
        if not tf.executing_eagerly():
            return
        if not _has_finite_weights(model):
            return
        for length, seed in product(_LENGTHS, range(_DRAWS)):
            with tf.device("CPU:0"):  # which has no TF32
                try:
                    alone = _trial(model, x, length, 0, seed)
                    longer = _trial(model, x, length, _PADDING, seed)
                except Exception:  # the model needs other values, or longer examples
                    continue
            if alone is not None and longer is not None:
                _check_trial(model, alone, longer)


def _check_trial(model: keras.Model, alone: _Trial, longer: _Trial) -> None:
    """Reject a model whose results for an example change with more padding."""
    rounding = _rounding(model)
    otherwise = "or cut padded batches by micro_batch_size alone"

    outputs = zip(alone.outputs, longer.outputs, strict=True)
    if not all(_close(*pair, rounding) for pair in outputs):
        rule = "must give the same outputs when an example is padded at its end"
        remedy = "mask the padding"
        received = model.name
        call = _first_that_differs(alone, longer, rounding)
        if call is not None:
            remedy, received = _remedy_for(call)
        raise ValueError(
            f"with micro_batch_tokens, model {rule}: {remedy}, {otherwise}. "
            f"Received: {received}"
        )
    if longer.mask_counts_padding:
        rule = "must leave padding out of the masks of its outputs"
        raise ValueError(
            f"with micro_batch_tokens, model {rule}. Received: {model.name}"
        )
    for name, loss in alone.added.items():
        if not _close(loss, longer.added[name], rounding):
            rule = "must add the same loss when an example is padded at its end"
            remedy = "leave padding out of this loss"
            raise ValueError(
                f"with micro_batch_tokens, model {rule}: {remedy}, {otherwise}. "
                f"Received: {name}"
            )


def _remedy_for(call: _LayerCall) -> tuple[str, str]:
    """Return what to do about a layer that depends on padding, and its description."""
    layer = f"{call.layer.name} ({type(call.layer).__name__})"
    if call.has_mask:
        remedy = "use a layer that respects the mask of its inputs"
        return remedy, f"{layer}, which ignores the mask"
    if call.mask_dropped_by is not None:
        dropping = call.mask_dropped_by
        remedy = "use layers that pass their mask on"
        reason = f"{dropping.name} ({type(dropping).__name__}) drops the mask"
        return remedy, f"{layer}, whose inputs have no mask: {reason}"
    remedy = "mask the padding, as Masking or Embedding(mask_zero=True) does"
    return remedy, f"{layer}, whose inputs have no mask"


@dataclass(frozen=True)
class _LayerCall:
    """A call of a layer in a trial.

    Attributes:
        layer: the layer.
        outputs: the numbers in the outputs.
        has_mask: whether an input has a mask.
        mask_dropped_by: the last layer, among those called before, that got a mask but
            does not support masks, so that its outputs have none; None if no layer did.
    """

    layer: keras.Layer
    outputs: list[np.ndarray]
    has_mask: bool
    mask_dropped_by: keras.Layer | None


@dataclass(frozen=True)
class _Trial:
    """The results of a model for one made-up example.

    Attributes:
        outputs: the outputs of the model.
        mask_counts_padding: whether the mask of an output is true for padding.
        added: by the name of a layer, the sum of the losses that it adds.
        calls: the calls of layers, by the layer's name and the number of its call.
    """

    outputs: list[np.ndarray]
    mask_counts_padding: bool
    added: dict[str, np.ndarray]
    calls: dict[tuple[str, int], _LayerCall]


def _trial(
    model: keras.Model, x: Nest, length: int, padding: int, seed: int
) -> _Trial | None:
    """Compute a made-up example; return None if none can be made for inputs like `x`.

    Args:
        model: the model.
        x: inputs of the model, which show the form of the example.
        length: the number of positions of the example.
        padding: the number of positions of padding after them.
        seed: chooses the values.
    """
    numbers = np.random.default_rng(seed)
    leaves = [_example(leaf, length, padding, numbers) for leaf in tf.nest.flatten(x)]
    if any(leaf is None for leaf in leaves):
        return None
    example = tf.nest.pack_sequence_as(x, leaves)

    calls: dict[tuple[str, int], _LayerCall] = {}
    mask_dropped_by: keras.Layer | None = None

    def recording(layer: keras.Layer) -> Callable[..., Any]:
        keras_call = layer.call
        count = 0

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count, mask_dropped_by
            outputs = keras_call(*arguments, **options)
            has_mask = _has_mask(arguments, options)
            calls[layer.name, count] = _LayerCall(
                layer, _arrays(outputs), has_mask, mask_dropped_by
            )
            count += 1
            if has_mask and not layer.supports_masking:
                mask_dropped_by = layer
            return outputs

        return call

    layers = []
    for layer in outermost_layers(model):
        if not isinstance(layer, keras.Model) and layer not in layers:
            layers.append(layer)
    # The scope discards what the pass assigns. It has the losses that layers add.
    scope = keras.StatelessScope(
        state_mapping=_varied(model, numbers), collect_losses=True
    )
    added = {}
    with scope, calling((layer, recording(layer)) for layer in layers):
        outputs = model(example, training=False)
        for layer in [*layers, model]:
            losses = losses_from_add_loss(layer)
            total = sum(float(tf.reduce_sum(loss)) for loss in losses)
            added[layer.name] = np.asarray(total)
    counts_padding = any(
        _counts_padding(output, length) for output in tf.nest.flatten(outputs)
    )
    return _Trial(_arrays(outputs), bool(counts_padding), added, calls)


def _has_mask(arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether a layer is called with a mask, or with inputs that have one."""
    if options.get("mask") is not None:
        return True
    leaves = tf.nest.flatten((arguments, options))
    return any(mask_of(leaf) is not None for leaf in leaves)


def _example(
    leaf: Any, length: int, padding: int, numbers: np.random.Generator
) -> tf.Tensor | None:
    """Return a made-up example for a part of the inputs, or None for strings.

    Integers are 1, which any vocabulary has, and which masks do not leave out.
    """
    sizes = leaf.shape[1:].as_list()
    is_ragged = isinstance(leaf, tf.RaggedTensor)
    if is_ragged:
        sizes[0] = length
    if leaf.dtype == tf.string or None in sizes:
        return None
    if leaf.dtype.is_floating:
        values = numbers.normal(size=[1, *sizes])
    else:
        values = np.ones([1, *sizes])
    if is_ragged:
        axes = [[0, 0]] * values.ndim
        axes[1] = [0, padding]
        values = np.pad(values, axes)
    return tf.constant(values.astype(leaf.dtype.as_numpy_dtype))


def _varied(
    model: keras.Model, numbers: np.random.Generator
) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Return values for weights that are all zero, because zeros would hide padding."""
    values = []
    for variable in model.trainable_variables:
        value = tf.convert_to_tensor(variable)
        if value.dtype.is_floating and not tf.reduce_any(value != 0):
            noise = numbers.normal(size=value.shape)
            values.append((variable, tf.cast(noise, value.dtype)))
    return values


def _has_finite_weights(model: keras.Model) -> bool:
    for variable in model.weights:
        value = tf.convert_to_tensor(variable)
        if value.dtype.is_floating and not tf.reduce_all(tf.math.is_finite(value)):
            return False
    return True


def _counts_padding(output: Any, length: int) -> bool:
    mask = mask_of(output)
    if mask is None or mask.shape.rank < 2:
        return False
    return bool(tf.reduce_any(mask[:, length:]))


def _arrays(outputs: Any) -> list[np.ndarray]:
    """Return the numbers in a layer's outputs, in float64 at most."""
    arrays = []
    for output in tf.nest.flatten(outputs):
        if tf.is_tensor(output) and output.dtype.is_floating:
            arrays.append(tf.cast(output, tf.float64).numpy())
    return arrays


def _rounding(model: keras.Model) -> float:
    dtypes = [model.compute_dtype]
    for layer in layers_of(model):
        dtypes.append(layer.compute_dtype)
    return max(_ROUNDING.get(str(dtype), 0.0) for dtype in dtypes)


def _close(value: np.ndarray, longer: np.ndarray, rounding: float) -> bool:
    """Return whether values are equal where both have elements.

    NaN equals NaN, and an infinity equals itself: a layer may give them for the made-up
    values, whatever the padding.
    """
    common = tuple(map(slice, map(min, value.shape, longer.shape)))
    value = value[common]
    largest = np.max(np.abs(value), initial=0.0, where=np.isfinite(value))
    return np.allclose(
        longer[common], value, rtol=0.0, atol=rounding * largest, equal_nan=True
    )


def _first_that_differs(
    alone: _Trial, longer: _Trial, rounding: float
) -> _LayerCall | None:
    """Return the first call of a layer whose outputs change."""
    for key, call in alone.calls.items():
        same_call = longer.calls.get(key, call)
        pairs = zip(call.outputs, same_call.outputs, strict=True)
        if not all(_close(*pair, rounding) for pair in pairs):
            return call
    return None
