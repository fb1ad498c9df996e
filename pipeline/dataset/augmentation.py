"""Augmentation: stateless functions of an input and a seed.

The seed of an example depends only on the seed of the run, the epoch and the number of
the example, so the batch size does not change an augmented example. The number is the
position of the example before the shuffling in memory or in a buffer, so this shuffling
does not change it, either. With `dataset.shuffle_files`, the number of an example is
different in each epoch, because its position depends on the order of the files.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from pipeline.common.errors import ConfigError
from pipeline.dataset.source import Source, compatible

# Takes an input and a seed of shape (2,), and returns the new input.
Augment = Callable[[Any, tf.Tensor], Any]


class Shift:
    """Shift an image at random, by up to `pixels` in each direction.

    Pixels that are shifted into the image are zero.

    Args:
        pixels: the largest shift, at least 1.

    Raises:
        ValueError: `pixels` is below 1.
    """

    def __init__(self, pixels: int):
        if pixels < 1:
            raise ValueError(f"pixels must be at least 1. Received: {pixels}")
        self.pixels = pixels

    def __call__(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Return the shifted image, of shape (height, width, channels).

        `image` has the same shape. `seed` has shape (2,).
        """
        padding = [[self.pixels, self.pixels], [self.pixels, self.pixels], [0, 0]]
        padded = tf.pad(image, padding)
        return tf.image.stateless_random_crop(padded, tf.shape(image), seed)


class Flip:
    """Mirror an image left to right with probability ½."""

    def __call__(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Return `image` or its mirror image, of shape (height, width, channels).

        `seed` has shape (2,).
        """
        return tf.image.stateless_random_flip_left_right(image, seed)


def example_seed(seed_of_epoch: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """Return the seed, of shape (2,), with which an example is augmented in an epoch.

    Args:
        seed_of_epoch: see `batches.epoch_seed`, of shape (2,).
        number: position of the example in the training split, scalar of int64. With
            `dataset.shuffle_files`, its position in the order in which this epoch's
            files are read.
    """
    return tf.random.experimental.stateless_fold_in(seed_of_epoch, number)


def augmented(source: Source, augment: Augment, seed_of_epoch: tf.Tensor) -> Source:
    """Return a source whose examples have augmented inputs.

    Args:
        source: the source of the examples. The first part of each key is the number of
            the example.
        augment: the augmentation.
        seed_of_epoch: see `batches.epoch_seed`, of shape (2,).
    """
    make = source.make
    assert make is not None

    def make_augmented(number: tf.Tensor, *rest_of_key: Any) -> tuple:
        x, *labels_and_weights = make(number, *rest_of_key)
        new_x = augment(x, example_seed(seed_of_epoch, number))
        return new_x, *labels_and_weights

    return Source(source.keys, make_augmented)


def check_keeps_inputs(spec: Any, augmented_spec: Any) -> None:
    """Raise a `ConfigError` if augmentation changes the shape or dtype of inputs.

    Args:
        spec: the spec of the inputs in a batch without augmentation.
        augmented_spec: the spec of the inputs in a batch with augmentation.
    """
    if not compatible(spec, augmented_spec):
        rule = f"must keep the shape and dtype of an input, {spec}"
        raise ConfigError("dataset.augment", rule, str(augmented_spec))
