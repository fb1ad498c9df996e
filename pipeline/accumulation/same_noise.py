"""Noise that does not depend on how an effective batch is cut.

Philox is a counter-based generator: block c of key k is a function of (k, c) alone (Salmon et al., Parallel random
numbers: as easy as 1, 2, 3, 2011). A layer takes one key an update. The example at place p of the effective batch
takes the blocks from p·⌈m/4⌉ on, where m is the number of values it needs and a block has four:

    place     0              1              2          …      in the effective batch, over all replicas
    blocks    0 … ⌈m/4⌉−1    ⌈m/4⌉ …        2⌈m/4⌉ …

So any micro-batch of any replica draws the rows of its own examples, as one draw for the whole batch would have them,
and nothing of that size is ever held. Noise is drawn in float32, whatever the precision of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import layers

from .keras_internals import calling, graph, keeps_call_of, layers_of

Draw = Callable[
    [Sequence[Any]], tf.Tensor
]  # a shape, whose sizes may be scalars → float32 in [0, 1)
_BLOCK = 4  # 32-bit values in a block
_PHILOX = 1  # its number in raw operations
_SCRAMBLE = 0x02461E293EC8F720  # the key by which TensorFlow makes a key of a seed


class Key(NamedTuple):
    """What a layer draws by, on the host: made on a GPU, the host would wait for it at every draw."""

    seed: tf.Tensor  # int64 of shape (2,)
    key: tf.Tensor  # of Philox, made of the seed; uint64 of shape (1,)
    counter: tf.Tensor  # its first block; uint64 of shape (2,)

    @classmethod
    def of(cls, seed: tf.Tensor, calls: int = 0) -> Key:
        """Return the key of a seed, or another one for each of several calls of a layer in a forward pass."""
        with tf.device("CPU:0"):
            if not calls:
                return cls(seed, *tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed))
            seed = tf.random.experimental.stateless_fold_in(seed, calls)
            # As that operation, whose XLA kernel takes a negative seed for another one.
            by, seeds = (
                tf.constant([_SCRAMBLE], tf.uint64),
                tf.bitcast(tf.cast(seed, tf.int64), tf.uint64),
            )
            given = {"shape": [4], "key": by, "counter": seeds, "alg": _PHILOX}
            bits = tf.raw_ops.StatelessRandomUniformFullIntV2(**given, dtype=tf.uint32)
            key, counter = tf.unstack(tf.bitcast(tf.reshape(bits, [2, 2]), tf.uint64))
            return cls(seed, key[None], tf.stack([tf.zeros((), tf.uint64), counter]))


def noisy_layers(model: keras.Model, x: Any) -> list[keras.Layer]:
    """Return the layers whose noise can be drawn example by example: Keras' own dropout and noise layers.

    None if an input in `x` is ragged: an example may then need as many values as the longest of its micro-batch.
    """
    if any(isinstance(leaf, tf.RaggedTensor) for leaf in tf.nest.flatten(x)):
        return []
    return [layer for layer in layers_of(model) if _formula(layer) is not None]


def keys_of(noisy: Sequence[keras.Layer]) -> list[tf.Tensor]:
    """Take a key from the seed of each noisy layer, once an update, as one call of the layer takes one."""
    with tf.device("CPU:0"):
        return [layer.seed_generator.next() for layer in noisy]


def drawn(
    noisy: Sequence[keras.Layer],
    keys: Sequence[tf.Tensor | Key],
    place: Any,
    examples: tf.Tensor,
    jit_compile: bool = False,
) -> AbstractContextManager[None]:
    """Make noisy layers draw for so many examples of an effective batch, from `place` on; `keys` are its `keys_of`."""
    draw = _uniform_by_xla if jit_compile else tf.raw_ops.StatelessRandomUniformV2
    made = [key if isinstance(key, Key) else Key.of(key) for key in keys]
    return calling(
        (layer, _call(layer, key, place, examples, draw))
        for layer, key in zip(noisy, made, strict=True)
    )


def _uniform_by_xla(**given: Any) -> tf.Tensor:
    """Return what TensorFlow's kernel makes of the same bits, the lower 23 of each: XLA's own takes the upper ones."""
    bits = tf.raw_ops.StatelessRandomUniformFullIntV2(dtype=tf.uint32, **given)
    return tf.bitcast(bits & 0x7FFFFF | 0x3F800000, tf.float32) - 1


def _call(
    layer: keras.Layer,
    key: Key,
    place: Any,
    examples: tf.Tensor,
    draw: Callable[..., tf.Tensor],
) -> Callable[..., tf.Tensor]:
    formula, here, calls = _formula(layer), graph(), 0
    assert formula is not None

    def call(inputs: tf.Tensor, training: Any = False) -> tf.Tensor:
        nonlocal calls
        # Keras draws in a layer's own loop, as for a recurrent cell, where each step needs new noise, and for inputs
        # with a known number of rows, whose first axis is not that of the examples.
        shared = (getattr(layer, "noise_shape", None) or (None,))[
            0
        ] is not None  # by all examples
        if (
            not training
            or graph() is not here
            or (inputs.shape[0] is not None and not shared)
        ):
            return type(layer).call(layer, inputs, training=training)
        # A layer that is called twice in a forward pass draws twice.
        of_call = Key.of(key.seed, calls) if calls else key
        calls += 1

        return formula(
            layer,
            inputs,
            lambda sizes: _drawn(sizes, shared, of_call, place, examples, draw),
        )

    return call


def _drawn(
    sizes: Sequence[Any],
    shared: bool,
    of_call: Key,
    place: Any,
    examples: tf.Tensor,
    draw: Callable[..., tf.Tensor],
) -> tf.Tensor:
    _, key, counter = of_call
    if shared:  # by all examples: the same noise in every micro-batch
        return draw(shape=sizes, key=key, counter=counter, alg=_PHILOX)
    values = math.prod(sizes[1:])
    blocks = -(-values // _BLOCK)
    with tf.device("CPU:0"):  # where the place is known
        # An example has several rows where a previous layer has merged the first axes.
        check = tf.debugging.assert_equal(
            sizes[0] % examples, 0, "same_noise: rows that are of no example"
        )
        with tf.control_dependencies([check] if check is not None else []):
            row = tf.cast(place, tf.int64) * tf.cast(sizes[0] // examples, tf.int64)
        first = tf.cast(row * tf.cast(blocks, tf.int64), tf.uint64)
        start = tf.stack([first, tf.zeros((), tf.uint64)])
        # The counter's lower half is zero: TensorFlow makes the upper one of the seed.
        counter += start
    noise = draw(
        shape=[sizes[0], blocks * _BLOCK], key=key, counter=counter, alg=_PHILOX
    )
    full = any(isinstance(size, int) and size % _BLOCK == 0 for size in sizes[1:])
    return tf.reshape(noise if full else noise[:, :values], sizes)


def _formula(
    layer: keras.Layer,
) -> Callable[[keras.Layer, tf.Tensor, Draw], tf.Tensor] | None:
    """Return the formula of the layer, given its draws; None if it draws nothing, or is not Keras' own."""
    amount = getattr(
        layer, "stddev" if isinstance(layer, layers.GaussianNoise) else "rate", 0
    )
    if not amount or amount == 1:  # dropout at 1 leaves nothing
        return None
    return next(
        (formula for kind, formula in _FORMULAS.items() if keeps_call_of(layer, kind)),
        None,
    )


