"""Collects all findings about a sweep in reading order, and suggests what to run next."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.report import critical_batch, findings, target_loss
from pipeline.report.comparison import NO_RUN, Comparison
from pipeline.report.findings import Finding
from pipeline.report.numbers import count
from pipeline.report.trajectories import Parting, partings
from pipeline.tracking.sweep_record import again_command


def summarize(sweep: Comparison) -> list[Finding]:
    """Return all findings in reading order."""
    target = target_loss.choose(sweep)
    pairs = partings(sweep)
    found = [
        findings.job_states(sweep),
        *findings.same_trajectory(sweep, pairs),
        findings.final_result(sweep),
        findings.time_to_target(sweep, target),
        *findings.cost_of_the_factor(sweep),
    ]
    for family, jobs in sweep.families.items():
        found += [f for f in critical_batch.findings(family, jobs, target) if f not in found]
    return [*found, *_next(sweep, found, pairs)]


def _next(sweep: Comparison, found: list[Finding], pairs: list[Parting]) -> Iterable[Finding]:
    """Suggest what to run next."""
    timed = next(finding.figures for finding in found if finding.topic == "time_to_target")
    missing = [job.name for job in sweep.jobs if job.status in (NO_RUN, "FAILED", "KILLED")]
    if missing:
        text = f"Run the {count(len(missing), 'job')} that did not finish: "
        text = "Once the sweep has ended, run what is then missing: " if sweep.status == "RUNNING" else text
        yield Finding("next", text + again_command(sweep.name, sweep.run_id, sweep.uri), {"missing": missing})
    largest = {f.figures["family"]: f.figures for f in found if f.topic == "largest_batch" and f.figures}
    best = timed.get("best")
    if sweep.best:
        yield Finding("next", f"Take {sweep.best}: the lowest loss of the search.", {"recommended": sweep.best})
    elif best and len(timed["groups"]) > 1:
        taken = sweep.groups[best][0]
        pays = largest.get(taken.family, {}).get("largest")
        text = f"On this machine take {best}: it reached the target first"
        text += "." if timed["told_apart"] else ", though not by more than chance may do."
        if pays and pays > (taken.batch or 0):
            text += f" With more devices, an effective batch of up to {pays} still pays."
        yield Finding("next", text, {"recommended": best, "batch": pays})
    for family, figures in largest.items():
        if figures["open"]:
            beyond = 2 * figures["largest"]
            text = f"Try an effective batch of {beyond}{' with ' + family if family else ''}: none was too large yet."
            yield Finding("next", text, {"batch": beyond, "family": family})
    seeds = max((sum(job.finished for job in jobs) for jobs in sweep.groups.values()), default=0)
    if seeds == 1:
        yield Finding("next", "Repeat with seed=0,1,2: one seed shows no error bars.", {"seeds": seeds})
    if any(not pair.agrees and not pair.from_the_start and pair.precision != "float64" for pair in pairs):
        text = "For trajectories that agree at every update, run with hardware.precision=float64."
        yield Finding("next", text, {"precision": "float64"})
