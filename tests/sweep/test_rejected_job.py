"""A sweep whose first job is rejected for its config ends; a later one is lost alone.

What is wrong is found by the job alone, as it builds its model on its data.
"""

from __future__ import annotations

import re
import shlex
from types import SimpleNamespace

import pytest

from pipeline.common.errors import RunError
from pipeline.sweep.ending import Ending, JobEndings, Outcome
from pipeline.sweep.job_batch import JobBatch, Slot
from tests.running import TINY, Store, pipeline
from tests.sweep.test_sweep import parent_and_children

WRONG_FOR_ALL = ("+model.clases=3", "seed=0,1,2")
RULE = "model.clases must be an argument of pipeline.components.model.mlp"
# The digits have ten classes: 9 are too few.
SOME_WRONG = "+model.classes=10,9,11"
ENDED = "As {} was the first job to end, this ended the sweep."


def changes(printed: str) -> list[tuple[str, str]]:
    """Return which job has started or ended, in order, and how."""
    return re.findall(r"^  (\S+): (started|\w+) ?", printed, re.MULTILINE)


class Scripted:
    """Starts nothing: each job ends at once, as its task says."""

    interval = 0.0

    def job(self, task, gpus):
        return SimpleNamespace(start=lambda: None, poll=lambda: task)

    def poll(self):
        pass


FINISHED = Ending(Outcome.FINISHED, 1.0)
REJECTED = Ending(Outcome.REJECTED, reason=f"{RULE}. Received: 'clases'.")


def run_batch(endings: list[Ending], stop_if_first_is_rejected: bool = True) -> None:
    tasks = {f"seed={seed}": ending for seed, ending in enumerate(endings)}
    batch = JobBatch(
        Scripted(), [Slot([])], JobEndings(), stop_if_first_is_rejected, patience=0
    )
    batch.run(tasks)


def test_the_first_job_that_is_rejected_ends_the_batch(capsys):
    with pytest.raises(RunError) as error:
        run_batch([REJECTED, FINISHED, FINISHED])
    said = str(error.value)
    assert said == f"{REJECTED.reason} {ENDED.format('seed=0')}"
    printed = capsys.readouterr().err
    assert changes(printed) == [("seed=0", "started"), ("seed=0", "rejected")]


@pytest.mark.parametrize(
    ("endings", "stops"),
    [([FINISHED, REJECTED, FINISHED], True), ([REJECTED, FINISHED], False)],
    ids=["later", "when the sweep goes on"],
)
def test_any_other_job_that_is_rejected_is_lost_alone(capsys, endings, stops):
    run_batch(endings, stops)
    ends = [how for _, how in changes(capsys.readouterr().err) if how != "started"]
    assert ends == [ending.outcome.value for ending in endings]


@pytest.mark.slow
def test_the_first_job_that_is_rejected_ends_the_sweep(tmp_path):
    call = ("train", "-m", *TINY, *WRONG_FOR_ALL, "hydra/launcher=basic")
    printed = pipeline(*call, cwd=tmp_path, status=1).stderr
    last = printed.splitlines()[-1]
    assert last.startswith(f"pipeline: {RULE}. Received: 'clases'.")
    assert last.endswith(ENDED.format("seed=0"))
    assert changes(printed) == [("seed=0", "started"), ("seed=0", "rejected")]
    assert "\n  seed=0  NOT RUN   rejected, which ended the sweep\n" in printed
    assert "\n  seed=1  NOT RUN\n" in printed
    assert "to correct an override, begin a new sweep\n" in printed
    # The key and the rule: with the traceback that the job prints, and on that line.
    parent, children = parent_and_children(Store(tmp_path))
    assert parent.info.status == "FAILED"
    assert children == {}


@pytest.mark.slow
def test_running_jobs_are_interrupted_when_the_first_to_end_is_rejected(tmp_path):
    long = ("training.epochs=100000", "hardware.parallel_jobs=2", SOME_WRONG)
    call = ("train", "-m", *TINY, *long, "hydra.sweep.dir=jobs")
    done = pipeline(*call, cwd=tmp_path, status=1)
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("pipeline: training.loss must fit")
    assert lines[-1].endswith(ENDED.format("classes=9"))
    # The output of a job is in its log: here the key and the rule stand once.
    assert done.stderr.count("training.loss must fit") == 1
    assert ("classes=9", "rejected") in changes(done.stderr)
    assert ("classes=11", "started") not in changes(done.stderr)
    assert "  classes=11  NOT RUN" in lines
    _, children = parent_and_children(Store(tmp_path))
    statuses = {name: run.info.status for name, (run,) in children.items()}
    assert statuses in ({"classes=10": "KILLED"}, {})  # it may not have begun


@pytest.mark.slow
def test_one_that_is_rejected_after_another_has_trained_is_lost_alone(tmp_path):
    call = ("train", "-m", *TINY, SOME_WRONG, "hydra/launcher=basic")
    printed = pipeline(*call, cwd=tmp_path, status=1).stderr
    ends = [change for change in changes(printed) if change[1] != "started"]
    assert ends == [
        ("classes=10", "finished"),
        ("classes=9", "rejected"),
        ("classes=11", "finished"),
    ]
    assert "The sweep was ended" not in printed
    assert re.search(r"^  classes=9 +NO RUN +training.loss must", printed, re.MULTILINE)

    # When it runs again it is the first to end, but others have trained before.
    (rest,) = re.findall(
        "^run what is missing with: pipeline (.+)$", printed, re.MULTILINE
    )
    again = pipeline(*shlex.split(rest), cwd=tmp_path, status=1).stderr
    assert re.search(
        r"^sweep \w+ \(multirun\): 1 of 3 jobs to run$", again, re.MULTILINE
    )
    assert re.search(r"^overrides: .* '?\+model.classes=10,9,11", again, re.MULTILINE)
    assert changes(again) == [("classes=9", "started"), ("classes=9", "rejected")]
    assert "The sweep was ended" not in again
