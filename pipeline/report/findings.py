"""Findings about a sweep: sentences with the figures behind them.

This module defines findings, and reports the states of the jobs. Each other topic has a
module of its own.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from pipeline.common.errors import count, printable
from pipeline.report.job_results import NO_RUN, JobResult, grouped
from pipeline.report.sweep_result import SweepResult
from pipeline.report.wording import joined
from pipeline.tracking.journal_lines import LOSS_EXPLODED


@dataclass(frozen=True)
class Result:
    """The result behind a finding. Each kind of finding has a subclass.

    Other modules use the fields. `findings.json` has the figures.
    """

    def figures(self) -> dict[str, Any]:
        """Return the figures by name: the fields, unless a subclass has others."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


AnyResult = TypeVar("AnyResult", bound=Result)


@dataclass(frozen=True)
class SweepFinding:
    """A finding on one topic.

    Attributes:
        topic: a key of `FindingsPage.topics`. Several findings may have the same topic,
            such as one per family.
        text: one or several sentences.
        result: the result behind the text, or None if there is none.
        plot: the key of the plot that shows the finding, or None.
    """

    topic: str
    text: str
    result: Result | None = None
    plot: str | None = None

    @property
    def figures(self) -> dict[str, Any]:
        """The figures of the result, which are empty if there is none."""
        if self.result is None:
            return {}
        return self.result.figures()

    def entry(self) -> dict[str, Any]:
        """Return the entry of `findings.json`."""
        return {
            "topic": self.topic,
            "text": self.text,
            "figures": self.figures,
            "plot": self.plot,
        }


@dataclass(frozen=True)
class FindingsPage:
    """A page with findings.

    Attributes:
        findings: the findings in the order of the page.
        topics: the headings of the findings, by topic.
        html: the page.
    """

    findings: list[SweepFinding]
    topics: Mapping[str, str]
    html: str

    def lines(self) -> list[str]:
        """Return the findings as lines for a terminal."""
        return lines(self.findings, self.topics)


def lines(findings: Sequence[SweepFinding], topics: Mapping[str, str]) -> list[str]:
    """Return findings as lines for a terminal, each after the heading of its topic."""
    texts = []
    for finding in findings:
        texts.append(printable(f"{topics[finding.topic]}: {finding.text}"))
    return texts


def results_of(
    findings: Sequence[SweepFinding], kind: type[AnyResult]
) -> list[AnyResult]:
    """Return the results of one kind."""
    return [item.result for item in findings if isinstance(item.result, kind)]


@dataclass(frozen=True)
class JobStates(Result):
    """The number of jobs of a sweep, in all and by status.

    Attributes:
        planned: the number of all jobs.
        by_status: the number of jobs with each status that occurs.
        exploded: the number of jobs whose loss exploded, though it was finite.
    """

    planned: int
    by_status: dict[str, int]
    exploded: int = 0

    def figures(self) -> dict[str, Any]:
        figures = {"planned": self.planned, **self.by_status}
        if self.exploded:
            figures["exploded"] = self.exploded
        return figures


def job_states(sweep: SweepResult) -> SweepFinding:
    """Report the number of finished jobs, and the names and failures of the others."""
    return states(sweep.jobs, "jobs", "job", running=sweep.status == "RUNNING")


def states(
    jobs: Sequence[JobResult], topic: str, noun: str, *, running: bool = False
) -> SweepFinding:
    """Report the number of finished jobs, and the names and failures of the others.

    Args:
        jobs: the jobs, or other runs.
        topic: the topic of the finding.
        noun: the word for one of `jobs`.
        running: whether jobs without a run may still begin.
    """
    jobs_by_status = grouped(jobs, lambda job: job.status)
    counts = {status: len(others) for status, others in jobs_by_status.items()}
    finished = counts.get("FINISHED", 0)
    text = f"{finished} of {count(len(jobs), noun)} finished."
    for status, others in jobs_by_status.items():
        if status != "FINISHED":
            names = [_name_and_failure(job) for job in others]
            state = _state(status, running)
            text += f" {len(others)} {state}: {joined(names)}."
    exploded = [job for job in jobs if LOSS_EXPLODED in job.tags]
    if exploded:
        names = [f"{job.name} ({job.tags[LOSS_EXPLODED]})" for job in exploded]
        text += f" The loss exploded in {len(exploded)}: {joined(names)}."
    return SweepFinding(topic, text, JobStates(len(jobs), counts, len(exploded)))


def _state(status: str, running: bool) -> str:
    """Return the phrase that describes the status of a job."""
    if status == NO_RUN and running:
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
            for interrupted, resumed in job.pauses:
                starts_and_ends += [(interrupted, -1), (resumed, 1)]

    running = 0
    most_at_once = 0
    for _, change in sorted(starts_and_ends):
        running += change
        most_at_once = max(most_at_once, running)
    if most_at_once < 2:
        return ""
    return (
        f" Up to {most_at_once} jobs ran at the same time: if they shared a device, "
        "their times are less reliable."
    )
