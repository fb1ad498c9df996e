"""`pipeline resume` of a job of a sweep: it goes on in the run of the job."""

from __future__ import annotations

import pytest

from tests.running import TINY, Store, pipeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Run a sweep of one job, which trains two updates."""
    folder = tmp_path_factory.mktemp("sweep")
    pipeline(
        *("train", "-m", *TINY, "training.epochs=null", "training.updates=2"),
        *("seed=range(7,8)", "hydra.sweep.dir=swept"),
        cwd=folder,
    )
    return folder


@pytest.mark.slow
def test_a_job_goes_on_in_its_run_beneath_the_sweep(folder):
    done = pipeline("resume", "swept/0", "training.updates=4", cwd=folder)
    again = "run what is missing of it with: pipeline sweep multirun --again "
    assert f"the run is a job of a sweep; {again}" in done.stderr
    store = Store(folder)
    (run,) = store.trained()
    (sweep,) = [run for run in store.runs() if "sweep.name" in run.data.tags]
    assert run.info.status == "FINISHED"
    assert list(store.history(run, "train/loss")) == [1, 2, 3, 4]
    assert run.data.tags["sweep"] == sweep.info.run_id
    assert run.data.tags["mlflow.parentRunId"] == sweep.info.run_id
    assert run.data.tags["sweep.job"] == run.info.run_name == "seed=7"


@pytest.mark.slow
def test_it_cannot_go_to_another_sweep(folder):
    override = "tracking.sweep=another"
    result = pipeline("resume", "swept/0", override, cwd=folder, status=2)
    assert result.stderr.strip() == (
        "pipeline: tracking.sweep must be left out of a single run: it is for a "
        "multirun. Received: 'another'."
    )
