"""Images out of a decoder have no static size: they are no batches for that."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf
from keras import layers
from omegaconf import OmegaConf

from pipeline.common.errors import ConfigError
from pipeline.dataset.load import load
from pipeline.dataset.single_examples import check_single_examples
from pipeline.dataset.splits import Data

COLORS = 3
SIZES = [8] * 30


def images_and_masks(sizes) -> tuple[tf.data.Dataset, None]:
    """Return square images and masks with the shape that `decode_png` gives them."""

    def decoded(size):
        image = tf.ones([size, size, COLORS])
        return tf.ensure_shape(image, [None, None, COLORS]), image[..., :1]

    return tf.data.Dataset.from_tensor_slices(sizes).map(decoded), None


def batches_of_images(sizes) -> tuple[tf.data.Dataset, None]:
    images, _ = images_and_masks(sizes)
    return images.batch(4), None


def loaded(function, sizes) -> Data:
    target = f"{__name__}.{function.__name__}"
    return load(OmegaConf.create({"_target_": target, "sizes": list(sizes)}))


def convolution() -> keras.Model:
    return keras.Sequential(
        [keras.Input((None, None, COLORS)), layers.Conv2D(COLORS, 1)]
    )


def test_images_and_masks_of_one_size_are_single_examples_of_that_size():
    data = loaded(images_and_masks, SIZES)
    shapes = [spec.shape.as_list() for spec in data.train.element_spec]
    assert shapes == [[8, 8, COLORS], [8, 8, 1]]
    check_single_examples(data, convolution())


def test_images_of_several_sizes_stay_as_they_are():
    data = loaded(images_and_masks, [8, 9] * 10)
    shapes = [spec.shape.as_list() for spec in data.train.element_spec]
    assert shapes == [[None, None, COLORS], [None, None, 1]]


def test_a_later_image_of_another_size_fails_where_it_is_read():
    data = loaded(images_and_masks, [*SIZES, 9])
    with pytest.raises(tf.errors.InvalidArgumentError, match="not compatible"):
        list(data.train)


def test_batches_of_images_are_told_by_the_rank_of_the_models_input():
    data = loaded(batches_of_images, SIZES)
    with pytest.raises(ConfigError, match="not batches"):
        check_single_examples(data, convolution())


def test_an_axis_of_size_1_that_keras_drops_makes_no_batch():
    numbers = tf.data.Dataset.from_tensor_slices(tf.ones([6, 8, 8, 1]))
    data = Data(numbers.map(lambda x: (x, 0)), None)
    model = keras.Sequential([keras.Input((8, 8)), layers.Flatten(), layers.Dense(2)])
    check_single_examples(data, model)
