"""Journals that somebody has written, with valid checksums.

Each is rejected alone, and the others are shipped.
"""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from pipeline.checkpoints import run_dirs
from pipeline.common.errors import ConfigError
from pipeline.tracking import journal_file
from pipeline.tracking.journal_file import JOURNAL_NAME, Past
from tests.running import Store, pipeline

START = {
    "format": 1,
    "store": "sqlite:///x",
    "experiment": "e",
    "name": "n",
    "params": {},
    "tags": {"journal": "1"},
    "system_metrics": False,
}
LINES = {
    "a row without its step": {"metrics": {"train/loss": 1.0}},
    "a row with a text": {"metrics": {"train/loss": "low"}, "step": 1},
    "a row with null": {"metrics": {"train/loss": None}, "step": 1},
    "a run without its ID": {"run": {}},
    "an ID that is a number": {"run": {"run_id": 5}},
    "an input without its context": {"dataset": {"name": "d"}},
    "a tag that is a number": {"tags": {"a": 1}},
    "a segment that is a list": {"resume": []},
    "a time that is a text": {"time": "now", "tags": {}},
}


def crafted(folder, *lines):
    folder.mkdir(exist_ok=True)
    writer = journal_file.create(folder / JOURNAL_NAME)
    for line in lines:
        writer.write(line)
    writer.close()
    return folder


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_lacks_something_is_damage(tmp_path, name):
    past = Past.read(crafted(tmp_path, {"start": START}, LINES[name]))
    past.close()
    assert past.damage.startswith("line 2: ")


@pytest.mark.parametrize(
    "start",
    [{"format": 1}, {**START, "tags": {}}, {**START, "store": 5}, {**START, "tags": 5}],
    ids=str,
)
def test_a_first_line_that_lacks_something_is_refused(tmp_path, start):
    with pytest.raises(ConfigError, match="RUN must have a journal of format 1"):
        Past.read(crafted(tmp_path, {"start": start}))


def test_a_nesting_without_end_is_damage(tmp_path, monkeypatch):
    nested = '{"time":1,"tags":' + 100_000 * '{"a":' + "1" + 100_001 * "}"
    monkeypatch.setattr(journal_file, "_encode", lambda _: nested)
    crafted(tmp_path / "nested", {})
    with pytest.raises(
        ConfigError, match=r"RUN must have a journal of format 1 \(line 1"
    ):
        Past.read(tmp_path / "nested")


def test_one_bad_journal_keeps_no_other_run_from_anything(tmp_path):
    """Without a check of the lines, `sync` and `resume` ended with `KeyError: 'step'`."""
    for number, line in enumerate(LINES.values()):
        crafted(tmp_path / f"bad {number}", {"start": START}, line)
    crafted(tmp_path / "worse", {"start": {"format": 1}})
    good = {**START, "store": f"sqlite:///{tmp_path}/mlruns/mlflow.db"}
    lines = (
        {"start": {**good, "tags": {"journal": "good"}}},
        {"run": {"run_id": 32 * "a", "experiment_id": "1"}},
        {"metrics": {"train/loss": 1.0}, "step": 1},
        {"end": "FINISHED"},
    )
    crafted(tmp_path / "good", *lines)
    answer = pipeline("sync", cwd=tmp_path, status=None)
    assert "Traceback" not in answer.stderr
    assert "good: 1 points were missing; run " in answer.stderr
    assert "worse: RUN_DIR must have a journal of format 1 (its first " in answer.stderr
    (run,) = Store(tmp_path).runs("e")
    assert run.info.status == "FINISHED"


def test_a_run_is_found_beside_bad_journals(tmp_path, monkeypatch):
    for number, line in enumerate(LINES.values()):
        crafted(tmp_path / f"bad {number}", {"start": START}, line)
    run = {"run": {"run_id": 32 * "a", "experiment_id": "1"}}
    crafted(tmp_path / "good", {"start": START}, run)
    monkeypatch.chdir(tmp_path)
    assert [str(found) for found in run_dirs.by_id("RUN").values()] == ["good"]
    assert run_dirs.find("aaaa", "RUN") == Path("good")
    with pytest.raises(ConfigError, match=r"\(at least 4 characters\)\. Received"):
        run_dirs.find("aaa", "RUN")


def test_a_second_start_in_a_folder_that_is_in_use_says_so(tmp_path):
    """The first line is not written yet: there is no run in the folder."""
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()

    def hold():
        journal_file.create(tmp_path / JOURNAL_NAME)
        ready.set()
        time.sleep(60)

    process = fork.Process(target=hold)
    process.start()
    try:
        assert ready.wait(30)
        with pytest.raises(ConfigError, match="a folder that no other process trains"):
            journal_file.create(tmp_path / JOURNAL_NAME)
    finally:
        process.kill()
        process.join()
    journal_file.create(tmp_path / JOURNAL_NAME).close()
