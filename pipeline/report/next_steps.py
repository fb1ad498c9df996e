"""Recommended next steps after a sweep, derived from the other findings."""

from collections.abc import Iterable
from typing import Any

from pipeline.report.comparison import SweepResult
from pipeline.report.findings import SweepFinding
from pipeline.report.job_results import NO_RUN, finished_jobs
from pipeline.report.ranking import is_reversed
from pipeline.report.seed_differences import FEWEST_SEEDS, difference
from pipeline.report.verdict import command_for_seeds
from pipeline.report.wording import count, number
from pipeline.tracking.foreign_store import again_command

_CHANCE = ", though not by more than chance may do"


def findings(sweep: SweepResult, earlier: list[SweepFinding]) -> Iterable[SweepFinding]:
    """Yield the recommendations that follow from the sweep and all earlier findings."""
    yield from _run_missing_jobs(sweep)
    yield from _take(sweep, earlier)
    yield from _try_larger_batches(earlier)
    yield from _repeat_with_seeds(sweep)
    yield from _run_in_float64(earlier)


def _figures(findings: list[SweepFinding], topic: str) -> list[dict[str, Any]]:
    """Return the figures of all findings on the topic that have a result."""
    return [
        finding.figures
        for finding in findings
        if finding.topic == topic and finding.figures
    ]


def _first_figures(findings: list[SweepFinding], topic: str) -> dict[str, Any]:
    """Return the first figures on a topic, or an empty dict if there is no result."""
    all_figures = _figures(findings, topic)
    if not all_figures:
        return {}
    return all_figures[0]


def _run_missing_jobs(sweep: SweepResult) -> Iterable[SweepFinding]:
    missing = []
    for job in sweep.jobs:
        if job.status in (NO_RUN, "FAILED", "KILLED"):
            missing.append(job.name)
    if not missing:
        return

    if sweep.status == "RUNNING":
        begin = "Once the sweep has ended, run what is then missing: "
    else:
        begin = f"Run the {count(len(missing), 'job')} that did not finish: "
    command = again_command(sweep.name, sweep.run_id, sweep.uri)
    yield SweepFinding("next", begin + command, {"missing": missing})


def _take(sweep: SweepResult, earlier: list[SweepFinding]) -> Iterable[SweepFinding]:
    """Yield the recommended settings, if any.

    These are the best settings of a search. Otherwise, if several groups were ranked by
    their time to the target and no time is only an upper bound, they are those of
    `_take_fastest`. Otherwise, they are those of the only verdict that recommends a
    setting.
    """
    if sweep.best:
        text = f"Take {sweep.best}: the lowest loss of the search."
        text += _better_final(sweep, earlier, sweep.best)
        yield SweepFinding("next", text, {"recommended": sweep.best})
        return

    times = _first_figures(earlier, "time_to_target")
    if len(times.get("groups", [])) > 1 and not times["at_most"]:
        yield _take_fastest(sweep, earlier, times)
        return

    # Follow the verdict if exactly one recommends a setting, since it is unknown which
    # group reached the target first.
    taken = []
    for verdict in _figures(earlier, "verdict"):
        if verdict["take"]:
            taken.append(verdict["take"])
    if len(taken) == 1:
        text = f"Take {taken[0]}, by whether accumulating pays."
        text += _better_final(sweep, earlier, taken[0])
        yield SweepFinding("next", text, {"recommended": taken[0], "batch": None})


def _take_fastest(
    sweep: SweepResult, earlier: list[SweepFinding], times: dict[str, Any]
) -> SweepFinding:
    """Recommend a group for this machine.

    It is the group that reached the target first, unless the verdict for the same
    recipe and micro-batch recommends another group.
    """
    fastest = times["best"]
    fastest_job = sweep.groups[fastest][0]
    recommended = fastest
    for verdict in _figures(earlier, "verdict"):
        same_recipe = verdict["recipe"] == fastest_job.recipe
        if same_recipe and verdict["micro"] == fastest_job.micro_batch_size:
            recommended = verdict["take"] or fastest

    if recommended != fastest:
        text = (
            f"On this machine take {recommended}, by whether accumulating pays; "
            f"{fastest} reached the target first."
        )
    else:
        text = f"On this machine take {recommended}: it reached the target first"
        if times.get("not_told_apart"):
            text += _CHANCE
        text += "."
    text += _better_final(sweep, earlier, recommended)

    recommended_job = sweep.groups[recommended][0]
    largest = None
    for figures in _figures(earlier, "largest_batch"):
        if figures["family"] == recommended_job.family:
            largest = figures["largest"]
    if largest and largest > (recommended_job.effective_batch_size or 0):
        text += f" With more devices, an effective batch of up to {largest} still pays."
    return SweepFinding("next", text, {"recommended": recommended, "batch": largest})


def _better_final(
    sweep: SweepResult, earlier: list[SweepFinding], recommended: str
) -> str:
    """Return a sentence if another group has a better final result.

    Otherwise, or if the final results are unknown, return an empty string.
    """
    final = _first_figures(earlier, "final")
    best = final.get("best")
    if best is None or recommended in (best, *final["same"]):
        return ""
    values = sweep.end_values
    chance = ""
    if recommended in values:
        lead = difference(values[best], values[recommended])
        if lead.equal:
            return ""
        if is_reversed(lead, sweep.lower_is_better(final["metric"])):
            chance = ", though not at the seeds that both have"
        elif lead.seeds > 1 and not lead.told_apart:
            chance = _CHANCE

    examples = ""
    horizons = final.get("horizons", {})
    if best in horizons and recommended in horizons:
        ratio = horizons[best] / horizons[recommended]
        if not 0.99 < ratio < 1.01:
            examples = f" after {number(ratio)} times the examples"
    return f" By its final {final['metric']} {best} is better{examples}{chance}."


def _try_larger_batches(earlier: list[SweepFinding]) -> Iterable[SweepFinding]:
    for figures in _figures(earlier, "largest_batch"):
        if not figures["open"]:
            continue
        batch = 2 * figures["largest"]
        family = figures["family"]
        text = f"Try an effective batch of {batch}"
        if family:
            text += f" with {family}"
        text += " on more devices: none was too large yet."
        yield SweepFinding("next", text, {"batch": batch, "family": family})


def _repeat_with_seeds(sweep: SweepResult) -> Iterable[SweepFinding]:
    most_seeds = 0
    for jobs in sweep.groups.values():
        most_seeds = max(most_seeds, len(finished_jobs(jobs)))
    if most_seeds != 1 or sweep.search:
        return
    text = "Repeat with seed=0,1,2: one seed shows no error bars."
    command = command_for_seeds(sweep, FEWEST_SEEDS - 1)
    if command:
        text = f"Repeat with more seeds, as one shows no error bars: {command}"
    yield SweepFinding("next", text, {"seeds": 1})


def _run_in_float64(earlier: list[SweepFinding]) -> Iterable[SweepFinding]:
    """Recommend float64 if rounding set trajectories apart in a lower precision."""
    for figures in _figures(earlier, "trajectories"):
        if figures["by_rounding"] and figures["precision"] != "float64":
            text = (
                "For trajectories that agree at every update, run with "
                "hardware.precision=float64."
            )
            yield SweepFinding("next", text, {"precision": "float64"})
            return
