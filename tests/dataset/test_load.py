"""What a dataset function returns, in the one form that the package works with."""

from __future__ import annotations

import itertools
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from hydra.utils import get_object
from omegaconf import OmegaConf

from pipeline.common.errors import ConfigError
from pipeline.config.stages import Slice
from pipeline.dataset.batches import effective_batches
from pipeline.dataset.load import from_tfds, load
from pipeline.dataset.source import ShareReader
from pipeline.dataset.splits import Data, Stored
from tests.parameters import mostly_slow


def loaded(function, **keys) -> Data:
    """Return the data of a function of this module."""
    return load(OmegaConf.create({"_target_": f"{__name__}.{function}", **keys}))


def photos(path):
    sys.stdout.write("a line of a function of one's own\n")
    folder = keras.utils.image_dataset_from_directory(
        path, image_size=(8, 8), batch_size=2
    )
    return folder, None


def test_a_function_may_write_to_standard_output(tmp_path, capsys):
    """As Keras' functions for folders do, with the default of `verbose`."""
    for name in "ab":
        (tmp_path / name).mkdir()
        image = np.zeros((8, 8, 3))
        keras.utils.save_img(tmp_path / name / "0.png", image, scale=False)
    data = loaded("photos", path=str(tmp_path), batched=True)
    assert data.loaders["train"].count == 1
    assert capsys.readouterr().out == ""


COUNT = 12  # images
SIDE = 4  # of an image, in pixels


def decoded(png):
    """Return an image of unknown size, as `decode_png` does."""
    image = tf.io.decode_png(png, channels=1)
    if tf.reduce_max(image) >= 100:  # a branch of the graph
        image = image - 100
    return image


def with_label(png):
    image = decoded(png)
    return image, tf.reduce_max(image), None


FUNCTIONS = {"x": decoded, "x, y, None": with_label}


def own_images(make, way):
    """Return images that have their number, plus 100, as the value of each pixel."""
    make = FUNCTIONS[make]
    pngs = []
    for number in range(COUNT):
        pixels = np.full((SIDE, SIDE, 1), 100 + number, np.uint8)
        pngs.append(tf.io.encode_png(pixels).numpy())
    records = tf.data.Dataset.from_tensor_slices(pngs)
    split = records.map(make)

    def shuffled(seed):
        return records.shuffle(COUNT, seed=seed, reshuffle_each_iteration=False)

    if way == "shuffled":
        traced = tf.function(make)
        return Data(split, None, shuffled=lambda seed: shuffled(seed).map(traced))
    return Data(split, None, stored={"train": Stored(split, records, make, shuffled)})


MADE = list(itertools.product(FUNCTIONS, ["shuffled", "stored"]))


@pytest.mark.parametrize(("make", "way"), mostly_slow(MADE, [MADE[0], MADE[-1]]))
def test_examples_have_one_form_in_whatever_way_they_are_made(make, way):
    """In the order of the split, with shuffled files, and from stored records."""
    data = loaded("own_images", make=make, way=way)
    parts = 1 if make == "x" else 2
    assert len(data.train.element_spec) == parts
    assert data.input_shape == (SIDE, SIDE, 1)
    assert (data.made_of("train") is not None) == (way == "stored")

    streamed = {"in_memory": False, "shuffle_buffer": 1}
    numbers_in_order = {}
    for by_file in (False, True):
        node = OmegaConf.create({**streamed, "shuffle_files": by_file})
        batches = effective_batches(node, data, [Slice(5, 1)], 0)
        assert len(batches.element_spec) == parts
        assert batches.element_spec[0].shape.as_list() == [None, SIDE, SIDE, 1]
        images = np.concatenate([batch[0] for batch in batches.as_numpy_iterator()])
        numbers_in_order[by_file] = images[:, 0, 0, 0].tolist()
    assert numbers_in_order[False] == list(range(COUNT))
    assert numbers_in_order[True] != list(range(COUNT))
    assert sorted(numbers_in_order[True]) == list(range(COUNT))

    # Each of two workers makes its half of a batch.
    reader = ShareReader(1, 1, 2)
    shares = effective_batches(node, data, [Slice(6, 1)], 0, reader=reader)
    halves = [share.batch[0] for share in shares.as_numpy_iterator()]
    assert [len(half) for half in halves] == [3, 3]
    numbers = numbers_in_order[True]
    assert np.concatenate(halves)[:, 0, 0, 0].tolist() == numbers[3:6] + numbers[9:]


def broken_images():
    return tf.data.Dataset.from_tensors(b"no image").repeat(3).map(decoded), None


def test_an_image_that_cannot_be_decoded_is_named_before_its_size_is_fixed():
    line = (
        r"^dataset must give examples \(the data cannot be read: example 0 of the train "
        "split, counted from 0: Unknown image file format"
    )
    with pytest.raises(ConfigError, match=line):
        loaded("broken_images")


def weights_without_labels():
    inputs = tf.data.Dataset.from_tensor_slices(np.zeros((4, 2)))
    return inputs.map(lambda x: (x, None, 2.0)), None


def sparse_inputs():
    rows = tf.sparse.from_dense(np.eye(4))
    return tf.data.Dataset.from_tensor_slices((rows, np.zeros(4))), None


def inputs_of_unknown_rank():
    def doubled(x, y):
        return tf.numpy_function(lambda x: 2 * x, [x], tf.float64), y

    split = tf.data.Dataset.from_tensor_slices((np.zeros((4, 2)), np.zeros(4)))
    return split.map(doubled), None


def endless():
    return tf.data.Dataset.from_tensors((np.zeros(2), 0)).repeat(), None


def number_unknown():
    split = tf.data.Dataset.from_tensors((np.zeros(2), 0)).filter(lambda x, y: True)
    return split, None


def validation_alone():
    return None, tf.data.Dataset.from_tensor_slices((np.zeros(4), np.zeros(4)))


@pytest.mark.parametrize(
    ("function", "rule"),
    [
        ("weights_without_labels", "must not yield sample weights without labels in"),
        ("sparse_inputs", r"must yield dense or ragged .*: see tf\.sparse\.to_dense"),
        (
            "inputs_of_unknown_rank",
            r"must yield tensors of known rank.*tf\.ensure_shape",
        ),
        ("endless", "must return a train split that ends: leave out `repeat`"),
        ("number_unknown", "must return a train split with a known number of examples"),
        ("validation_alone", "must return a training split. Received: null"),
    ],
)
def test_what_trains_nothing_is_rejected(function, rule):
    with pytest.raises(ConfigError, match=rf"dataset\._target_ {rule}"):
        loaded(function)


def test_a_dataset_of_tfds_has_a_training_split(tmp_path):
    line = r"dataset\.train_split must be a split of digits, .* Received: null"
    with pytest.raises(ConfigError, match=line):
        from_tfds(
            builder="pipeline.dataset.builtin.digits.Digits",
            data_dir=str(tmp_path),
            train_split=None,
        )


@pytest.mark.parametrize("name", ["digits", "topics"])
def test_a_config_may_name_a_dataset_by_the_module_where_it_once_was(name):
    now = get_object(f"pipeline.dataset.{name}")
    assert now is get_object(f"pipeline.dataset.load.{name}")
    assert now is get_object(f"pipeline.dataset.builtin.{name}.{name}")
