"""Config → keras.Model, of the dataset's shape and number of classes."""

import fnmatch
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from omegaconf import DictConfig

from pipeline.accumulation.internals import unsupported
from pipeline.common.errors import ConfigError
from pipeline.dataset.splits import Data
from pipeline.trust import instantiate


def build(node: DictConfig, data: Data) -> keras.Model:
    """Return the model of `node`. A builder gets `input_shape` (of one example, without the batch), `classes` and
    `training_examples` (the training split, example by example) where it has parameters of those names and the config
    gives them no value. Raise a `ConfigError` for a wrong target or argument, or a model that cannot be trained here.
    """
    known = {"input_shape": data.input_shape, "classes": data.classes}
    known |= {} if data.loaders else {"training_examples": data.train}
    offers = instantiate.accepted(instantiate.locate(node, "model"), node, **known)
    model = instantiate.build(node, "model", **offers)
    if not isinstance(model, keras.Model):
        raise ConfigError(
            "model._target_", "must give a keras.Model", type(model).__name__
        )
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
    """Return dense layers over the flattened input.

    Args:
        input_shape: of one example, any rank.
        classes: width of the output, which are logits.
        hidden: widths of the hidden layers.
        dropout: share of each hidden layer's outputs that is dropped.
        l2: factor of the weights' L2 penalty.
    """
    _check(classes=[classes], hidden=hidden, dropout=dropout, l2=l2)
    inputs = keras.Input(tuple(input_shape))
    x = inputs if len(input_shape) == 1 else layers.Flatten()(inputs)
    return keras.Model(inputs, _head(x, classes, hidden, dropout, l2), name="mlp")


def cnn(
    input_shape: Sequence[int],
    classes: int,
    filters: Sequence[int] = (64, 128),
    kernel_size: int = 3,
    hidden: Sequence[int] = (128,),
    dropout: float = 0.0,
    l2: float = 0.0,
) -> keras.Model:
    """Return convolutions, each followed by 2×2 pooling while the image is large enough, then dense layers.

    Args:
        input_shape: (height, width, channels).
        classes: width of the output, which are logits.
        filters, kernel_size: channels, and height and width, of each convolution.
        hidden, dropout, l2: as for `mlp`, for the dense layers; `l2` holds for the convolutions too.
    """
    if len(input_shape) != 3:
        raise ValueError(
            f"input_shape must be (height, width, channels). Received: {tuple(input_shape)}"
        )
    _check(
        filters=filters,
        kernel_size=[kernel_size],
        hidden=hidden,
        classes=[classes],
        dropout=dropout,
        l2=l2,
    )
    x = inputs = keras.Input(tuple(input_shape))
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
    return keras.Model(
        inputs, _head(layers.Flatten()(x), classes, hidden, dropout, l2), name="cnn"
    )


def tabular(
    input_shape: Sequence[int],
    training_examples: tf.data.Dataset,
    hidden: Sequence[int] = (64, 64),
    activation: str | None = None,
    dropout: float = 0.0,
    l2: float = 0.0,
) -> keras.Model:
    """Return dense layers over measurements that are normalised as those of the training split, with one output.

    Args:
        input_shape: of one example, (measurements,).
        training_examples: whose means and variances the first layer takes.
        hidden, dropout, l2: as for `mlp`.
        activation: of the output, such as `sigmoid`.
    """
    _check(hidden=hidden, dropout=dropout, l2=l2)
    if len(input_shape) != 1:
        raise ValueError(
            f"input_shape must be (measurements,). Received: {tuple(input_shape)}"
        )
    inputs = keras.Input(tuple(input_shape))
    # In full precision under a mixed policy: measurements and their variances may be larger than float16 holds.
    normalisation = layers.Normalization(dtype=keras.config.floatx())
    normalisation.adapt(training_examples.map(lambda x, *_: x).batch(1024))
    x = _head(normalisation(inputs), 1, hidden, dropout, l2)
    return keras.Model(
        inputs,
        layers.Activation(activation, dtype=x.dtype)(x) if activation else x,
        name="tabular",
    )


