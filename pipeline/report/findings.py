"""Findings about a sweep: sentences with the figures behind them."""

import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from pipeline.common import rounding
from pipeline.common.rounding import IN_TF32, TF32
from pipeline.config import key_kinds
from pipeline.config.schema import Kind
from pipeline.report import statistics
from pipeline.report.comparison import Comparison
from pipeline.report.job_results import NO_RUN, Curve, JobResult, grouped, pooled
from pipeline.report.statistics import Scale, Spread, count, joined, number

EQUAL = 1e-6  # relative difference below which float32 results count as equal
LEVELS = ("1e-6", "1e-3", "1e-2")  # relative differences of a loss
LOSS, PRECISION = "train/loss", "hardware.precision"
# The effective batch stands in a param of its own, and evaluations change no update.
_OF_NO_UPDATE = ("accumulation.effective_batch_size", "training.evaluate_every")


@dataclass(frozen=True)
class Finding:
    """One finding."""

    topic: str  # may occur once for each family of jobs
    text: str
    figures: dict[str, Any] = field(
        default_factory=dict
    )  # numbers in the text; empty if there is no result
    plot: str | None = None  # key of the plot that shows it


def job_states(sweep: Comparison) -> Finding:
    """Return how many jobs finished, and which did not and why."""
    states = grouped(sweep.jobs, "status")
    words = {
        "FINISHED": "finished",
        "FAILED": "failed",
        "KILLED": "killed",
        "RUNNING": "still running",
    }
    words |= {
        NO_RUN: "not started yet" if sweep.status == "RUNNING" else "without a run",
        "SCHEDULED": "not started",
    }
    figures = {"planned": len(sweep.jobs)} | {
        status: len(jobs) for status, jobs in states.items()
    }
    text = f"{figures.get('FINISHED', 0)} of {count(len(sweep.jobs), 'job')} finished."
    for status, jobs in states.items():
        if status != "FINISHED":
            why = {
                job.name: job.tags.get("failure", "").strip().partition("\n")[0]
                for job in jobs
            }
            which = [
                f"{name} ({textwrap.shorten(reason, 160)})" if reason else name
                for name, reason in why.items()
            ]
            text += (
                f" {len(jobs)} {words.get(status, status.lower())}: {joined(which)}."
            )
    return Finding("jobs", text, figures)


@dataclass(frozen=True)
class Parting:
    """Two jobs that should train one trajectory, and the relative difference of their training losses."""

    base: JobResult  # with the smallest factor
    other: JobResult
    precision: str
    curve: Curve  # the difference at each update that both logged


def partings(sweep: Comparison) -> list[Parting]:
    """Pair each job with the one of smallest factor among those of equal effective batch, seed and config."""
    found = []
    for jobs in grouped(sweep.jobs, _trajectory).values():
        base, *others = sorted(jobs, key=lambda job: job.factor or 0)
        for other in others:
            left, right = base.curves[LOSS], other.curves[LOSS]
            steps, of_left, of_right = np.intersect1d(
                left.steps, right.steps, return_indices=True
            )
            if steps.size:
                differences = statistics.relative_difference(
                    left.values[of_left], right.values[of_right]
                )
                found.append(
                    Parting(
                        base,
                        other,
                        _precision(base, other),
                        Curve(steps, differences),
                    )
                )
    return found


def _trajectory(job: JobResult) -> tuple | None:
    if job.batch is None or LOSS not in job.curves:
        return None
    kept = {
        key: value for key, value in job.params.items() if _decides_the_updates(key)
    }
    kept |= {
        "derived.effective_batch_size": str(job.batch),
        PRECISION: job.params.get(PRECISION, "float32"),
    }
    return tuple(sorted(kept.items()))


def _decides_the_updates(key: str) -> bool:
    """Return whether jobs that differ in a param train different trajectories."""
    if key in key_kinds.DERIVED_CUT or key in _OF_NO_UPDATE:
        return False
    return key_kinds.kind_of(key) == Kind.TRAINING


