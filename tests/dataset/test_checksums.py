"""Checksums of data files: computed in training, remembered until a file changes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time

import pytest

from pipeline.common.errors import DataError
from pipeline.components import assembly
from pipeline.config.compose import composed
from pipeline.config.resolve import resolve
from pipeline.dataset import checksums
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
