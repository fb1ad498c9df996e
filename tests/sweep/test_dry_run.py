"""`pipeline sweep NAME --dry` lists the jobs of a sweep, and creates nothing."""

from __future__ import annotations

import pytest

from pipeline.sweep import dry_run
from tests import synthetic
from tests.composing import spec_of
from tests.running import one_process

AT_64 = "effective batch 128 = 64 × 2 × 1 replica"
TO_DO = "model=mlp accumulation.factor=2 training.epochs=3 seed=0,1"


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["accumulation.factor=2"], f"{AT_64}, 10 epochs"),
        (["training.updates=7", "accumulation.factor=2"], f"{AT_64}, 7 updates"),
        (
            ["accumulation.micro_batch_size=auto", "accumulation.factor=null"],
            "effective batch 128, micro-batch auto, 10 epochs",
        ),
        (
            ["dataset.batched=true", "accumulation.factor=2"],
            "2 batches of the dataset per update, 10 epochs",
        ),
        (
            [
                "accumulation.effective_batch_size=null",
                "accumulation.micro_batch_size=8",
                "accumulation.factor=null",
                "accumulation.batch_schedule=[{start:{updates:0},effective_batch_size:"
                "16},{start:{updates:3},effective_batch_size:64}]",
            ],
            "effective batch 16 = 8 × 2 × 1 replica at first, 10 epochs",
        ),
    ],
    ids=["epochs", "updates", "searched", "batched", "schedule"],
)
def test_the_sizes_of_a_job_are_those_of_its_config(overrides, text):
    assert dry_run.sizes(spec_of(overrides)) == text


def test_the_jobs_are_listed_and_nothing_is_created(tmp_path):
    sweep = synthetic.PlantedSweep(
        synthetic.store(tmp_path), ["seed=0", "seed=1"], ["seed"], "seeds"
    )
    sweep.job("seed=0", {"train/loss": [2, 1]})
    sweep.job("seed=1", {"train/loss": [2, 1]}, status="KILLED")
    (tmp_path / "used").mkdir()
    lines = {
        "new": f"sweep seeds {TO_DO} --dry",
        "in a folder": f"sweep seeds --dry {TO_DO} hydra.sweep.dir=used",
        "again": f"sweep seeds --again {sweep.run_id} {TO_DO} --dry",
        "invalid": f"sweep seeds --dry {TO_DO} accumulation.factor=2,7000",
    }
    results = one_process(lines, tmp_path)
    for result in results.values():
        assert result["changed"] == []
    jobs = [f"  seed=0: {AT_64}, 3 epochs", f"  seed=1: {AT_64}, 3 epochs"]
    for name in ("new", "in a folder"):
        assert results[name]["status"] == 0
        assert results[name]["out"].splitlines() == [*jobs, "2 jobs"]
    assert results["again"]["status"] == 0, results["again"]
    jobs[0] += " (finished)"
    assert results["again"]["out"].splitlines() == [*jobs, "1 of 2 jobs to run"]
    assert results["invalid"]["status"] == 2
    assert (
        "accumulation.factor must be a number of micro-batches"
        in results["invalid"]["err"]
    )
