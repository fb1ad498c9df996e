"""Networks as they are known, for the benchmarks: ResNets (He et al. 2015) and causal transformers with norms first."""

from __future__ import annotations

import keras

RESNETS = {
    10: (1, 1, 1, 1),
    18: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
}  # blocks in each of the four stages; from 50 on bottlenecks
IMAGENET = 64  # pixels from which on the first convolution is that for ImageNet


def resnet(depth: int, side: int, classes: int) -> keras.Model:
    """Build one of `RESNETS` for square images: (examples, side, side, 3) → logits (examples, classes)."""
    inputs = keras.Input((side, side, 3))
    if side >= IMAGENET:
        hidden = _convolved(inputs, 64, 7, strides=2, relu=True)
        hidden = keras.layers.MaxPooling2D(3, strides=2, padding="same")(hidden)
    else:
        hidden = _convolved(inputs, 64, 3, relu=True)
    for stage, blocks in enumerate(RESNETS[depth]):
        for block in range(blocks):
            strides = 2 if stage and not block else 1
            hidden = (_bottleneck if depth >= 50 else _basic)(
                hidden, 64 * 2**stage, strides
            )
    hidden = keras.layers.GlobalAveragePooling2D()(hidden)
    return keras.Model(
        inputs, keras.layers.Dense(classes)(hidden), name=f"resnet{depth}"
    )


def transformer(
    layers: int, width: int, heads: int, vocabulary: int, length: int
) -> keras.Model:
    """Build a causal transformer: tokens (examples, length) → logits (examples, length, vocabulary)."""
    inputs = keras.Input((length,), dtype="int32")
    hidden = Positions()(keras.layers.Embedding(vocabulary, width)(inputs))
    for _ in range(layers):
        normed = keras.layers.LayerNormalization()(hidden)
        hidden += keras.layers.MultiHeadAttention(heads, width // heads)(
            normed, normed, use_causal_mask=True
        )
        normed = keras.layers.LayerNormalization()(hidden)
        hidden += keras.layers.Dense(width)(
            keras.layers.Dense(4 * width, activation="gelu")(normed)
        )
    hidden = keras.layers.LayerNormalization()(hidden)
    return keras.Model(
        inputs, keras.layers.Dense(vocabulary)(hidden), name="transformer"
    )


@keras.saving.register_keras_serializable("benchmarks")
class Positions(keras.layers.Layer):
    """Adds a learned vector of its place to each token: (examples, length, width) → the same."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.table = self.add_weight(
            shape=shape[1:], initializer="random_normal", name="table"
        )

    def call(self, tokens: keras.KerasTensor) -> keras.KerasTensor:
        return tokens + keras.ops.convert_to_tensor(self.table, tokens.dtype)


def _convolved(
    hidden: keras.KerasTensor,
    filters: int,
    size: int,
    strides: int = 1,
    relu: bool = False,
) -> keras.KerasTensor:
    hidden = keras.layers.Conv2D(
        filters, size, strides, padding="same", use_bias=False
    )(hidden)
    hidden = keras.layers.BatchNormalization()(hidden)
    return keras.layers.ReLU()(hidden) if relu else hidden


def _basic(hidden: keras.KerasTensor, filters: int, strides: int) -> keras.KerasTensor:
    made = _convolved(_convolved(hidden, filters, 3, strides, relu=True), filters, 3)
    return keras.layers.ReLU()(made + _shortcut(hidden, filters, strides))


def _bottleneck(
    hidden: keras.KerasTensor, filters: int, strides: int
) -> keras.KerasTensor:
    made = _convolved(hidden, filters, 1, relu=True)
    made = _convolved(_convolved(made, filters, 3, strides, relu=True), 4 * filters, 1)
    return keras.layers.ReLU()(made + _shortcut(hidden, 4 * filters, strides))


def _shortcut(
    hidden: keras.KerasTensor, filters: int, strides: int
) -> keras.KerasTensor:
    same = strides == 1 and hidden.shape[-1] == filters
    return hidden if same else _convolved(hidden, filters, 1, strides)
