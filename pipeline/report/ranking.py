"""Ranks the groups of jobs by final result and by time to the target.

Groups are ranked by their means over seeds. The interval of the difference between the
best group and the second one shows whether chance explains the lead.
"""

import math
from dataclasses import dataclass
from typing import Any

from pipeline.common.errors import count
from pipeline.report import wording
from pipeline.report.findings import Result, SweepFinding, shared_device_caveat
from pipeline.report.html_page import plot_key
from pipeline.report.job_results import LOSS, finished_jobs
from pipeline.report.seed_differences import Difference, Values, difference
from pipeline.report.statistics import EQUAL, Spread, spread
from pipeline.report.sweep_result import SweepResult
from pipeline.report.target import TargetLoss
from pipeline.report.wording import Scale, joined, number, plus_minus


@dataclass(frozen=True)
class Ranked:
    """A group in a ranking, merged with the groups that have the same values.

    Attributes:
        name: the name of the group.
        values: the value of the group for each seed.
        same: the names of the groups that have the same value for each seed.
    """

    name: str
    values: Values
    same: tuple[str, ...] = ()

    @property
    def spread(self) -> Spread:
        values = spread(list(self.values.values()))
        if values is None:
            raise ValueError(f"{self.name} has no value")
        return values


@dataclass(frozen=True)
class Ranking:
    """The groups of a sweep ordered by the mean of a value, with the best group first.

    The mean is over all seeds of a group, while two groups are compared at the seeds
    that both have. So a group may be ahead of the best group in this comparison.

    Attributes:
        quantity: what the values are, such as `val/accuracy`.
        groups: the groups in order.
        lower_is_better: whether the best group has the lowest mean.
    """

    quantity: str
    groups: list[Ranked]
    lower_is_better: bool

    @classmethod
    def by_mean(
        cls, quantity: str, values_by_group: dict[str, Values], lower_is_better: bool
    ) -> "Ranking":
        """Rank one or more groups by their means.

        Groups with the same value for each seed are merged.
        """
        sign = 1 if lower_is_better else -1
        groups = [Ranked(name, values) for name, values in values_by_group.items()]
        groups.sort(key=lambda group: sign * group.spread.mean)

        merged: list[Ranked] = []
        for group in groups:
            # Another group may have the same mean, and so stand between the two.
            for place, other in enumerate(merged):
                if _same_values(other.values, group.values):
                    same = (*other.same, group.name)
                    merged[place] = Ranked(other.name, other.values, same)
                    break
            else:
                merged.append(group)
        return cls(quantity, merged, lower_is_better)

    def title(self, group: Ranked) -> str:
        """Return the name of a group, and of those that have the same values.

        Other metrics of these groups may differ, so the quantity is named.
        """
        if not group.same:
            return group.name
        same = joined(list(group.same))
        return f"{group.name} (and {same}, with the same {self.quantity})"

    @property
    def best(self) -> Ranked:
        return self.groups[0]

    @property
    def second(self) -> Ranked:
        return self.groups[1]

    @property
    def lead(self) -> Difference:
        """The difference between the means: the second group minus the best."""
        return difference(self.best.values, self.second.values)

    @property
    def not_told_apart(self) -> list[str]:
        """The groups that are not behind the best group by more than chance explains.

        Groups that can be compared with the best at only one seed are left out.
        """
        names = []
        for group in self.groups[1:]:
            lead = difference(self.best.values, group.values)
            if lead.seeds > 1 and not self._is_behind(lead):
                names.append(group.name)
        return names

    def _is_behind(self, lead: Difference) -> bool:
        """Return whether a group is told apart from the best, and is worse."""
        return lead.told_apart and not is_reversed(lead, self.lower_is_better)

    @property
    def means(self) -> dict[str, float]:
        """The mean of each group, including those that were merged, in order."""
        means = {}
        for group in self.groups:
            for name in (group.name, *group.same):
                means[name] = group.spread.mean
        return means

    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "best": self.best.name,
            "same": list(self.best.same),
            "deviation": self.best.spread.deviation,
            "seeds": self.best.spread.count,
            "groups": self.means,
        }
        if len(self.groups) == 1:
            return figures

        figures["worst"] = self.groups[-1].name
        # `difference` and `told_apart` stay None if the error of the lead is unknown,
        # for example with one seed.
        figures["difference"] = None
        figures["told_apart"] = None
        figures["not_told_apart"] = self.not_told_apart
        lead = self.lead
        if math.isfinite(lead.half_width()):
            figures["difference"] = (lead.value, lead.half_width())
            figures["told_apart"] = self._is_behind(lead)
        return figures

    def sentences(self, scale: Scale, leads: str, trails: str) -> str:
        """Describe the best and the worst group, and whether chance explains the lead.

        With a single group, return only its value.

        Args:
            scale: the units in which values are written.
            leads: the words between the best group and its value.
            trails: the words between the worst group and its value.
        """
        best = self.best.spread
        best_value = f"{best.text(scale)} ({count(best.count, 'seed')})"
        if len(self.groups) == 1:
            return f"{best_value}."
        worst = self.groups[-1]
        if abs(best.mean - worst.spread.mean) <= EQUAL * abs(best.mean):
            return (
                f"all {len(self.means)} groups have the same mean, {best_value}, but "
                f"not the same value for each seed. {self._lead_sentence(scale)}"
            )
        worst_value = worst.spread.text(scale)
        ends = (
            f"{self.title(self.best)} {leads} {best_value}, {self.title(worst)} "
            f"{trails} {worst_value}."
        )
        return f"{ends} {self._lead_sentence(scale)}"

    def _lead_sentence(self, scale: Scale) -> str:
        name = self.second.name
        lead = self.lead
        distance = abs(lead.value)
        if lead.seeds < 2:
            return (
                f"The next is {name}, {number(distance, scale)} behind, with one seed."
            )
        if lead.equal:
            return f"{name} does just as well on the seeds that both groups have."

        where = "behind"
        has_equal_mean = distance <= EQUAL * abs(self.best.spread.mean)
        if is_reversed(lead, self.lower_is_better) and not has_equal_mean:
            where = "ahead on the seeds that both groups have"
        half_width = lead.half_width()
        if math.isinf(half_width):
            why = f"as all seeds are equally far {where.partition(' ')[0]}"
            if lead.seeds == 2:
                why = f"as both seeds are equally far {where.partition(' ')[0]}"
            if not self.best.spread.deviation and not self.second.spread.deviation:
                why = "as the results of neither group vary over its seeds"
            lead_text = number(distance, scale)
            return (
                f"The next is {name}, {lead_text} {where}; {why}, the effect of chance "
                "is unknown."
            )
        interval = plus_minus(distance, half_width, scale)
        method = "95%, Welch"
        if lead.paired:
            method = f"95%, over {count(lead.seeds, 'pair')} with equal seeds"
        text = f"The next is {name}, {interval} {where} ({method}), "
        if not lead.told_apart:
            return f"{text}so the data do not tell them apart."
        if is_reversed(lead, self.lower_is_better):
            return f"{text}so the order comes from seeds that only one of them has."
        text += "so they differ."
        others = self.not_told_apart
        if others:
            text += f" Not told apart from the best over the seeds: {joined(others)}."
        return text


