"""The generator Philox4x32-10 as elementwise operations, for many counters at once.

TensorFlow's own operation draws the blocks of consecutive counters. Here, each block
can have any counter. The results are those of TensorFlow's operation for the same key
and counters.

The source is Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011. A round
maps the four words c of a counter, with the two words k of the key, to

    c0, c1, c2, c3  ─►  high(M1·c2) ⊕ c1 ⊕ k0,  low(M1·c2),
                        high(M0·c0) ⊕ c3 ⊕ k1,  low(M0·c0)

where a product has 64 bits, of which `high` and `low` are the halves. Between rounds,
W0 and W1 are added to the words of the key. Words have 32 bits, and are stored in
int64, which all devices multiply.
"""

from __future__ import annotations

import tensorflow as tf

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # M0, M1
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # W0, W1
_WORD = 0xFFFFFFFF


def random_words(key: tf.Tensor, lower: tf.Tensor, upper: tf.Tensor) -> tf.Tensor:
    """Return four random words for each counter.

    Args:
        key: the 64 bits of the key, a scalar of int64.
        lower: the lower 64 bits of each counter, of int64 and any shape.
        upper: the upper 64 bits of all counters, a scalar of int64.

    Returns:
        Words of uint32, of the shape of `lower` and a last axis of size 4.
    """
    c0, c1 = _words(lower)
    c2, c3 = _words(tf.fill(tf.shape(lower), upper))
    k0, k1 = _words(key)
    for _ in range(_ROUNDS):
        low_0, high_0 = _words(c0 * _MULTIPLIERS[0])
        low_1, high_1 = _words(c2 * _MULTIPLIERS[1])
        c0 = high_1 ^ c1 ^ k0
        c1 = low_1
        c2 = high_0 ^ c3 ^ k1
        c3 = low_0
        k0 = (k0 + _KEY_STEPS[0]) & _WORD
        k1 = (k1 + _KEY_STEPS[1]) & _WORD
    return tf.cast(tf.stack([c0, c1, c2, c3], axis=-1), tf.uint32)


def _words(value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the lower and the upper 32 bits of int64 values."""
    upper = tf.bitwise.right_shift(value, tf.constant(32, tf.int64))
    return value & _WORD, upper & _WORD
