"""A training split that is longer than memory: 1 GB of files, in bounded memory, from the first update on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from tests.running import Store, pipeline

pytestmark = pytest.mark.slow
SIDE, SHARDS, CLASSES = 64, 32, 8
GIB = 2**30
SIZE = "accumulation.effective_batch_size=64"
# No checksum is computed before the first update is done; that update notes how many bytes the process has read.
WATCHED = """
import threading
from pathlib import Path

import keras
from pipeline.dataset import checksums

updated = threading.Event()
sha256_of = checksums.sha256_of


def held(path):
    if not updated.wait(300):
        raise RuntimeError("the first update waits for the checksums")
    return sha256_of(path)


checksums.sha256_of = held


class Watched(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if not updated.is_set():
            rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
            Path("read").write_text(rows["rchar"])
            updated.set()
"""


def written(folder: Path, size: int) -> Path:
    """A TFDS folder of so many bytes of images, in files that are sorted by class."""
    shape = (SIDE, SIDE, 3)
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Tensor(
                shape=shape, dtype=np.uint8, encoding="bytes"
            ),
            "label": tfds.features.ClassLabel(num_classes=CLASSES),
        }
    )
    place = folder / "big" / "1.0.0"
    place.mkdir(parents=True)
    numbers = np.random.default_rng(0)
    each = size // np.prod(shape) // SHARDS
    template = tfds.core.ShardedFileTemplate(
        data_dir=place, dataset_name="big", split="train", filetype_suffix="tfrecord"
    )
    for shard in range(SHARDS):
        path = str(template.sharded_filepath(shard_index=shard, num_shards=SHARDS))
        # The same images in all files, but for their first pixel: making them takes longer than writing them.
        records = [
            features.serialize_example(
                {"image": image, "label": shard * CLASSES // SHARDS}
            )
            for image in numbers.integers(0, 256, (64, *shape)).astype("uint8")
        ]
        with tf.io.TFRecordWriter(path) as writer:
            for number in range(each):
                writer.write(records[number % len(records)])
    split = tfds.core.SplitInfo(
        name="train",
        shard_lengths=[int(each)] * SHARDS,
        num_bytes=0,
        filename_template=template,
    )
    tfds.folder_dataset.write_metadata(
        data_dir=place, features=features, split_infos=[split]
    )
    return folder


def run(folder: Path, *more: str, warm: bool = False) -> dict:
    """What a short run over the files has logged, and its peak of memory, which a warm process shares with others."""
    given = (
        "dataset=tfds",
        "dataset.name=big:1.0.0",
        f"dataset.data_dir={folder}",
        "dataset.validation_split=null",
    )
    small = (
        "model.filters=[4]",
        "model.hidden=[]",
        "training.updates=60",
        "tracking.log_model=false",
        SIZE,
    )
    quiet = ("tracking.system_metrics=false", "dataset.in_memory=false")
    cache = str(folder / "cache")
    pipeline(
        "train",
        *given,
        *small,
        *quiet,
        *more,
        cwd=folder,
        warm=warm,
        XDG_CACHE_HOME=cache,
    )
    store = Store(folder)
    made = store.runs()[-1]
    return {
        **store.histories(made),
        "peak": made.data.metrics["perf/peak_memory_bytes"],
    }


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    return written(tmp_path_factory.mktemp("big"), GIB)


def test_a_gigabyte_is_streamed_in_bounded_memory(big):
    """The examples would take four, as floats."""
    buffer = "dataset.shuffle_buffer=2000"
    one, two = run(big, buffer), run(big, buffer, "accumulation.factor=8")
    assert max(one["peak"], two["peak"]) < 1.5 * GIB
    # The same order at another factor: the examples of an update are the same, so its loss is, within float32.
    losses = [np.array(list(each["train/loss"].values())) for each in (one, two)]
    assert np.abs(losses[0][:5] / losses[1][:5] - 1).max() < 1e-4
    other = run(big, buffer, "seed=1", "training.updates=2", warm=True)
    assert np.abs(next(iter(other["train/loss"].values())) / losses[0][0] - 1) > 1e-3


def test_the_first_update_waits_neither_for_the_data_nor_for_their_checksums(big):
    """It has read few bytes of them by then, and all checksums come after it."""
    (big / "watched.py").write_text(WATCHED)
    watching = (
        "+training.callbacks.watched._target_=watched.Watched",
        "hydra.run.dir=first",
    )
    run(big, "dataset.shuffle_buffer=500", "training.updates=2", *watching, warm=True)
    read = int((big / "read").read_text())
    print(f"{read / 2**20:.0f} MiB are read before the first update is done")
    assert read < GIB / 4
    files = json.loads((big / "first" / "dataset.json").read_text())["files"]
    assert sum("tfrecord" in name for name in files) == SHARDS


def test_auto_streams_what_is_too_large(big):
    """The files hold 1 GiB of bytes, which are 4 GiB of floats."""
    from pipeline.dataset import cache

    said = pipeline(
        "train",
        "dataset=tfds",
        "dataset.name=big:1.0.0",
        f"dataset.data_dir={big}",
        "--cfg",
        "job",
        cwd=big,
    )
    assert "in_memory: auto" in said.stdout
    held = cache.limit() / cache.SHARE >= 4 * GIB
    if held:
        pytest.skip(
            f"a quarter of this machine's memory is {cache.limit() / cache.SHARE / GIB:.0f} GiB"
        )
    given = (
        "dataset=tfds",
        "dataset.name=big:1.0.0",
        f"dataset.data_dir={big}",
        "dataset.validation_split=null",
    )
    small = (
        "model.filters=[4]",
        "model.hidden=[]",
        "training.updates=3",
        "tracking.log_model=false",
        "hydra.run.dir=auto",
    )
    said = pipeline("train", *given, *small, cwd=big, warm=False)
    assert re.search(
        r"4.0 GiB of training examples are streamed, as a quarter of the memory is [\d.]+ GiB; ",
        said.stderr,
    )
    recorded = (big / "auto" / "config.yaml").read_text()
    assert "in_memory: false" in recorded
    assert re.search(r"shuffle_buffer: 27\d\d\n", recorded)  # of 48 KiB each in 128 MiB
