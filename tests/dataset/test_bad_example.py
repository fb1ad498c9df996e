"""Data that cannot be read, at the start and in the middle of a run.

One line names the file and the example.
"""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from tests.parameters import mostly_slow
from tests.running import Store, one_process, pipeline, start, wait

SHARDS = 4
EXAMPLES_PER_SHARD = 16
SIDE = 8  # of an image, in pixels
SMALL = (
    "model.filters=[2]",
    "model.hidden=[]",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
)
CUT = (
    "accumulation.effective_batch_size=8",
    "accumulation.factor=2",
    "accumulation.micro_batch_size=null",
)
STREAMED = (
    "dataset.in_memory=false",
    "dataset.shuffle_files=false",
    "dataset.shuffle_buffer=1",
)


def written(folder: Path, *, seed: int = 0, bad: int | None = None) -> Path:
    """Write a TFDS folder of PNG images in four files, and return where they are.

    Args:
        folder: TFDS' data_dir.
        seed: of the images.
        bad: number of an example that is no image; None for none.
    """
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=(SIDE, SIDE, 1)),
            "label": tfds.features.ClassLabel(num_classes=2),
        }
    )
    place = folder / "own" / "1.0.0"
    place.mkdir(parents=True, exist_ok=True)
    template = tfds.core.ShardedFileTemplate(
        data_dir=place, dataset_name="own", split="train", filetype_suffix="tfrecord"
    )
    shape = (SHARDS, EXAMPLES_PER_SHARD, SIDE, SIDE, 1)
    pixels = np.random.default_rng(seed).integers(0, 256, shape).astype("uint8")
    for shard, images in enumerate(pixels):
        path = template.sharded_filepath(shard_index=shard, num_shards=SHARDS)
        with tf.io.TFRecordWriter(str(path)) as writer:
            for number, image in enumerate(images):
                if shard * EXAMPLES_PER_SHARD + number == bad:
                    image = io.BytesIO(b"no image")
                example = features.encode_example({"image": image, "label": number % 2})
                writer.write(features.serialize_example(example))

    split = tfds.core.SplitInfo(
        name="train",
        shard_lengths=[EXAMPLES_PER_SHARD] * SHARDS,
        num_bytes=0,
        filename_template=template,
    )
    tfds.folder_dataset.write_metadata(
        data_dir=place, features=features, split_infos=[split]
    )
    return place


def file(place: Path, number: int) -> Path:
    """Return the path of a file of `written`."""
    return place / f"own-train.tfrecord-{number:05d}-of-{SHARDS:05d}"


def overrides(folder: Path, *more: str) -> list[str]:
    """Return the overrides of a run on the data in `folder`."""
    return [
        "dataset=tfds",
        "dataset.name=own:1.0.0",
        f"dataset.data_dir={folder}",
        "dataset.validation_split=null",
        "dataset.scale=0.01",
        *SMALL,
        *CUT,
        *more,
    ]


def failed(folder: Path) -> tuple[str, list[int]]:
    """Return why the run failed, and the steps of its rows."""
    store = Store(folder)
    run = store.run()
    assert run.info.status == "FAILED"
    return run.data.tags["failure"], sorted(store.history(run, "train/loss"))


def test_an_example_that_cannot_be_decoded_is_named_with_its_file(tmp_path):
    place = written(tmp_path / "data", bad=2 * EXAMPLES_PER_SHARD + 3)
    data = tmp_path / "data"
    err = pipeline(
        "train",
        *overrides(data, *STREAMED, "training.epochs=1"),
        cwd=tmp_path,
        status=1,
    ).stderr
    where = (
        "example 35 of the train split, which is example 3 of "
        f"{file(place, 2)}, counted from 0: "
    )
    why, steps = failed(tmp_path)
    assert f"the data cannot be read: {where}" in why
    assert "\n" not in why
    assert f"the data cannot be read: {where}" in err
    assert "image" in err.split(where)[1].splitlines()[0]
    assert "Traceback" not in err
    assert steps == [1, 2, 3, 4]  # of 8 examples each, as the 35th is in the fifth


