"""Findings about a sweep: sentences with the figures behind them.

This module defines findings, and reports the states of the jobs. Each other topic has a
module of its own.
"""

import textwrap
from dataclasses import dataclass, field
from typing import Any

from pipeline.report.comparison import SweepResult
from pipeline.report.job_results import NO_RUN, JobResult, grouped
from pipeline.report.wording import count, joined


@dataclass(frozen=True)
class SweepFinding:
    """A finding on one topic. The entries of `findings.json` have these four fields.

    Attributes:
        topic: a key of `writer.TOPICS`. Several findings may have the same topic, such
            as one per family.
        text: one or several sentences.
        figures: the numbers behind the text, by name; empty if there is no result.
        plot: the key of the plot that shows the finding, or None.
    """

    topic: str
    text: str
    figures: dict[str, Any] = field(default_factory=dict)
    plot: str | None = None


def job_states(sweep: SweepResult) -> SweepFinding:
    """Report the number of finished jobs, and the names and failures of the others."""
    jobs_by_status = grouped(sweep.jobs, lambda job: job.status)
    figures = {"planned": len(sweep.jobs)}
    for status, jobs in jobs_by_status.items():
        figures[status] = len(jobs)

    finished = figures.get("FINISHED", 0)
    text = f"{finished} of {count(len(sweep.jobs), 'job')} finished."
    for status, jobs in jobs_by_status.items():
        if status != "FINISHED":
            names = [_name_and_failure(job) for job in jobs]
            state = _state(status, sweep)
            text += f" {len(jobs)} {state}: {joined(names)}."
    return SweepFinding("jobs", text, figures)


def _state(status: str, sweep: SweepResult) -> str:
    """Return the phrase that describes the status of a job."""
    if status == NO_RUN and sweep.status == "RUNNING":
        return "not started yet"
    words = {
        "FAILED": "failed",
        "KILLED": "killed",
        "RUNNING": "still running",
        NO_RUN: "without a run",
        "SCHEDULED": "not started",
    }
    return words.get(status, status.lower())


def _name_and_failure(job: JobResult) -> str:
    reason = job.tags.get("failure", "").strip().partition("\n")[0]
    if not reason:
        return job.name
    return f"{job.name} ({textwrap.shorten(reason, 160)})"


def shared_device_caveat(sweep: SweepResult) -> str:
    """Return a caveat about times, which is empty unless jobs ran at the same time."""
    starts_and_ends = []
    for job in sweep.jobs:
        if job.started:
            starts_and_ends.append((job.started, 1))
            if job.ended:
                starts_and_ends.append((job.ended, -1))

    running = 0
    most_at_once = 0
    for _, change in sorted(starts_and_ends):
        running += change
        most_at_once = max(most_at_once, running)
    if most_at_once < 2:
        return ""
    return (
        f" Up to {most_at_once} jobs ran at the same time: where they shared a device, "
        "their seconds say less."
    )
