"""Reports whether accumulating pays: factors above 1 compared with factor 1.

Jobs are compared only with jobs of the same micro-batch size, so that they need the
same memory. Their losses are compared at an equal budget of time, and at an equal
budget of examples. A budget is the amount at which the shortest job ends.
"""

import math
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.common.errors import count
from pipeline.config import plain
from pipeline.report.equal_budget import (
    BUDGETS,
    BudgetContrast,
    Setting,
    contrast_at_budget,
    losses_at_budget,
)
from pipeline.report.findings import Result, SweepFinding, shared_device_caveat
from pipeline.report.job_results import (
    LOSS,
    PEAK_MEMORY,
    JobResult,
    by_group,
    grouped,
    pooled,
)
from pipeline.report.sweep_result import EVALUATIONS, SweepResult
from pipeline.report.wording import SECONDS, joined, number
from pipeline.tracking.foreign_store import again_command

# The states of a verdict with their headlines. If the states at the two budgets differ,
# the verdict is the one listed first here, or `depends` if one is `pays` and the other
# is `not`.
_HEADLINES = {
    "depends": "Accumulate by {factor} only if you are short of {scarce}",
    "pays": "Accumulate by {factor}",
    "not": "Do not accumulate",
    "few": "There are not enough seeds to tell",
    "unvaried": (
        "The effect of chance is unknown, as the results do not vary over the seeds"
    ),
    "same": "Accumulating makes no difference beyond the variation over seeds",
}

# Values that need no quotes in an override.
PLAIN_VALUE = re.compile(r"[\w.+-]+")


@dataclass(frozen=True)
class Verdict(Result):
    """Whether accumulating pays for jobs of one recipe and micro-batch size.

    Attributes:
        recipe: the settings that the jobs share; see `JobResult.recipe`.
        micro: the micro-batch size of the jobs.
        metric: the loss that is compared.
        contrasts: the comparison at each budget of `BUDGETS` that allows one; at least
            one.
        reasons: why the other budgets do not allow a comparison, by budget.
        memory_ratio: the peak memory with the larger factor relative to factor 1, or
            NaN if it is unknown.
        rates: the peak learning rate of the best setting with each factor, by factor,
            for each budget of `contrasts`.
        command: the command that adds the seeds which a verdict needs; empty if none
            are needed or the seed of a job is unknown.
        remarks: sentences that follow the verdict.
    """

    recipe: str
    micro: int | None
    metric: str
    contrasts: list[BudgetContrast]
    reasons: dict[str, str]
    memory_ratio: float
    rates: dict[str, dict[int, float]]
    command: str
    remarks: str

    @property
    def chosen(self) -> BudgetContrast:
        """The contrast that decides the state."""
        return chosen_contrast(self.contrasts)

    @property
    def state(self) -> str:
        """A key of `_HEADLINES`."""
        return state_of(self.contrasts)

    @property
    def seeds(self) -> int:
        return self.chosen.seeds

    @property
    def headline(self) -> str:
        headline = _HEADLINES[self.state].format(
            factor=self.chosen.other.factor, scarce=BUDGETS[self.chosen.axis]
        )
        return f"{_prefix(self.recipe)}{headline}"

    @property
    def better(self) -> Setting | None:
        """The better setting at the first budget that is decided.

        Time takes precedence, since it is the first budget. The result is None if no
        budget is decided.
        """
        for contrast in self.contrasts:
            if contrast.decided:
                return contrast.better
        return None

    @property
    def reason(self) -> str:
        """The reason to take `better`; valid only if that is not None."""
        reason = "the verdict on accumulating recommends it"
        if self.state == "depends":
            # Both budgets are decided, and time is the first of them.
            reason += " at equal time"
        return reason

    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        for contrast in self.contrasts:
            rates = {"rates": self.rates[contrast.axis]}
            figures[contrast.axis] = contrast.figures() | rates
        figures |= {
            "recipe": self.recipe,
            "micro": self.micro,
            "state": self.state,
            "headline": self.headline,
            "seeds": self.seeds,
            "memory": self.memory_ratio,
            "take": None,
            "take_factor": None,
            "rates": self.rates[self.chosen.axis],
            "command": self.command,
        }
        if self.better is not None:
            figures["take"] = self.better.group
            figures["take_factor"] = self.better.factor
        return figures

    def text(self) -> str:
        """Return the verdict in words."""
        clauses = {}
        for axis, reason in self.reasons.items():
            clauses[axis] = _no_contrast(axis, reason)
        for contrast in self.contrasts:
            clauses[contrast.axis] = _clause(contrast, self.metric)
        compared = " and ".join(clauses[axis] for axis in BUDGETS)

        add_seeds = ""
        if self.command:
            add_seeds = f" To add seeds: {self.command}"
        return (
            f"{self.headline}: {_equal_memory(self)}, {compared} "
            f"({_method(self.chosen)}). {_budgets_sentence(self.contrasts)}"
            f"{_rates_sentence(self.rates)}{self.remarks}{add_seeds}"
        )


