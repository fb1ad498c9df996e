"""The comparison of a sweep: words, a table and plots, from what MLflow holds.

read (comparison.py) ─► find (findings.py) ─► one HTML page, a CSV, PNGs, the findings as JSON
                     └► draw (plots.py) ──┘
"""

from __future__ import annotations

import csv
import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from pipeline.report import comparison, drawing, findings, plots, statistics, target_loss, wording
from pipeline.report.comparison import Comparison, JobResult
from pipeline.report.critical_batch import NOISE, noise_scale
from pipeline.report.target_loss import Target
from pipeline.report.wording import Finding

_TEMPLATE = Path(__file__).with_name("report.html")
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


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        run_id: of the sweep's parent run, to which the files belong.
        findings: what was found, in the order in which it should be read.
        page: the HTML page; it needs no other file.
        files: all files, the page among them.
    """

    run_id: str
    experiment_id: str
    sweep: str
    findings: list[Finding]
    page: Path
    files: list[Path]

    def __str__(self) -> str:
        """The findings as plain text, for a terminal."""
        lines = [f"{_TOPICS.get(finding.topic, finding.topic)}: {finding.text}" for finding in self.findings]
        return "\n".join(["".join(c if c.isprintable() else " " for c in line) for line in lines])


def write(uri: str, sweep: str, out: Path) -> Report:
    """Writes the report of a sweep that finished, failed or still runs.

    Args:
        uri: of the store.
        sweep: the parent's run ID, the start of it, or its run name.
        out: the folder for `report.html`, `jobs.csv`, `findings.json` and `*.png`; made where it is missing.

    Raises:
        ConfigError: there is no such sweep, or several, or the store does not answer.
    """
    read = comparison.read(uri, sweep)
    found, drawn = findings.find(read), plots.draw(read)
    out.mkdir(parents=True, exist_ok=True)
    page, table, data = out / "report.html", out / "jobs.csv", out / "findings.json"
    page.write_text(_page(read, found, drawn), encoding="utf-8")
    with table.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(_csv(read))
    data.write_text(json.dumps([_plain(asdict(finding)) for finding in found], indent=1, allow_nan=False) + "\n")
    images = [out / f"{plot.key}.png" for plot in drawn]
    for plot, path in zip(drawn, images, strict=True):
        drawing.image(plot, path)
    return Report(read.run_id, read.experiment_id, read.name, found, page, [page, table, data, *images])


def _plain(value: Any) -> Any:
    """Without what JSON does not know: numbers that are not finite become text."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


Column = tuple[str, Callable[[JobResult], float], wording.Scale]


def _columns(sweep: Comparison, aim: Target | None) -> list[Column]:
    """Name, value of a job, and how it is written; NaN where a job has none."""
    costs: Callable[[JobResult], dict[str, float]] = lambda job: aim.costs.get(job.name, {}) if aim else {}  # noqa: E731
    columns: list[Column] = [
        ("factor", lambda job: job.factor or math.nan, wording.plain),
        ("effective batch", lambda job: job.batch or math.nan, wording.plain),
        ("micro-batch", lambda job: job.micro or math.nan, wording.plain),
        ("updates", lambda job: max((int(c.steps[-1]) for c in job.curves.values()), default=math.nan), wording.plain),
        ("examples", lambda job: job.last("train/examples_seen"), wording.plain),
    ]
    columns += [(name, lambda job, name=name: sweep.final(job, name), wording.plain) for name in sweep.metrics]  # type: ignore[misc]
    return [
        *columns,
        ("updates to target", lambda job: costs(job).get("updates", math.nan), wording.plain),
        ("examples to target", lambda job: costs(job).get("examples", math.nan), wording.plain),
        ("time to target", lambda job: costs(job).get("seconds", math.nan), wording.seconds),
        ("time per update", lambda job: job.typical("perf/update_seconds"), wording.seconds),
        ("examples/s", lambda job: job.typical("perf/examples_per_second"), wording.plain),
        ("peak memory", lambda job: job.last("perf/peak_memory_bytes"), wording.size),
        ("noise scale", lambda job: noise_scale(job, aim), wording.plain),
    ]


def _csv(sweep: Comparison) -> list[list[Any]]:
    """One row a job, in plain units: seconds, bytes, examples."""
    columns = _columns(sweep, target_loss.choose(sweep))
    rows: list[list[Any]] = [["job", "status", "run", "seed", *(name for name, *_ in columns), "failure"]]
    for job in sweep.jobs:
        values = [value(job) for _, value, _ in columns]
        cells = ["" if math.isnan(value) else value for value in values]
        texts = [_cell(text) for text in (job.name, job.status, job.run_id or "", job.params.get("seed", ""))]
        rows.append([*texts, *cells, _cell(" ".join(job.failure.split()))])
    return rows


