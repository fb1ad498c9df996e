"""Journals that somebody has written, with valid checksums.

Each is rejected alone, and the others are shipped.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from pipeline.checkpoints import run_dirs
from pipeline.common.errors import ConfigError
from pipeline.tracking import journal_file, journal_lines
from pipeline.tracking.foreign_store import ForeignStore
from pipeline.tracking.journal_file import JOURNAL_NAME, LineReader, Past
from pipeline.tracking.journal_lines import (
    Artifact,
    Created,
    End,
    Fork,
    Input,
    Line,
    Model,
    Resume,
    Row,
    RunIds,
    RunStart,
    Start,
    Tags,
)
from tests.running import Store, pipeline
from tests.shared import place_store

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
    "an input without its digest": {"dataset": {"name": "d"}, "context": "training"},
    "a list of metrics": {"metrics": None, "step": 1},
    "a fork of nothing": {"fork_of": None},
    "an artifact of nothing": {"artifact": None},
    "an artifact that is a number": {"artifact": 5},
    "a list of artifacts": {"artifact": ["link"]},
    "a model of nothing": {"model": None},
}
# Each kind of line, and its text in journals of this format, which stays as it is.
DATASET = {"name": "d", "digest": "1", "source_type": "code", "source": "{}"}
RUN = RunStart(1, "sqlite:///x", "e", "n", {"a": 1}, {"journal": "1"}, True, [0], {})
TEXTS = [
    (
        Start(RUN, time=1),
        '"time":1,"start":{"format":1,"store":"sqlite:///x","experiment":"e",'
        '"name":"n","params":{"a":1},"tags":{"journal":"1"},"system_metrics":true,'
        '"gpus":[0],"segment":{}}}',
    ),
    (
        Created(RunIds("r", "7"), time=2),
        '"time":2,"run":{"run_id":"r","experiment_id":"7"}}',
    ),
    (
        Input(DATASET, "training", time=3),
        '"time":3,"dataset":{"name":"d","digest":"1","source_type":"code",'
        '"source":"{}"},"context":"training"}',
    ),
    (Artifact("a.json", time=4), '"time":4,"artifact":"a.json"}'),
    (
        Row(7, {"train/loss": 0.5, "train/epoch": 1}, time=5),
        '"time":5,"step":7,"metrics":{"train/loss":0.5,"train/epoch":1}}',
    ),
    (
        Row(7, {"train/mine": 2.0}, logged=True, time=6),
        '"time":6,"step":7,"metrics":{"train/mine":2.0},"logged":true}',
    ),
    (Tags({"a": "b"}, time=7), '"time":7,"tags":{"a":"b"}}'),
    (Model(32 * "0", time=8), f'"time":8,"model":"{32 * "0"}"}}'),
    (Fork("s", time=9), '"time":9,"fork_of":"s"}'),
    (End("FAILED", time=10), '"time":10,"end":"FAILED"}'),
    (
        Resume({"after": 7, "cut": {}}, time=11),
        '"time":11,"resume":{"after":7,"cut":{}}}',
    ),
]


def crafted(folder, *lines):
    folder.mkdir(exist_ok=True)
    writer = journal_file.create(folder / JOURNAL_NAME)
    for line in lines:
        writer.write(line)
    writer.close()
    return folder


def read(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return list(LineReader(descriptor).lines())
    finally:
        os.close(descriptor)


def test_the_lines_on_disk_are_those_of_this_format(tmp_path):
    folder = crafted(tmp_path, *(line.content() for line, _ in TEXTS))
    texts = (folder / JOURNAL_NAME).read_text().splitlines()
    head = len('{"crc":"00000000",')
    assert [text[head:] for text in texts] == [text for _, text in TEXTS]
    assert read(folder / JOURNAL_NAME) == [line for line, _ in TEXTS]


def test_a_line_without_a_time_gets_the_current_one(tmp_path):
    before = int(time.time() * 1000)
    folder = crafted(tmp_path, Tags({}).content())
    (line,) = read(folder / JOURNAL_NAME)
    assert before <= line.time <= int(time.time() * 1000)


def test_the_first_line_of_an_older_version_may_lack_what_came_later():
    content = {"time": 1, "start": {"format": 1, "store": "s", "gpus": None}}
    line = journal_lines.parsed(content)
    assert line == Start(RunStart(format=1, store="s"), time=1)
    assert json.dumps(line.content()["start"].get("gpus")) == "null"


def test_a_kind_of_line_that_is_not_known_yet_is_passed_over(tmp_path):
    lines = ({"start": START}, {"new": 1}, {"tags": {"a": "b"}})
    past = Past.read(crafted(tmp_path, *lines))
    assert (past.damage, past.tags) == ("", {"a": "b"})
    assert type(read(tmp_path / JOURNAL_NAME)[1]) is Line


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_lacks_something_is_damage(tmp_path, name):
    past = Past.read(crafted(tmp_path, {"start": START}, LINES[name]))
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
    place_store(tmp_path)
    answer = pipeline("sync", cwd=tmp_path, status=None)
    assert "Traceback" not in answer.stderr
    assert "good: 1 point sent to the store; run " in answer.stderr
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


def test_a_path_in_place_of_a_run_id_is_answered_with_the_id(tmp_path):
    run = {"run": {"run_id": 32 * "a", "experiment_id": "1"}}
    crafted(tmp_path / "run", {"start": START}, run)
    (tmp_path / "run" / "best.keras").touch()
    store = ForeignStore(f"sqlite:///{tmp_path}/mlflow.db", ())
    for name in ("run", "run/best.keras"):
        with pytest.raises(ConfigError) as error:
            store.run(str(tmp_path / name))
        assert str(error.value).endswith(f"Did you mean '{32 * 'a'}'?")


def test_a_run_is_not_told_from_its_copy_by_the_id(tmp_path, monkeypatch):
    run = {"run": {"run_id": 32 * "a", "experiment_id": "1"}}
    for name in ("original", "copy"):
        crafted(tmp_path / name, {"start": START}, run)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"one run directory.*Choices: copy, origina"):
        run_dirs.find("aaaa", "RUN")
    assert run_dirs.find("original", "RUN") == Path("original")


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
