"""Checksums of data files: computed in training, remembered until a file changes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import pytest
import tensorflow as tf

from pipeline.common.errors import ConfigError, DataError
from pipeline.components import assembly
from pipeline.config.compose import composed
from pipeline.config.resolve import resolve
from pipeline.dataset import Data, checksums
from pipeline.tracking import provenance
from tests.running import Store, pipeline

QUICK = (
    "train",
    "experiment=quick",
    "model=mlp",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
)
RUN = (*QUICK, "hydra.run.dir=run")


def expected(content: bytes) -> str:
    return hashlib.sha256(str(len(content)).encode() + content).hexdigest()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pipeline" / "checksums"


def aged(path) -> None:
    os.utime(path, (time.time() - 60,) * 2)


def test_a_file_that_has_not_changed_is_not_read_again(tmp_path, cache):
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    assert checksums.sha256_of(file) == expected(b"abc")
    assert not cache.exists()  # it may change within the resolution of its date
    aged(file)
    assert checksums.sha256_of(file) == expected(b"abc")
    (entry,) = cache.iterdir()
    entry.write_text(entry.read_text().replace(expected(b"abc"), "known"))
    assert checksums.sha256_of(file) == "known"
    file.write_bytes(b"abd")  # of the same size; and its date as well
    aged(file)
    assert checksums.sha256_of(file) == expected(b"abd")
    entry.write_text("{")
    assert checksums.sha256_of(file) == expected(b"abd")


def example_of(**numbers: int) -> bytes:
    """Return a serialized example whose features have the order of the arguments."""
    serialized = b""
    for name, number in numbers.items():
        values = tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
        features = tf.train.Features(feature={name: values})
        # The entries of a serialized mapping may be concatenated in any order.
        serialized += features.SerializeToString()
    # An example has the mapping in its field 1: a tag, the length and the bytes.
    assert len(serialized) < 128
    return bytes([0x0A, len(serialized)]) + serialized


def record_file(path: Path, *records: bytes) -> Path:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return path


def record_of(path: Path) -> dict[str, object]:
    split = tf.data.Dataset.range(1)
    return provenance.dataset(Data(split, None, files=(path,)))


def test_the_order_of_the_features_of_an_example_does_not_count(tmp_path, cache):
    """TFDS wrote the same digits as other bytes in three of ten preparations."""
    names = ("first", "second", "other", "swapped")
    folders = {name: tmp_path / name for name in names}
    for folder in folders.values():
        folder.mkdir()
    file = "digits-train.tfrecord-00000-of-00001"
    examples = example_of(image=1, label=2), example_of(image=3, label=4)
    recorded = record_of(record_file(folders["first"] / file, *examples))
    reordered = example_of(label=2, image=1), example_of(label=4, image=3)
    second = record_of(record_file(folders["second"] / file, *reordered))
    assert second["files"] != recorded["files"]
    assert second["records"] == recorded["records"]
    provenance.check_dataset(recorded, second, "1")

    # The negative controls: another value, another order of the examples, and a record
    # of an older version.
    other = record_of(
        record_file(folders["other"] / file, examples[0], example_of(image=3))
    )
    swapped = record_of(record_file(folders["swapped"] / file, *reversed(examples)))
    older = {key: value for key, value in recorded.items() if key != "records"}
    for then, now in ((recorded, other), (recorded, swapped), (older, second)):
        with pytest.raises(ConfigError, match=f"the file {file} differs"):
            provenance.check_dataset(then, now, "1")


def test_records_that_are_no_examples_have_no_checksum(tmp_path, cache):
    sequence = tf.train.SequenceExample()
    sequence.feature_lists.feature_list["x"].feature.add().int64_list.value.append(1)
    others = {
        "texts": b"no example",
        "tensors": tf.io.serialize_tensor(tf.zeros(2)).numpy(),
        "sequences": sequence.SerializeToString(),
    }
    for name, record in others.items():
        file = record_file(tmp_path / f"{name}.tfrecord", record)
        assert record_of(file)["records"] == {}, name
    damaged = record_file(tmp_path / "damaged.tfrecord", example_of(image=1))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert record_of(damaged)["records"] == {}


def written(folder, *names) -> list[Path]:
    """Write files that are a minute old."""
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"old")
        aged(path)
    return paths


def computed(files: checksums.DataFiles) -> dict[str, str]:
    files.compute(lambda _: None)
    files.wait()
    return files.checksums


@pytest.mark.parametrize("when", ["before its checksum", "while it is computed"])
def test_a_file_that_changes_early_has_no_checksum(when, tmp_path, cache, monkeypatch):
    """The checksum would be that of other data than the run began with."""
    first, second, same = written(tmp_path, "first", "second", "same")
    files = checksums.DataFiles([first, second, same])

    def change():
        first.write_bytes(b"new!")
        second.write_bytes(b"new!")

    if when == "before its checksum":
        change()
    else:
        hashed = checksums.sha256_of

        def hashed_then_changed(path):
            checksum = hashed(path)
            if path == same:  # the last of the three
                change()
            return checksum

        monkeypatch.setattr(checksums, "sha256_of", hashed_then_changed)
    assert computed(files) == {
        "first": checksums.CHANGED,
        "second": checksums.CHANGED,
        "same": expected(b"old"),
    }
    with pytest.raises(DataError, match="first has changed since the run began"):
        files.check()


def test_a_file_that_is_written_again_with_its_content_has_not_changed(tmp_path, cache):
    (file,) = written(tmp_path, "file")
    files = checksums.DataFiles([file])
    assert computed(files) == {"file": expected(b"old")}
    file.write_bytes(b"old")
    files.check()
    file.write_bytes(b"new")
    with pytest.raises(DataError, match="has changed"):
        files.check()


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path, cache):
    names = ["a/x.csv", "b/c/x.csv", "b/x.csv", "b/y.csv"]
    for folder in (tmp_path / "here", tmp_path / "moved"):
        paths = written(folder, *names)
        paths[0].write_bytes(b"other")
        recorded = computed(checksums.DataFiles(paths))
        assert recorded == {
            "a/x.csv": expected(b"other"),
            "b/c/x.csv": expected(b"old"),
            "b/x.csv": expected(b"old"),
            "y.csv": expected(b"old"),
        }


@pytest.mark.slow
def test_a_file_of_a_validation_split_that_is_kept_may_not_change_either(tmp_path):
    """It is read at the first evaluation, which may be hours later.

    The training split in memory is read at once.
    """
    overrides = ["model=mlp", "hardware.device=cpu", f"dataset.data_dir={tmp_path}"]
    files = assembly.assemble(resolve(composed(overrides))).files

    def change(split):
        (file,) = tmp_path.rglob(f"*-{split}.tfrecord*")
        file.write_bytes(file.read_bytes()[::-1])

    change("train")
    files.check()
    change("validation")
    with pytest.raises(DataError, match="has changed"):
        files.check()


@pytest.mark.slow
def test_a_run_records_them_beside_its_training(tmp_path, cache):
    pipeline(*RUN, f"dataset.data_dir={tmp_path}/data", cwd=tmp_path)
    store = Store(tmp_path)
    run = store.run()
    recorded = json.loads((tmp_path / "run" / "dataset.json").read_text())
    logged = store.client.download_artifacts(
        run.info.run_id, "dataset.json", str(tmp_path)
    )
    with open(logged, encoding="utf-8") as file:
        assert json.load(file) == recorded
    checksums_by_name = {}
    for file in (tmp_path / "data").rglob("*"):
        if file.name in recorded["files"]:
            checksums_by_name[file.name] = expected(file.read_bytes())
    assert len(checksums_by_name) == 4
    assert recorded["files"] == checksums_by_name
    # Checked before a rerun trains anything, and where a run goes on.
    shutil.copytree(tmp_path / "data", tmp_path / "other")
    (victim,) = (tmp_path / "other").rglob("*train.tfrecord*")
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    other_data = f"dataset.data_dir={tmp_path}/other"
    rerun = ("rerun", run.info.run_id, f"--allow={tmp_path}/other", other_data)
    resume = ("resume", "run", other_data, "training.epochs=3")
    for arguments in (rerun, resume):
        rejected = pipeline(*arguments, cwd=tmp_path, status=2)
        assert f"the file {victim.name} differs" in rejected.stderr, rejected.stderr
    # One that is not requested is not compared.
    pipeline(*RUN[:-1], "hydra.run.dir=none", "dataset.checksum=none", cwd=tmp_path)
    none = json.loads((tmp_path / "none" / "dataset.json").read_text())
    assert (none["checksum"], none["files"], none["content"]) == ("none", {}, {})
    assert none["examples"] == recorded["examples"]
