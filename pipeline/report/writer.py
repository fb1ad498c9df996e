"""`pipeline report`: write the files of a sweep's report, from MLflow alone.

read (comparison.py) ─► summarize ──────► report.html, jobs.csv, findings.json
                     └► draw (plots.py) ─┘
"""

import csv
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pipeline.common.errors import ConfigError, Parser, printable, say
from pipeline.config import compose
from pipeline.report import (
    comparison,
    critical_batch,
    findings,
    plots,
    rate_drift,
    verdict,
)
from pipeline.report.comparison import Comparison
from pipeline.report.critical_batch import NOISE, noise_scale
from pipeline.report.findings import Finding
from pipeline.report.html_page import finite, render
from pipeline.report.job_results import (
    NO_RUN,
    JobResult,
    Measure,
    comparable_jobs,
    grouped,
    pooled,
)
from pipeline.report.statistics import (
    PLAIN,
    SECONDS,
    SIZE,
    Scale,
    Spread,
    count,
    number,
)
from pipeline.tracking.foreign_store import ForeignStore, again_command
from pipeline.trust import artifact_locations

_TOPICS = {
    "jobs": "Jobs",
    "trajectories": "Same trajectory?",
    "final": "Final result",
    "time_to_target": "Time to a target",
    "cost": "What the factor costs",
    "largest_batch": "Largest batch that pays",
    "critical": "Critical batch",
    "schedule": "Schedule",
    "noise_scale": "Gradient noise scale",
    "rate_drift": "Best rate by batch",
    "verdict": "Does accumulating pay?",
    "next": "Next",
}
_MEASURED = (
    "train/loss",
    "train/learning_rate",
    "train/examples_seen",
    "perf/update_seconds",
    NOISE,
)


@dataclass(frozen=True)
class Report:
    """The findings about the sweep `run_id`, in reading order, and the path of the HTML page."""

    run_id: str
    findings: list[Finding]
    page: Path

    def __str__(self) -> str:
        """Return the findings as text for a terminal, one per line."""
        return "\n".join(
            [
                printable(f"{_TOPICS[finding.topic]}: {finding.text}")
                for finding in self.findings
            ]
        )


def report(arguments: Sequence[str]) -> int:
    """Write the report of a sweep from what MLflow recorded: findings, a table and plots."""
    parser = Parser(
        prog="pipeline report", description=report.__doc__, allow_abbrev=False
    )
    sweep = "run ID of the sweep, its start, the name of its run, or NAME of `pipeline sweep NAME`: its newest sweep"
    parser.add_argument("sweep", metavar="SWEEP", help=sweep)
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="PLACE",
        help="a place where artifacts may be",
    )
    if not arguments:
        raise ConfigError("SWEEP", "must name a sweep of the store", "")
    options, overrides = parser.parse_known_args(list(arguments))
    own = compose.composed(overrides)
    publish(own.tracking.uri, options.sweep, [*own.trust.allow, *options.allow])
    return 0


def publish(uri: str, sweep: str, allow: Sequence[str]) -> None:
    """Write the report of a sweep, log it to the parent run, and print its findings; for arguments see `write`."""
    store = ForeignStore.open(uri, allow)
    with (
        artifact_locations.confined(uri, store.places),
        tempfile.TemporaryDirectory() as folder,
    ):
        written = write(uri, sweep, Path(folder), allow)
        store.client().log_artifacts(written.run_id, folder, "report")
        place = store.client().get_run(written.run_id).info.artifact_uri
    shown = unquote(urlsplit(place).path) if place.startswith("file:") else place
    say(
        *str(written).splitlines(),
        f"report: {shown}/report/{written.page.name}",
        to=sys.stdout,
    )


