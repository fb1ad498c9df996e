"""Stateless augmentations: functions of one input and a seed, which is made here from (seed, epoch, example)."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf


def epoch_key(seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """Return the key of an epoch, int64 of shape (2,); the order of its examples follows from it as well."""
    return tf.random.experimental.stateless_fold_in(tf.constant([seed, 0], tf.int64), epoch)


def augmenting(augment: Callable | None, key: tf.Tensor) -> Callable[[tf.Tensor, tuple], tuple]:
    """Return a function of (number, example) that augments the example's input by the epoch's `key` and its number."""

    def example_of(number: tf.Tensor, example: tuple) -> tuple:
        if augment is None:
            return example
        seed = tf.random.experimental.stateless_fold_in(key, number)
        return (augment(example[0], seed), *example[1:])

    return example_of


class Shift:
    """Move an image by up to `pixels` in each direction; what comes in from outside is zero."""

    def __init__(self, pixels: int):
        if pixels < 1:
            raise ValueError(f"pixels must be at least 1. Received: {pixels}")
        self.pixels = pixels

    def __call__(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """`image` of (height, width, channels) and a seed of shape (2,) → the moved image."""
        padding = [[self.pixels, self.pixels], [self.pixels, self.pixels], [0, 0]]
        return tf.image.stateless_random_crop(tf.pad(image, padding), tf.shape(image), seed)


class Flip:
    """Mirror an image left to right, every other time."""

    def __call__(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """`image` of (height, width, channels) and a seed of shape (2,) → the image or its mirror image."""
        return tf.image.stateless_random_flip_left_right(image, seed)
