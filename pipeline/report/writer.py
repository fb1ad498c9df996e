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
from urllib.parse import unquote, urlsplit

from pipeline.common.errors import ConfigError, Parser, printable, say
from pipeline.config import compose
from pipeline.report import branches, comparison, critical_batch, findings, plots, rate_drift, verdict
from pipeline.report.comparison import Comparison
from pipeline.report.critical_batch import NOISE, noise_scale
from pipeline.report.findings import Finding, Parting, partings
from pipeline.report.html_page import finite, render
from pipeline.report.job_results import NO_RUN, JobResult, Measure, comparable_jobs, grouped, pooled
from pipeline.report.statistics import Scale, Spread, count, number, plain, seconds, size
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


def report(arguments: Sequence[str]) -> int:
    """Write the report of a sweep from what MLflow recorded: findings, a table and plots."""
    parser = Parser(prog="pipeline report", description=report.__doc__, allow_abbrev=False)
    sweep = "run ID of the sweep, its start, the name of its run, or NAME of `pipeline sweep NAME`: its newest sweep"
    parser.add_argument("sweep", metavar="SWEEP", help=sweep)
    parser.add_argument("--allow", action="append", default=[], metavar="PLACE", help="a place where artifacts may be")
    if not arguments:
        raise ConfigError("SWEEP", "must name a sweep of the store", "")
    options, overrides = parser.parse_known_args(list(arguments))
    own = compose.composed(overrides)
    publish(own.tracking.uri, options.sweep, [*own.trust.allow, *options.allow])
    return 0


def publish(uri: str, sweep: str, allow: Sequence[str]) -> None:
    """Write the report of a sweep, log it to the parent run, and print its findings; for arguments see `write`."""
    store = ForeignStore.open(uri, allow)
    with artifact_locations.confined(uri, store.places), tempfile.TemporaryDirectory() as folder:
        written = write(uri, sweep, Path(folder), allow)
        store.client().log_artifacts(written.run_id, folder, "report")
        place = store.client().get_run(written.run_id).info.artifact_uri
    shown = unquote(urlsplit(place).path) if place.startswith("file:") else place
    say(*str(written).splitlines(), f"report: {shown}/report/{written.page.name}", to=sys.stdout)


