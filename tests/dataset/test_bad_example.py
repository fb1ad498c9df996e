"""Data that cannot be read, at the start and in the middle of a run: the file and the example, in one line."""

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

SHARDS, EACH, SIDE = 4, 16, 8
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
    """A TFDS folder of PNG images in four files; the one of number `bad` is none."""
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=(SIDE, SIDE, 1)),
            "label": tfds.features.ClassLabel(num_classes=2),
        }
    )
    place = folder / "own" / "1.0.0"
    place.mkdir(parents=True, exist_ok=True)
    pixels = (
        np.random.default_rng(seed)
        .integers(0, 256, (SHARDS, EACH, SIDE, SIDE, 1))
        .astype("uint8")
    )
    template = tfds.core.ShardedFileTemplate(
        data_dir=place, dataset_name="own", split="train", filetype_suffix="tfrecord"
    )
    for shard, images in enumerate(pixels):
        with tf.io.TFRecordWriter(
            str(template.sharded_filepath(shard_index=shard, num_shards=SHARDS))
        ) as writer:
            for number, image in enumerate(images):
                broken = shard * EACH + number == bad
                feature = {
                    "image": io.BytesIO(b"no image") if broken else image,
                    "label": number % 2,
                }
                writer.write(
                    features.serialize_example(features.encode_example(feature))
                )
    split = tfds.core.SplitInfo(
        name="train",
        shard_lengths=[EACH] * SHARDS,
        num_bytes=0,
        filename_template=template,
    )
    tfds.folder_dataset.write_metadata(
        data_dir=place, features=features, split_infos=[split]
    )
    return place


def file(place: Path, number: int) -> Path:
    return place / f"own-train.tfrecord-{number:05d}-of-{SHARDS:05d}"


def line(folder: Path, *more: str) -> list[str]:
    given = (
        "dataset=tfds",
        "dataset.name=own:1.0.0",
        f"dataset.data_dir={folder}",
        "dataset.validation_split=null",
    )
    return [*given, "dataset.scale=0.01", *SMALL, *CUT, *more]


def failed(folder: Path) -> tuple[str, list[int]]:
    """Why the run failed, and its steps."""
    store = Store(folder)
    run = store.run()
    assert run.info.status == "FAILED"
    return run.data.tags["failure"], sorted(store.history(run, "train/loss"))


def test_an_example_that_cannot_be_decoded_is_named_with_its_file(tmp_path):
    place = written(tmp_path / "data", bad=2 * EACH + 3)
    said = pipeline(
        "train",
        *line(tmp_path / "data", *STREAMED, "training.epochs=1"),
        cwd=tmp_path,
        status=1,
    ).stderr
    where = f"example 35 of the train split, which is example 3 of {file(place, 2)}, counted from 0: "
    why, steps = failed(tmp_path)
    assert f"the data cannot be read: {where}" in why
    assert "\n" not in why
    assert f"the data cannot be read: {where}" in said
    assert "image" in said.split(where)[1].splitlines()[0]
    assert "Traceback" not in said
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
def test_what_can_be_known_before_is_refused_before(tmp_path):
    place = written(tmp_path / "bad", bad=EACH + 5)
    own = tmp_path / "run"
    own.mkdir()
    (own / "nothing.py").write_text(NOTHING)
    (own / "own.py").write_text(OWN)
    none = [
        "dataset=tfds",
        "+dataset.builder=nothing.Nothing",
        "dataset.name=null",
        f"dataset.data_dir={tmp_path}/none",
        *SMALL,
        *CUT,
    ]
    table = ["dataset=breast_cancer", "dataset._target_=own.table", "model=mlp", *CUT]
    lines = {
        "table": table,
        "bad": line(tmp_path / "bad", "dataset.in_memory=true"),
        "none": none,
    }
    found = one_process(
        {name: " ".join(["train", *given]) for name, given in lines.items()}, own
    )
    for answer in found.values():
        assert (answer["status"], answer["changed"]) == (2, [])
        assert answer["err"].count("\n") <= 2
        assert "Traceback" not in answer["err"]
    where = f"example 21 of the train split, which is example 5 of {file(place, 1)}, counted from 0: "
    assert (
        f"dataset must give examples (the data cannot be read: {where}"
        in found["bad"]["err"]
    )
    rows = "example 17 of the train split, counted from 0: ValueError: row 17 has no label)"
    assert (
        f"dataset must give examples (the data cannot be read: {rows}"
        in found["table"]["err"]
    )
    assert "No examples were yielded" in found["none"]["err"]


@pytest.mark.parametrize(
    "how", mostly_slow(["torn", "gone", "replaced", "the same again"], [], ["replaced"])
)
def test_a_file_that_changes_while_training(tmp_path, how):
    place, other = written(tmp_path / "data"), written(tmp_path / "other", seed=1)
    epochs = 20 if how == "the same again" else 400
    more = (*STREAMED, f"training.epochs={epochs}", "tracking.log_every=1")
    process = start(
        "train",
        *line(tmp_path / "data", *more),
        "hydra.run.dir=run",
        cwd=tmp_path,
        warm=True,
    )
    journal = tmp_path / "run" / "journal.jsonl"

    def rows() -> int:
        texts = journal.read_text().splitlines() if journal.exists() else []
        return sum('"train/loss"' in text for text in texts)

    known = tmp_path / "run" / "dataset.json"
    wait(lambda: rows() >= 20 and json.loads(known.read_text())["files"])
    target = file(place, 1)
    if how == "torn":
        whole = target.read_bytes()
        target.write_bytes(whole[: len(whole) // 2] + b"?" * 100)
    elif how == "gone":
        target.unlink()
    elif how == "replaced":
        shutil.move(file(other, 1), target)
    else:
        shutil.copy(target, tmp_path / "same")
        (tmp_path / "same").touch()
        shutil.move(tmp_path / "same", target)
    _, err = process.communicate(timeout=300)
    store = Store(tmp_path)
    if how == "the same again":
        assert process.returncode == 0, err
        assert store.run().info.status == "FINISHED"
        return
    assert process.returncode == 1, err
    why, steps = failed(tmp_path)
    assert str(target) in why
    assert "\n" not in why
    assert (
        "cannot be read" if how == "gone" else "has changed since the run began"
    ) in why
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 20
    assert (len(steps) == epochs * 8) == (how == "replaced")
