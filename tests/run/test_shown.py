"""What is shown of a run: through a kill, a resume, a second shipping and a rerun."""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from pathlib import Path

import pytest

from tests.running import TINY, Store, one_process, pipeline

MINE = """
import os, signal, time
from pathlib import Path
import numpy as np

def mean(x, y, outputs):
    kill = Path("kill")
    files = len(list(Path("run/shown").glob("*")))
    if kill.exists() and kill.read_text() == str(files):
        kill.unlink()
        while not Path("run/checkpoints/10").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return {"label": np.ravel(y), "mean": np.mean(outputs, axis=-1)}

def heat(x, y, outputs):
    np.random.rand()
    return outputs
"""
RUN = (
    *("train", *TINY, "training.epochs=2", "training.checkpoint_every=10"),
    *("training.evaluate_every=6", "hardware.deterministic=true"),
    "hydra.run.dir=run",
)
SHOW = (
    "tracking.show={examples: 4}",
    "+training.shown.mean={_target_: mine.mean, _partial_: true}",
    "+training.shown.heat={_target_: mine.heat, _partial_: true}",
)
STEPS = {6, 12, 18, 24}
KEYS = {"confusion", "fixed", "heat", "reliability", "worst"}
NAME = re.compile(
    r"images/shown~(?P<key>\w+)\+step\+(?P<step>\d+)\+timestamp\+(?P<time>\d+)"
    r"\+[0-9a-f-]{36}(?P<end>\.png|\+compressed\.webp)"
)


def artifacts(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the size and the content of each file that a run has shown, by path."""
    store = Store(folder)
    run_id = store.run().info.run_id
    files = {}
    for place in ("images", "shown"):
        for file in store.client.list_artifacts(run_id, place):
            local = Path(store.client.download_artifacts(run_id, file.path))
            files[file.path] = (file.file_size, local.read_bytes())
    return files


def check_all_are_there_once(folder: Path) -> None:
    store = Store(folder)
    run = store.run()
    names = artifacts(folder)
    steps_by_key = defaultdict(list)
    rows = store.client.get_metric_history(run.info.run_id, "val/loss")
    times = {point.step: point.timestamp for point in rows}
    for name in names:
        if match := NAME.fullmatch(name):
            step = int(match["step"])
            steps_by_key[match["key"], match["end"]].append(step)
            assert int(match["time"]) >= times[step]
    assert {key for key, _ in steps_by_key} == KEYS
    for steps in steps_by_key.values():
        assert sorted(steps) == sorted(STEPS)
    tables = [name for name in names if name.startswith("shown/")]
    expected = set()
    for step in STEPS:
        expected |= {f"shown/examples_{step:09}.csv", f"shown/mean_{step:09}.csv"}
    assert set(tables) == expected
    assert len(names) == len(STEPS) * (2 * len(KEYS) + 2)


@pytest.mark.slow
def test_a_killed_run_shows_each_evaluation_once_and_trains_as_without(tmp_path):
    """It is killed when the row of update 18 is there, and nothing of it is shown.

    Updates 11 to 18 are then trained again. The evaluation of update 12 was shown
    before, and is not shown again.
    """
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "kill").write_text(
        "4"
    )  # when two evaluations with two tables are there
    pipeline(*RUN, *SHOW, cwd=tmp_path, status=-signal.SIGKILL)
    pipeline("resume", "run", cwd=tmp_path)
    check_all_are_there_once(tmp_path)
    before = artifacts(tmp_path)
    pipeline("sync", "run", cwd=tmp_path)
    assert artifacts(tmp_path) == before

    store = Store(tmp_path)
    run = store.run()
    plain = tmp_path / "plain"
    plain.mkdir()
    pipeline(*RUN, cwd=plain)
    other = Store(plain)
    assert store.histories(run) == other.histories(other.run())
    tags = (run.data.tags, other.run().data.tags)
    assert tags[0]["config.hash"] == tags[1]["config.hash"]
    assert other.client.list_artifacts(other.run().info.run_id, "images") == []

    # The gate covers the functions of a record.
    again = f"rerun {run.info.run_id}"
    lines = {"strange": again, "allowed": f"{again} --allow mine"}
    answers = one_process(lines, tmp_path)
    assert answers["strange"]["status"] == 2
    assert "training.shown.mean._target_" in answers["strange"]["err"]
    assert answers["allowed"]["status"] == 0, answers["allowed"]["err"]
    assert "bit-equal" in answers["allowed"]["err"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "keys", "notes"),
    [
        ("text", {"reliability"}, ["the confusion matrix: there are 257 classes"]),
        ("tabular_binary", {"confusion", "reliability"}, []),
        (
            "tabular_regression",
            set(),
            ["the confusion matrix: the labels", "the reliability curve: the labels"],
        ),
    ],
)
def test_what_applies_is_shown(tmp_path, experiment, keys, notes):
    quiet = ("tracking.log_model=false", "tracking.system_metrics=false")
    few = ("training.updates=2", "training.evaluate_every=2", "tracking.show={}")
    command = ("train", f"experiment={experiment}", *quiet, *few, "hydra.run.dir=run")
    done = pipeline(*command, cwd=tmp_path)
    said = [line for line in done.stderr.splitlines() if "tracking.show" in line]
    assert len(said) == len(notes)
    for line, note in zip(said, notes, strict=True):
        assert line.startswith(f"tracking.show leaves out {note}")
    shown = set()
    for name in artifacts(tmp_path):
        if match := NAME.fullmatch(name):
            shown.add(match["key"])
    assert shown == keys
    table = (tmp_path / "run" / "shown" / "examples_000000002.csv").read_text()
    assert table.startswith("set,index,loss,label,prediction,")
    if experiment == "text":
        # Python's help topics are English texts, which the dataset decodes.
        assert len(re.findall(r"\b(the|of|is)\b", table)) > 3