def write(uri: str, sweep: str, out: Path, allow: Sequence[str] = ()) -> Report:
    """Write `report.html`, `jobs.csv` and `findings.json` to the folder `out`; the other arguments select the sweep."""
    read = comparison.read(uri, sweep, allow)
    found, columns = summarize(read), _columns(read)
    jobs, varied = count(len(read.jobs), "job"), ", ".join(read.varied) or "nothing"
    shown = [
        column
        for column in columns
        if any(math.isfinite(column[1](job)) for job in read.jobs)
    ]
    tables = {
        "Table": (["job", *(name for name, *_ in shown), "status"], _rows(read, shown))
    }
    tables["Best by value"] = (
        ["value", f"best final {read.quality}", "with"],
        _best(read),
    )
    content: dict[str, Any] = {
        "findings": found,
        "topics": _TOPICS,
        "question": read.question,
        "tables": tables,
    }
    content |= {
        "groups": list(read.groups),
        "repeated": len(read.groups) < len(read.jobs),
    }
    content["absent"] = [
        name for name in _MEASURED if not any(name in job.curves for job in read.jobs)
    ]
    about = (
        f"{jobs}, varied: {varied} · {read.status.lower()} · MLflow run {read.run_id}"
    )
    footer = f"Computed from the metrics of {jobs} in MLflow; jobs.csv beside this page has the table."
    drawn = [
        *(critical_batch.branch_plots(read) if read.branches else []),
        *plots.draw(read),
    ]
    html = render(f"Sweep {read.name}", about, drawn, footer, **content)
    out.mkdir(parents=True, exist_ok=True)
    (page := out / "report.html").write_text(html, encoding="utf-8")
    with (out / "jobs.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(
            file
        )  # a row for each job, in base units: seconds, bytes, examples
        table.writerow(
            ["job", "status", "run", "seed", *(name for name, *_ in columns), "failure"]
        )
        for job in read.jobs:
            texts = [
                _cell(text)
                for text in (
                    job.name,
                    job.status,
                    job.run_id or "",
                    job.params.get("seed", ""),
                )
            ]
            cells = [
                "" if math.isnan(value := measure(job)) else value
                for _, measure, _ in columns
            ]
            table.writerow(
                [*texts, *cells, _cell(" ".join(job.tags.get("failure", "").split()))]
            )
    data = finite([asdict(finding) for finding in found])
    (out / "findings.json").write_text(
        json.dumps(data, indent=1, allow_nan=False) + "\n"
    )
    return Report(read.run_id, found, page)


def summarize(sweep: Comparison) -> list[Finding]:
    """Return all findings in reading order."""
    if sweep.branches:
        return [findings.job_states(sweep), *critical_batch.branch_findings(sweep)]
    found = [
        findings.job_states(sweep),
        *findings.same_trajectory(sweep),
        findings.final_result(sweep),
    ]
    found += [findings.time_to_target(sweep), *findings.cost_of_the_factor(sweep)]
    for family, jobs in grouped(sweep.jobs, "family").items():
        found += [
            f for f in critical_batch.findings(sweep, family, jobs) if f not in found
        ]
    found += [*rate_drift.findings(sweep), *verdict.findings(sweep)]
    return [*found, *_next(sweep, found)]


def _next(sweep: Comparison, found: list[Finding]) -> Iterable[Finding]:
    timed, final = (
        next(f.figures for f in found if f.topic == topic)
        for topic in ("time_to_target", "final")
    )
    if missing := [
        job.name for job in sweep.jobs if job.status in (NO_RUN, "FAILED", "KILLED")
    ]:
        text = f"Run the {count(len(missing), 'job')} that did not finish: "
        text = (
            "Once the sweep has ended, run what is then missing: "
            if sweep.status == "RUNNING"
            else text
        )
        yield Finding(
            "next",
            text + again_command(sweep.name, sweep.run_id, sweep.uri),
            {"missing": missing},
        )
    largest = {
        f.figures["family"]: f.figures
        for f in found
        if f.topic == "largest_batch" and f.figures
    }
    verdicts = {
        (of["recipe"], of["micro"]): of
        for f in found
        if f.topic == "verdict" and (of := f.figures)
    }
    first, ends = timed.get("best"), final.get("best")
    said = f" By its final {final.get('metric')} {ends} is better" if ends else ""
    said += (
        "." if final.get("told_apart") else ", though not by more than chance may do."
    )
    if sweep.best:
        text = f"Take {sweep.best}: the lowest loss of the search." + (
            said if ends not in (None, sweep.best) else ""
        )
        yield Finding("next", text, {"recommended": sweep.best})
    elif first and len(timed["groups"]) > 1:
        fastest = sweep.groups[first][0]
        best = verdicts.get((fastest.recipe, fastest.micro), {}).get("take") or first
        taken = sweep.groups[best][0]
        pays = largest.get(taken.family, {}).get("largest")
        chance = (
            "" if timed["told_apart"] else ", though not by more than chance may do"
        )
        text = f"On this machine take {best}: it reached the target first{chance}."
        if best != first:
            text = f"On this machine take {best}, by whether accumulating pays; {first} reached the target first."
        text += said if ends not in (None, best) else ""
        if pays and pays > (taken.batch or 0):
            text += (
                f" With more devices, an effective batch of up to {pays} still pays."
            )
        yield Finding("next", text, {"recommended": best, "batch": pays})
    for family, figures in largest.items():
        if figures["open"]:
            beyond, by = 2 * figures["largest"], f" with {family}" if family else ""
            text = f"Try an effective batch of {beyond}{by} on more devices: none was too large yet."
            yield Finding("next", text, {"batch": beyond, "family": family})
    if (
        max(
            (sum(job.finished for job in jobs) for jobs in sweep.groups.values()),
            default=0,
        )
        == 1
    ):
        yield Finding(
            "next",
            "Repeat with seed=0,1,2: one seed shows no error bars.",
            {"seeds": 1},
        )
    parted = [
        f.figures
        for f in found
        if f.topic == "trajectories" and f.figures.get("by_rounding")
    ]
    if any(of["precision"] != "float64" for of in parted):
        text = "For trajectories that agree at every update, run with hardware.precision=float64."
        yield Finding("next", text, {"precision": "float64"})