def is_reversed(lead: Difference, lower_is_better: bool) -> bool:
    """Return whether a group with a worse mean is ahead in the comparison.

    Args:
        lead: the difference between the means: that group minus the group with the
            better mean.
        lower_is_better: whether lower values are better.
    """
    if lower_is_better:
        return lead.value < 0
    return lead.value > 0


def _same_values(first: Values, second: Values) -> bool:
    """Return whether two groups have the same seeds and the same value for each."""
    return set(first) == set(second) and difference(first, second).equal


@dataclass(frozen=True)
class FinalResult(Result):
    """The groups ranked by their final results.

    Attributes:
        metric: the metric of the results.
        ranking: the groups in order.
        horizons: the number of examples that each group saw, if these are not equal;
            otherwise empty.
    """

    metric: str
    ranking: Ranking
    horizons: dict[str, float]

    @property
    def equal(self) -> bool:
        """Whether there are several groups, all with the same value for each seed."""
        return len(self.ranking.groups) == 1 and len(self.ranking.means) > 1

    def figures(self) -> dict[str, Any]:
        horizons = {}
        if self.horizons:
            horizons = {"horizons": self.horizons}
        if self.equal:
            means = self.ranking.means
            return {"metric": self.metric, "equal": True, "groups": means} | horizons
        figures = self.ranking.figures() | {"metric": self.metric} | horizons
        figures["value"] = self.ranking.best.spread.mean
        return figures


