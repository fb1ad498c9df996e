"""Writes the files of a sweep's report from data in MLflow only.

reading.read ─┬► summarize (findings) ─┐
              ├► table ────────────────┼► report.html, jobs.csv, findings.json
              └► plots.draw ───────────┘
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pipeline.common.errors import count, say
from pipeline.report import (
    critical_batch,
    factor_cost,
    findings,
    largest_batch,
    next_steps,
    noise_scale,
    parent_verdict,
    plots,
    ranking,
    rate_drift,
    reading,
    table,
    trajectories,
    verdict,
)
from pipeline.report.findings import SweepFinding
from pipeline.report.html_page import PageParts, render
from pipeline.report.job_results import (
    EXAMPLES_SEEN,
    LEARNING_RATE,
    LOSS,
    UPDATE_SECONDS,
    by_family,
    comparable_state,
    jobs_with,
)
from pipeline.report.sweep_result import SweepResult
from pipeline.report.wording import finite
from pipeline.tracking.foreign_store import ForeignStore
from pipeline.trust import artifact_locations

# The heading of each topic of a finding.
TOPICS = {
    "verdict": "Does accumulating pay?",
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
    "next": "Next",
}
# The page lists which of these metrics were logged by no run.
_MEASURED = (
    LOSS,
    LEARNING_RATE,
    EXAMPLES_SEEN,
    UPDATE_SECONDS,
    noise_scale.NOISE,
)


@dataclass(frozen=True)
class Report:
    """A report that was written.

    Attributes:
        sweep: the sweep that the report describes.
        findings: the findings in the order of the page.
        page: the path of the HTML page.
    """

    sweep: SweepResult
    findings: list[SweepFinding]
    page: Path

    @property
    def run_id(self) -> str:
        """The ID of the sweep's parent run."""
        return self.sweep.run_id

    def __str__(self) -> str:
        """Return the findings as text for a terminal, one per line."""
        return "\n".join(findings.lines(self.findings, TOPICS))


def publish(uri: str, sweep: str, allow: Sequence[str]) -> None:
    """Write the report of a sweep, log it to the parent run, and print its findings.

    Verdicts are also recorded in the parent run; see `parent_verdict.record`. For the
    arguments, see `write`.
    """
    store = ForeignStore.open(uri, allow)
    with (
        artifact_locations.confined(uri, store.places),
        tempfile.TemporaryDirectory() as folder,
    ):
        written = write(uri, sweep, Path(folder), allow)
        client = store.client()
        client.log_artifacts(written.run_id, folder, "report")
        parent_verdict.record(client, written.sweep, written.findings)
        place = client.get_run(written.run_id).info.artifact_uri
    if place.startswith("file:"):
        place = unquote(urlsplit(place).path)
    where = f"report: {place}/report/{written.page.name}"
    which = f"reported: {written.sweep.identity}"
    say(*str(written).splitlines(), which, where, to=sys.stdout)


def write(uri: str, sweep: str, out: Path, allow: Sequence[str] = ()) -> Report:
    """Write the report of a sweep: `report.html`, `jobs.csv` and `findings.json`.

    Args:
        uri: the address of the sweep's store.
        sweep: the run ID of the sweep, a prefix of it, the run name, or the name of the
            sweep file, which selects its newest sweep.
        out: the folder for the files, which is created if necessary.
        allow: locations where artifacts may be.
    """
    read_sweep = reading.read(uri, sweep, allow)
    sweep_findings = summarize(read_sweep)
    page = out / "report.html"
    html = _page(read_sweep, sweep_findings)
    data = finite([finding.entry() for finding in sweep_findings])

    out.mkdir(parents=True, exist_ok=True)
    page.write_text(html, encoding="utf-8")
    table.write_csv(out / "jobs.csv", read_sweep)
    (out / "findings.json").write_text(
        json.dumps(data, indent=1, allow_nan=False) + "\n"
    )
    return Report(read_sweep, sweep_findings, page)


def summarize(sweep: SweepResult) -> list[SweepFinding]:
    """Return all findings in the order of the page."""
    if sweep.branches:
        return [findings.job_states(sweep), *critical_batch.branch_findings(sweep)]

    verdicts = list(verdict.findings(sweep))
    ordered = [
        *verdicts,
        findings.job_states(sweep),
        *trajectories.findings(sweep),
        ranking.final_result(sweep),
        ranking.time_to_target(sweep),
        *factor_cost.findings(sweep),
    ]
    for family, jobs in by_family(sweep.jobs).items():
        costs = largest_batch.batch_costs(sweep, family, jobs)
        for finding in (
            largest_batch.finding(sweep, costs),
            noise_scale.prediction(sweep, costs),
        ):
            # Skip duplicates: families without a result may have identical findings.
            if finding is not None and finding not in ordered:
                ordered.append(finding)
    ordered += rate_drift.findings(sweep)
    return [*ordered, *next_steps.findings(sweep, ordered)]


def _page(sweep: SweepResult, sweep_findings: list[SweepFinding]) -> str:
    """Return the HTML page of a sweep."""
    drawn = plots.draw(sweep)
    if sweep.branches:
        drawn = [*critical_batch.branch_plots(sweep), *drawn]
    absent = []
    for metric in _MEASURED:
        if not jobs_with(sweep.jobs, metric):
            absent.append(metric)

    jobs = count(len(sweep.jobs), "job")
    varied = ", ".join(sweep.varied) or "nothing"
    about = (
        f"{jobs}, varied: {varied} · {sweep.status.lower()} · MLflow run "
        f"{sweep.run_id}{sweep.place}"
    )
    footer = (
        f"Computed from the metrics of {jobs} in MLflow; jobs.csv next to this page has "
        "the table."
    )
    averaged = ""
    if len(sweep.groups) < len(sweep.jobs):
        averaged = comparable_state(sweep.groups.values())
    parts = PageParts(
        findings=sweep_findings,
        topics=TOPICS,
        question=sweep.question,
        tables=[table.groups_table(sweep), table.best_by_value(sweep)],
        groups=list(sweep.groups),
        averaged=averaged,
        absent=absent,
    )
    return render(f"Sweep {sweep.name}", about, drawn, footer, parts)
