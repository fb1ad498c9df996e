"""`pipeline critical`: branches of a checkpoint, killed and continued, and what is refused."""

from __future__ import annotations

import signal

import pytest

from tests.running import Store, one_process, pipeline, start, wait

TINY = (
    "model=mlp",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
    "hardware.deterministic=true",
)
RUN = (
    *(
        "train",
        *TINY,
        "accumulation.effective_batch_size=32",
        "accumulation.factor=2",
        "schedule=constant",
    ),
    *(
        "training.updates=40",
        "training.checkpoint_every=20",
        "training.evaluate_every=40",
        "hydra.run.dir=run",
    ),
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run whose checkpoints of updates 20 and 40 are there; an epoch of it has 45 updates."""
    folder = tmp_path_factory.mktemp("critical")
    pipeline(*RUN, cwd=folder)
    return folder


def test_branches_of_a_checkpoint_are_killed_and_continued(folder):
    process = start("critical", "run@20", "--examples=384", cwd=folder)
    store = Store(folder)
    wait(lambda: any(run.info.status == "FINISHED" for run in store.trained()[1:]))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    (parent,) = [
        run for run in store.runs() if run.data.tags.get("sweep.name") == "critical"
    ]
    again = f"critical run@20 --examples=384 --again {parent.info.run_id}"
    assert f"run what is missing with: pipeline {again}" in said
    done = pipeline(*again.split(), cwd=folder)
    jobs = {
        run.data.tags["sweep.job"]: run
        for run in store.trained()
        if run.data.tags.get("sweep")
    }
    assert list(jobs) == ["batch=32", "batch=64", "batch=128"]
    assert {run.info.status for run in jobs.values()} == {"FINISHED"}
    assert {run.data.tags["mlflow.parentRunId"] for run in jobs.values()} == {
        parent.info.run_id
    }
    rows = {name: store.histories(run) for name, run in jobs.items()}
    before = store.histories(store.trained()[0])
    # The smallest branch is the run itself, as its rate is constant; the others read on where it was.
    assert {u: rows["batch=32"]["train/loss"][u] for u in range(21, 33)} == {
        u: before["train/loss"][u] for u in range(21, 33)
    }
    for k, name in ((1, "batch=32"), (2, "batch=64"), (4, "batch=128")):
        seen = rows[name]["train/examples_seen"]
        assert list(seen.values()) == [640 + 32 * k * n for n in range(1, 12 // k + 1)]
        (rate,) = set(rows[name]["train/learning_rate"].values())
        assert rate == pytest.approx(before["train/learning_rate"][20] * k**0.5)
        assert len(rows[name]["val/loss"]) == 1
    assert rows["batch=64"]["train/loss"][21] != before["train/loss"][21]
    assert "Critical batch: " in done.stdout
    assert "Schedule: " in done.stdout
    refused = pipeline(
        "critical", "run@40", "--again", parent.info.run_id, cwd=folder, status=2
    )
    assert "--again must be a sweep of the same branches" in refused.stderr


def test_what_is_refused_in_one_line(folder):
    expected = {
        "critical none@20": "RUN@UPDATE must be one run directory",
        "critical run@30": "RUN@UPDATE must name an update whose checkpoint is there. Received: 'run@30'.",
        "critical run@20 --examples=100": "--examples must be at least 192, and the training split at least",
        "critical run@20 --examples=many": "arguments must be as pipeline critical --help says",
        "critical": "arguments must be as pipeline critical --help says",
        "critical run@20 nope=1": "nope",
        "critical run@20 --again 12345678": "SWEEP must name one sweep of the store.",
    }
    for line, answer in one_process({line: line for line in expected}, folder).items():
        assert answer["status"] == 2, (line, answer)
        assert (
            answer["err"].splitlines()[-1].startswith(f"pipeline: {expected[line]}")
        ), (line, answer["err"])
        assert answer["changed"] == [], line