def final_result(sweep: SweepResult) -> SweepFinding:
    """Report which group has the best final result, and whether its lead is chance."""
    metric = sweep.quality
    values_by_group = sweep.ends
    if metric is None or not values_by_group:
        text = "There is no final metric to compare: no job has finished with one."
        return SweepFinding("final", text)

    lower_is_better = sweep.lower_is_better(metric)
    ranking = Ranking.by_mean(metric, values_by_group, lower_is_better)
    horizons = _unequal_horizons(sweep, list(values_by_group))
    result = FinalResult(metric, ranking, horizons)
    plot = plot_key(f"final_by_{sweep.axes[0]}")
    return SweepFinding("final", _final_sentences(result), result, plot)


def _final_sentences(result: FinalResult) -> str:
    ranking = result.ranking
    caveat = ""
    if result.horizons:
        fewest = number(min(result.horizons.values()))
        most = number(max(result.horizons.values()))
        caveat = (
            " These results are not after equal numbers of examples: the groups saw "
            f"from {fewest} to {most}."
        )
    if result.equal:
        value = ranking.best.spread.text()
        groups = len(ranking.means)
        seeds = ""
        if ranking.best.spread.count > 1:
            seeds = ", with the same value for each seed"
        return (
            f"Final {result.metric}: all {groups} groups end at {value}{seeds}.{caveat}"
        )

    if len(ranking.means) == 1:
        subject = f"Final {result.metric} of {ranking.best.name}"
    elif ranking.lower_is_better:
        subject = f"Final {result.metric}, where lower is better"
    else:
        subject = f"Final {result.metric}, where higher is better"
    sentences = ranking.sentences(wording.PLAIN, "ends best, at", "worst, at")
    return f"{subject}: {sentences}{caveat}"


def _unequal_horizons(sweep: SweepResult, groups: list[str]) -> dict[str, float]:
    """Return the examples that each group saw, or an empty dict if these are equal.

    They count as equal if they differ by at most the largest batch of the sweep.
    """
    horizons = {}
    for group in groups:
        seen = sweep.horizon(group)
        if math.isfinite(seen):
            horizons[group] = seen
    if not horizons:
        return {}
    if max(horizons.values()) - min(horizons.values()) <= sweep.largest_batch:
        return {}
    return horizons


@dataclass(frozen=True)
class TargetTimes(Result):
    """The groups ranked by their times to the target.

    Attributes:
        target: the target.
        at_most: the upper bound on the seconds to the target, for each group with a job
            that met it at its first point. These groups are not ranked.
        ranking: the groups in order, or None if no group can be ranked.
    """

    target: TargetLoss
    at_most: dict[str, float]
    ranking: Ranking | None

    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "metric": self.target.metric,
            "target": self.target.value,
            "all_reach": self.target.all_reach,
            "at_most": self.at_most,
        }
        if self.ranking is not None:
            figures |= self.ranking.figures()
            figures["seconds"] = self.ranking.best.spread.mean
        return figures