def write(uri: str, sweep: str, out: Path, allow: Sequence[str] = ()) -> Report:
    """Write `report.html`, `jobs.csv` and `findings.json` to the folder `out`; the other arguments select the sweep."""
    read = comparison.read(uri, sweep, allow)
    found, columns = summarize(read), _columns(read)
    jobs, varied = count(len(read.jobs), "job"), ", ".join(read.varied) or "nothing"
    shown = [column for column in columns if any(math.isfinite(column[1](job)) for job in read.jobs)]
    html = render(
        f"Sweep {read.name}",
        f"{jobs}, varied: {varied} · {read.status.lower()} · MLflow run {read.run_id}",
        [*(branches.plots(read) if read.branches else []), *plots.draw(read)],
        f"Computed from the metrics of {jobs} in MLflow; jobs.csv beside this page has the table.",
        findings=found,
        topics=_TOPICS,
        question=read.question,
        tables={
            "Table": (["job", *(name for name, *_ in shown), "status"], _rows(read, shown)),
            "Best by value": (["value", f"best final {read.quality}", "with"], _best(read)),
        },
        repeated=len(read.groups) < len(read.jobs),
        absent=[name for name in _MEASURED if not any(name in job.curves for job in read.jobs)],
        groups=list(read.groups),
    )
    out.mkdir(parents=True, exist_ok=True)
    page = out / "report.html"
    page.write_text(html, encoding="utf-8")
    with (out / "jobs.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)  # a row for each job, in base units: seconds, bytes, examples
        table.writerow(["job", "status", "run", "seed", *(name for name, *_ in columns), "failure"])
        for job in read.jobs:
            texts = [_cell(text) for text in (job.name, job.status, job.run_id or "", job.params.get("seed", ""))]
            values = [value(job) for _, value, _ in columns]
            cells = ["" if math.isnan(value) else value for value in values]
            table.writerow([*texts, *cells, _cell(" ".join(job.tags.get("failure", "").split()))])
    data = finite([asdict(finding) for finding in found])
    (out / "findings.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    return Report(read.run_id, found, page)


def summarize(sweep: Comparison) -> list[Finding]:
    """Return all findings in reading order."""
    if sweep.branches:
        return [findings.job_states(sweep), *branches.findings(sweep)]
    pairs = partings(sweep)
    found = [
        findings.job_states(sweep),
        *findings.same_trajectory(sweep, pairs),
        findings.final_result(sweep),
        findings.time_to_target(sweep),
        *findings.cost_of_the_factor(sweep),
    ]
    for family, jobs in grouped(sweep.jobs, "family").items():
        found += [f for f in critical_batch.findings(family, jobs, sweep.target) if f not in found]
    found += [*rate_drift.findings(sweep), *verdict.findings(sweep)]
    return [*found, *_next(sweep, found, pairs)]


def _next(sweep: Comparison, found: list[Finding], pairs: list[Parting]) -> Iterable[Finding]:
    timed = next(finding.figures for finding in found if finding.topic == "time_to_target")
    missing = [job.name for job in sweep.jobs if job.status in (NO_RUN, "FAILED", "KILLED")]
    if missing:
        text = f"Run the {count(len(missing), 'job')} that did not finish: "
        text = "Once the sweep has ended, run what is then missing: " if sweep.status == "RUNNING" else text
        yield Finding("next", text + again_command(sweep.name, sweep.run_id, sweep.uri), {"missing": missing})
    largest = {f.figures["family"]: f.figures for f in found if f.topic == "largest_batch" and f.figures}
    verdicts = {(of["recipe"], of["micro"]): of for f in found if f.topic == "verdict" and (of := f.figures)}
    best = timed.get("best")
    final = next(finding.figures for finding in found if finding.topic == "final")
    ends = final.get("best")
    said = f" By its final {final.get('metric')} {ends} is better" if ends else ""
    said += "." if final.get("told_apart") else ", though not by more than chance may do."
    if sweep.best:
        text = f"Take {sweep.best}: the lowest loss of the search." + (said if ends not in (None, sweep.best) else "")
        yield Finding("next", text, {"recommended": sweep.best})
    elif best and len(timed["groups"]) > 1:
        first, taken = best, sweep.groups[best][0]
        best = verdicts.get((taken.recipe, taken.micro), {}).get("take") or first
        taken = sweep.groups[best][0]
        pays = largest.get(taken.family, {}).get("largest")
        text = f"On this machine take {best}: it reached the target first"
        text += "." if timed["told_apart"] else ", though not by more than chance may do."
        if best != first:
            text = f"On this machine take {best}, by whether accumulating pays; {first} reached the target first."
        text += said if ends not in (None, best) else ""
        if pays and pays > (taken.batch or 0):
            text += f" With more devices, an effective batch of up to {pays} still pays."
        yield Finding("next", text, {"recommended": best, "batch": pays})
    for family, figures in largest.items():
        if figures["open"]:
            beyond = 2 * figures["largest"]
            by = f" with {family}" if family else ""
            text = f"Try an effective batch of {beyond}{by} on more devices: none was too large yet."
            yield Finding("next", text, {"batch": beyond, "family": family})
    seeds = max((sum(job.finished for job in jobs) for jobs in sweep.groups.values()), default=0)
    if seeds == 1:
        yield Finding("next", "Repeat with seed=0,1,2: one seed shows no error bars.", {"seeds": seeds})
    if any(not pair.agrees and not pair.from_the_start and pair.precision != "float64" for pair in pairs):
        text = "For trajectories that agree at every update, run with hardware.precision=float64."
        yield Finding("next", text, {"precision": "float64"})


Column = tuple[str, Measure, Scale]  # name, value for a job, unit


def _columns(sweep: Comparison) -> list[Column]:
    def cost(axis: str) -> Measure:
        return lambda job: sweep.target.cost(job, axis) if sweep.target else math.nan

    return [
        ("factor", lambda job: job.factor or math.nan, plain),
        ("effective batch", lambda job: job.batch or math.nan, plain),
        ("micro-batch", lambda job: job.micro or math.nan, plain),
        ("updates", lambda job: max((int(c.steps[-1]) for c in job.curves.values()), default=math.nan), plain),
        ("examples", lambda job: job.last("train/examples_seen"), plain),
        *((metric, partial(sweep.final, metric=metric), plain) for metric in sweep.metrics),
        ("updates to target", cost("updates"), plain),
        ("examples to target", cost("examples"), plain),
        ("time to target", cost("seconds"), seconds),
        ("time per update", lambda job: job.typical("perf/update_seconds"), seconds),
        ("examples/s", lambda job: job.typical("perf/examples_per_second"), plain),
        ("peak memory", lambda job: job.last("perf/peak_memory_bytes"), size),
        ("noise scale", lambda job: noise_scale(job, sweep.target), plain),
    ]


def _best(sweep: Comparison) -> list[list[str]]:
    """Return a row for each value of each swept key: the best final result with it, and the settings of that."""
    rows, sign = [], 1 if sweep.lower_is_better(sweep.quality or "train/loss") else -1
    for key in sweep.axes if sweep.axes != ["group"] else ():
        for value, jobs in grouped(sweep.jobs, partial(JobResult.setting, key=key)).items():
            ends = [(sign * sweep.ends[group].mean, group) for group in grouped(jobs, "group") if group in sweep.ends]
            if ends:
                _, best = min(ends)
                shown = value if isinstance(value, str) else number(value)
                rows.append([f"{key}={shown}", sweep.ends[best].text(), best])
    return rows


def _fitted(spread: Spread, scale: Scale) -> str:
    """Return the text of a cell, which breaks before its deviation alone; sizes have none."""
    text = spread.text(scale) if spread.deviation else number(spread.mean, scale)
    return text.replace(" ", "\N{NO-BREAK SPACE}").replace("\N{NO-BREAK SPACE}±", " ±")


def _cell(text: str) -> str:
    """Return text without control characters, quoted if a spreadsheet would evaluate it as a formula."""
    return "'" * (text.lstrip()[:1] in tuple("=+-@＝＋－＠") or text[:1].isspace()) + printable(text)


def _rows(sweep: Comparison, columns: list[Column]) -> list[list[str]]:
    rows = []
    for group, jobs in sweep.groups.items():
        spreads = [(pooled(comparable_jobs(jobs), value), scale) for _, value, scale in columns]
        cells = ["–" if spread is None else _fitted(spread, scale) for spread, scale in spreads]
        done = sum(job.finished for job in jobs)
        status = jobs[0].status.lower() if len(jobs) == 1 else f"{done} of {len(jobs)} finished"
        rows.append([group, *cells, status])
    return rows
