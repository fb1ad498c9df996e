"""A running run is ended from MLflow's UI by a tag, or by `pipeline stop`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from pipeline.tracking.journal_file import JOURNAL_NAME, is_locked
from tests import shared
from tests.browser import server, window
from tests.checkpoints.left import metrics_in, weights_in
from tests.running import TINY, Store, one_process, pipeline, start, wait

ENDLESS = (*TINY, "training.epochs=100000")
# A callback that makes a run last long enough to be stopped.
PAUSE = """
import os
import time

import keras


class Pause(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(float(os.environ.get("PAUSE", 0)))
"""
UPDATES = 240
PAUSED = (
    "train",
    *TINY,
    "model.hidden=[16]",
    "model.dropout=0.2",
    "hardware.deterministic=true",
    "training.epochs=null",
    f"training.updates={UPDATES}",
    "training.evaluate_every=30",
    "+training.callbacks.pause={_target_: pauses.Pause}",
    "hydra.run.dir=run",
)
# What MLflow's own page sends when somebody adds a tag to a run.
SET_TAG = """
const [runId, done] = arguments;
fetch('/ajax-api/2.0/mlflow/runs/set-tag', {
  method: 'POST',
  headers: {'Content-Type': 'application/json'},
  body: JSON.stringify({run_id: runId, key: 'stop', value: 'enough'}),
}).then(answer => done(answer.status));"""


def rows_in(run_dir: Path) -> int:
    """Return the number of updates with a row in the journal of a run directory."""
    journal = run_dir / JOURNAL_NAME
    return journal.read_text().count("train/loss") if journal.exists() else 0


def test_a_run_is_stopped_from_a_browser_and_resumed_to_the_same_bits(
    tmp_path, chromium
):
    for name in ("stopped", "undisturbed"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "pauses.py").write_text(PAUSE)
    pipeline(*PAUSED, cwd=tmp_path / "undisturbed")
    folder = tmp_path / "stopped"
    shared.place_store(folder)
    store = Store(folder)
    process = start(*PAUSED, cwd=folder, PAUSE="1")
    wait(lambda: rows_in(folder / "run") > 5)
    run_id = store.run().info.run_id

    with (
        server(f"sqlite:///{folder}/mlruns/mlflow.db") as address,
        window(chromium) as chrome,
    ):
        experiment_id = store.run().info.experiment_id
        chrome.get(f"{address}/#/experiments/{experiment_id}/runs/{run_id}")
        wait(lambda: "Running" in chrome.page_source, 60)
        assert chrome.execute_async_script(SET_TAG, run_id) == 200
        _, err = process.communicate(timeout=60)
        assert process.returncode == 143, err
        chrome.refresh()
        wait(lambda: "Killed" in chrome.page_source, 60)

    done = rows_in(folder / "run")
    assert 5 < done < UPDATES
    assert "the run has the tag stop in MLflow: it ends now" in err
    resume = f"resume from update {done}: pipeline resume {folder}/run"
    last = "pipeline: interrupted (the tag stop was set in MLflow)"
    assert err.splitlines()[-2:] == [resume, last]
    run = store.run()
    assert run.info.status == "KILLED"
    assert "stop" not in run.data.tags
    assert "the tag stop was set in MLflow" in run.data.tags["failure"]

    # Somebody sets it once more, when nothing runs.
    store.client.set_tag(run_id, "stop", "too late")
    pipeline("resume", "run", cwd=folder)
    run = store.run()
    assert run.info.status == "FINISHED"
    assert "stop" not in run.data.tags
    assert metrics_in(folder) == metrics_in(tmp_path / "undisturbed")
    expected = weights_in(tmp_path / "undisturbed", UPDATES)
    assert weights_in(folder, UPDATES) == expected


@pytest.mark.slow
def test_the_tag_of_a_sweep_ends_all_its_jobs(tmp_path):
    jobs = ("seed=0,1,2", "hardware.parallel_jobs=2", "hydra.sweep.dir=jobs")
    shared.place_store(tmp_path)
    process = start("train", "-m", *ENDLESS, *jobs, cwd=tmp_path)
    wait(lambda: all(rows_in(tmp_path / "jobs" / job) > 20 for job in "01"))
    store = Store(tmp_path)
    (parent,) = [run for run in store.runs() if "sweep.name" in run.data.tags]
    store.client.set_tag(parent.info.run_id, "stop", "")
    _, err = process.communicate(timeout=90)
    assert process.returncode == 143, err
    assert f"sweep {parent.info.run_id} has the tag stop in MLflow" in err
    assert "  seed=2  NOT RUN" in err
    again = f"pipeline sweep multirun --again {parent.info.run_id}"
    way_on, last = err.splitlines()[-2:]
    assert way_on.startswith(f"run what is missing with: {again}")
    assert last == "pipeline: interrupted (SIGTERM)"
    for run in store.runs():
        assert run.info.status == "KILLED"
        assert "stop" not in run.data.tags
    assert len(store.trained()) == 2


@pytest.mark.slow
def test_a_run_of_this_machine_is_stopped_by_a_signal(tmp_path):
    shared.place_store(tmp_path)
    process = start("train", *ENDLESS, "hydra.run.dir=run", cwd=tmp_path)
    wait(lambda: rows_in(tmp_path / "run") > 5)
    pid = json.loads((tmp_path / "run" / JOURNAL_NAME).read_text().split("\n")[0])[
        "start"
    ]["segment"]["pid"]
    stopped = pipeline("stop", "run", cwd=tmp_path)
    assert not is_locked(tmp_path / "run" / JOURNAL_NAME)  # it has waited
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert f"SIGTERM to process {pid}: waiting for the run in run" in stopped.stderr
    assert stopped.stderr.splitlines()[-1] == "the run in run has ended as KILLED"
    done = rows_in(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / str(done)).is_dir()
    result, times, way_on, last = err.splitlines()[-4:]
    assert result.startswith("last ")
    assert times.startswith(f"{done} updates in ")
    assert way_on == f"resume from update {done}: pipeline resume {tmp_path}/run"
    assert last == "pipeline: interrupted (SIGTERM)"

    run_id = Store(tmp_path).run().info.run_id
    lines = {
        "folder": "stop run",
        "ID": f"stop {run_id[:8]}",
        "unknown": "stop 0123abcd",
    }
    answers = one_process(lines, tmp_path)
    for name in ("folder", "ID"):
        printed = answers[name]["err"]
        assert printed.startswith("pipeline: RUN must be running; it is KILLED.")
        assert len(printed.splitlines()) == 1
    assert "RUN must name one run of the store" in answers["unknown"]["err"]
    assert {answer["status"] for answer in answers.values()} == {2}


def test_a_process_that_has_another_file_open_is_not_signalled(tmp_path):
    """The ID of an ended process may be that of another one by now."""
    from pipeline.cli import stop

    file = tmp_path / "file"
    file.touch()
    other = tmp_path / "other"
    other.touch()
    with other.open():
        assert stop._process_with_open(file, os.getpid()) is None
    with file.open():
        assert stop._process_with_open(file, os.getpid()).pid == os.getpid()
        assert stop._process_with_open(file, None) is None


@pytest.mark.slow
def test_a_run_of_another_machine_is_stopped_by_its_tag(tmp_path):
    """Its journal is not below the folder, as another machine's would not be."""
    shared.place_store(tmp_path)
    store = f"tracking.uri=sqlite:///{tmp_path}/mlruns/mlflow.db"
    process = start("train", *ENDLESS, "hydra.run.dir=run", cwd=tmp_path)
    wait(lambda: rows_in(tmp_path / "run") > 5)
    run_id = Store(tmp_path).run().info.run_id
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    begin = time.monotonic()
    stopped = pipeline("stop", run_id[:8], store, cwd=elsewhere)
    assert "asked 1 run to end by setting the tag stop" in stopped.stderr
    _, err = process.communicate(timeout=60)
    print(f"ended {time.monotonic() - begin:.1f} s after the command began")
    assert process.returncode == 143, err
    assert "stop" not in Store(tmp_path).run().data.tags