def chosen_contrast(contrasts: Sequence[BudgetContrast]) -> BudgetContrast:
    """Return the contrast whose state comes first in `_HEADLINES`."""
    order = list(_HEADLINES)
    return min(contrasts, key=lambda contrast: order.index(contrast.state))


def state_of(contrasts: Sequence[BudgetContrast]) -> str:
    """Return the state of the verdict that follows from contrasts at some budgets."""
    if {"pays", "not"} <= {contrast.state for contrast in contrasts}:
        return "depends"
    return chosen_contrast(contrasts).state


def findings(sweep: SweepResult) -> Iterable[SweepFinding]:
    """Yield a verdict for each recipe and micro-batch, if the sweep is over factors.

    A recipe consists of the settings that jobs share, such as a scaling rule, apart
    from seed, batch sizes and learning rate. If there is no verdict, yield the reason.
    """
    if len(_factors(sweep.jobs) - {None}) < 2:
        return
    if sweep.search:
        text = (
            "No verdict on the factors of a search: each trial was chosen by the "
            "results of earlier ones, so factors had unequal chances."
        )
        yield SweepFinding("verdict", text)
        return

    # Leave out groups with a job that failed: they cannot be recommended.
    left_out = []
    for group, jobs in sweep.groups.items():
        if any(job.has_outcome and not job.finished for job in jobs):
            left_out.append(group)
    remark = ""
    if left_out:
        remark = f" Left out, as not every seed finished: {joined(left_out)}."

    found = []
    for jobs in _jobs_of_equal_memory(sweep, left_out):
        missing = _missing_jobs(sweep, jobs[0])
        if missing:
            found.append(_no_verdict_yet(jobs[0].recipe, missing))
            continue
        verdict = _verdict(sweep, jobs, remark)
        if verdict is not None:
            found.append(verdict)
    yield from found
    if found:
        return

    missing = [job for job in sweep.jobs if not job.has_outcome]
    if missing:
        yield _no_verdict_yet("", missing)
        return
    jobs = [job for job in sweep.jobs if job.group not in left_out]
    text = (
        "Whether accumulating pays cannot be determined: this takes jobs with "
        "factor 1 and with a larger factor, of one micro-batch size, that "
        f"finished with a loss, {_why_no_pair(jobs)}."
    )
    yield SweepFinding("verdict", text + remark)


def _jobs_of_equal_memory(
    sweep: SweepResult, left_out: list[str]
) -> Iterable[list[JobResult]]:
    """Yield the jobs of each recipe and micro-batch with factor 1 and a larger one."""
    jobs = [
        job for job in sweep.jobs if job.group not in left_out and job.micro_batch_size
    ]
    for alike in grouped(jobs, lambda job: (job.recipe, job.micro_batch_size)).values():
        factors = _factors(alike)
        if 1 in factors and len(factors) > 1:
            yield alike


def _missing_jobs(sweep: SweepResult, job: JobResult) -> list[JobResult]:
    """Return the jobs that have to end before there is a verdict on jobs like `job`.

    The micro-batch of a job without a run is unknown, so such a job is always returned.
    """
    missing = []
    for other in sweep.jobs:
        is_like = other.recipe == job.recipe and other.micro_batch_size in (
            None,
            job.micro_batch_size,
        )
        if is_like and not other.has_outcome:
            missing.append(other)
    return missing


