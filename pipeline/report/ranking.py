"""Which group of jobs is the best: by its final result, and by the time to a target.

The groups are ranked by their means over seeds. Whether chance explains the lead of
the best one is judged by Welch's interval of its difference to the second.
"""

from dataclasses import dataclass
from typing import Any

from pipeline.report import statistics
from pipeline.report.comparison import SweepResult, TargetLoss
from pipeline.report.findings import SweepFinding, shared_device_caveat
from pipeline.report.job_results import LOSS, finished_jobs
from pipeline.report.statistics import (
    EQUAL,
    Difference,
    Scale,
    Spread,
    count,
    number,
)


@dataclass(frozen=True)
class Ranking:
    """The groups of a sweep in the order of a value.

    Attributes:
        groups: the spread of the value over seeds by group, the best group first.
    """

    groups: dict[str, Spread]

    @classmethod
    def by_mean(cls, spreads: dict[str, Spread], lower_is_better: bool) -> "Ranking":
        """Rank the groups, of which there is at least one, by their means."""
        sign = 1 if lower_is_better else -1
        order = sorted(spreads, key=lambda group: sign * spreads[group].mean)
        return cls({group: spreads[group] for group in order})

    @property
    def names(self) -> list[str]:
        return list(self.groups)

    @property
    def best(self) -> Spread:
        return self.groups[self.names[0]]

    @property
    def second(self) -> Spread:
        return self.groups[self.names[1]]

    @property
    def lead(self) -> float:
        """Return how far the second group is behind the best."""
        return abs(self.second.mean - self.best.mean)

    @property
    def interval(self) -> Difference | None:
        """Return Welch's interval of the lead; None if chance is not known."""
        return statistics.welch_difference(self.best, self.second)

    @property
    def told_apart(self) -> bool:
        """Return whether chance does not explain the lead."""
        return self.interval is not None and self.lead > self.interval.half_width

    def figures(self) -> dict[str, Any]:
        means = {group: spread.mean for group, spread in self.groups.items()}
        figures: dict[str, Any] = {
            "best": self.names[0],
            "deviation": self.best.deviation,
            "seeds": self.best.count,
            "groups": means,
        }
        if len(self.groups) == 1:
            return figures

        figures["worst"] = self.names[-1]
        figures["difference"] = None
        if self.interval is not None:
            figures["difference"] = (self.interval.value, self.interval.half_width)
        figures["told_apart"] = self.told_apart
        return figures

    def sentences(self, scale: Scale, leads: str, trails: str) -> str:
        """Describe the best group, the worst, and whether chance explains the lead.

        Args:
            scale: the units of the value.
            leads: the words between the best group and its value.
            trails: the words between the worst group and its value.
        """
        best_value = f"{self.best.text(scale)} ({count(self.best.count, 'seed')})"
        if len(self.groups) == 1:
            return f"{best_value}."
        best_name = self.names[0]
        worst_name = self.names[-1]
        worst_value = self.groups[worst_name].text(scale)
        ends = f"{best_name} {leads} {best_value}, {worst_name} {trails} {worst_value}."
        return f"{ends} {self._lead_sentence(scale)}"

    def _lead_sentence(self, scale: Scale) -> str:
        second_name = self.names[1]
        if min(self.best.count, self.second.count) < 2:
            return "With one seed, chance is not told from effect."
        if self.lead <= EQUAL * abs(self.best.mean):
            return f"{second_name} does just as well."

        if self.interval is None:
            lead = number(self.lead, scale)
            chance = "as neither varies over its seeds, chance is not known"
            return f"The next is {second_name}, {lead} behind; {chance}."
        lead = Spread(self.lead, self.interval.half_width, 2).text(scale)
        if self.told_apart:
            verdict = "so they differ"
        else:
            verdict = "so the data do not tell them apart"
        return f"The next is {second_name}, {lead} behind (95%, Welch), {verdict}."


def final_result(sweep: SweepResult) -> SweepFinding:
    """Return which group ends best, and whether chance explains its lead."""
    metric = sweep.quality
    spreads = sweep.ends
    if metric is None or not spreads:
        text = "There is no final metric to compare: no job has finished with one."
        return SweepFinding("final", text)

    lower_is_better = sweep.lower_is_better(metric)
    ranking = Ranking.by_mean(spreads, lower_is_better)
    figures = ranking.figures()
    if len(spreads) > 1 and _all_equal(ranking):
        figures = {"metric": metric, "equal": True, "groups": figures["groups"]}
        text = f"all {len(spreads)} groups end at {ranking.best.text()}."
        text = f"Final {metric}: {text}"
        return SweepFinding("final", text, figures, "final_by_factor")

    if len(spreads) == 1:
        subject = f"Final {metric} of {ranking.names[0]}"
    elif lower_is_better:
        subject = f"Final {metric}, where lower is better"
    else:
        subject = f"Final {metric}, where higher is better"
    sentences = ranking.sentences(statistics.PLAIN, "ends best, at", "worst, at")
    figures["metric"] = metric
    figures["value"] = ranking.best.mean
    plot = f"final_by_{sweep.axes[0]}"
    return SweepFinding("final", f"{subject}: {sentences}", figures, plot)


def _all_equal(ranking: Ranking) -> bool:
    best = ranking.best.mean
    for spread in ranking.groups.values():
        if not abs(best - spread.mean) <= EQUAL * abs(best):
            return False
    return True


def time_to_target(sweep: SweepResult) -> SweepFinding:
    """Return which group reaches the target first, and whether chance explains it."""
    target = sweep.target
    if target is None:
        why = "no job has finished"
        if any(job.status in ("FINISHED", "RUNNING") for job in sweep.jobs):
            why = "no job has a loss that has fallen"
        text = f"No target can be chosen: {why}."
        return SweepFinding("time_to_target", text)

    text = _target_sentence(sweep, target)
    figures: dict[str, Any] = {
        "metric": target.metric,
        "target": target.value,
        "all_reach": target.all_reach,
    }
    times = {}
    for group, jobs in sweep.groups.items():
        spread = target.spread(jobs, "seconds")
        if spread is not None:
            times[group] = spread
    if not times:
        text += "; no group reached it with all of its seeds."
        return SweepFinding("time_to_target", text, figures)

    ranking = Ranking.by_mean(times, lower_is_better=True)
    sentences = ranking.sentences(
        statistics.SECONDS, "gets there first, after", "last, after"
    )
    if len(times) == 1:
        sentences = f"It is reached after {sentences}"
    text += f". {sentences}{shared_device_caveat(sweep)}"
    figures |= ranking.figures()
    figures["seconds"] = ranking.best.mean
    return SweepFinding("time_to_target", text, figures, "time_to_target")


def _target_sentence(sweep: SweepResult, target: TargetLoss) -> str:
    """Return which target was chosen and why, without a period."""
    reach = "reached by half of the jobs, as others did not get near"
    if target.all_reach:
        jobs = count(len(target.judged), "job")
        state = "that finished" if finished_jobs(sweep.jobs) else "still running"
        reach = f"the lowest that all of the {jobs} {state} reached"

    text = f"The target is {target.metric} ≤ {number(target.value)}, {reach}"
    if target.metric == LOSS:
        text += f" (means over {count(sweep.window, 'example')})"
    return text