def _precision(base: JobResult, other: JobResult) -> str:
    """Return the precision whose rounding may set two jobs apart."""
    precisions = {base.params.get(PRECISION, "float32")}
    if IN_TF32 in base.tags or IN_TF32 in other.tags:
        precisions.add(TF32)
    return rounding.coarsest(precisions)


def _is_rounding(pair: Parting) -> bool:
    """Return whether rounding explains the difference at each update."""
    bounds = rounding.BY_PRECISION[pair.precision]
    updates = zip(pair.curve.steps, pair.curve.values, strict=True)
    return all(value <= bounds.bound(int(step)) for step, value in updates)


def same_trajectory(sweep: Comparison) -> list[Finding]:
    """Return, for each precision, whether jobs that differ only in how a batch is cut train the same trajectory."""
    if not (pairs := partings(sweep)):
        runs = sum(LOSS in job.curves for job in sweep.jobs)
        why = (
            "no two jobs share effective batch, seed and the rest of the config"
            if runs > 1
            else "it takes two runs"
        )
        return [Finding("trajectories", f"Trajectories cannot be compared: {why}.")]
    precisions = dict.fromkeys(pair.precision for pair in pairs)
    return [
        _parting([pair for pair in pairs if pair.precision == precision], precision)
        for precision in precisions
    ]


def _parting(pairs: list[Parting], precision: str) -> Finding:
    at_first = rounding.BY_PRECISION[precision].first
    worst = max(pairs, key=lambda pair: pair.curve.values.max())
    steps, differences = worst.curve.steps, worst.curve.values
    first, largest = (
        max(float(pair.curve.values[0]) for pair in pairs),
        float(differences.max()),
    )
    at = int(steps[differences.argmax()])
    beyond = {
        level: [p.curve.steps[p.curve.values > float(level)] for p in pairs]
        for level in LEVELS
    }
    above = {
        level: min((int(of[0]) for of in found if of.size), default=None)
        for level, found in beyond.items()
    }
    parted = [pair for pair in pairs if not _is_rounding(pair)]
    early = [
        pair
        for pair in parted
        if pair.curve.steps[0] == 1 and pair.curve.values[0] > at_first
    ]
    figures = {
        "precision": precision,
        "pairs": len(pairs),
        "updates": int(steps.size),
        "agree": not parted,
    }
    figures |= {
        "first": first,
        "largest": largest,
        "at": at,
        "above": above,
        "by_rounding": len(parted) - len(early),
    }
    jobs = len(pairs) + len({pair.base.name for pair in pairs})
    subject = f"{count(jobs, 'job')} of equal effective batch, seed and config"
    params = [(pair.base.params, pair.other.params) for pair in pairs]
    differing = {
        key
        for base, other in params
        for key in base | other
        if base.get(key) != other.get(key)
    } - {*key_kinds.DERIVED_CUT, "accumulation.effective_batch_size"}
    shown_kinds = (Kind.TRAINING, Kind.NUMERICS)
    if shown := sorted(
        key for key in differing if key_kinds.kind_of(key) in shown_kinds
    ):
        subject += f" (but for {joined(shown)})"
    who = f"{worst.base.name} and {worst.other.name}"
    if not parted:
        text = f"In {precision}, {subject} train the same trajectory to floating point: their training losses differ "
        text += f"by at most {number(largest)} of their value, over {count(steps.size, 'update')}."
        return Finding("trajectories", text, figures, "difference")
    levels = "; ".join(
        f"above {level} from update {step}"
        for level, step in above.items()
        if step is not None
    )
    text = f"In {precision}, the trajectories of {subject} part: their training losses differ by "
    begin = (
        "the first update"
        if steps[0] == 1
        else f"update {steps[0]}, the first that was logged"
    )
    text += f"at most {number(first)} of their value at {begin}; {levels or 'never above 1e-6'}; "
    finite = f"at most {number(largest)}, at update {at} ({who})."
    text += (
        finite
        if math.isfinite(largest)
        else f"from update {at} only one of {who} is finite."
    )
    if early:
        tags = ("model.batch_dependent_layers", "model.cut_dependent_noise")
        named = {
            job.tags.get(tag, "none")
            for pair in early
            for job in (pair.base, pair.other)
            for tag in tags
        }
        layers = ", ".join(sorted(named - {"none"}))
        text += " That is more than rounding, which cannot have been amplified yet at the first update: "
        other = "the jobs compute different things, as with dropout, of which each micro-batch draws its own."
        text += (
            f"what these layers do depends on the micro-batch: {layers}."
            if layers
            else other
        )
    elif steps[0] == 1 and math.isfinite(largest):
        step, apart = (
            int(steps[differences > 0][0]),
            float(differences[differences > 0][0]),
        )
        figures["amplified"] = largest / apart
        text += f" Rounding set {who} apart by {number(apart)} at update {step}, and training amplified that "
        text += f"{number(largest / apart)} times."
    return Finding(
        "trajectories", text, {**figures, "rounding": not early}, "difference"
    )