def _no_verdict_yet(recipe: str, missing: list[JobResult]) -> SweepFinding:
    """Return why there is no verdict yet: jobs that it compares have not ended.

    If there were one already, the settings that come first in a sweep would win, and
    this look at the data would have a chance of error that no later look allows for.
    """
    are_missing = "has not ended"
    if len(missing) > 1:
        are_missing = "have not ended"
    text = (
        f"{_prefix(recipe)}No verdict yet, as {count(len(missing), 'job')} that it "
        f"compares {are_missing}: {joined([job.name for job in missing])}. This report "
        "does not count as a look at the data: it does not widen later intervals."
    )
    return SweepFinding("verdict", text)


def _why_no_pair(jobs: list[JobResult]) -> str:
    """Return a clause on why no jobs can be compared with factor 1 at equal memory.

    Args:
        jobs: the jobs of the groups in which every seed finished.
    """
    bases = [job for job in jobs if job.factor == 1]
    others = [job for job in jobs if job.factor is not None and job.factor > 1]
    if not bases or not others:
        kind = "a larger factor"
        if not bases:
            kind = "factor 1"
        return f"and there is no job with {kind} that did"

    micro_of_bases = {job.micro_batch_size for job in bases}
    micro_of_others = {job.micro_batch_size for job in others}
    if not micro_of_bases & micro_of_others:
        return (
            f"while factor 1 has micro-batches of {_sizes(micro_of_bases)}, and larger "
            f"factors of {_sizes(micro_of_others)}"
        )
    if {job.recipe for job in bases} & {job.recipe for job in others}:
        return "and no loss was logged"
    keys: dict[str, None] = {}  # an ordered set
    for base in bases:
        for other in others:
            for key, value in {*base.settings} ^ {*other.settings}:
                if f"{key}={value}" in f" {base.recipe} {other.recipe} ".split():
                    keys[key] = None
    names = joined(sorted(keys))
    return (
        f"while jobs with factor 1 and jobs with larger factors differ in {names}, too: "
        "sweep accumulation.factor and optimizer.learning_rate as separate keys"
    )


def _sizes(sizes: set[int | None]) -> str:
    known = sorted(size for size in sizes if size is not None)
    return joined([str(size) for size in known]) or "unknown size"


def _factors(jobs: list[JobResult]) -> set[int | None]:
    return {job.factor for job in jobs}


def _verdict(
    sweep: SweepResult, jobs: list[JobResult], remark: str
) -> SweepFinding | None:
    """Return the verdict on jobs of one recipe and micro-batch size.

    Return None if no loss was logged.
    """
    metric = sweep.judged_loss
    if metric is None:
        return None
    contrasts = []
    reasons = {}
    for axis in BUDGETS:
        losses = losses_at_budget(sweep, metric, jobs, axis)
        if losses.reason:
            reasons[axis] = losses.reason
        else:
            contrasts.append(contrast_at_budget(losses, axis, sweep.looks))

    recipe = jobs[0].recipe
    if not contrasts:
        clauses = [_no_contrast(axis, reason) for axis, reason in reasons.items()]
        text = (
            f"{_prefix(recipe)}Whether accumulating pays cannot be determined: "
            f"{' and '.join(clauses)}.{remark}"
        )
        return SweepFinding("verdict", text)

    chosen = chosen_contrast(contrasts)
    command = ""
    if state_of(contrasts) == "few":
        command = _command_for_verdict(sweep, jobs, contrasts)
    result = Verdict(
        recipe=recipe,
        micro=jobs[0].micro_batch_size,
        metric=metric,
        contrasts=contrasts,
        reasons=reasons,
        memory_ratio=_memory_ratio(jobs, chosen),
        rates={contrast.axis: _rates(jobs, contrast) for contrast in contrasts},
        command=command,
        remarks=_metric_remark(sweep, metric) + shared_device_caveat(sweep) + remark,
    )
    return SweepFinding("verdict", result.text(), result)


def _metric_remark(sweep: SweepResult, metric: str) -> str:
    """Return why the training loss is compared although there are evaluations."""
    evaluations = sweep.fewest_evaluations
    if metric != LOSS or evaluations is None:
        return ""
    return (
        f" The training loss is compared, because a job has only "
        f"{count(evaluations, 'evaluation')}, and the validation loss needs "
        f"{EVALUATIONS}."
    )


