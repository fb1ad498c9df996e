"""Recommended next steps after a sweep, derived from the other findings."""

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.common.errors import count
from pipeline.config.plain import short, without_seed
from pipeline.report.findings import Result, SweepFinding, results_of
from pipeline.report.job_results import NO_RUN, JobResult, finished_jobs
from pipeline.report.largest_batch import LargestBatch
from pipeline.report.ranking import FinalResult, Ranking, TargetTimes, is_reversed
from pipeline.report.search_range import FEWEST_VALUES
from pipeline.report.seed_differences import FEWEST_SEEDS, difference
from pipeline.report.sweep_result import SweepResult
from pipeline.report.trajectories import PairDifferences
from pipeline.report.verdict import PLAIN_VALUE, Verdict, command_for_seeds
from pipeline.report.wording import number
from pipeline.tracking.foreign_store import again_command


def findings(sweep: SweepResult, earlier: list[SweepFinding]) -> Iterable[SweepFinding]:
    """Yield the recommendations that follow from the sweep and all earlier findings."""
    yield from _run_missing_jobs(sweep)
    yield from _take(sweep, earlier)
    yield from _try_larger_batches(earlier)
    yield from _repeat_with_seeds(sweep)
    yield from _run_in_float64(earlier)


@dataclass(frozen=True)
class MissingJobs(Result):
    """The names of the jobs to run again."""

    missing: list[str]


@dataclass(frozen=True)
class BestOfSearch(Result):
    """The recommended settings of a search."""

    recommended: str


@dataclass(frozen=True)
class EdgeOfSearch(Result):
    """A key whose best value lies at an edge of the search.

    Attributes:
        key: the config key.
        best: its best value.
        edge: `lower` or `upper`.
    """

    key: str
    best: float
    edge: str


@dataclass(frozen=True)
class Recommendation(Result):
    """The recommended group.

    Attributes:
        recommended: the name of the group.
        batch: the largest batch of its family that pays, if that is known.
    """

    recommended: str
    batch: int | None


@dataclass(frozen=True)
class LargerBatch(Result):
    """A larger batch to try with a family."""

    batch: int
    family: str


@dataclass(frozen=True)
class MoreSeeds(Result):
    """The number of seeds that were run, which is too small."""

    seeds: int


@dataclass(frozen=True)
class OtherPrecision(Result):
    """A precision to try."""

    precision: str


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
    if sweep.branches:
        # The record lacks the arguments of `pipeline critical`.
        command = f"pipeline critical as before, with --again {sweep.run_id}"
    yield SweepFinding("next", begin + command, MissingJobs(missing))


def _take(sweep: SweepResult, earlier: list[SweepFinding]) -> Iterable[SweepFinding]:
    """Yield the recommended settings, if any.

    For a search, these are its best settings; see `_take_best_of_search`. Otherwise, if
    several groups were ranked by their time to the target and no time is only an upper
    bound, they are those of `_take_fastest`. Otherwise, they are those of the only
    verdict that recommends a setting. Except for a search, nothing is yielded while
    jobs are missing, since the settings that ran first would win.
    """
    if sweep.best:
        best = _take_best_of_search(sweep, earlier)
        yield best
        for result in results_of([best], BestOfSearch):
            yield from _search_beyond_edges(sweep, result.recommended)
        return
    if not all(job.has_outcome for job in sweep.jobs):
        return

    for times in results_of(earlier, TargetTimes):
        if times.ranking is None or times.at_most:
            continue
        if len(times.ranking.means) > 1:
            fastest = _take_fastest(sweep, earlier, times.ranking)
            if fastest is not None:
                yield fastest
            return

    # Follow the verdict if exactly one recommends a setting, since it is unknown which
    # group reached the target first.
    texts = {}
    for verdict in results_of(earlier, Verdict):
        if verdict.better is not None:
            group = verdict.better.group
            texts[group] = f"Take {group}: {verdict.reason}."
    if len(texts) == 1:
        ((group, text),) = texts.items()
        text += _edge_of_rates(sweep, group)
        text += _better_final(sweep, earlier, group)
        yield SweepFinding("next", text, Recommendation(group, None))


def _take_best_of_search(
    sweep: SweepResult, earlier: list[SweepFinding]
) -> SweepFinding:
    """Recommend the best settings of a search.

    They are those with the best final value of the metric of `training.keep_best`.
    Without such a metric, they are those with the lowest loss, which the search
    minimizes.
    """
    finals = results_of(earlier, FinalResult)
    if sweep.keeps_best_by is not None and finals and not finals[0].equal:
        final = finals[0]
        best = final.ranking.best.name
        extreme = "lowest" if final.ranking.lower_is_better else "highest"
        text = f"Take {best}: the {extreme} final {final.metric} of the search."
        text += _add_seeds_to_search(sweep, best)
        return SweepFinding("next", text, BestOfSearch(best))

    text = f"Take {sweep.best}: the lowest loss of the search."
    text += _better_final(sweep, earlier, sweep.best)
    text += _add_seeds_to_search(sweep, sweep.best)
    return SweepFinding("next", text, BestOfSearch(sweep.best))


