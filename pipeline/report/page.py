"""The report of a sweep: words, a table and plots, from what MLflow holds.

read (comparison.py) ─► summarize (summary.py) ─► report.html, jobs.csv, findings.json
                     └► draw (plots.py) ─────────┘
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from pipeline.report import comparison, numbers, plots, statistics, target_loss
from pipeline.report.comparison import Comparison, JobResult, comparable_jobs
from pipeline.report.critical_batch import NOISE, noise_scale
from pipeline.report.document import document, figures, json_text
from pipeline.report.findings import Finding
from pipeline.report.plotly_figure import DASHES, LIGHT, Plot
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
    """What was written.

    Attributes:
        run_id: the sweep's parent run, to which the files belong.
        findings: in the order in which they should be read.
        page: the HTML page; it needs no other file.
    """

    run_id: str
    findings: list[Finding]
    page: Path

    def __str__(self) -> str:
        """Return the findings as plain text for a terminal, one a line."""
        lines = [f"{_TOPICS[finding.topic]}: {finding.text}" for finding in self.findings]
        return "\n".join(["".join(c if c.isprintable() else " " for c in line) for line in lines])


def write(uri: str, sweep: str, out: Path, allow: Sequence[str] = ()) -> Report:
    """Write the report of a sweep that finished, failed or still runs.

    Args:
        uri: of the store.
        sweep: the parent's run ID, the start of it, or its run name.
        out: the folder for `report.html`, `jobs.csv` and `findings.json`; made where it is missing.

    Raises:
        ConfigError: there is no such sweep, or several, or the store does not answer.
    """
    read = comparison.read(uri, sweep, allow)
    found, drawn, columns = summarize(read), plots.draw(read), _columns(read, target_loss.choose(read))
    out.mkdir(parents=True, exist_ok=True)
    page = out / "report.html"
    page.write_text(_page(read, found, drawn, columns), encoding="utf-8")
    with (out / "jobs.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(_csv(read, columns))
    (out / "findings.json").write_text(json_text([asdict(finding) for finding in found], indent=1) + "\n")
    return Report(read.run_id, found, page)


# A column's name, its value for a job, which is NaN where the job has none, and how it is written.
Column = tuple[str, Callable[[JobResult], float], numbers.Scale]


def _columns(sweep: Comparison, target: TargetLoss | None) -> list[Column]:
    def cost(axis: str) -> Callable[[JobResult], float]:
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
    """Return a header and a row for each job, in plain units: seconds, bytes, examples."""
    rows: list[list[Any]] = [["job", "status", "run", "seed", *(name for name, *_ in columns), "failure"]]
    for job in sweep.jobs:
        values = [value(job) for _, value, _ in columns]
        cells = ["" if math.isnan(value) else value for value in values]
        texts = [_cell(text) for text in (job.name, job.status, job.run_id or "", job.params.get("seed", ""))]
        rows.append([*texts, *cells, _cell(" ".join(job.failure.split()))])
    return rows


def _cell(text: str) -> str:
    """Quote what a spreadsheet would take for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def _page(sweep: Comparison, found: Sequence[Finding], drawn: Sequence[Plot], columns: list[Column]) -> str:
    jobs, varied = numbers.count(len(sweep.jobs), "job"), ", ".join(sweep.varied) or "nothing"
    about = f"{jobs}, varied: {varied} · {sweep.status.lower()} · MLflow run {sweep.run_id}"
    body = "\n".join([_words(found, drawn), _tables(sweep, columns), _figures(sweep, drawn)])
    footer = f"Computed from the metrics of {jobs} in MLflow; jobs.csv beside this page has the table."
    return document(f"Sweep {sweep.name}", about, body, drawn, footer)


def _words(found: Sequence[Finding], drawn: Sequence[Plot]) -> str:
    titles = {plot.key: plot.title for plot in drawn}
    items = []
    for finding in found:
        kind = "next" if finding.topic == "next" else "found" if finding.figures else "unsaid"
        link = f' <a href="#{finding.plot}">{escape(titles[finding.plot])}</a>' if finding.plot in titles else ""
        items.append(f'<li class="{kind}"><h3>{_TOPICS[finding.topic]}</h3><p>{escape(finding.text)}{link}</p></li>')
    return f'<section><h2>What was found</h2><ul class="findings">{"".join(items)}</ul></section>'


def _tables(sweep: Comparison, columns: list[Column]) -> str:
    columns = [column for column in columns if any(math.isfinite(column[1](job)) for job in sweep.jobs)]
    head = ["job", *(name for name, *_ in columns), "status"]
    rows = []
    for group, jobs in sweep.groups.items():
        compared = comparable_jobs(jobs)
        cells = [_mean(statistics.spread([value(job) for job in compared]), scale) for _, value, scale in columns]
        done = sum(job.finished for job in jobs)
        status = jobs[0].status.lower() if len(jobs) == 1 else f"{done} of {len(jobs)} finished"
        rows.append([group, *cells, status])
    text = f"<section><h2>Table</h2>{_table(head, rows)}"
    if any(len(jobs) > 1 for jobs in sweep.groups.values()):
        text += "<p class=about>Means over the seeds that finished ± one sample standard deviation.</p>"
    rows = []
    for job in sweep.jobs:
        values = [(value(job), scale) for _, value, scale in columns]
        cells = ["–" if math.isnan(value) else numbers.number(value, scale) for value, scale in values]
        rows.append([job.name, *cells, job.status.lower(), job.run_id or "–", job.failure.strip().split("\n")[0]])
    every = _table([*head, "run", "failure"], rows)
    return f"{text}<details><summary>Each of the {numbers.count(len(rows), 'job')}</summary>{every}</details></section>"


def _mean(spread: statistics.Spread | None, scale: numbers.Scale) -> str:
    if spread is None:
        return "–"
    # Sizes are equal over seeds: ± 0 would say nothing.
    return numbers.spread(spread, scale) if spread.deviation else numbers.number(spread.mean, scale)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = []
    for first, *rest in rows:
        cells = "".join(f"<td{' class=text' if len(cell) > 40 else ''}>{escape(cell)}</td>" for cell in rest)
        body.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="Table">{table}</div>'


def _figures(sweep: Comparison, drawn: Sequence[Plot]) -> str:
    absent = [name for name in _MEASURED if not any(name in job.curves for job in sweep.jobs)]
    text = f'<p class="about">Not drawn, as no run has it: {", ".join(absent)}.</p>' if absent else ""
    if len(sweep.groups) > 1 and drawn:
        text += f'<div class="legend" role="group" aria-label="Show or hide">{_legend(sweep)}</div>'
    return f"<section>{text}{figures(drawn)}</section>"


def _legend(sweep: Comparison) -> str:
    chips = []
    for index, group in enumerate(sweep.groups):
        style = f"stroke: var(--c{index % len(LIGHT)}); stroke-dasharray: {DASHES[index % len(DASHES)]}"
        line = f'<line x1="0" y1="4" x2="30" y2="4" stroke-width="3" style="{style}"/>'
        # Escaped twice: a trace's group is the name as Plotly reads it, with its entities.
        name = escape(escape(group, quote=False))
        svg = f'<svg aria-hidden="true">{line}</svg>'
        chips.append(f'<button data-group="{name}" aria-pressed="true">{svg}{escape(group)}</button>')
    return "".join(chips)
