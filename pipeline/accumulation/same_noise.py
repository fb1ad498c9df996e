"""Noise that does not depend on how an effective batch is cut.

Philox is a counter-based generator: block c of key k is a function of (k, c) alone
(Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011). Each layer uses one
key per update. The example at position p of the effective batch uses the blocks from
p·⌈m/4⌉ on, where m is the number of values per example, and a block has four values:

    position  0              1              2          …      in the effective batch
    blocks    0 … ⌈m/4⌉−1    ⌈m/4⌉ …        2⌈m/4⌉ …   …      over all replicas

So a micro-batch draws the same values for its examples as one draw for the whole
effective batch would, on any replica, without the memory for that draw. Noise is drawn
in float32, whatever the precision of the layer.

In a cut by tokens, m depends on the padded length of the micro-batch, and the positions
of its examples do not follow each other. So each example has 2³² blocks there, and its
own draw:

    position  0              1              2          …
    blocks    0 … 2³²−1      2³² … 2·2³²−1  …

The values of an example are drawn from its first step to its last one. More padding
adds values at the end, and changes none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import layers

from . import philox
from .keras_internals import calling, graph, keeps_call_of, layers_of

# A function of a shape, whose sizes may be scalar tensors. It returns float32 values in
# [0, 1).
Draw = Callable[[Sequence[Any]], tf.Tensor]

_BLOCK = 4  # 32-bit values per block
_BLOCKS_OF_EXAMPLE = 2**32  # in a cut by tokens
_PHILOX = 1  # the number of the Philox algorithm in raw operations
_SCRAMBLE = 0x02461E293EC8F720  # with it, TensorFlow derives a key from a seed


class Key(NamedTuple):
    """The key from which a layer draws its noise.

    The key is on the host: if it were on a GPU, the host would wait for it at every
    draw.
    """

    seed: tf.Tensor  # int64 of shape (2,)
    key: tf.Tensor  # the Philox key from the seed; uint64 of shape (1,)
    counter: tf.Tensor  # number of the first block; uint64 of shape (2,)

    @classmethod
    def from_seed(cls, seed: tf.Tensor, call: int = 0) -> Key:
        """Return the key of a seed for call number `call` of the layer in a pass."""
        with tf.device("CPU:0"):
            if not call:
                key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
                return cls(seed, key, counter)
            seed = tf.random.experimental.stateless_fold_in(seed, call)
            # Compute the result of `StatelessRandomGetKeyCounter` without that
            # operation, whose XLA kernel returns another key for a negative seed.
            scramble = tf.constant([_SCRAMBLE], tf.uint64)
            bits = tf.raw_ops.StatelessRandomUniformFullIntV2(
                shape=[4],
                key=scramble,
                counter=tf.bitcast(tf.cast(seed, tf.int64), tf.uint64),
                alg=_PHILOX,
                dtype=tf.uint32,
            )
            key, counter = tf.unstack(tf.bitcast(tf.reshape(bits, [2, 2]), tf.uint64))
            return cls(seed, key[None], tf.stack([tf.zeros((), tf.uint64), counter]))


def noisy_layers(model: keras.Model, x: Any) -> list[keras.Layer]:
    """Return the layers whose noise can be drawn example by example.

    They are Keras' own dropout and noise layers. If an input in `x` is ragged, there
    are none: the number of values per example may then depend on the longest example in
    the micro-batch.
    """
    if any(isinstance(leaf, tf.RaggedTensor) for leaf in tf.nest.flatten(x)):
        return []
    return [layer for layer in layers_of(model) if _formula(layer) is not None]


def draw_noise_seeds(noisy: Sequence[keras.Layer]) -> list[tf.Tensor]:
    """Draw a seed from each noisy layer's seed generator, as a call of the layer does.

    Call this once per update.
    """
    with tf.device("CPU:0"):
        return [layer.seed_generator.next() for layer in noisy]


def noise_by_position(
    noisy: Sequence[keras.Layer],
    keys: Sequence[tf.Tensor | Key],
    position: Any,
    examples: tf.Tensor,
    jit_compile: bool = False,
) -> AbstractContextManager[None]:
    """Make noisy layers draw noise by each example's place in the effective batch.

    This applies inside the `with` block.

    Args:
        noisy: the layers; see `noisy_layers`.
        keys: one seed per layer for this update (see `draw_noise_seeds`), or the key
            made from it.
        position: position of the micro-batch's first example in the effective batch. In
            a cut by tokens, the position of each example, of shape (examples,).
        examples: number of examples in the micro-batch.
        jit_compile: whether XLA compiles the calls.
    """
    rows = _rows(position, examples, jit_compile)
    keys = [_as_key(key) for key in keys]
    pairs = zip(noisy, keys, strict=True)
    return calling((layer, _call(layer, key, rows)) for layer, key in pairs)


def _as_key(seed_or_key: tf.Tensor | Key) -> Key:
    if isinstance(seed_or_key, Key):
        return seed_or_key
    return Key.from_seed(seed_or_key)


def _uniform_by_xla(**arguments: Any) -> tf.Tensor:
    """Return the values that TensorFlow's own kernel would draw, if XLA compiles.

    TensorFlow's kernel uses the lower 23 bits of each value; XLA's uses the upper ones.
    """
    bits = tf.raw_ops.StatelessRandomUniformFullIntV2(dtype=tf.uint32, **arguments)
    return _uniform_from_bits(bits)


def _uniform_from_bits(bits: tf.Tensor) -> tf.Tensor:
    """Return values in [0, 1) from integers of 32 bits, as TensorFlow's kernel does."""
    return tf.bitcast(bits & 0x7FFFFF | 0x3F800000, tf.float32) - 1