def final_result(sweep: Comparison) -> Finding:
    """Return which group ends best, and whether chance explains its lead."""
    metric, spreads = sweep.quality, sweep.ends
    if metric is None or not spreads:
        return Finding(
            "final",
            "There is no final metric to compare: no job has finished with one.",
        )
    sign = 1 if sweep.lower_is_better(metric) else -1
    words, figures = _ranked(
        spreads, sign, statistics.PLAIN, "ends best, at", "worst, at"
    )
    best = spreads[figures["best"]]
    if len(spreads) > 1 and all(
        abs(best.mean - spread.mean) <= EQUAL * abs(best.mean)
        for spread in spreads.values()
    ):
        text = f"Final {metric}: all {len(spreads)} groups end at {best.text()}."
        return Finding(
            "final",
            text,
            {"metric": metric, "equal": True, "groups": figures["groups"]},
            "final_by_factor",
        )
    where = (
        f", where {'lower' if sign > 0 else 'higher'} is better"
        if len(spreads) > 1
        else f" of {figures['best']}"
    )
    figures |= {"metric": metric, "value": best.mean}
    return Finding(
        "final", f"Final {metric}{where}: {words}", figures, f"final_by_{sweep.axes[0]}"
    )


def _ranked(
    spreads: dict[str, Spread], sign: int, scale: Scale, leads: str, trails: str
) -> tuple[str, dict[str, Any]]:
    """Describe the best group, the worst, and whether chance explains the lead; with `sign` 1 the lowest is best."""
    order = sorted(spreads, key=lambda group: sign * spreads[group].mean)
    best, last = spreads[order[0]], spreads[order[-1]]
    figures: dict[str, Any] = {
        "best": order[0],
        "deviation": best.deviation,
        "seeds": best.count,
    }
    figures["groups"] = {group: spreads[group].mean for group in order}
    text = f"{best.text(scale)} ({count(best.count, 'seed')})"
    if len(order) == 1:
        return f"{text}.", figures
    text = f"{order[0]} {leads} {text}, {order[-1]} {trails} {last.text(scale)}. "
    second = spreads[order[1]]
    interval, by = statistics.difference(best, second), abs(second.mean - best.mean)
    apart = interval is not None and by > interval[1]
    figures |= {"worst": order[-1], "difference": interval, "told_apart": apart}
    if min(best.count, second.count) < 2:
        return f"{text}With one seed, chance is not told from effect.", figures
    if by <= EQUAL * abs(best.mean):
        return f"{text}{order[1]} does just as well.", figures
    behind = f"{number(by, scale)} behind; as neither varies over its seeds, chance is not known"
    if interval is not None:
        verdict = "so they differ" if apart else "so the data do not tell them apart"
        behind = (
            f"{Spread(by, interval[1], 2).text(scale)} behind (95%, Welch), {verdict}"
        )
    return f"{text}The next is {order[1]}, {behind}.", figures