def _command_for_verdict(
    sweep: SweepResult, jobs: list[JobResult], contrasts: list[BudgetContrast]
) -> str:
    """Return the command that adds the seeds which the contrasts ask for.

    Args:
        sweep: the sweep.
        jobs: the jobs of the verdict.
        contrasts: its contrasts.
    """
    more = 0
    factors: set[int] = set()
    for contrast in contrasts:
        more = max(more, contrast.more.count)
        factors.update(contrast.more.factors)
    wanted = [job for job in jobs if job.factor in factors]
    return command_for_seeds(sweep, more, wanted)


def command_for_seeds(
    sweep: SweepResult, more: int, wanted: Sequence[JobResult] | None = None
) -> str:
    """Return the command that adds `more` seeds to the settings of some jobs.

    The command does not repeat finished jobs. If the names of all jobs include the
    seed, it also lists the existing seeds. Otherwise it adds at least two seeds, since
    the names of the new jobs would not include a single seed. The result is empty if
    the seed of a job is unknown.

    Args:
        sweep: the sweep.
        more: the number of seeds to add to each setting.
        wanted: jobs of the settings that get seeds; by default, all jobs.
    """
    seeds = {job.seed or "" for job in sweep.jobs}
    if not all(seed.isdecimal() for seed in seeds):
        return ""
    if wanted is None:
        wanted = sweep.jobs
    known = sorted(int(seed) for seed in seeds)
    in_names = all("seed" in dict(job.settings) for job in sweep.jobs)
    if in_names:
        # Some settings may lack seeds that others have.
        fewest = min(len({job.seed for job in of}) for of in by_group(wanted).values())
        more = max(fewest + more - len(known), 0)
    else:
        more = max(more, 2)
    wanted_seeds = list(range(known[-1] + 1, known[-1] + 1 + more))
    if in_names:
        wanted_seeds = known + wanted_seeds
    values = ",".join(str(seed) for seed in wanted_seeds)
    overrides = [f"seed={values}", *_overrides_of_settings(sweep, wanted)]
    command = again_command(sweep.name, sweep.run_id, sweep.uri)
    return f"{command} {shlex.join(overrides)}"


def _overrides_of_settings(
    sweep: SweepResult, wanted: Sequence[JobResult]
) -> list[str]:
    """Return the overrides that select the settings of some jobs of a sweep.

    A swept key gets no override if its values have to be quoted, or if another swept
    key has the same name in the names of the jobs.
    """
    names = [plain.short(key, "") for key in sweep.varied]
    overrides = []
    for key in sweep.varied:
        name = plain.short(key, "")
        if key == "seed" or names.count(name) > 1:
            continue
        short_key = name.removesuffix("=")
        texts = [dict(job.settings).get(short_key) for job in sweep.jobs]
        of_wanted = [dict(job.settings).get(short_key) for job in wanted]
        values = list(dict.fromkeys(of_wanted))
        if set(values) == set(texts):
            continue
        if not all(value and PLAIN_VALUE.fullmatch(value) for value in values):
            continue
        choices = ",".join(map(str, values))
        if len(values) == 1:
            # Let this key stay swept, since it is in the names of the jobs.
            choices = f"choice({choices})"
        overrides.append(f"{key}={choices}")
    return overrides


def _prefix(recipe: str) -> str:
    if not recipe:
        return ""
    return f"{recipe}: "


def _no_contrast(axis: str, reason: str) -> str:
    return f"at equal {BUDGETS[axis]} nothing can be said, as {reason}"


def _method(contrast: BudgetContrast) -> str:
    seeds = count(contrast.seeds, "seed")
    if contrast.seeds > 1 and contrast.result.best.paired:
        return f"{seeds}, paired"
    return seeds


def _equal_memory(verdict: Verdict) -> str:
    """Return the clause on the comparison with factor 1 at equal memory."""
    peak = ""
    if not math.isnan(verdict.memory_ratio):
        peak = f", peak ×{verdict.memory_ratio:.2f}"
    return (
        "compared with factor 1 at equal memory (micro-batches of "
        f"{verdict.micro}{peak})"
    )


