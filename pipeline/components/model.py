"""Builds the Keras model of a config, and defines the models in `conf/model`."""

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from omegaconf import DictConfig

from pipeline.accumulation.internals import unsupported
from pipeline.common.errors import ConfigError
from pipeline.dataset.splits import Data
from pipeline.trust import instantiate

# Errors for parameters of a model that the dataset cannot provide.
_NOT_OFFERED = {
    "classes": (
        "must be given: return pipeline.dataset.Data(…, …, classes=10) from the "
        "dataset's function, with the model's number of classes, even for examples "
        "without labels; or train with +model.classes=10"
    ),
    "input_shape": (
        "must be given, as the dataset has several inputs; or use a model that does "
        "not need it"
    ),
}


def build(node: DictConfig, data: Data) -> keras.Model:
    """Build the model that `node` describes.

    The target may have the parameters `input_shape` (of one example, without the batch
    axis), `classes`, and `training_examples` (the training split, example by example;
    not with `dataset.batched`). Those that the config leaves out come from the dataset.

    Args:
        node: the `model` group of the config.
        data: the loaded dataset.

    Raises:
        ConfigError: a target or an argument is wrong, or the model cannot be trained.
    """
    offers: dict[str, Any] = {"input_shape": data.input_shape, "classes": data.classes}
    if not data.loaders:
        offers["training_examples"] = data.train
    builder = instantiate.locate(node, "model")
    arguments = instantiate.accepted(builder, node, **offers)
    for name in instantiate.required(builder) & arguments.keys():
        if arguments[name] is None:
            raise ConfigError(f"model.{name}", _NOT_OFFERED[name])
    model = instantiate.build(node, "model", **arguments)
    if not isinstance(model, keras.Model):
        rule = "must return a keras.Model"
        raise ConfigError("model._target_", rule, type(model).__name__)
    for rule, received in unsupported(model, as_by_fit=True):
        raise ConfigError("model", rule, received)
    return model


def mlp(
    input_shape: Sequence[int],
    classes: int,
    hidden: Sequence[int] = (128, 128),
    dropout: float = 0.0,
    l2: float = 0.0,
) -> keras.Model:
    """Return a multilayer perceptron on the flattened input.

    Args:
        input_shape: shape of one example, of any rank.
        classes: number of classes; the outputs are logits, (batch, classes).
        hidden: widths of the hidden layers.
        dropout: dropout rate after each hidden layer.
        l2: factor of the L2 penalty on the kernels.

    Raises:
        ValueError: an argument is out of range.
    """
    _check(classes=[classes], hidden=hidden, dropout=dropout, l2=l2)
    inputs = keras.Input(tuple(input_shape))
    x = inputs if len(input_shape) == 1 else layers.Flatten()(inputs)
    logits = _head(x, classes, hidden, dropout, l2)
    return keras.Model(inputs, logits, name="mlp")


def cnn(
    input_shape: Sequence[int],
    classes: int,
    filters: Sequence[int] = (64, 128),
    kernel_size: int = 3,
    hidden: Sequence[int] = (128,),
    dropout: float = 0.0,
    l2: float = 0.0,
) -> keras.Model:
    """Return a convolutional network with dense layers at its end.

    Each convolution is followed by 2×2 max pooling, unless a side of the image is
    already down to one pixel.

    Args:
        input_shape: (height, width, channels).
        classes: number of classes; the outputs are logits, (batch, classes).
        filters: number of channels of each convolution.
        kernel_size: height and width of the convolution kernels.
        hidden, dropout, l2: see `mlp`. They apply to the dense layers, and `l2` also to
            the convolutions.

    Raises:
        ValueError: an argument is out of range, or the input is not an image.
    """
    if len(input_shape) != 3:
        rule = "input_shape must be (height, width, channels)"
        raise ValueError(f"{rule}. Received: {tuple(input_shape)}")
    _check(
        filters=filters,
        kernel_size=[kernel_size],
        hidden=hidden,
        classes=[classes],
        dropout=dropout,
        l2=l2,
    )
    inputs = keras.Input(tuple(input_shape))
    x = inputs
    for channels in filters:
        x = layers.Conv2D(
            channels,
            kernel_size,
            padding="same",
            activation="relu",
            kernel_regularizer=_l2(l2),
        )(x)
        if min(x.shape[1:3]) >= 2:
            x = layers.MaxPooling2D()(x)
    logits = _head(layers.Flatten()(x), classes, hidden, dropout, l2)
    return keras.Model(inputs, logits, name="cnn")


