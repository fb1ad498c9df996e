"""Which data is kept in memory and which is streamed: `dataset.in_memory=auto`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import psutil
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from omegaconf import OmegaConf

from pipeline.config.stages import Slice
from pipeline.dataset import Data, batches, cache
from pipeline.dataset import load as dataset
from pipeline.dataset.stream import Loader

AUTO = {"in_memory": "auto", "shuffle_buffer": None}


def split(**parts: object) -> Data:
    return Data(tf.data.Dataset.from_tensor_slices((parts["x"], parts["y"])), None)


def settled(data: Data, **node: object) -> tuple[dict, str]:
    """Return the keys of the group after the decision, and the line for the user."""
    keys = {**AUTO, **node}
    decided, line = cache.decide_in_memory(OmegaConf.create(keys), data)
    return {**keys, **decided}, line


def test_what_fits_a_quarter_of_the_memory_is_kept(monkeypatch):
    assert 0 < cache.limit() <= psutil.virtual_memory().total
    # 408 bytes each
    data = split(x=np.zeros((1000, 100), np.float32), y=np.zeros(1000, np.int64))
    assert settled(data) == (
        {"in_memory": True, "shuffle_buffer": None},
        "398 KiB of training examples are kept in memory",
    )
    monkeypatch.setattr(cache, "limit", lambda: 4 * 408_000 - 4)
    monkeypatch.setattr(cache, "BUFFER", 408 * 50)
    node, line = settled(data)
    assert node == {"in_memory": False, "shuffle_buffer": 50}
    assert re.fullmatch(
        r"398 KiB .* are streamed, because a quarter of the memory is 398 KiB; "
        r"shuffled in a buffer of 50 examples",
        line,
    )
    assert settled(data, shuffle_buffer=7)[0] == {
        "in_memory": False,
        "shuffle_buffer": 7,
    }
    # By file, if the data can be read so and are to be.
    by_file = replace(data, shuffled=lambda seed: data.train)
    line = settled(by_file, shuffle_files=True)[1]
    assert line.endswith("; shuffled by file and in a buffer of 50 examples")
    for other, shuffle_files in ((by_file, False), (data, True)):
        line = settled(other, shuffle_files=shuffle_files)[1]
        assert line.endswith("; shuffled in a buffer of 50 examples")

    for in_memory in (True, False):  # whatever its size
        node = {"in_memory": in_memory, "shuffle_buffer": None}
        assert settled(data, in_memory=in_memory) == (node, "")


def test_a_validation_split_that_is_kept_is_read_once(monkeypatch):
    """It is kept with the training split if it fits in 1/32 of the memory.

    Here it has 20 examples of 12 bytes.
    """
    read = []

    def examples():
        read.append(1)
        for number in range(20):
            yield float(number), number % 3

    spec = (tf.TensorSpec((), tf.float32), tf.TensorSpec((), tf.int64))
    validation = tf.data.Dataset.from_generator(examples, output_signature=spec)
    data = Data(
        validation, validation.apply(tf.data.experimental.assert_cardinality(20))
    )
    expected = [*data.validation.as_numpy_iterator()]
    for size, kept in ((32 * 240 - 1, False), (32 * 240, True)):
        monkeypatch.setattr(cache, "limit", lambda size=size: size)
        read.clear()
        assert cache.keeps_validation(OmegaConf.create({}), data) is kept
        evaluated = batches.evaluation_batches(data, "validation", 8, None, None, kept)
        for _ in range(3):
            assert [*evaluated.unbatch().as_numpy_iterator()] == expected
        passes = 1 if kept else 3
        assert len(read) == passes
    assert not cache.keeps_validation(OmegaConf.create({"in_memory": False}), data)


def test_examples_of_unequal_length_are_measured():
    texts = tf.data.Dataset.from_tensor_slices(["a" * 10, "b" * 30] * 40).map(
        lambda text: (text, tf.strings.length(text))
    )
    _, line = settled(Data(texts, None))
    # 20 bytes and an int32 each
    assert line.startswith(f"{80 * 24 / 1024:.0f} KiB of training examples")


@pytest.mark.slow
def test_the_peak_of_a_run_is_not_that_of_the_process_that_started_it():
    """As that of a notebook may be: Linux passes `ru_maxrss` on."""
    array = np.ones(2**30 + 2**29, np.uint8)
    program = (
        "from pipeline.components import devices; "
        "print(devices.peak_memory(devices.Devices(None, False, '')))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 2**26 < int(done.stdout) < array.size


class Sorted(tfds.core.GeneratorBasedBuilder):
    """The numbers 0 to 999 in files sorted by class, which is their hundreds digit."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict(
            {
                "x": tfds.features.Scalar(np.float32),
                "label": tfds.features.ClassLabel(num_classes=10),
            }
        )
        # Otherwise TFDS would mix the examples.
        return tfds.core.DatasetInfo(
            builder=self, features=features, disable_shuffling=True
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for number in range(1000):
            yield number, {"x": float(number), "label": number // 100}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of twenty files, each of one class or two."""
    folder = tmp_path_factory.mktemp("sorted")
    builder = Sorted(data_dir=folder)
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(num_shards=20)
    )
    assert len(list(folder.rglob("*.tfrecord*"))) == 20
    return folder


def load(folder) -> Data:
    node = {
        "_target_": "pipeline.dataset.from_tfds",
        "builder": f"{__name__}.Sorted",
        "data_dir": str(folder),
    }
    keys = {"download": False, "input_key": "x", "scale": 1.0, "validation_split": None}
    return dataset.load(OmegaConf.create({**node, **keys}))


def streamed(
    data: Data, size: int = 50, *, seed: int = 0, **node: object
) -> list[list[int]]:
    """The numbers of each of two epochs, in their order."""
    keys = {"in_memory": False, "shuffle_files": True, "shuffle_buffer": 100, **node}
    numbers = []
    for x, _ in batches.effective_batches(
        OmegaConf.create(keys), data, [Slice(size, 2)], seed
    ):
        numbers += x.numpy().astype(int).tolist()
    return [numbers[:1000], numbers[1000:]]


@pytest.mark.slow
def test_files_that_are_sorted_by_class_are_mixed(files):
    data = load(files)
    first, second = streamed(data)
    assert sorted(first) == sorted(second) == list(range(1000))
    assert first != second
    assert streamed(load(files), 64) == [first, second]  # whatever the size of a batch
    assert streamed(data, seed=1)[0] != first
    classes = Counter(number // 100 for number in first[:50])
    assert len(classes) >= 6
    assert max(classes.values()) <= 20
    # The negative control: one file after the other.
    in_turn = streamed(data, shuffle_files=False)[0]
    assert len({number // 100 for number in in_turn[:50]}) <= 3


def test_a_buffer_that_sees_one_class_is_told_of(files):
    data = load(files)

    def warning(**node: object) -> str:
        keys = {"in_memory": False, "shuffle_files": False, **node}
        return batches.one_class(OmegaConf.create(keys), data, 0)

    assert warning(shuffle_buffer=60).startswith(
        "the first 60 examples that are streamed are all of class "
    )
    assert warning(shuffle_buffer=60, shuffle_files=True) == ""
    assert warning(shuffle_buffer=500) == ""
    assert warning(shuffle_buffer=None) == ""  # all of them
    assert warning(in_memory=True) == ""


READ = []  # labels that `noted_files` has read


def noted_files(seed):
    """Return 40 files of 4 examples each, of one class, in a shuffled order."""

    def note(label):
        READ.append(int(label))
        return label

    def noted(x, label):
        return x, tf.ensure_shape(tf.numpy_function(note, [label], label.dtype), [])

    def examples(file):
        return tf.data.Dataset.from_tensors((file, file % 2)).repeat(4)

    files = tf.data.Dataset.range(40)
    shuffled = files.shuffle(40, seed=seed, reshuffle_each_iteration=False)
    return shuffled.flat_map(examples).map(noted)


def test_the_buffer_that_is_looked_at_is_the_one_of_training():
    buffer = 8
    files = noted_files(0).apply(tf.data.experimental.assert_cardinality(160))
    data = Data(files, None, shuffled=noted_files)
    streamed_files = {"in_memory": False, "shuffle_files": True}
    node = OmegaConf.create({**streamed_files, "shuffle_buffer": buffer})
    kinds = set()
    for seed in range(6):
        tf.random.set_seed(seed)  # as a run does
        warning = batches.one_class(node, data, seed)
        READ.clear()
        effective = batches.effective_batches(node, data, [Slice(4, 1)], seed)
        next(iter(effective))
        is_of_one_class = len(set(READ[:buffer])) == 1
        assert bool(warning) == is_of_one_class
        kinds.add(is_of_one_class)
    assert kinds == {True, False}


def test_a_loader_shuffles_its_batches_itself():
    x_and_y = (np.zeros((8, 2)), np.repeat([0, 1], 4))
    loader = Loader(tf.data.Dataset.from_tensor_slices(x_and_y).batch(4), "train")
    data = Data(loader.examples(), None, loaders={"train": loader})
    node = OmegaConf.create({"in_memory": False})
    assert batches.one_class(node, data, 0) == ""
