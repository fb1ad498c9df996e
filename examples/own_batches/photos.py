"""Batches of images as Keras' loader makes them → micro-batches of an update.

Command, in examples/own_batches:

    python photos.py && pipeline train --config-dir conf experiment=photos

Run time:  about 15 seconds on two CPU cores
Expect:    4 updates per epoch, the last one of 2 examples

`python photos.py` writes the images: 38 of 8×8 pixels, in one folder per class.
"""

from pathlib import Path

import keras
import numpy as np

FOLDER = Path("photos")


def write(path):
    """Write 19 images of random pixels in each of two classes."""
    numbers = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (path / name).mkdir(parents=True, exist_ok=True)
        for index in range(19):
            pixels = numbers.integers(0, 255, (8, 8, 3))
            keras.utils.save_img(path / name / f"{index}.png", pixels, scale=False)


def folder(path, batch_size=4, seed=0):
    """Return the images below a folder, one folder a class; no validation split."""
    size = {"image_size": (8, 8), "batch_size": batch_size}
    images = keras.utils.image_dataset_from_directory(
        path, seed=seed, verbose=False, **size
    )
    return images, None


def generator(seed=0):
    """Return a generator function; each call of it yields the batches of one epoch.

    How many batches an epoch has is not known in advance.
    """

    def batches():
        numbers = np.random.default_rng(seed)
        for size in (3, 5, 2, 4, 1, 6, 2):
            yield numbers.normal(size=(size, 8, 8, 3)), numbers.integers(0, 2, size)

    return batches, None


class Bricks(keras.utils.PyDataset):
    """Seven batches of four images."""

    def __len__(self):
        return 7

    def __getitem__(self, index):
        numbers = np.random.default_rng(index)
        return numbers.normal(size=(4, 8, 8, 3)), numbers.integers(0, 2, 4)


def bricks():
    return Bricks(), None


def linear(input_shape):
    """Return a model of one dense layer, on the flattened images."""
    layers = [
        keras.Input(input_shape),
        keras.layers.Flatten(),
        keras.layers.Dense(2, kernel_initializer="zeros"),
    ]
    return keras.Sequential(layers)


if __name__ == "__main__":
    write(FOLDER)
