"""What `pipeline sync` closes: a sweep whose process died before it was closed."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from pipeline.common.errors import ConfigError
from pipeline.sweep import closing, sweep_file
from pipeline.sweep.ending import INTERRUPTED, Ending, JobEndings, Outcome
from pipeline.tracking.foreign_store import OwnStore
from tests import synthetic
from tests.running import environment
from tests.synthetic import PlantedSweep

RUNNING = """
import sys
from pathlib import Path
from pipeline.sweep import sweep_file
from pipeline.tracking.foreign_store import SweepRecord

sweep_file.write_locked(Path("jobs"), SweepRecord(*sys.argv[1:]), "seeds")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def planted(tmp_path):
    """A sweep of two jobs that still says RUNNING; one of its jobs has finished."""
    sweep = PlantedSweep(synthetic.store(tmp_path), ["seed=0", "seed=1"], ["seed"])
    sweep.job("seed=0", {"train/loss": [2, 1]})
    return sweep


def status(sweep: PlantedSweep) -> str:
    return sweep.client.get_run(sweep.run_id).info.status


def test_a_sweep_is_closed_once_its_process_is_gone(tmp_path, planted, capsys):
    arguments = [planted.store.uri, planted.run_id, planted.experiment_id]
    process = subprocess.Popen(
        [sys.executable, "-c", RUNNING, *arguments],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    own = OwnStore(planted.store.uri)
    try:
        assert process.stdout.readline() == "locked\n"
        closing.close_left_open(tmp_path / "jobs", own)
        assert status(planted) == "RUNNING"
    finally:
        process.communicate(timeout=60)

    closing.close_left_open(tmp_path / "jobs", own)
    assert status(planted) == "FAILED"
    printed = capsys.readouterr().err
    assert "  seed=0  FINISHED  train/loss 1\n" in printed
    assert "  seed=1  NO RUN\n" in printed
    assert "1 of 2 jobs finished" in printed

    closing.close_left_open(tmp_path / "jobs", own)  # it is closed by now
    assert capsys.readouterr().err == ""


def test_the_table_of_jobs_has_the_metric_that_ranks_them_and_the_best_first(
    tmp_path, capsys
):
    names = [f"seed={seed}" for seed in range(5)]
    sweep = PlantedSweep(synthetic.store(tmp_path), names, ["seed"])
    endings = [(0.5, "FINISHED"), (0.9, "FAILED"), (0.75, "FINISHED")]
    for seed, (accuracy, state) in enumerate(endings):
        curves = {"val/loss": [1.0], "val/accuracy": [0.1, accuracy]}
        sweep.job(f"seed={seed}", curves, status=state)
    sweep.job("seed=3", {"val/accuracy": [math.nan]})
    assert closing.close(sweep.planned, names, JobEndings(), patience=0) == 1
    assert capsys.readouterr().err.splitlines() == [
        "  seed=2  FINISHED  val/accuracy 0.75",
        "  seed=0  FINISHED  val/accuracy 0.5",
        "  seed=1  FAILED",
        "  seed=3  FINISHED",
        "  seed=4  NO RUN",
        f"sweep {sweep.run_id}: 3 of 5 jobs finished",
    ]


def test_a_lower_loss_is_better_in_the_table_of_jobs(tmp_path, capsys):
    names = ["seed=0", "seed=1"]
    sweep = PlantedSweep(synthetic.store(tmp_path), names, ["seed"])
    for name, loss in zip(names, (2.0, 1.5), strict=True):
        sweep.job(name, {"train/loss": [3.0], "val/loss": [loss]})
    assert closing.close(sweep.planned, names, JobEndings(), patience=0) == 0
    assert capsys.readouterr().err.splitlines()[:2] == [
        "  seed=1  FINISHED  val/loss 1.5",
        "  seed=0  FINISHED  val/loss 2",
    ]


def test_the_runs_of_interrupted_jobs_name_what_interrupted_their_sweep(
    tmp_path, capsys
):
    names = ["seed=0", "seed=1"]
    sweep = PlantedSweep(synthetic.store(tmp_path), names, ["seed"])
    failures = ["interrupted by SIGTERM", "ValueError: too many"]
    endings = JobEndings()
    for name, failure in zip(names, failures, strict=True):
        sweep.job(name, {}, status="KILLED", tags={"failure": failure})
        endings.add(name, Ending(Outcome.NO_RESULT, cause=INTERRUPTED))
    closing.close(sweep.planned, names, endings, 0, "KILLED", "Ctrl-C")
    assert capsys.readouterr().err.splitlines()[:2] == [
        "  seed=0  KILLED    interrupted by Ctrl-C: the sweep sent SIGTERM",
        "  seed=1  KILLED    ValueError: too many",
    ]


def test_a_sweep_in_another_store_is_left_alone(tmp_path, planted):
    sweep_file.write_locked(tmp_path / "jobs", planted.planned, "made")
    other = OwnStore(f"sqlite:///{tmp_path}/other.db")
    with pytest.raises(ConfigError, match=r"tracking\.uri must be that of the sweep"):
        closing.close_left_open(tmp_path / "jobs", other)
    assert status(planted) == "RUNNING"


def test_a_folder_without_a_sweep_has_nothing_to_close(tmp_path):
    assert sweep_file.read_unlocked(tmp_path) is None
    (tmp_path / "sweep.json").write_text("{")
    assert sweep_file.read_unlocked(tmp_path) is None
