"""What a sweep showed, in words, each with its figures; never more than its data holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from pipeline.report import critical_batch, statistics, target_loss, wording
from pipeline.report.comparison import NO_RUN, Comparison, JobResult
from pipeline.report.statistics import Spread
from pipeline.report.target_loss import Target
from pipeline.report.trajectories import Parting, partings
from pipeline.report.wording import Finding, count, listed, number
from pipeline.sweep import resume

EQUAL = 1e-6  # relative; what ends this close is the same in float32


def find(sweep: Comparison) -> list[Finding]:
    """Everything worth saying, in the order in which it should be read."""
    aim = target_loss.choose(sweep)
    pairs = partings(sweep)
    found = [_jobs(sweep), *_trajectories(sweep, pairs), _final(sweep), _time(sweep, aim), *_cost(sweep)]
    unsaid: dict[tuple[str, str], list[str]] = {}
    for family, jobs in sweep.families.items():
        for finding in critical_batch.findings(family, jobs, aim):
            if finding.figures:
                found.append(finding)
            else:
                unsaid.setdefault((finding.topic, finding.text), []).append(family)
    for (topic, text), families in unsaid.items():
        about = f"{listed([f or 'others' for f in families])}: " if len(families) < len(sweep.families) else ""
        found.append(Finding(topic, about + text))
    return [*found, *_next(sweep, found, pairs)]


def _jobs(sweep: Comparison) -> Finding:
    states = Counter(job.status for job in sweep.jobs)
    words = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "killed", "RUNNING": "still running"}
    words |= {NO_RUN: "not started yet" if sweep.status == "RUNNING" else "without a run", "SCHEDULED": "not started"}
    text = f"{states['FINISHED']} of {count(len(sweep.jobs), 'job')} finished."
    for status, n in states.items():
        if status != "FINISHED":
            which = [job.name + (f" ({_line(job.failure)})" if job.failure else "") for job in sweep.jobs]
            which = [entry for entry, job in zip(which, sweep.jobs, strict=True) if job.status == status]
            text += f" {n} {words.get(status, status.lower())}: {listed(which)}."
    return Finding("jobs", text, {"planned": len(sweep.jobs), **states})


def _line(text: str) -> str:
    first = next(iter(text.strip().splitlines()), "")
    return first if len(first) <= 160 else f"{first[:159]}…"


def _trajectories(sweep: Comparison, pairs: list[Parting]) -> list[Finding]:
    if not pairs:
        runs = sum("train/loss" in job.curves for job in sweep.jobs)
        why = "no two jobs share effective batch, seed and the rest of the config" if runs > 1 else "it takes two runs"
        return [Finding("trajectories", f"Trajectories cannot be compared: {why}.")]
    return [
        _parting([p for p in pairs if p.precision == precision], precision)
        for precision in dict.fromkeys(p.precision for p in pairs)
    ]


def _parting(pairs: list[Parting], precision: str) -> Finding:
    worst = max(pairs, key=lambda pair: pair.largest)
    above = {level: min((step for p in pairs if (step := p.above[level])), default=None) for level in worst.above}
    first = max(pair.first for pair in pairs)
    figures = {"precision": precision, "pairs": len(pairs), "updates": int(worst.curve.steps.size)}
    figures |= {"first": first, "largest": worst.largest, "at": worst.at, "above": above}
    subject = f"{count(len(pairs) + len({p.one for p in pairs}), 'job')} of equal effective batch, seed and config"
    who = f"{worst.one} and {worst.other}"
    if all(pair.agrees for pair in pairs):
        text = f"In {precision}, {subject} train the same trajectory to floating point: their training losses differ "
        text += f"by at most {number(worst.largest)} of their value, over {count(worst.curve.steps.size, 'update')}."
        return Finding("trajectories", text, {**figures, "agree": True}, "difference")
    levels = "; ".join(f"above {level} from update {step}" for level, step in above.items() if step is not None)
    text = f"In {precision}, the trajectories of {subject} part: their training losses differ by "
    at = "the first update" if worst.begins == 1 else f"update {worst.begins}, the first that was logged"
    text += f"at most {number(first)} of their value at {at}; {levels or 'never above 1e-6'}; "
    if math.isfinite(worst.largest):
        text += f"at most {number(worst.largest)}, at update {worst.at} ({who})."
    else:
        text += f"from update {worst.at} only one of {who} is finite."
    early = [pair for pair in pairs if pair.from_the_start]
    if early:
        layers = ", ".join(sorted({pair.dependent for pair in early} - {""}))
        text += " That is more than rounding, which cannot have been amplified yet at the first update: "
        text += f"{layers} depend on the micro-batch they see." if layers else "the jobs compute different things"
        text += "" if layers else ", as with dropout, of which each micro-batch draws its own."
    elif worst.begins == 1 and worst.start is not None and math.isfinite(worst.largest):
        step, apart = worst.start
        amplified = worst.largest / apart
        figures["amplified"] = amplified
        text += f" Rounding set {who} apart by {number(apart)} at update {step}, and training amplified that "
        text += f"{number(amplified)} times."
    return Finding("trajectories", text, {**figures, "agree": False, "rounding": not early}, "difference")


def _final(sweep: Comparison) -> Finding:
    metric = sweep.quality
    spreads = _by_group(sweep, lambda job: sweep.final(job, metric) if metric and job.finished else math.nan)
    if metric is None or not spreads:
        return Finding("final", "There is no final metric to compare: no job has finished with one.")
    sign = 1 if sweep.lower_is_better(metric) else -1
    order = sorted(spreads, key=lambda group: sign * spreads[group].mean)
    best = spreads[order[0]]
    if len(order) > 1 and abs(best.mean - spreads[order[-1]].mean) <= EQUAL * abs(best.mean):
        text = f"Final {metric}: all {len(order)} groups end at {wording.spread(best)}."
        groups = {group: spreads[group].mean for group in order}
        return Finding("final", text, {"metric": metric, "equal": True, "groups": groups}, "final_by_factor")
    if len(order) > 1:
        text = f"Final {metric}, where {'lower' if sign > 0 else 'higher'} is better: {order[0]} ends best, at "
    else:
        text = f"Final {metric} of {order[0]}: "
    text += f"{wording.spread(best)} ({count(best.count, 'seed')})"
    figures: dict[str, Any] = {"metric": metric, "best": order[0], "value": best.mean, "deviation": best.deviation}
    figures |= {"seeds": best.count, "groups": {group: spreads[group].mean for group in order}}
    if len(order) > 1:
        last = spreads[order[-1]]
        text += f", {order[-1]} worst, at {wording.spread(last)}. {_versus(order, spreads, wording.plain)}"
        figures |= {"worst": order[-1], "difference": statistics.difference(best, spreads[order[1]])}
    return Finding("final", text + ("." if len(order) == 1 else ""), figures, "final_by_factor")


def _versus(order: list[str], spreads: dict[str, Spread], scale: wording.Scale) -> str:
    """Whether the first of `order` is told apart from the second."""
    one, other = spreads[order[0]], spreads[order[1]]
    interval = statistics.difference(one, other)
    if interval is None:
        if min(one.count, other.count) > 1:
            return _without_chance(order[1], abs(other.mean - one.mean), one.mean, scale)
        text = f"With one seed in {order[0] if one.count == 1 else order[1]}, chance is not told from effect."
        return (
            text if len({s.count for s in spreads.values()}) > 1 else "With one seed, chance is not told from effect."
        )
    by, half = abs(interval[0]), interval[1]
    if by <= EQUAL * abs(one.mean):
        return f"{order[1]} does just as well."
    verdict = "so the data do not tell them apart" if by <= half else "so they differ"
    return f"The next is {order[1]}, {wording.spread(Spread(by, half, 2), scale)} behind (95%, Welch), {verdict}."


def _without_chance(other: str, by: float, mean: float, scale: wording.Scale) -> str:
    if by <= EQUAL * abs(mean):
        return f"{other} does just as well."
    return f"The next is {other}, {number(by, scale)} behind; as neither varies over its seeds, chance is not known."


def _by_group(sweep: Comparison, value: Callable[[JobResult], float]) -> dict[str, Spread]:
    spreads = {group: statistics.spread([value(job) for job in jobs]) for group, jobs in sweep.groups.items()}
    return {group: spread for group, spread in spreads.items() if spread is not None}


def _time(sweep: Comparison, aim: Target | None) -> Finding:
    if aim is None:
        goes = any(job.status in ("FINISHED", "RUNNING") for job in sweep.jobs)
        why = "no job has a loss that has fallen" if goes else "no job has finished"
        return Finding("time_to_target", f"No target can be chosen: {why}.")
    times = {group: spread for group, jobs in sweep.groups.items() if (spread := aim.spread(jobs, "seconds"))}
    n = len(aim.judged)
    those = "the one job" if n == 1 else "both jobs" if n == 2 else f"all {n} jobs"
    whose = "that finished" if any(job.finished for job in sweep.jobs) else "still running"
    reach = (
        f"the lowest that {those} {whose} reached"
        if aim.all_reach
        else "reached by half of the jobs, as others did not get near"
    )
    text = f"The target is {aim.metric} ≤ {number(aim.value)}, {reach}"
    if aim.metric == "train/loss":
        text += f" (means over {count(sweep.window, 'example')})"
    figures: dict[str, Any] = {"metric": aim.metric, "target": aim.value, "all_reach": aim.all_reach}
    if not times:
        return Finding("time_to_target", f"{text}; no group reached it with all of its seeds.", figures)
    order = sorted(times, key=lambda group: times[group].mean)
    best = times[order[0]]
    first = f"{order[0]} gets there first," if len(order) > 1 else "It is reached"
    text += f". {first} after {wording.spread(best, wording.seconds)} of training"
    text += f" ({count(best.count, 'seed')})"
    figures |= {"best": order[0], "seconds": best.mean, "deviation": best.deviation, "seeds": best.count}
    figures["groups"] = {group: times[group].mean for group in order}
    if len(order) > 1:
        apart = statistics.difference(best, times[order[1]])
        figures["told_apart"] = apart is not None and abs(apart[0]) > apart[1]
        text += f"; {order[-1]} last, after {wording.spread(times[order[-1]], wording.seconds)}. "
        text += _versus(order, times, wording.seconds)
    else:
        text += "."
    return Finding("time_to_target", text + _shared(sweep), figures, "time_to_target")


def _shared(sweep: Comparison) -> str:
    if sweep.at_once < 2:
        return ""
    return f" Up to {sweep.at_once} jobs ran at the same time: where they shared a device, their seconds say less."


def _cost(sweep: Comparison) -> Iterable[Finding]:
    for family, jobs in sweep.families.items():
        factors = sorted({job.factor for job in jobs if job.factor and "perf/update_seconds" in job.curves})
        if len(factors) < 2:
            continue
        ends = []
        for factor in (factors[0], factors[-1]):
            of = [job for job in jobs if job.factor == factor]
            ends.append(
                [
                    statistics.spread([job.typical(f"perf/{m}") for job in of])
                    for m in ("update_seconds", "examples_per_second")
                ]
                + [statistics.spread([job.last("perf/peak_memory_bytes") for job in of])]
            )
        text = f"{family + ': f' if family else 'F'}rom factor {factors[0]} to {factors[-1]}"
        figures: dict[str, Any] = {"family": family, "factors": factors}
        names = ("update_seconds", "examples_per_second", "peak_memory_bytes")
        words = (
            ("an update takes", wording.seconds),
            ("examples per second", wording.plain),
            ("peak memory", wording.size),
        )
        parts = []
        for name, (word, scale), low, high in zip(names, words, *ends, strict=True):
            if low and high and low.mean:
                parts.append(
                    f"{word} {number(low.mean, scale)} → {number(high.mean, scale)} (×{high.mean / low.mean:.2f})"
                )
                figures[name] = (low.mean, high.mean)
        yield Finding("cost", f"{text}, {'; '.join(parts)}.{_shared(sweep)}", figures, "update_seconds")


def _next(sweep: Comparison, found: list[Finding], pairs: list[Parting]) -> Iterable[Finding]:
    """What the findings suggest."""
    of = {finding.topic: finding for finding in reversed(found)}
    missing = [job.name for job in sweep.jobs if job.status in (NO_RUN, "FAILED", "KILLED")]
    if missing:
        text = f"Run the {count(len(missing), 'job')} that did not finish: "
        text = "Once the sweep has ended, run what is then missing: " if sweep.status == "RUNNING" else text
        yield Finding("next", text + resume.command(sweep.name, sweep.run_id, sweep.uri), {"missing": missing})
    largest = {f.figures["family"]: f.figures for f in found if f.topic == "largest_batch" and f.figures}
    best = of["time_to_target"].figures.get("best")
    if best and len(of["time_to_target"].figures["groups"]) > 1:
        taken = sweep.groups[best][0]
        pays = largest.get(taken.family, {}).get("largest")
        told = of["time_to_target"].figures["told_apart"]
        text = f"On this machine take {best}: it reached the target first"
        text += "." if told else ", though not by more than chance may do."
        if pays and pays > (taken.batch or 0):
            text += f" With more devices, an effective batch of up to {pays} still pays."
        yield Finding("next", text, {"recommended": best, "batch": pays})
    for family, figures in largest.items():
        if figures["open"]:
            beyond = 2 * figures["largest"]
            text = f"Try an effective batch of {beyond}{' with ' + family if family else ''}: none was too large yet."
            yield Finding("next", text, {"batch": beyond, "family": family})
    for finding in found:
        if finding.topic != "noise_scale" or not finding.figures:
            continue
        family, predicted = finding.figures["family"], finding.figures["predicted"]
        tried = max(job.batch or 0 for job in sweep.families[family])
        if predicted > 2 * tried and family not in largest:  # else the sweep itself has said how far it pays
            text = f"The noise scale of {number(predicted)} is far above every batch tried: larger ones should pay."
            yield Finding("next", text, {"predicted": predicted})
    seeds = max((sum(job.finished for job in jobs) for jobs in sweep.groups.values()), default=0)
    if seeds == 1:
        yield Finding("next", "Repeat with seed=0,1,2: one seed shows no error bars.", {"seeds": seeds})
    if any(not pair.agrees and not pair.from_the_start and pair.precision != "float64" for pair in pairs):
        text = "For trajectories that agree at every update, run with hardware.precision=float64."
        yield Finding("next", text, {"precision": "float64"})