def _add_seeds_to_search(sweep: SweepResult, best: str) -> str:
    """Return how to add seeds to the best settings of a search if they have only one.

    The number of trials at once is that of the seeds, as such trials have different
    values. So each seed is run once.
    """
    # The name of a job may also have its effective batch size.
    settings = set(without_seed(best).split())
    jobs = []
    for job in finished_jobs(sweep.jobs):
        if settings <= set(job.name.split()):
            jobs.append(job)
    if len(jobs) != 1:
        return ""

    text = " This is one seed, so the effect of chance is unknown."
    overrides = _overrides_of_trial(sweep, jobs[0])
    if not overrides:
        return text
    seeds = ",".join(str(seed) for seed in range(FEWEST_SEEDS))
    overrides += [
        f"seed={seeds}",
        f"hydra.sweeper.trials={FEWEST_SEEDS}",
        f"hydra.sweeper.at_once={FEWEST_SEEDS}",
    ]
    return (
        f"{text} To add seeds, repeat the search's command with {' '.join(overrides)}"
    )


def _overrides_of_trial(sweep: SweepResult, job: JobResult) -> list[str]:
    """Return the overrides that fix all searched keys but the seed at a job's values.

    Return an empty list if a value has to be quoted, or if its key is ambiguous.
    """
    names = [short(key, "").removesuffix("=") for key in sweep.varied]
    settings = dict(job.settings)
    overrides = []
    for key, name in zip(sweep.varied, names, strict=True):
        if key == "seed":
            continue
        value = settings.get(name, "")
        if names.count(name) > 1 or not PLAIN_VALUE.fullmatch(value):
            return []
        overrides.append(f"{key}={value}")
    return overrides


def _search_beyond_edges(
    sweep: SweepResult, recommended: str
) -> Iterable[SweepFinding]:
    """Recommend to search beyond the range whose edge has the best learning rate.

    Intervals on a logarithmic scale are checked for other keys, too. The other keys may
    have a natural limit, such as a dropout rate of 0.

    Args:
        sweep: the search.
        recommended: the best settings.
    """
    best_texts = dict(word.split("=", 1) for word in recommended.split() if "=" in word)
    names = [short(key, "").removesuffix("=") for key in sweep.ranges]
    for key, searched in sweep.ranges.items():
        name = short(key, "").removesuffix("=")
        if names.count(name) > 1:
            continue
        if not searched.log and key.split(".")[-1] != "learning_rate":
            continue
        tried = [job.setting(name) for job in sweep.jobs if job.status != NO_RUN]
        numbers = [value for value in tried if isinstance(value, float)]
        try:
            best = float(best_texts[name])
        except (KeyError, ValueError):
            continue
        edge = searched.edge(best, numbers)
        if edge == "lower":
            text = f"Search {key} below {number(searched.low)}, too"
        elif edge == "upper":
            text = f"Search {key} above {number(searched.high)}, too"
        else:
            continue
        text += (
            f": the best value, {best_texts[name]}, lies at the {edge} edge of the "
            f"search, which was from {number(searched.low)} to {number(searched.high)}."
        )
        yield SweepFinding("next", text, EdgeOfSearch(key, best, edge))


def _take_fastest(
    sweep: SweepResult, earlier: list[SweepFinding], times: Ranking
) -> SweepFinding | None:
    """Recommend a group for this machine.

    It is the group that reached the target first, unless the verdict for the same
    recipe and micro-batch recommends another group. Return None if that verdict needs
    more seeds.
    """
    fastest = times.best.name
    fastest_job = sweep.groups[fastest][0]
    verdict = _verdict_on_jobs_like(fastest_job, earlier)
    if verdict is not None and verdict.state == "few":
        return None
    if verdict is None or verdict.better is None:
        recommended = fastest
        reason = "it reached the target first"
        if times.not_told_apart:
            reason += ", though not by more than chance can explain"
    else:
        recommended = verdict.better.group
        reason = verdict.reason
        if recommended != fastest and recommended not in times.not_told_apart:
            reason += f", though {fastest} reached the target first"
    text = f"On this machine take {recommended}: {reason}."
    text += _edge_of_rates(sweep, recommended)
    text += _better_final(sweep, earlier, recommended)

    recommended_job = sweep.groups[recommended][0]
    largest = None
    for batches in results_of(earlier, LargestBatch):
        if batches.family == recommended_job.family:
            largest = batches.largest
    if largest and largest > (recommended_job.effective_batch_size or 0):
        text += (
            " With more devices, enlarge the batch by replicas, not by the factor: "
            f"an effective batch of up to {largest} takes fewer updates to the target, "
            "at the price of more examples."
        )
    return SweepFinding("next", text, Recommendation(recommended, largest))