def decoder(
    classes: int,
    length: int,
    width: int = 64,
    blocks: int = 2,
    heads: int = 4,
    dropout: float = 0.0,
) -> keras.Model:
    """Return a decoder-only transformer, with a layer norm before each attention and before each two dense layers.

    Args:
        classes: number of tokens, and width of the output, which are logits (batch, time, tokens).
        length: longest sequence.
        width: of the residual stream, a multiple of `heads`.
        blocks, heads: of attention and dense layers, and of each attention.
        dropout: share of each block's outputs that is dropped.
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
        raise ValueError(
            f"width must be a multiple of heads, {heads}. Received: {width}"
        )
    tokens = keras.Input((None,), dtype="int32")
    positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(classes, width)(tokens) + layers.Embedding(length, width)(
        positions
    )
    for _ in range(blocks):
        normed = layers.LayerNormalization()(x)
        x += _dropped(
            layers.MultiHeadAttention(heads, width // heads)(
                normed, normed, use_causal_mask=True
            ),
            dropout,
        )
        normed = layers.LayerNormalization()(x)
        x += _dropped(
            layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(normed)),
            dropout,
        )
    x = layers.LayerNormalization()(x)
    return keras.Model(
        tokens, layers.Dense(classes, dtype=keras.config.floatx())(x), name="decoder"
    )


def application(
    input_shape: Sequence[int],
    classes: int,
    name: str,
    weights: str | None = None,
    frozen: Sequence[str] = (),
) -> keras.Model:
    """Return a network of `keras.applications` with a dense layer of `classes` logits on its pooled features.

    Args:
        input_shape, classes: as for `cnn`.
        name: such as `ResNet50` or `MobileNetV2`.
        weights: your own, of this network: a `.keras` file, of which the layers that fit are taken by name, or a
            `.weights.h5` file, of which they are taken in their order; the last layer may be another one.
        frozen: patterns, such as `conv1_*`, of the names of layers that are not trained.
    """
    build = getattr(keras.applications, name, None)
    if not callable(build) or not name[:1].isupper():
        raise ValueError(
            f"name must be a model of keras.applications. Received: {name}"
        )
    base = build(
        include_top=False, weights=None, input_shape=tuple(input_shape), pooling="avg"
    )
    outputs = layers.Dense(classes, dtype=keras.config.floatx(), name="logits")(
        base.output
    )
    model = keras.Model(base.input, outputs, name=name.lower())
    if weights is not None:
        _take_weights(model, weights)
    for pattern in frozen:
        found = [
            layer for layer in model.layers if fnmatch.fnmatchcase(layer.name, pattern)
        ]
        if not found:
            raise ValueError(
                f"frozen: no layer has a name like this. Received: {pattern}"
            )
        for layer in found:
            layer.trainable = False
    return model


def _take_weights(model: keras.Model, file: str) -> None:
    if not Path(file).is_file():
        raise ValueError(f"weights must be a file that is there. Received: {file}")
    if file.endswith(".weights.h5"):
        before = model.get_weights()
        model.load_weights(file, skip_mismatch=True)
        fits = not all(map(np.array_equal, before, model.get_weights()))
    elif file.endswith(".keras"):
        theirs = {
            layer.name: layer.get_weights()
            for layer in keras.models.load_model(file, compile=False).layers
        }
        shapes = {
            name: [value.shape for value in values]
            for name, values in theirs.items()
            if values
        }
        fitting = [
            layer
            for layer in model.layers
            if shapes.get(layer.name) == [w.shape for w in layer.weights]
        ]
        for layer in fitting:
            layer.set_weights(theirs[layer.name])
        fits = bool(fitting)
    else:
        raise ValueError(
            f"weights must be a .keras or .weights.h5 file. Received: {file}"
        )
    if not fits:
        raise ValueError(
            f"weights must be of this model: no layer's fit. Received: {file}"
        )


def _dropped(x: keras.KerasTensor, dropout: float) -> keras.KerasTensor:
    return layers.Dropout(dropout)(x) if dropout else x


def _check(*, dropout: float, l2: float = 0.0, **sizes: Sequence[int]) -> None:
    """Raise a ValueError for what Keras builds a useless model of, without a word."""
    for name, values in sizes.items():
        if not all(
            isinstance(value, int) and not isinstance(value, bool) and value >= 1
            for value in values
        ):
            raise ValueError(
                f"{name}: each size must be a whole number of at least 1. Received: {list(values)}"
            )
    if isinstance(dropout, bool) or not 0 <= dropout < 1:
        raise ValueError(f"dropout must be from 0 to below 1. Received: {dropout}")
    if isinstance(l2, bool) or not 0 <= l2 < float("inf"):
        raise ValueError(f"l2 must be a number of at least 0. Received: {l2}")


def _head(
    x: keras.KerasTensor, classes: int, hidden: Sequence[int], dropout: float, l2: float
) -> keras.KerasTensor:
    for units in hidden:
        x = _dropped(
            layers.Dense(units, activation="relu", kernel_regularizer=_l2(l2))(x),
            dropout,
        )
    # Logits in full precision under a mixed policy: a softmax of float16 loses what the loss needs.
    return layers.Dense(
        classes, dtype=keras.config.floatx(), kernel_regularizer=_l2(l2)
    )(x)


def _l2(factor: float) -> keras.regularizers.Regularizer | None:
    return keras.regularizers.L2(factor) if factor else None
