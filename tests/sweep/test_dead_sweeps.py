"""A sweep whose process was killed is known to be dead by the lock of its file.

Where the lock says nothing, its heartbeats do, after `SILENCE_LIMIT` seconds.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.cli.resume import resume
from pipeline.cli.stop import stop
from pipeline.common.errors import ConfigError
from pipeline.sweep import closing, liveness, sweep_file
from pipeline.sweep.liveness import ALIVE, SILENCE_LIMIT
from pipeline.tracking.foreign_store import OwnStore
from pipeline.tracking.journal_file import is_locked
from tests import synthetic
from tests.cli.test_runs import listed
from tests.running import environment
from tests.synthetic import PlantedSweep

RUNNING = """
import sys
from pathlib import Path
from pipeline.sweep import sweep_file
from pipeline.tracking.foreign_store import SweepRecord

print(sweep_file.write_locked(Path("jobs"), SweepRecord(*sys.argv[1:]), "seeds"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A sweep that still says RUNNING, and has just written a heartbeat."""
    monkeypatch.chdir(tmp_path)
    sweep = PlantedSweep(synthetic.store(tmp_path), ["seed=0"], ["seed"], "seeds")
    sweep.tag(sweep.run_id, **{ALIVE: str(int(1000 * time.time()))})
    return sweep


@contextmanager
def process_of(sweep: PlantedSweep):
    """Lock the sweep's folder, as the process that runs the sweep does."""
    arguments = [sweep.store.uri, sweep.run_id, sweep.experiment_id]
    process = subprocess.Popen(
        [sys.executable, "-c", RUNNING, *arguments],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        process_id = process.stdout.readline().strip()
        sweep.tag(sweep.run_id, **{sweep_file.PROCESS: process_id})
        yield
    finally:
        process.kill()
        process.communicate(timeout=60)


def parent_of(sweep: PlantedSweep):
    return sweep.client.get_run(sweep.run_id)


def check_rejected(sweep: PlantedSweep) -> None:
    with pytest.raises(ConfigError, match=r"^SWEEP must have ended"):
        liveness.reject_if_alive(sweep.client, parent_of(sweep))
    assert not liveness.was_killed(parent_of(sweep))


def test_a_sweep_is_dead_as_soon_as_its_process_is_gone(tmp_path, planted):
    with process_of(planted):
        check_rejected(planted)
        listing = listed(tmp_path)["sweep seeds"]
        assert listing["status"] == "running"
        assert listing["next_command"] == ""
    liveness.reject_if_alive(planted.client, parent_of(planted))
    assert liveness.was_killed(parent_of(planted))
    listing = listed(tmp_path)["sweep seeds"]
    assert listing["status"] == "killed"
    again = f"pipeline sweep seeds --again {planted.run_id}"
    assert listing["next_command"] == again


@pytest.mark.parametrize("changed", ["kernel", "process"])
def test_the_file_of_another_machine_or_process_says_nothing(planted, changed):
    with process_of(planted):
        pass
    file = Path("jobs", sweep_file.NAME)
    file.write_text(json.dumps({**json.loads(file.read_text()), changed: "other"}))
    check_rejected(planted)


def test_a_sweep_whose_folder_is_elsewhere_is_dead_after_a_silence(tmp_path, planted):
    check_rejected(planted)
    silent_since = time.time() - SILENCE_LIMIT - 1
    planted.tag(planted.run_id, **{ALIVE: str(int(1000 * silent_since))})
    liveness.reject_if_alive(planted.client, parent_of(planted))
    assert listed(tmp_path)["sweep seeds"]["status"] == "killed"


def test_stopping_a_sweep_by_its_name_names_the_folder_of_the_running_one(planted):
    rule = "RUN must be the folder or the ID of a running sweep, not its name"
    with process_of(planted):
        with pytest.raises(ConfigError, match=rf"^{rule}.*Choices: jobs\.$"):
            stop(["seeds"])
        # Another call of the same sweep has ended.
        shutil.copytree("jobs", "earlier")
        stop([planted.run_id[:8]])
        assert not is_locked(Path("jobs", sweep_file.NAME))
    with pytest.raises(ConfigError, match=rf"^{rule}. Received: 'seeds'\.$"):
        stop(["seeds"])


def test_stopping_a_dead_sweep_says_that_the_sweep_was_killed(planted):
    planted.job("seed=0", {"train/loss": [2, 1]})
    with process_of(planted):
        pass
    with pytest.raises(ConfigError, match="RUN must be running; it is KILLED"):
        stop(["jobs"])


def test_resuming_the_folder_of_a_sweep_or_of_a_job_without_a_run_names_the_sweep(
    planted,
):
    with process_of(planted):
        pass
    Path("jobs", "1").mkdir()
    command = f"pipeline sweep seeds --again {planted.run_id}"
    for folder in ("jobs", "jobs/1", "jobs/2"):
        with pytest.raises(ConfigError, match=rf"RUN must be .* by: {command}\b"):
            resume([folder])


def test_another_folder_of_a_reopened_sweep_does_not_close_it(planted):
    with process_of(planted):
        pass
    planted.tag(planted.run_id, **{sweep_file.PROCESS: "that of --again"})
    closing.close_left_open(Path("jobs"), OwnStore(planted.store.uri))
    assert parent_of(planted).info.status == "RUNNING"


def test_a_new_sweep_without_a_heartbeat_is_not_dead(tmp_path):
    client = synthetic.store(tmp_path).client()
    run = client.create_run("0", tags={"sweep.name": "seeds"})
    assert not liveness.was_killed(run)
