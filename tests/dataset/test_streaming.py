"""A training split of 1 GB is streamed in bounded memory, from the first update on."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from tests.running import Store, pipeline

pytestmark = pytest.mark.slow
SIDE = 64  # of an image, in pixels
SHARDS = 32
CLASSES = 8
GIB = 2**30

# No checksum is computed before the first update is done; that update notes how many
# bytes the process has read.
WATCHED = """
import threading
from pathlib import Path

import keras
from pipeline.dataset import checksums

updated = threading.Event()
sha256_of = checksums.sha256_of


def sha256_after_first_update(path):
    if not updated.wait(300):
        raise RuntimeError("the first update waits for the checksums")
    return sha256_of(path)


checksums.sha256_of = sha256_after_first_update


class Watched(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if not updated.is_set():
            for line in Path("/proc/self/io").read_text().splitlines():
                name, value = line.split(": ")
                if name == "rchar":
                    Path("read").write_text(value)
            updated.set()
"""


def written(folder: Path, size: int) -> Path:
    """Write a TFDS folder of `size` bytes of images, in files sorted by class."""
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
    template = tfds.core.ShardedFileTemplate(
        data_dir=place, dataset_name="big", split="train", filetype_suffix="tfrecord"
    )
    numbers = np.random.default_rng(0)
    per_shard = int(size // np.prod(shape) // SHARDS)
    for shard in range(SHARDS):
        # A file repeats 64 images: making them takes longer than writing them.
        label = shard * CLASSES // SHARDS
        records = []
        for image in numbers.integers(0, 256, (64, *shape)).astype("uint8"):
            example = {"image": image, "label": label}
            records.append(features.serialize_example(example))
        path = template.sharded_filepath(shard_index=shard, num_shards=SHARDS)
        with tf.io.TFRecordWriter(str(path)) as writer:
            for number in range(per_shard):
                writer.write(records[number % len(records)])

    split = tfds.core.SplitInfo(
        name="train",
        shard_lengths=[per_shard] * SHARDS,
        num_bytes=0,
        filename_template=template,
    )
    tfds.folder_dataset.write_metadata(
        data_dir=place, features=features, split_infos=[split]
    )
    return folder


def overrides(folder: Path) -> list[str]:
    """Return the overrides of a run of a small model on the data in `folder`."""
    return [
        "dataset=tfds",
        "dataset.name=big:1.0.0",
        f"dataset.data_dir={folder}",
        "dataset.validation_split=null",
        "model.filters=[4]",
        "model.hidden=[]",
        "tracking.log_model=false",
    ]


@dataclass(frozen=True)
class Run:
    """What a run has logged: its losses by update, and its peak of memory in bytes."""

    losses: np.ndarray
    peak: float


def run(folder: Path, *more: str, warm: bool = False) -> Run:
    """Train 60 updates, or as many as `more` says, and return what was logged.

    A warm process shares memory with others, so its peak is not its own.
    """
    pipeline(
        "train",
        *overrides(folder),
        "training.updates=60",
        "accumulation.effective_batch_size=64",
        "tracking.system_metrics=false",
        "dataset.in_memory=false",
        *more,
        cwd=folder,
        warm=warm,
        XDG_CACHE_HOME=str(folder / "cache"),
    )
    store = Store(folder)
    newest = store.runs()[-1]
    losses = store.history(newest, "train/loss")
    peak = newest.data.metrics["perf/peak_memory_bytes"]
    return Run(np.array(list(losses.values())), peak)


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    return written(tmp_path_factory.mktemp("big"), GIB)


def test_a_gigabyte_is_streamed_in_bounded_memory(big):
    """The examples would take four, as floats."""
    buffer = "dataset.shuffle_buffer=2000"
    at_once = run(big, buffer)
    in_eight = run(big, buffer, "accumulation.factor=8")
    assert at_once.peak < 1.5 * GIB
    assert in_eight.peak < 1.5 * GIB
    # The order is the same at another factor, so the examples of an update are, and its
    # loss is within float32.
    assert np.abs(at_once.losses[:5] / in_eight.losses[:5] - 1).max() < 1e-4
    other = run(big, buffer, "seed=1", "training.updates=2", warm=True)
    assert np.abs(other.losses[0] / at_once.losses[0] - 1) > 1e-3


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
    assert len([name for name in files if "tfrecord" in name]) == SHARDS


def test_auto_streams_what_is_too_large(big):
    """The files hold 1 GiB of bytes, which are 4 GiB of floats."""
    from pipeline.dataset import cache

    shown = pipeline("train", *overrides(big), "--cfg", "job", cwd=big).stdout
    assert "in_memory: auto" in shown

    quarter = cache.limit() / cache.SHARE
    if quarter >= 4 * GIB:
        pytest.skip(f"a quarter of this machine's memory is {quarter / GIB:.0f} GiB")
    more = ("training.updates=3", "hydra.run.dir=auto")
    done = pipeline("train", *overrides(big), *more, cwd=big, warm=False)
    line = (
        r"4.0 GiB of training examples are streamed, because a quarter of the memory "
        r"is [\d.]+ GiB; "
    )
    assert re.search(line, done.stderr)
    recorded = (big / "auto" / "config.yaml").read_text()
    assert "in_memory: false" in recorded
    # Its examples take 48 KiB each, in 128 MiB.
    assert re.search(r"shuffle_buffer: 27\d\d\n", recorded)