def _dropout(layer: keras.Layer, x: tf.Tensor, draw: Draw) -> tf.Tensor:
    kept = draw(_sizes(x, _noise_shape(layer, x))) >= layer.rate
    return tf.where(kept, x / (1 - layer.rate), tf.zeros((), x.dtype))


def _alpha_dropout(layer: keras.Layer, x: tf.Tensor, draw: Draw) -> tf.Tensor:
    # Klambauer et al., Self-normalizing neural networks, 2017: dropped units are -α·λ; mean and variance are restored.
    dropped = -1.6732632423543772 * 1.0507009873554805
    scale = ((1 - layer.rate) * (1 + layer.rate * dropped**2)) ** -0.5
    kept = draw(_sizes(x, _noise_shape(layer, x))) >= layer.rate
    return scale * (tf.where(kept, x, tf.cast(dropped, x.dtype)) - dropped * layer.rate)


def _gaussian_dropout(layer: keras.Layer, x: tf.Tensor, draw: Draw) -> tf.Tensor:
    return x * tf.cast(
        1 + math.sqrt(layer.rate / (1 - layer.rate)) * _normal(x, draw), x.dtype
    )


def _gaussian_noise(layer: keras.Layer, x: tf.Tensor, draw: Draw) -> tf.Tensor:
    return x + tf.cast(layer.stddev * _normal(x, draw), x.dtype)


def _normal(x: tf.Tensor, draw: Draw) -> tf.Tensor:
    """Return normal noise for `x` after Box and Muller, 1958: XLA's own depends on how many values are drawn."""
    # In float64 where the layer computes in it: the last bit of a logarithm depends on its place in a vector register.
    pairs = tf.cast(
        draw([*_sizes(x, [None] * x.shape.rank), 2]),
        tf.float64 if x.dtype == tf.float64 else tf.float32,
    )
    return tf.sqrt(-2 * tf.math.log(1 - pairs[..., 0])) * tf.cos(
        2 * math.pi * pairs[..., 1]
    )


_SPATIAL = (layers.SpatialDropout1D, layers.SpatialDropout2D, layers.SpatialDropout3D)
_FORMULAS = {
    **dict.fromkeys((layers.Dropout, *_SPATIAL), _dropout),
    layers.AlphaDropout: _alpha_dropout,
    layers.GaussianDropout: _gaussian_dropout,
    layers.GaussianNoise: _gaussian_noise,
}


def _sizes(x: tf.Tensor, shape: Sequence[int | None]) -> list[Any]:
    """Return the sizes of `shape`, in which None is the size of that axis of `x`: a scalar where it is not known."""
    sizes = [
        known if given is None else given
        for given, known in zip(shape, x.shape, strict=False)
    ]
    return [
        tf.shape(x)[axis] if size is None else size for axis, size in enumerate(sizes)
    ]


def _noise_shape(layer: keras.Layer, x: tf.Tensor) -> Sequence[int | None]:
    """Return the shape of a dropout's noise; None where it is that of `x`."""
    rank = x.shape.rank
    if not isinstance(layer, _SPATIAL):
        return [None] * rank if layer.noise_shape is None else layer.noise_shape
    channels = (
        1 if getattr(layer, "data_format", None) == "channels_first" else rank - 1
    )
    return [None if axis in (0, channels) else 1 for axis in range(rank)]