Column = tuple[str, Measure, Scale]  # name, value for a job, unit


def _columns(sweep: Comparison) -> list[Column]:
    return [
        ("factor", lambda job: job.factor or math.nan, PLAIN),
        ("effective batch", lambda job: job.batch or math.nan, PLAIN),
        ("micro-batch", lambda job: job.micro or math.nan, PLAIN),
        (
            "updates",
            lambda job: max(
                (int(c.steps[-1]) for c in job.curves.values()), default=math.nan
            ),
            PLAIN,
        ),
        ("examples", lambda job: job.last("train/examples_seen"), PLAIN),
        *(
            (metric, partial(sweep.final, metric=metric), PLAIN)
            for metric in sweep.metrics
        ),
        ("updates to target", partial(sweep.cost, axis="updates"), PLAIN),
        ("examples to target", partial(sweep.cost, axis="examples"), PLAIN),
        ("time to target", partial(sweep.cost, axis="seconds"), SECONDS),
        ("time per update", lambda job: job.typical("perf/update_seconds"), SECONDS),
        ("examples/s", lambda job: job.typical("perf/examples_per_second"), PLAIN),
        ("peak memory", lambda job: job.last("perf/peak_memory_bytes"), SIZE),
        ("noise scale", lambda job: noise_scale(job, sweep), PLAIN),
    ]


def _best(sweep: Comparison) -> list[list[str]]:
    """Return a row for each value of each swept key: the best final result with it, and the settings of that."""
    rows, sign = [], 1 if sweep.lower_is_better(sweep.quality or "train/loss") else -1
    for key in sweep.axes if sweep.axes != ["group"] else ():
        for value, jobs in grouped(
            sweep.jobs, partial(JobResult.setting, key=key)
        ).items():
            if ends := [
                (sign * sweep.ends[g].mean, g)
                for g in grouped(jobs, "group")
                if g in sweep.ends
            ]:
                (_, best), shown = (
                    min(ends),
                    value if isinstance(value, str) else number(value),
                )
                rows.append([f"{key}={shown}", sweep.ends[best].text(), best])
    return rows


def _fitted(spread: Spread, scale: Scale) -> str:
    """Return the text of a cell, which breaks before its deviation alone; sizes have none."""
    text = spread.text(scale) if spread.deviation else number(spread.mean, scale)
    return text.replace(" ", "\N{NO-BREAK SPACE}").replace("\N{NO-BREAK SPACE}±", " ±")


def _cell(text: str) -> str:
    """Return text without control characters, quoted if a spreadsheet would evaluate it as a formula."""
    return "'" * (
        text.lstrip()[:1] in tuple("=+-@＝＋－＠") or text[:1].isspace()
    ) + printable(text)


def _rows(sweep: Comparison, columns: list[Column]) -> list[list[str]]:
    rows = []
    for group, jobs in sweep.groups.items():
        spreads = [
            (pooled(comparable_jobs(jobs), value), scale) for _, value, scale in columns
        ]
        cells = [
            "–" if spread is None else _fitted(spread, scale)
            for spread, scale in spreads
        ]
        finished = f"{sum(job.finished for job in jobs)} of {len(jobs)} finished"
        rows.append(
            [group, *cells, finished if len(jobs) > 1 else jobs[0].status.lower()]
        )
    return rows
