"""How the jobs of a sweep have ended, as it is recorded and printed."""

from __future__ import annotations

from pipeline.sweep.ending import (
    INTERRUPTED,
    Ending,
    JobEndings,
    Outcome,
    interrupted_before_start,
    without_result,
)


def test_an_ending_is_printed_as_its_cause_or_else_as_its_outcome():
    assert str(Ending(Outcome.FINISHED, 0.5)) == "finished"
    assert str(Ending(Outcome.FAILED, reason="ValueError: no")) == "failed"
    assert str(without_result("killed by SIGKILL", "")) == "killed by SIGKILL"
    assert str(interrupted_before_start()) == "interrupted"


def test_the_reason_of_a_job_without_result_ends_with_its_last_line():
    ending = without_result("killed by SIGKILL", "first\n\n  so long  \n\n")
    assert ending.reason == "killed by SIGKILL: so long"
    stopped = without_result(INTERRUPTED, "waiting for the store sqlite:///mlflow.db\n")
    assert stopped.reason == "interrupted"


def test_a_job_that_finishes_when_it_runs_again_has_no_reason_to_have_failed():
    """A search may choose the same values again in a later batch."""
    endings = JobEndings()
    endings.add("rate=0.1", Ending(Outcome.FAILED, reason="ValueError: no"))
    endings.add("rate=0.2", interrupted_before_start())
    assert endings.failure_reasons() == {
        "rate=0.1": "ValueError: no",
        "rate=0.2": "interrupted",
    }
    endings.add("rate=0.1", Ending(Outcome.FINISHED, 0.5))
    assert endings.failure_reasons() == {"rate=0.2": "interrupted"}
    assert endings.losses(["rate=0.1", "rate=0.2"]) == {
        "rate=0.1": 0.5,
        "rate=0.2": float("inf"),
    }
