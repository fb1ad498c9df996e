"""Images → the class of each pixel, where some pixels count more, and some not at all.

Command:   cd examples/segmentation && pipeline train --config-dir conf experiment=shapes
Run time:  about a minute on two CPU cores
Expect:    val/iou above 0.8

Each pixel has a weight: 0 at the edges of a shape, where a label would be uncertain,
and more for the small shapes than for the background. The number of pixels that count
differs from image to image, so a mean of micro-batch means would not be the mean over
the pixels of the effective batch; accumulation here is.
"""

import keras
import numpy as np
import tensorflow as tf

from pipeline.dataset import Data

SIZE = 32  # pixels in each direction
CLASSES = ("background", "disc", "square")


def shapes(count, seed):
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:SIZE, :SIZE]
    masks = np.zeros((count, SIZE, SIZE), np.int32)
    weights = np.ones((count, SIZE, SIZE), np.float32)
    for mask, weight in zip(masks, weights, strict=True):
        for label in (1, 2):
            radius = random.integers(3, 7)
            center = random.integers(radius, SIZE - radius, 2)
            offsets = np.abs(y - center[0]), np.abs(x - center[1])
            distance = np.hypot(*offsets) if label == 1 else np.maximum(*offsets)
            mask[distance <= radius] = label
            weight[distance <= radius] = 5
            weight[np.abs(distance - radius) < 1] = 0
    images = masks[..., None] / 2 + random.normal(0, 0.3, (count, SIZE, SIZE, 1))
    examples = tf.data.Dataset.from_tensor_slices(
        (images.astype(np.float32), masks, weights)
    )
    held_out = count // 5
    return Data(
        examples.skip(held_out),
        examples.take(held_out),
        name="shapes",
        classes=len(CLASSES),
    )


def unet(units, classes):
    """A network of two resolutions, with one connection that skips the lower one."""

    def convolved(inputs, units):
        return keras.layers.Conv2D(units, 3, padding="same", activation="relu")(inputs)

    images = keras.Input((SIZE, SIZE, 1))
    fine = convolved(images, units)
    coarse = convolved(keras.layers.MaxPooling2D()(fine), 2 * units)
    coarse = convolved(coarse, 2 * units)
    raised = keras.layers.UpSampling2D(interpolation="bilinear")(coarse)
    joined = convolved(keras.layers.Concatenate()([fine, raised]), units)
    return keras.Model(images, keras.layers.Conv2D(classes, 1)(joined))