OWN = """
import tensorflow as tf


def rows():
    for number in range(40):
        if number == 17:
            raise ValueError("row 17 has no label")
        yield [float(number)] * 4, number % 2


def table():
    spec = (tf.TensorSpec((4,), tf.float32), tf.TensorSpec((), tf.int64))
    made = tf.data.Dataset.from_generator(rows, output_signature=spec)
    return made.apply(tf.data.experimental.assert_cardinality(40)), None
"""
NOTHING = """
import numpy as np
import tensorflow_datasets as tfds


class Nothing(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        pixels = tfds.features.Tensor(shape=(2,), dtype=np.int64)
        features = tfds.features.FeaturesDict({"image": pixels, "label": np.int64})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, downloads):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield from ()
"""


@pytest.mark.slow
def test_what_can_be_known_before_is_rejected_before(tmp_path):
    place = written(tmp_path / "bad", bad=EXAMPLES_PER_SHARD + 5)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "nothing.py").write_text(NOTHING)
    (folder / "own.py").write_text(OWN)
    none = [
        "dataset=tfds",
        "+dataset.builder=nothing.Nothing",
        "dataset.name=null",
        f"dataset.data_dir={tmp_path}/none",
        *SMALL,
        *CUT,
    ]
    table = ["dataset=breast_cancer", "dataset._target_=own.table", "model=mlp", *CUT]
    bad = overrides(tmp_path / "bad", "dataset.in_memory=true")
    lines = {
        "table": " ".join(["train", *table]),
        "bad": " ".join(["train", *bad]),
        "none": " ".join(["train", *none]),
    }
    answers = one_process(lines, folder)
    for answer in answers.values():
        assert (answer["status"], answer["changed"]) == (2, [])
        assert answer["err"].count("\n") <= 2
        assert "Traceback" not in answer["err"]

    cannot = "dataset must give examples (the data cannot be read: "
    image = (
        "example 21 of the train split, which is example 5 of "
        f"{file(place, 1)}, counted from 0: "
    )
    row = "example 17 of the train split, counted from 0: "
    row += "ValueError: row 17 has no label)"
    assert cannot + image in answers["bad"]["err"]
    assert cannot + row in answers["table"]["err"]
    assert "No examples were yielded" in answers["none"]["err"]


def change(target: Path, how: str, other: Path) -> None:
    """Change a file while it is read.

    Args:
        target: the file.
        how: "torn", "gone", "replaced" by `other`, or "the same again".
        other: a file of other examples.
    """
    if how == "torn":
        content = target.read_bytes()
        target.write_bytes(content[: len(content) // 2] + b"?" * 100)
    elif how == "gone":
        target.unlink()
    elif how == "replaced":
        shutil.move(other, target)
    else:
        copy = target.parents[3] / "same"
        shutil.copy(target, copy)
        copy.touch()
        shutil.move(copy, target)


@pytest.mark.parametrize(
    "how", mostly_slow(["torn", "gone", "replaced", "the same again"], [], ["replaced"])
)
def test_a_file_that_changes_while_training(tmp_path, how):
    place = written(tmp_path / "data")
    other = written(tmp_path / "other", seed=1)
    epochs = 20 if how == "the same again" else 400
    more = (*STREAMED, f"training.epochs={epochs}", "tracking.log_every=1")
    process = start(
        "train",
        *overrides(tmp_path / "data", *more),
        "hydra.run.dir=run",
        cwd=tmp_path,
        warm=True,
    )
    journal = tmp_path / "run" / "journal.jsonl"
    dataset = tmp_path / "run" / "dataset.json"

    def has_begun() -> bool:
        if not journal.exists():
            return False
        rows = [
            row for row in journal.read_text().splitlines() if '"train/loss"' in row
        ]
        return len(rows) >= 20 and bool(json.loads(dataset.read_text())["files"])

    wait(has_begun)
    target = file(place, 1)
    change(target, how, file(other, 1))
    _, err = process.communicate(timeout=300)
    if how == "the same again":
        assert process.returncode == 0, err
        assert Store(tmp_path).run().info.status == "FINISHED"
        return

    assert process.returncode == 1, err
    why, steps = failed(tmp_path)
    assert str(target) in why
    assert "\n" not in why
    if how == "gone":
        assert "cannot be read" in why
    else:
        assert "has changed since the run began" in why
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 20
    assert (len(steps) == epochs * 8) == (how == "replaced")