def _cell(text: str) -> str:
    """A spreadsheet takes what begins like a formula for one."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def _page(sweep: Comparison, found: Sequence[Finding], drawn: Sequence[plots.Plot]) -> str:
    from plotly.offline import get_plotlyjs

    data = [_plain(drawing.plotly(plot)) for plot in drawn]
    jobs = wording.count(len(sweep.jobs), "job")
    about = (
        f"{jobs}, varied: {', '.join(sweep.varied) or 'nothing'} · {sweep.status.lower()} · MLflow run {sweep.run_id}"
    )
    parts = {
        "title": _escape(f"Sweep {sweep.name}"),
        "heading": _escape(f"Sweep {sweep.name}").replace("_", "_<wbr>"),
        "about": _escape(about),
        "light": _palette(drawing.LIGHT),
        "dark": _palette(drawing.DARK),
        "body": "\n".join([_words(found, drawn), _tables(sweep), _figures(sweep, drawn)]),
        "footer": f"Computed from the metrics of {jobs} in MLflow; jobs.csv beside this page has the table.",
        "plotly": get_plotlyjs(),
        # JSON in a script element: no text in it may close the element.
        "data": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        "count": str(len(drawing.LIGHT)),
    }
    # Filled in one pass, so that a name in the store that looks like a gap of the template stays a name.
    pieces = _TEMPLATE.read_text(encoding="utf-8").split("{{")
    filled = [parts[name] + rest for name, rest in (piece.split("}}", 1) for piece in pieces[1:])]
    return pieces[0] + "".join(filled)


def _escape(text: str) -> str:
    return html.escape(text)


def _palette(colours: Sequence[str]) -> str:
    return " ".join(f"--c{index}: {colour};" for index, colour in enumerate(colours))


def _words(found: Sequence[Finding], drawn: Sequence[plots.Plot]) -> str:
    keys = {plot.key: plot.title for plot in drawn}
    items = []
    for finding in found:
        kind = "next" if finding.topic == "next" else "found" if finding.figures else "unsaid"
        link = f' <a href="#{finding.plot}">{_escape(keys[finding.plot])}</a>' if finding.plot in keys else ""
        heading = _escape(_TOPICS.get(finding.topic, finding.topic))
        items.append(f'<li class="{kind}"><h3>{heading}</h3><p>{_escape(finding.text)}{link}</p></li>')
    return f'<section><h2>What was found</h2><ul class="findings">{"".join(items)}</ul></section>'


def _tables(sweep: Comparison) -> str:
    columns = _columns(sweep, target_loss.choose(sweep))
    columns = [column for column in columns if any(math.isfinite(column[1](job)) for job in sweep.jobs)]
    head = ["job", *(name for name, *_ in columns), "status"]
    rows = []
    for group, jobs in sweep.groups.items():
        spreads = [
            (statistics.spread([value(job) for job in comparison.whole(jobs)]), scale) for _, value, scale in columns
        ]
        cells = [_mean(spread, scale) if spread else "–" for spread, scale in spreads]
        done = sum(job.finished for job in jobs)
        status = jobs[0].status.lower() if len(jobs) == 1 else f"{done} of {len(jobs)} finished"
        rows.append([group, *cells, status])
    text = f"<section><h2>Table</h2>{_table(head, rows)}"
    if any(len(jobs) > 1 for jobs in sweep.groups.values()):
        text += "<p class=about>Means over the seeds that finished ± one sample standard deviation.</p>"
    rows = []
    for job in sweep.jobs:
        values = [(value(job), scale) for _, value, scale in columns]
        cells = [wording.number(value, scale) if not math.isnan(value) else "–" for value, scale in values]
        rows.append([job.name, *cells, job.status.lower(), job.run_id or "–", job.failure.strip().split("\n")[0]])
    every = _table([*head, "run", "failure"], rows)
    return f"{text}<details><summary>Each of the {wording.count(len(rows), 'job')}</summary>{every}</details></section>"


def _mean(spread: statistics.Spread, scale: wording.Scale) -> str:
    """Sizes are equal over seeds: their ± 0 would say nothing."""
    return wording.spread(spread, scale) if spread.deviation else wording.number(spread.mean, scale)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{_escape(name)}</th>' for name in head)
    body = []
    for first, *rest in rows:
        cells = "".join(f"<td{' class=text' if len(cell) > 40 else ''}>{_escape(cell)}</td>" for cell in rest)
        body.append(f'<tr><th scope="row">{_escape(first)}</th>{cells}</tr>')
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="Table">{table}</div>'


def _figures(sweep: Comparison, drawn: Sequence[plots.Plot]) -> str:
    absent = [
        name
        for name in ("train/loss", "train/learning_rate", "train/examples_seen", "perf/update_seconds", NOISE)
        if not any(name in job.curves for job in sweep.jobs)
    ]
    text = f'<p class="about">Not drawn, as no run has it: {", ".join(absent)}.</p>' if absent else ""
    if len(sweep.groups) > 1 and any(plot.by_group for plot in drawn):
        text += f'<div class="legend" role="group" aria-label="Show or hide">{_legend(sweep)}</div>'
    for section, of in groupby(drawn, key=lambda plot: plot.section):
        text += f'<h2>{_escape(section)}</h2><div class="plots">'
        for plot in of:
            text += f'<figure aria-labelledby="{plot.key}-title"><h3 id="{plot.key}-title">{_escape(plot.title)}</h3>'
            text += f'<div id="{plot.key}" class="plotly-graph-div"></div>'
            text += f"<figcaption>{_escape(plot.caption)}</figcaption></figure>"
        text += "</div>"
    return f"<section>{text}</section>"


def _legend(sweep: Comparison) -> str:
    dashes = {"solid": "", "dash": "9 5", "dot": "3 4", "dashdot": "9 4 3 4", "longdash": "14 4"}
    chips = []
    for index, group in enumerate(sweep.groups):
        colour = f"var(--c{index % len(drawing.LIGHT)})"
        dash = dashes.get(drawing.DASHES[index % len(drawing.DASHES)], "14 4 3 4")
        line = f'<line x1="0" y1="4" x2="30" y2="4" stroke="{colour}" stroke-width="3" stroke-dasharray="{dash}"/>'
        # Escaped twice: a trace's group is the name as Plotly reads it, with its entities.
        name = _escape(html.escape(group, quote=False))
        svg = f'<svg aria-hidden="true">{line}</svg>'
        chips.append(f'<button data-group="{name}" aria-pressed="true">{svg}{_escape(group)}</button>')
    return "".join(chips)