def time_to_target(sweep: SweepResult) -> SweepFinding:
    """Report which group reaches the target first, and whether its lead is chance.

    A group is ranked only if all of its judged jobs reached the target. A group with a
    job that met the target at its first point is not ranked either, since its time is
    only an upper bound.
    """
    target = sweep.target
    if target is None:
        why = "no job has finished"
        if any(job.status in ("FINISHED", "RUNNING") for job in sweep.jobs):
            why = "no job has a loss that has fallen"
        text = f"No target can be chosen: {why}."
        return SweepFinding("time_to_target", text)

    bounds = {}
    for group, jobs in sweep.groups.items():
        bound = target.bound(jobs, "seconds")
        if bound is not None:
            bounds[group] = bound
    ranking = None
    times = sweep.target_values("seconds")
    if times:
        ranking = Ranking.by_mean("time", times, lower_is_better=True)
    result = TargetTimes(target, bounds, ranking)

    reached = _reached_sentences(result, has_others=len(sweep.groups) > 1)
    text = f"{_target_sentence(sweep, target)}{reached}"
    if ranking is None:
        return SweepFinding("time_to_target", text, result)
    text += shared_device_caveat(sweep)
    return SweepFinding("time_to_target", text, result, "time_to_target")


def _reached_sentences(result: TargetTimes, has_others: bool) -> str:
    """Return the end of the sentence on the target, and who reached it.

    `has_others` is whether the sweep has several groups, so that a group has to be
    named.
    """
    not_ranked = _bounds_sentence(result.at_most)
    ranking = result.ranking
    if ranking is None:
        if result.at_most:
            return f".{not_ranked}"
        return f"; no group reached it with all of its seeds.{not_ranked}"

    leads = "gets there first, after"
    if result.at_most:
        leads = "gets there first among the others, after"
    sentences = ranking.sentences(wording.SECONDS, leads, "last, after")
    if len(ranking.groups) == 1:
        who = "It is reached"
        if has_others:
            who = f"{ranking.title(ranking.best)} reached it"
        sentences = f"{who} after {sentences}"
    return f".{not_ranked} {sentences}"


def _bounds_sentence(bounds: dict[str, float]) -> str:
    """Return a sentence on groups that met the target at the first evaluation."""
    if not bounds:
        return ""
    names = []
    for group, bound in bounds.items():
        if math.isfinite(bound):
            names.append(f"{group} (≤ {number(bound, wording.SECONDS)})")
        else:
            names.append(group)
    return (
        " Already at the target at the first evaluation, and so not ranked: "
        f"{joined(names)}; evaluate more often (training.evaluate_every)."
    )


def _rule_of_some(target: TargetLoss) -> str:
    """Return how a target was chosen that not all judged jobs reached."""
    way_down = "half of the way down from the first to the lowest loss"
    if target.chosen_by_half:
        far = len(target.judged) - target.jobs_near_target
        return (
            f"it is the lowest loss that half of them reached, as {far} of them got "
            f"less than {way_down}"
        )
    return (
        "it is the lowest loss that was reached by every job that got at least "
        f"{way_down}"
    )


def _target_sentence(sweep: SweepResult, target: TargetLoss) -> str:
    """Return a sentence on the target and how it was chosen, without its period."""
    jobs = count(len(target.judged), "job")
    if target.all_reach:
        state = "that finished" if finished_jobs(sweep.jobs) else "still running"
        if len(target.judged) == 1:
            reach = f"the lowest that the job {state} reached"
        else:
            reach = f"the lowest that all of the {jobs} {state} reached"
    else:
        reached = [name for name in target.judged if name in target.costs]
        reach = f"reached by {len(reached)} of the {jobs}: {_rule_of_some(target)}"

    text = f"The target is {target.metric} ≤ {number(target.value)}, {reach}"
    if target.metric == LOSS:
        text += f" (means over {count(sweep.window, 'example')})"
    return text