def time_to_target(sweep: Comparison) -> Finding:
    """Return which group reaches the target first, and whether chance explains its lead."""
    if (target := sweep.target) is None:
        goes = any(job.status in ("FINISHED", "RUNNING") for job in sweep.jobs)
        why = "no job has a loss that has fallen" if goes else "no job has finished"
        return Finding("time_to_target", f"No target can be chosen: {why}.")
    times = {
        group: spread
        for group, jobs in sweep.groups.items()
        if (spread := target.spread(jobs, "seconds"))
    }
    whose = (
        "that finished" if any(job.finished for job in sweep.jobs) else "still running"
    )
    reach = (
        f"the lowest that all of the {count(len(target.judged), 'job')} {whose} reached"
    )
    reach = (
        reach
        if target.all_reach
        else "reached by half of the jobs, as others did not get near"
    )
    over = (
        f" (means over {count(sweep.window, 'example')})"
        if target.metric == LOSS
        else ""
    )
    text = f"The target is {target.metric} ≤ {number(target.value)}, {reach}{over}"
    figures: dict[str, Any] = {
        "metric": target.metric,
        "target": target.value,
        "all_reach": target.all_reach,
    }
    if not times:
        return Finding(
            "time_to_target",
            f"{text}; no group reached it with all of its seeds.",
            figures,
        )
    words, ranked = _ranked(
        times, 1, statistics.SECONDS, "gets there first, after", "last, after"
    )
    figures |= {**ranked, "seconds": times[ranked["best"]].mean}
    text += f". {words if len(times) > 1 else f'It is reached after {words}'}"
    return Finding("time_to_target", text + shared(sweep), figures, "time_to_target")


def shared(sweep: Comparison) -> str:
    """Return a caveat about seconds if jobs ran at the same time, else an empty text."""
    edges = [
        (at, by)
        for job in sweep.jobs
        if job.started
        for at, by in ((job.started, 1), (job.ended, -1))
        if at
    ]
    at_once = max(np.cumsum([change for _, change in sorted(edges)]), default=0)
    caveat = f" Up to {at_once} jobs ran at the same time: where they shared a device, their seconds say less."
    return caveat if at_once > 1 else ""


def cost_of_the_factor(sweep: Comparison) -> Iterable[Finding]:
    """Yield, for each family, the cost of the largest factor compared with the smallest."""
    measured = (
        ("update_seconds", "an update takes", statistics.SECONDS, JobResult.typical),
        (
            "examples_per_second",
            "examples per second",
            statistics.PLAIN,
            JobResult.typical,
        ),
        ("peak_memory_bytes", "peak memory", statistics.SIZE, JobResult.last),
    )
    for family, jobs in grouped(sweep.jobs, "family").items():
        factors = sorted(
            {
                job.factor
                for job in jobs
                if job.factor and "perf/update_seconds" in job.curves
            }
        )
        if len(factors) < 2:
            continue
        figures: dict[str, Any] = {"family": family, "factors": factors}
        ends, parts = (
            [
                [job for job in jobs if job.factor == factor]
                for factor in (factors[0], factors[-1])
            ],
            [],
        )
        for name, words, scale, value in measured:
            low, high = (
                pooled(of, partial(value, metric=f"perf/{name}")) for of in ends
            )
            if low and high and low.mean:
                parts.append(
                    f"{words} {low.text(scale)} → {high.text(scale)} (×{high.mean / low.mean:.2f})"
                )
                figures[name] = (low.mean, high.mean)
        text = f"{family + ': f' if family else 'F'}rom factor {factors[0]} to {factors[-1]}, {'; '.join(parts)}."
        yield Finding("cost", text + shared(sweep), figures, "update_seconds")