def tabular(
    input_shape: Sequence[int],
    training_examples: tf.data.Dataset,
    hidden: Sequence[int] = (64, 64),
    activation: str | None = None,
    dropout: float = 0.0,
    l2: float = 0.0,
) -> keras.Model:
    """Return a multilayer perceptron on normalized measurements, with one output.

    Args:
        input_shape: shape of one example, (measurements,).
        training_examples: the examples from which the normalization layer takes the
            mean and the variance of each measurement.
        hidden, dropout, l2: see `mlp`.
        activation: activation of the output, such as `sigmoid`, or None for a linear
            output.

    Raises:
        ValueError: an argument is out of range, or an example is not a vector.
    """
    _check(hidden=hidden, dropout=dropout, l2=l2)
    if len(input_shape) != 1:
        rule = "input_shape must be (measurements,)"
        raise ValueError(f"{rule}. Received: {tuple(input_shape)}")
    inputs = keras.Input(tuple(input_shape))
    # Normalize in full precision even under a mixed policy: measurements and their
    # variances may exceed the range of float16.
    normalization = layers.Normalization(dtype=keras.config.floatx())
    normalization.adapt(training_examples.map(lambda x, *_: x).batch(1024))
    outputs = _head(normalization(inputs), 1, hidden, dropout, l2)
    if activation:
        outputs = layers.Activation(activation, dtype=outputs.dtype)(outputs)
    return keras.Model(inputs, outputs, name="tabular")