def _memory_ratio(jobs: list[JobResult], contrast: BudgetContrast) -> float:
    """Return the ratio of the peak memory of `other` to that of `base` in `contrast`.

    The ratio is NaN if one of the two is unknown.
    """
    jobs_by_group = by_group(jobs)
    base = pooled(jobs_by_group[contrast.base.group], _peak_memory)
    other = pooled(jobs_by_group[contrast.other.group], _peak_memory)
    if base is None or other is None or base.mean == 0:
        return math.nan
    return other.mean / base.mean


def _peak_memory(job: JobResult) -> float:
    return job.last(PEAK_MEMORY)


def _rates(jobs: list[JobResult], contrast: BudgetContrast) -> dict[int, float]:
    """Return the peak learning rate of the best setting with each factor, by factor.

    A factor without a logged learning rate is left out.
    """
    jobs_by_group = by_group(jobs)
    rates = {}
    for factor, setting in contrast.best_by_factor.items():
        rate = pooled(jobs_by_group[setting.group], lambda job: job.peak_rate)
        if rate is not None:
            rates[factor] = rate.mean
    return rates


def _budgets_sentence(contrasts: Sequence[BudgetContrast]) -> str:
    """Return a sentence with the amounts at which losses are compared."""
    amounts = []
    for contrast in contrasts:
        if contrast.axis == "seconds":
            amounts.append(f"{number(contrast.budget, SECONDS)} of training")
        else:
            amounts.append(f"{number(contrast.budget)} examples")
    return f"Compared after {' and after '.join(amounts)}, where the shortest run ends."


def _rates_sentence(rates: dict[str, dict[int, float]]) -> str:
    """Return a sentence on the rates, by budget if they differ between budgets."""
    texts = {}
    for axis, rate_by_factor in rates.items():
        factors = []
        for factor, rate in rate_by_factor.items():
            factors.append(f"{number(rate)} with factor {factor}")
        if factors:
            texts[axis] = ", ".join(factors)
    if not texts:
        return ""
    if len(set(texts.values())) == 1:
        return f" The peak learning rates were {next(iter(texts.values()))}."
    clauses = [f"at equal {BUDGETS[axis]} {text}" for axis, text in texts.items()]
    return f" The peak learning rates: {'; '.join(clauses)}."


def _clause(contrast: BudgetContrast, metric: str) -> str:
    """Return the clause that compares the losses at one budget."""
    best = (
        f"at equal {BUDGETS[contrast.axis]} {metric} with factor "
        f"{contrast.other.factor}, the best above 1,"
    )
    if contrast.result.best.equal:
        return f"{best} is the same with each seed"

    direction = "higher"
    if contrast.result.value < 0:
        direction = "lower"
    difference = number(abs(contrast.result.value))
    without = ""
    left_out = contrast.without.clauses(metric)
    if left_out:
        without = f", while {' and '.join(left_out)}"
    certainty = f"{_interval(contrast)}{_consequence(contrast)}"
    return f"{best} is {direction} by {difference} ({certainty}){without}"


def _interval(contrast: BudgetContrast) -> str:
    """Return the interval of the difference, or why there is none."""
    if contrast.seeds < 2:
        return "one seed"
    least = contrast.result.lower
    most = contrast.result.upper
    if math.isinf(least) or math.isinf(most):
        return "the effect of chance is unknown, as the results do not vary"
    if least < 0 < most:
        ends = f"lower by {number(-least)} to higher by {number(most)}"
    else:
        # Both ends have the sign that the words before the interval express.
        nearest, farthest = sorted([abs(least), abs(most)])
        ends = f"{number(nearest)} to {number(farthest)}"
    # The interval of a look has a higher level; see `chance_of_look`.
    return f"95% over all looks: {ends}"


def _consequence(contrast: BudgetContrast) -> str:
    """Return the clause that follows an interval that decides nothing; else ""."""
    if contrast.state == "same":
        return ", within chance"
    if contrast.state != "few":
        return ""
    seeds = count(contrast.more.count, "more seed")
    would = "would tell"
    if contrast.seeds < 2:
        would = "would show how far seeds vary"
    factors = [str(factor) for factor in contrast.more.factors]
    return f"; {seeds} of factors {', '.join(factors[:-1])} and {factors[-1]} {would}"
