"""Writes the files of a sweep's report.

read (comparison.py) ─► summarize (summary.py) ─► report.html, jobs.csv, findings.json
                     └► draw (plots.py) ─────────┘
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.common.errors import printable
from pipeline.report import comparison, numbers, plots, target_loss
from pipeline.report.comparison import Comparison, Measure, comparable_jobs, pooled
from pipeline.report.critical_batch import NOISE, noise_scale
from pipeline.report.findings import Finding
from pipeline.report.html_page import Plot, finite, render
from pipeline.report.summary import summarize
from pipeline.report.target_loss import TargetLoss

_TOPICS = {
    "jobs": "Jobs",
    "trajectories": "Same trajectory?",
    "final": "Final result",
    "time_to_target": "Time to a target",
    "cost": "What the factor costs",
    "largest_batch": "Largest batch that pays",
    "noise_scale": "Gradient noise scale",
    "next": "Next",
}
_MEASURED = ("train/loss", "train/learning_rate", "train/examples_seen", "perf/update_seconds", NOISE)


@dataclass(frozen=True)
class Report:
    """The findings about the sweep `run_id`, in reading order, and the path of the HTML page."""

    run_id: str
    findings: list[Finding]
    page: Path

    def __str__(self) -> str:
        """Return the findings as text for a terminal, one per line."""
        return "\n".join([printable(f"{_TOPICS[finding.topic]}: {finding.text}") for finding in self.findings])


def write(uri: str, sweep: str, out: Path, allow: Sequence[str] = ()) -> Report:
    """Write `report.html`, `jobs.csv` and `findings.json` to the folder `out`; the other arguments select the sweep."""
    read = comparison.read(uri, sweep, allow)
    found, drawn, columns = summarize(read), plots.draw(read), _columns(read, target_loss.choose(read))
    out.mkdir(parents=True, exist_ok=True)
    page = out / "report.html"
    page.write_text(_page(read, found, drawn, columns), encoding="utf-8")
    with (out / "jobs.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(_csv(read, columns))
    data = finite([asdict(finding) for finding in found])
    (out / "findings.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    return Report(read.run_id, found, page)


Column = tuple[str, Measure, numbers.Scale]  # name, value for a job, unit


def _columns(sweep: Comparison, target: TargetLoss | None) -> list[Column]:
    def cost(axis: str) -> Measure:
        return lambda job: target.cost(job, axis) if target else math.nan

    return [
        ("factor", lambda job: job.factor or math.nan, numbers.plain),
        ("effective batch", lambda job: job.batch or math.nan, numbers.plain),
        ("micro-batch", lambda job: job.micro or math.nan, numbers.plain),
        ("updates", lambda job: max((int(c.steps[-1]) for c in job.curves.values()), default=math.nan), numbers.plain),
        ("examples", lambda job: job.last("train/examples_seen"), numbers.plain),
        *((metric, partial(sweep.final, metric=metric), numbers.plain) for metric in sweep.metrics),
        ("updates to target", cost("updates"), numbers.plain),
        ("examples to target", cost("examples"), numbers.plain),
        ("time to target", cost("seconds"), numbers.seconds),
        ("time per update", lambda job: job.typical("perf/update_seconds"), numbers.seconds),
        ("examples/s", lambda job: job.typical("perf/examples_per_second"), numbers.plain),
        ("peak memory", lambda job: job.last("perf/peak_memory_bytes"), numbers.size),
        ("noise scale", lambda job: noise_scale(job, target), numbers.plain),
    ]


def _csv(sweep: Comparison, columns: list[Column]) -> list[list[Any]]:
    """Return a header and a row for each job, in base units: seconds, bytes, examples."""
    rows: list[list[Any]] = [["job", "status", "run", "seed", *(name for name, *_ in columns), "failure"]]
    for job in sweep.jobs:
        values = [value(job) for _, value, _ in columns]
        cells = ["" if math.isnan(value) else value for value in values]
        texts = [_cell(text) for text in (job.name, job.status, job.run_id or "", job.params.get("seed", ""))]
        rows.append([*texts, *cells, _cell(" ".join(job.tags.get("failure", "").split()))])
    return rows


def _cell(text: str) -> str:
    """Quote text that a spreadsheet would evaluate as a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def _page(sweep: Comparison, found: list[Finding], drawn: list[Plot], columns: list[Column]) -> str:
    jobs, varied = numbers.count(len(sweep.jobs), "job"), ", ".join(sweep.varied) or "nothing"
    columns = [column for column in columns if any(math.isfinite(column[1](job)) for job in sweep.jobs)]
    return render(
        f"Sweep {sweep.name}",
        f"{jobs}, varied: {varied} · {sweep.status.lower()} · MLflow run {sweep.run_id}",
        drawn,
        f"Computed from the metrics of {jobs} in MLflow; jobs.csv beside this page has the table.",
        findings=found,
        topics=_TOPICS,
        head=["job", *(name for name, *_ in columns), "status"],
        rows=_rows(sweep, columns),
        repeated=len(sweep.groups) < len(sweep.jobs),
        absent=[name for name in _MEASURED if not any(name in job.curves for job in sweep.jobs)],
        groups=list(sweep.groups),
    )


def _rows(sweep: Comparison, columns: list[Column]) -> list[list[str]]:
    """Return a row for each group of jobs."""
    rows = []
    for group, jobs in sweep.groups.items():
        spreads = [(pooled(comparable_jobs(jobs), value), scale) for _, value, scale in columns]
        cells = ["–" if spread is None else numbers.spread(spread, scale) for spread, scale in spreads]
        done = sum(job.finished for job in jobs)
        status = jobs[0].status.lower() if len(jobs) == 1 else f"{done} of {len(jobs)} finished"
        rows.append([group, *cells, status])
    return rows
