"""`pipeline critical`: branches of a checkpoint, killed and continued.

And what it rejects.
"""

from __future__ import annotations

import re
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
    "train",
    *TINY,
    "accumulation.effective_batch_size=32",
    "accumulation.factor=2",
    "schedule=constant",
    "training.updates=40",
    "training.checkpoint_every=20",
    "training.evaluate_every=40",
    "hydra.run.dir=run",
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run that has the checkpoints of updates 20 and 40.

    An epoch has 45 updates.
    """
    folder = tmp_path_factory.mktemp("critical")
    pipeline(*RUN, cwd=folder)
    return folder


def test_branches_of_a_checkpoint_are_killed_and_continued(folder):
    store = Store(folder)

    def a_branch_has_finished() -> bool:
        statuses = [run.info.status for run in store.trained()[1:]]
        return "FINISHED" in statuses

    process = start("critical", "run@20", "--examples=384", cwd=folder)
    wait(a_branch_has_finished)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    (parent,) = [
        run for run in store.runs() if run.data.tags.get("sweep.name") == "critical"
    ]
    again = f"critical run@20 --examples=384 --again {parent.info.run_id}"
    assert f"run what is missing with: pipeline {again}" in err

    done = pipeline(*again.split(), cwd=folder)
    assert "Critical batch: " in done.stdout
    assert "Schedule: " in done.stdout
    run_by_job = {}
    for run in store.trained():
        if run.data.tags.get("sweep"):
            run_by_job[run.data.tags["sweep.job"]] = run
    assert list(run_by_job) == ["batch=32", "batch=64", "batch=128"]
    for run in run_by_job.values():
        assert run.info.status == "FINISHED"
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id

    curves_by_job = {name: store.histories(run) for name, run in run_by_job.items()}
    source = store.histories(store.trained()[0])
    # The smallest branch is the run itself, as its rate is constant; the others read on
    # from the same example.
    for update in range(21, 33):
        loss = curves_by_job["batch=32"]["train/loss"][update]
        assert loss == source["train/loss"][update]
    assert curves_by_job["batch=64"]["train/loss"][21] != source["train/loss"][21]
    for batch in (32, 64, 128):
        curves = curves_by_job[f"batch={batch}"]
        seen = list(curves["train/examples_seen"].values())
        assert seen == list(range(640 + batch, 640 + 384 + 1, batch))
        (rate,) = set(curves["train/learning_rate"].values())
        expected = source["train/learning_rate"][20] * (batch / 32) ** 0.5
        assert rate == pytest.approx(expected)
        assert len(curves["val/loss"]) == 1

    other_branches = ("critical", "run@40", "--again", parent.info.run_id)
    rejected = pipeline(*other_branches, cwd=folder, status=2)
    assert "--again must be a sweep of the same branches" in rejected.stderr


def test_branches_of_a_run_that_is_cut_by_tokens_are_cut_by_tokens(tmp_path):
    texts = (
        "train",
        "experiment=text",
        "model.width=8",
        "model.blocks=1",
        "accumulation.effective_batch_size=16",
        "accumulation.micro_batch_tokens=512",
        "schedule=constant",
        "training.epochs=null",
        "training.updates=20",
        "training.checkpoint_every=10",
        "training.evaluate_every=20",
        "tracking.log_model=false",
        "tracking.system_metrics=false",
        "hardware.deterministic=true",
        "hydra.run.dir=run",
    )
    pipeline(*texts, cwd=tmp_path)
    command = ("critical", "run@10", "--examples=96")
    done = pipeline(*command, cwd=tmp_path)
    assert "Critical batch: The critical batch is" in done.stdout
    assert (
        "Gradient noise scale: Not measured: micro-batches that are cut by tokens are "
        "not random samples." in done.stdout
    )

    store = Store(tmp_path)
    run, *branches = store.trained()
    source = store.histories(run)
    tokens_seen = set()
    for branch in branches:
        assert branch.data.params["derived.micro_batch_tokens"] == "512"
        curves = store.histories(branch)
        assert "train/gradient_noise_scale" not in curves
        tokens_seen.add(max(curves["train/tokens_seen"].values()))
        if branch.data.tags["sweep.job"] == "batch=16":
            for update in range(11, 17):
                loss = source["train/loss"][update]
                assert curves["train/loss"][update] == loss
    # All branches have read the same examples.
    assert len(tokens_seen) == 1

    # As the report says, a cut by examples measures the noise scale.
    by_examples = (
        "accumulation.micro_batch_tokens=null",
        "accumulation.micro_batch_size=8",
        "tracking.experiment=examples",
    )
    done = pipeline(*command, *by_examples, cwd=tmp_path)
    assert re.search(r"Gradient noise scale: \S+ examples\.", done.stdout)


def test_what_is_rejected_in_one_line(folder):
    rule_by_line = {
        "critical none@20": "RUN@UPDATE must be one run directory",
        "critical run@30": "RUN@UPDATE must name an update whose checkpoint exists. "
        "Received: 'run@30'.",
        "critical run@20 --examples=100": "--examples must be at least 192, with at "
        "least 64 training examples",
        "critical run@20 --examples=many": "arguments of pipeline critical cannot be "
        "read (argument --examples: invalid int value: 'many'): see pipeline",
        "critical": "RUN@UPDATE must be given: see pipeline critical --help.",
        "critical run@20 nope=1": "nope",
        "critical run@20 --again 12345678": "SWEEP must name one sweep of the store ",
    }
    answers = one_process({line: line for line in rule_by_line}, folder)
    for line, answer in answers.items():
        assert answer["status"] == 2, (line, answer)
        last = answer["err"].splitlines()[-1]
        assert last.startswith(f"pipeline: {rule_by_line[line]}"), (line, answer["err"])
        assert answer["changed"] == [], line