def decoder(
    classes: int,
    length: int,
    width: int = 64,
    blocks: int = 2,
    heads: int = 4,
    dropout: float = 0.0,
) -> keras.Model:
    """Return a decoder-only transformer with pre-layer normalization.

    Inputs are token numbers, of shape (batch, time). Outputs are logits, of shape
    (batch, time, classes).

    Args:
        classes: size of the vocabulary.
        length: maximum length of a sequence.
        width: width of the residual stream, a multiple of `heads`.
        blocks: number of blocks, each with an attention layer and two dense layers.
        heads: number of heads per attention layer.
        dropout: dropout rate after each attention layer and each pair of dense layers.

    Raises:
        ValueError: an argument is out of range, or `width` is not a multiple of
            `heads`.
    """
    _check(
        dropout=dropout,
        classes=[classes],
        length=[length],
        width=[width],
        blocks=[blocks],
        heads=[heads],
    )
    if width % heads:
        rule = f"width must be a multiple of heads, {heads}"
        raise ValueError(f"{rule}. Received: {width}")
    tokens = keras.Input((None,), dtype="int32")
    positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    embedded_tokens = layers.Embedding(classes, width)(tokens)
    x = embedded_tokens + layers.Embedding(length, width)(positions)
    for _ in range(blocks):
        normed = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(heads, width // heads)
        attended = attention(normed, normed, use_causal_mask=True)
        x += _dropped(attended, dropout)

        normed = layers.LayerNormalization()(x)
        # Keep the order in which these layers are created: each draws its seed then.
        narrow = layers.Dense(width)
        wide = layers.Dense(4 * width, activation="gelu")
        x += _dropped(narrow(wide(normed)), dropout)
    x = layers.LayerNormalization()(x)
    logits = layers.Dense(classes, dtype=keras.config.floatx())(x)
    return keras.Model(tokens, logits, name="decoder")


def application(
    input_shape: Sequence[int],
    classes: int,
    name: str,
    weights: str | None = None,
    frozen: Sequence[str] = (),
) -> keras.Model:
    """Return a network from `keras.applications`, with a new layer for the classes.

    A dense layer computes the logits from the average-pooled features.

    Args:
        input_shape, classes: see `cnn`.
        name: name of the network, such as `ResNet50` or `MobileNetV2`.
        weights: a `.keras` or `.weights.h5` file with weights of this network. Weights
            of a `.keras` file are loaded into layers of the same name, those of a
            `.weights.h5` file in the order of the layers. Layers whose weights do not
            fit, such as the last one, keep their initial weights.
        frozen: patterns for names of layers that are not trained, such as `conv1_*`.

    Raises:
        ValueError: there is no network `name`, it does not take the input shape, a
            pattern matches no layer, or the weights are missing, of another file type,
            or fit no layer.
    """
    build = getattr(keras.applications, name, None)
    if not callable(build) or not name[:1].isupper():
        rule = "name must be a model of keras.applications"
        raise ValueError(f"{rule}. Received: {name}")
    base = build(
        include_top=False, weights=None, input_shape=tuple(input_shape), pooling="avg"
    )
    head = layers.Dense(classes, dtype=keras.config.floatx(), name="logits")
    model = keras.Model(base.input, head(base.output), name=name.lower())
    if weights is not None:
        _take_weights(model, weights)
    for pattern in frozen:
        matching = [
            layer for layer in model.layers if fnmatch.fnmatchcase(layer.name, pattern)
        ]
        if not matching:
            rule = "frozen must have only patterns that match a layer's name"
            raise ValueError(f"{rule}. Received: {pattern}")
        for layer in matching:
            layer.trainable = False
    return model


def _take_weights(model: keras.Model, file: str) -> None:
    """Load weights from a file into the layers that they fit.

    Raises:
        ValueError: the file is missing or of another type, or its weights fit no layer.
    """
    if not Path(file).is_file():
        raise ValueError(f"weights must be a file that exists. Received: {file}")
    if file.endswith(".weights.h5"):
        before = model.get_weights()
        model.load_weights(file, skip_mismatch=True)
        fits = not all(map(np.array_equal, before, model.get_weights()))
    elif file.endswith(".keras"):
        fits = _take_weights_by_name(
            model, keras.models.load_model(file, compile=False)
        )
    else:
        rule = "weights must be a .keras or .weights.h5 file"
        raise ValueError(f"{rule}. Received: {file}")
    if not fits:
        rule = "weights must fit at least one layer of this model"
        raise ValueError(f"{rule}. Received: {file}")


def _take_weights_by_name(model: keras.Model, source: keras.Model) -> bool:
    """Copy weights from layers of `source` to layers of the same name and shapes.

    Return whether any layer was copied.
    """
    weights_by_layer = {layer.name: layer.get_weights() for layer in source.layers}
    fits = False
    for layer in model.layers:
        weights = weights_by_layer.get(layer.name)
        if not weights:
            continue
        shapes = [weight.shape for weight in weights]
        if shapes == [variable.shape for variable in layer.weights]:
            layer.set_weights(weights)
            fits = True
    return fits


def _dropped(x: keras.KerasTensor, dropout: float) -> keras.KerasTensor:
    return layers.Dropout(dropout)(x) if dropout else x


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check(*, dropout: float, l2: float = 0.0, **sizes: Sequence[int]) -> None:
    """Raise a ValueError if a size, `dropout` or `l2` is out of range."""
    for name, values in sizes.items():
        if not all(map(_is_size, values)):
            rule = f"{name}: each size must be a whole number of at least 1"
            raise ValueError(f"{rule}. Received: {list(values)}")
    if isinstance(dropout, bool) or not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1. Received: {dropout}")
    if isinstance(l2, bool) or not 0 <= l2 < float("inf"):
        raise ValueError(f"l2 must be a number of at least 0. Received: {l2}")


def _head(
    x: keras.KerasTensor, classes: int, hidden: Sequence[int], dropout: float, l2: float
) -> keras.KerasTensor:
    """Return logits that hidden layers and an output layer compute from `x`."""
    for units in hidden:
        dense = layers.Dense(units, activation="relu", kernel_regularizer=_l2(l2))
        x = _dropped(dense(x), dropout)
    # Compute logits in full precision even under a mixed policy: a softmax in float16
    # is too coarse for the loss.
    logits = layers.Dense(
        classes, dtype=keras.config.floatx(), kernel_regularizer=_l2(l2)
    )
    return logits(x)


def _l2(factor: float) -> keras.regularizers.Regularizer | None:
    return keras.regularizers.L2(factor) if factor else None
