"""A sweep that is started within a job of Slurm, such as a task of a job array."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from pipeline.sweep.slurm import SlurmJob
from tests.running import Store, pipeline
from tests.sweep.test_slurm import slurm  # noqa: F401  a fixture
from tests.sweep.test_sweep import TINY

# What Slurm sets in the second task of a job array with two tasks in its step.
ARRAY_TASK = {
    "SLURM_JOB_ID": "9002",
    "SLURM_ARRAY_JOB_ID": "9001",
    "SLURM_ARRAY_TASK_ID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_MEM_PER_CPU": "100",
}


@pytest.mark.parametrize("within", [True, False])
def test_jobs_do_not_inherit_the_job_that_submits_them(within, monkeypatch):
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "mine"}
    variables = kept | {"SLURM_ARRAY_TASK_ID": "2", "SUBMITIT_EXECUTOR": "slurm"}
    if within:
        variables = kept | ARRAY_TASK | {"SUBMITIT_EXECUTOR": "slurm"}
    for name in list(os.environ):
        if name.startswith("SLURM"):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    inherited = {}

    def submit(call):
        inherited.update(os.environ)

    launcher = SimpleNamespace(params={}, name="sweep")
    job = SlurmJob(SimpleNamespace(number=0), launcher)
    monkeypatch.setattr(job, "_executor", lambda: SimpleNamespace(submit=submit))
    job.start()
    # Outside of a job, these variables are the user's own.
    expected = kept if within else variables
    passed = {name: inherited[name] for name in variables if name in inherited}
    assert passed == expected
    assert variables.items() <= os.environ.items()


@pytest.mark.slow
def test_a_sweep_within_a_job_array(tmp_path, slurm):  # noqa: F811
    launcher = "hydra/launcher=submitit_slurm"
    variables = slurm | ARRAY_TASK
    pipeline("train", "-m", *TINY, "seed=0,1", launcher, cwd=tmp_path, **variables)
    statuses = [run.info.status for run in Store(tmp_path).trained()]
    assert statuses == ["FINISHED"] * 2
