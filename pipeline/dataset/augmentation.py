"""Stateless augmentations: functions of one input and a seed, which follows from (seed, epoch, example number)."""

import tensorflow as tf


class Shift:
    """Move an image by up to `pixels` in each direction; pixels from outside the image are zero."""

    def __init__(self, pixels: int):
        if pixels < 1:
            raise ValueError(f"pixels must be at least 1. Received: {pixels}")
        self.pixels = pixels

    def __call__(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """`image` of (height, width, channels) and a seed of shape (2,) → the moved image."""
        padding = [[self.pixels, self.pixels], [self.pixels, self.pixels], [0, 0]]
        return tf.image.stateless_random_crop(
            tf.pad(image, padding), tf.shape(image), seed
        )


class Flip:
    """Mirror an image left to right with probability ½."""

    def __call__(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """`image` of (height, width, channels) and a seed of shape (2,) → the image or its mirror image."""
        return tf.image.stateless_random_flip_left_right(image, seed)