def _edge_of_rates(sweep: SweepResult, group: str) -> str:
    """Return a sentence if the group has the smallest or the largest rate, else "".

    Its rate is compared with those that were tried at the same batch, of which there
    have to be at least `FEWEST_VALUES`: of two rates, each is at an edge.
    """
    job = sweep.groups[group][0]
    rate = job.setting("rate")
    batch = job.effective_batch_size
    rates = set()
    for other in sweep.jobs:
        is_alike = other.recipe == job.recipe and other.effective_batch_size == batch
        if is_alike and isinstance(other.setting("rate"), float):
            rates.add(other.setting("rate"))
    if rate not in rates or len(rates) < FEWEST_VALUES:
        return ""
    if rate == max(rates):
        edge = "largest"
    elif rate == min(rates):
        edge = "smallest"
    else:
        return ""
    direction = "larger" if edge == "largest" else "smaller"
    return (
        f" Its rate is the {edge} that was tried at this batch: try {direction} ones, "
        "too."
    )


def _verdict_on_jobs_like(
    job: JobResult, earlier: list[SweepFinding]
) -> Verdict | None:
    """Return the verdict on jobs of the recipe and micro-batch of a job, if any."""
    for verdict in results_of(earlier, Verdict):
        same_recipe = verdict.recipe == job.recipe
        if same_recipe and verdict.micro == job.micro_batch_size:
            return verdict
    return None


def _better_final(
    sweep: SweepResult, earlier: list[SweepFinding], recommended: str
) -> str:
    """Return a sentence if another group has a better final result.

    The sentence says whether chance may explain the difference. Return an empty string
    if no other group has a better result, or if the final results are unknown.
    """
    finals = results_of(earlier, FinalResult)
    if not finals or finals[0].equal:
        return ""
    final = finals[0]
    best = final.ranking.best
    if recommended in (best.name, *best.same):
        return ""
    values = sweep.ends
    other_seeds = ""
    if recommended in values:
        lead = difference(best.values, values[recommended])
        if lead.equal:
            return ""
        if is_reversed(lead, final.ranking.lower_is_better):
            other_seeds = ", though not on the seeds that both groups have"
        elif lead.seeds > 1 and not lead.told_apart:
            return (
                f" {best.name} ends best by {final.metric}, but the difference is "
                "within chance."
            )

    examples = ""
    seen_by_best = final.horizons.get(best.name, 0)
    seen = final.horizons.get(recommended, 0)
    if seen_by_best > 0 and seen > 0 and not 0.99 < seen_by_best / seen < 1.01:
        examples = f" after {number(seen_by_best / seen)} times the examples"
    return f" By its final {final.metric} {best.name} is better{examples}{other_seeds}."


def _try_larger_batches(earlier: list[SweepFinding]) -> Iterable[SweepFinding]:
    for result in results_of(earlier, LargestBatch):
        if not result.open:
            continue
        batch = 2 * result.largest
        text = f"Try an effective batch of {batch}"
        if result.family:
            text += f" with {result.family}"
        text += " on more devices: no batch was too large yet."
        yield SweepFinding("next", text, LargerBatch(batch, result.family))


def _repeat_with_seeds(sweep: SweepResult) -> Iterable[SweepFinding]:
    most_seeds = 0
    for jobs in sweep.groups.values():
        most_seeds = max(most_seeds, len(finished_jobs(jobs)))
    if most_seeds != 1 or sweep.search:
        return
    text = "Repeat with seed=0,1,2: one seed gives no error bars."
    command = command_for_seeds(sweep, FEWEST_SEEDS - 1)
    if command:
        text = f"Repeat with more seeds, as one seed gives no error bars: {command}"
    yield SweepFinding("next", text, MoreSeeds(1))


def _run_in_float64(earlier: list[SweepFinding]) -> Iterable[SweepFinding]:
    """Recommend float64 if rounding set trajectories apart in a lower precision."""
    for differences in results_of(earlier, PairDifferences):
        by_rounding = differences.parted_by("rounding")
        if by_rounding and differences.precision != "float64":
            text = (
                "For trajectories that agree at every update, run with "
                "hardware.precision=float64."
            )
            yield SweepFinding("next", text, OtherPrecision("float64"))
            return