@dataclass(frozen=True)
class _Rows:
    """The examples of a micro-batch, for which noise is drawn."""

    position: Any  # of the first example in the effective batch
    examples: tf.Tensor  # number of examples
    jit_compile: bool  # whether XLA compiles the draws

    def uniform(self, **arguments: Any) -> tf.Tensor:
        """Draw uniform values; the arguments are those of TensorFlow's operations."""
        if self.jit_compile:
            return _uniform_by_xla(**arguments)
        return tf.raw_ops.StatelessRandomUniformV2(**arguments)

    def can_draw(self, inputs: tf.Tensor) -> bool:
        """Return whether noise for these inputs does not depend on the cut."""
        return True

    def draw(self, key: Key, sizes: Sequence[Any]) -> tf.Tensor:
        """Return values of shape `sizes`, drawn by the positions of the examples."""
        values = math.prod(sizes[1:])
        blocks = -(-values // _BLOCK)
        counter = key.counter
        with tf.device("CPU:0"):  # where the position already is
            # An example has several rows if a previous layer has merged the first axes.
            check = tf.debugging.assert_equal(
                sizes[0] % self.examples,
                0,
                "same_noise: the noise has rows that belong to no example",
            )
            checks = [] if check is None else [check]
            with tf.control_dependencies(checks):
                position = tf.cast(self.position, tf.int64)
                row = position * tf.cast(sizes[0] // self.examples, tf.int64)
            first = tf.cast(row * tf.cast(blocks, tf.int64), tf.uint64)
            start = tf.stack([first, tf.zeros((), tf.uint64)])
            # Add to the lower half of the counter, which is zero: TensorFlow derives
            # only the upper half from the seed.
            counter += start
        noise = self.uniform(
            shape=[sizes[0], blocks * _BLOCK],
            key=key.key,
            counter=counter,
            alg=_PHILOX,
        )
        fills_blocks = any(
            isinstance(size, int) and size % _BLOCK == 0 for size in sizes[1:]
        )
        if not fills_blocks:
            noise = noise[:, :values]
        return tf.reshape(noise, sizes)

    def draw_shared(self, key: Key, sizes: Sequence[Any]) -> tf.Tensor:
        """Return values that all examples share, the same in every micro-batch."""
        return self.uniform(shape=sizes, key=key.key, counter=key.counter, alg=_PHILOX)


@dataclass(frozen=True)
class _RowsByTokens(_Rows):
    """The examples of a micro-batch in a cut by tokens, each with its `position`."""

    def can_draw(self, inputs: tf.Tensor) -> bool:
        """Return whether more padding adds values only at the end of an example.

        This is not so with a second axis of unknown size, as in attention's dropout.
        """
        return None not in inputs.shape[2:]

    def draw(self, key: Key, sizes: Sequence[Any]) -> tf.Tensor:
        checks = []
        if tf.is_tensor(sizes[1]):
            # Values of a second sequence axis would come between those of the first.
            rule = (
                "same_noise: the noise has rows of unknown length that belong to no "
                "example"
            )
            checks.append(tf.debugging.assert_equal(sizes[0], self.examples, rule))
        with tf.control_dependencies([check for check in checks if check is not None]):
            # An example has several rows if a previous layer has merged the first axes.
            values = math.prod(sizes) // self.examples
        blocks = -(-values // _BLOCK)
        if self.jit_compile:
            # XLA would have to know the number of values in each iteration of a loop.
            noise = self._draw_at_once(key, blocks)[:, :values]
            return tf.reshape(tf.stop_gradient(noise), sizes)

        with tf.device("CPU:0"):  # where the positions already are
            positions = tf.cast(self.position, tf.uint64)
            first = positions * tf.constant(_BLOCKS_OF_EXAMPLE, tf.uint64)
            start = tf.stack([first, tf.zeros_like(first)], axis=1)
            counters = key.counter + start

        def noise_of_example(counter: tf.Tensor) -> tf.Tensor:
            noise = self.uniform(
                shape=[blocks * _BLOCK], key=key.key, counter=counter, alg=_PHILOX
            )
            return noise[:values]

        noise = tf.map_fn(noise_of_example, counters, fn_output_signature=tf.float32)
        return tf.reshape(tf.stop_gradient(noise), sizes)

    def _draw_at_once(self, key: Key, blocks: Any) -> tf.Tensor:
        """Return the values of all examples, (examples, values) of float32."""
        first = tf.cast(self.position, tf.int64) * _BLOCKS_OF_EXAMPLE
        counters = first[:, None] + tf.range(tf.cast(blocks, tf.int64))[None, :]
        counters += tf.bitcast(key.counter[0], tf.int64)
        upper = tf.bitcast(key.counter[1], tf.int64)
        words = philox.random_words(tf.bitcast(key.key[0], tf.int64), counters, upper)
        values = tf.reshape(words, [self.examples, _BLOCK * blocks])
        return _uniform_from_bits(values)


def _rows(position: Any, examples: tf.Tensor, jit_compile: bool) -> _Rows:
    """Return the examples of a micro-batch; for the arguments, see `_Rows`."""
    if tf.convert_to_tensor(position).shape.rank == 0:
        return _Rows(position, examples, jit_compile)
    return _RowsByTokens(position, examples, jit_compile)


def _call(layer: keras.Layer, key: Key, rows: _Rows) -> Callable[..., tf.Tensor]:
    formula = _formula(layer)
    assert formula is not None
    traced_graph = graph()
    calls = 0

    def call(inputs: tf.Tensor, training: Any = False) -> tf.Tensor:
        nonlocal calls
        noise_shape = getattr(layer, "noise_shape", None)
        is_shared = noise_shape is not None and noise_shape[0] is not None
        # Let Keras draw in a layer's own loop, such as that of a recurrent cell, where
        # each step needs new noise; and for inputs with a known number of rows, whose
        # first axis is not that of the examples.
        is_of_examples = inputs.shape[0] is None or is_shared
        is_drawn_here = is_of_examples and rows.can_draw(inputs)
        if not training or graph() is not traced_graph or not is_drawn_here:
            return type(layer).call(layer, inputs, training=training)
        # If a layer is called again in a forward pass, draw other values.
        key_of_call = Key.from_seed(key.seed, calls) if calls else key
        calls += 1

        def draw(sizes: Sequence[Any]) -> tf.Tensor:
            if is_shared:
                return rows.draw_shared(key_of_call, sizes)
            return rows.draw(key_of_call, sizes)

        return formula(layer, inputs, draw)

    return call


def _formula(
    layer: keras.Layer,
) -> Callable[[keras.Layer, tf.Tensor, Draw], tf.Tensor] | None:
    """Return the function that computes a layer's outputs from inputs and noise.

    Return None if the layer draws nothing, or if its `call` is not Keras' own.
    """
    if isinstance(layer, layers.GaussianNoise):
        draws = getattr(layer, "stddev", 0) != 0
    else:
        # Dropout at a rate of 1 outputs zeros.
        draws = getattr(layer, "rate", 0) not in (0, 1, None)
    if not draws:
        return None
    for kind, formula in _FORMULAS.items():
        if keeps_call_of(layer, kind):
            return formula
    return None


def _dropout(layer: keras.Layer, x: tf.Tensor, draw: Draw) -> tf.Tensor:
    kept = draw(_sizes(x, _noise_shape(layer, x))) >= layer.rate
    return tf.where(kept, x / (1 - layer.rate), tf.zeros((), x.dtype))


def _alpha_dropout(layer: keras.Layer, x: tf.Tensor, draw: Draw) -> tf.Tensor:
    """Set dropped units to -α·λ, then restore mean and variance.

    Klambauer et al., Self-normalizing neural networks, 2017.
    """
    dropped = -1.6732632423543772 * 1.0507009873554805
    scale = ((1 - layer.rate) * (1 + layer.rate * dropped**2)) ** -0.5
    kept = draw(_sizes(x, _noise_shape(layer, x))) >= layer.rate
    return scale * (tf.where(kept, x, tf.cast(dropped, x.dtype)) - dropped * layer.rate)


def _gaussian_dropout(layer: keras.Layer, x: tf.Tensor, draw: Draw) -> tf.Tensor:
    deviation = math.sqrt(layer.rate / (1 - layer.rate))
    return x * tf.cast(1 + deviation * _normal(x, draw), x.dtype)


def _gaussian_noise(layer: keras.Layer, x: tf.Tensor, draw: Draw) -> tf.Tensor:
    return x + tf.cast(layer.stddev * _normal(x, draw), x.dtype)


def _normal(x: tf.Tensor, draw: Draw) -> tf.Tensor:
    """Return standard normal noise of the shape of `x`, by Box and Muller (1958).

    XLA's own normal noise would depend on how many values are drawn at once.
    """
    # Compute in float64 if the layer does, so that noise differs by float64 rounding at
    # most: the last bit of a logarithm depends on the position in a vector register.
    dtype = tf.float64 if x.dtype == tf.float64 else tf.float32
    pairs = tf.cast(draw([*_sizes(x, [None] * x.shape.rank), 2]), dtype)
    radius = tf.sqrt(-2 * tf.math.log(1 - pairs[..., 0]))
    return radius * tf.cos(2 * math.pi * pairs[..., 1])


_SPATIAL = (layers.SpatialDropout1D, layers.SpatialDropout2D, layers.SpatialDropout3D)
_FORMULAS = {
    **dict.fromkeys((layers.Dropout, *_SPATIAL), _dropout),
    layers.AlphaDropout: _alpha_dropout,
    layers.GaussianDropout: _gaussian_dropout,
    layers.GaussianNoise: _gaussian_noise,
}


def _sizes(x: tf.Tensor, shape: Sequence[int | None]) -> list[Any]:
    """Return the sizes of `shape`, with each None replaced by the size in `x`.

    A size that is unknown during tracing is a scalar tensor.
    """
    sizes = []
    for axis, (size, size_of_x) in enumerate(zip(shape, x.shape, strict=False)):
        if size is None:
            size = size_of_x
        if size is None:
            size = tf.shape(x)[axis]
        sizes.append(size)
    return sizes


def _noise_shape(layer: keras.Layer, x: tf.Tensor) -> Sequence[int | None]:
    """Return the shape of a dropout layer's noise.

    None means that the axis has the same size as in `x`.
    """
    rank = x.shape.rank
    if isinstance(layer, _SPATIAL):
        # All elements of a channel share the noise.
        is_channels_first = getattr(layer, "data_format", None) == "channels_first"
        channels = 1 if is_channels_first else rank - 1
        shape: list[int | None] = [1] * rank
        shape[0] = None
        shape[channels] = None
        return shape
    if layer.noise_shape is None:
        return [None] * rank
    return layer.noise_shape
