"""The sentences of a report, recomputed from the rows of eight planted sweeps.

Nothing of `pipeline.report` is used but its findings: the rules are written down here a
second time, in loops over rows.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from pipeline.report import writer
from pipeline.report.findings import SweepFinding
from pipeline.report.job_results import Curve, JobResult
from pipeline.report.sweep_result import SweepResult
from tests import synthetic
from tests.synthetic import PlantedSweep

FIRST_LOOK = 0.04  # the chance of error of the first verdict on a sweep
NUMBER = r"(-?[\d.]+(?:e-?\d+)?)"
SPREAD = rf"{NUMBER}(?: ± {NUMBER})?"
VARIED = ["accumulation.factor", "seed"]


@dataclass
class Job:
    """A job as rows: validation losses by update."""

    factor: int
    seed: int
    losses: dict[int, float]
    micro: int = 8
    seconds: float = 1.0  # of an update
    status: str = "FINISHED"

    @property
    def batch(self) -> int:
        return self.micro * self.factor

    @property
    def group(self) -> str:
        return f"factor={self.factor} batch={self.batch}"

    @property
    def name(self) -> str:
        return f"{self.group} seed={self.seed}"

    @property
    def finished(self) -> bool:
        return self.status == "FINISHED"

    @property
    def first_loss(self) -> float:
        return next(iter(self.losses.values()))

    @property
    def last_loss(self) -> float:
        return self.losses[max(self.losses)]

    def x(self, axis: str, update: int) -> float:
        scale = {"updates": 1.0, "examples": self.batch, "seconds": self.seconds}
        return scale[axis] * update


@dataclass
class Planted:
    """A planted sweep."""

    jobs: list[Job]
    planned: list[str] = field(default_factory=list)  # names that never ran
    search: bool = False


def falling(end: float, updates: int, evaluations: int = 8, bend: float = 2.0) -> dict:
    """Return losses that fall from 3 to `end`, faster at first."""
    losses = {}
    for row in range(1, evaluations + 1):
        share = row / evaluations
        losses[round(updates * share)] = end + (3 - end) * (1 - share) ** bend
    return losses


def jobs(ends: dict[int, list[float]], updates: int = 320, **more: Any) -> list[Job]:
    """Return a job for each end, with the same examples for each factor."""
    planted_jobs = []
    for factor, ends_of_factor in ends.items():
        # A larger update takes longer, but less than so many small ones.
        seconds = 0.3 * factor**0.9
        for seed, end in enumerate(ends_of_factor):
            losses = falling(end, updates // factor)
            planted_jobs.append(Job(factor, seed, losses, seconds=seconds, **more))
    return planted_jobs


def censored() -> Planted:
    """Return factor 8 evaluated only after it is where the others end."""
    planted_jobs = jobs({1: [1.5, 1.52, 1.53], 4: [1.45, 1.5, 1.47]})
    for job in jobs({8: [1.6, 1.61, 1.62]}):
        job.losses = dict.fromkeys(job.losses, job.last_loss)
        planted_jobs.append(job)
    return Planted(planted_jobs)


def unequal_horizons() -> Planted:
    """Return three factors with the same number of updates each."""
    ends_by_factor = {
        1: [1.8, 1.83, 1.85],
        2: [1.6, 1.66, 1.63],
        4: [1.5, 1.5, 1.5],
    }
    planted_jobs = []
    for factor, ends in ends_by_factor.items():
        for seed, end in enumerate(ends):
            losses = falling(end + 0.01 * seed, updates=80)
            planted_jobs.append(Job(factor, seed, losses, seconds=0.5 * factor))
    return Planted(planted_jobs)


def ties() -> Planted:
    """Return two factors that end alike."""
    ends = {
        1: [1.5, 1.54, 1.51],
        2: [1.5, 1.54, 1.51],
        4: [1.7, 1.78, 1.7],
    }
    return Planted(jobs(ends))


def one_seed() -> Planted:
    return Planted(jobs({1: [1.5], 2: [1.45], 4: [1.62]}))


def unequal_variances() -> Planted:
    """Return a factor whose seeds vary many times as much as those of the other two."""
    ends = {
        1: [1.5, 1.51, 1.49, 1.5],
        4: [1.2, 1.9, 1.3, 1.8],
        8: [1.6, 1.62, 1.59, 1.6],
    }
    return Planted(jobs(ends))


def diverged() -> Planted:
    """Return a factor whose losses rise, so that half of the jobs set the target."""
    planted_jobs = jobs({1: [1.5, 1.53, 1.52], 2: [1.4, 1.44, 1.46]})
    for job in jobs({16: [1.5, 1.5, 1.5]}):
        start = 3 + 0.1 * job.seed
        job.losses = {update: start + update for update in job.losses}
        planted_jobs.append(job)
    return Planted(planted_jobs)


def missing() -> Planted:
    """Return a sweep of which a job failed, and another one never ran."""
    ends = {
        1: [1.5, 1.53, 1.52],
        2: [1.4, 1.45, 1.44],
        4: [1.3, 1.31, 1.32],
    }
    planted_jobs = jobs(ends)
    planted_jobs[-1].status = "FAILED"
    return Planted(planted_jobs, planned=["factor=8 batch=64 seed=0"])


def reversed_lead() -> Planted:
    """Return a best group that is best by a seed which failed in the second one."""
    ends = {
        1: [1.5, 1.51, 1.0],
        2: [1.4, 1.405, 1.45],
        4: [1.7, 1.72, 1.71],
    }
    planted_jobs = jobs(ends)
    last_seed_of_factor_2 = planted_jobs[5]
    last_seed_of_factor_2.status = "FAILED"
    return Planted(planted_jobs)


def search() -> Planted:
    return Planted(jobs({1: [1.5], 4: [1.4], 16: [1.7]}), search=True)


PLANTED = {
    make.__name__: make
    for make in (
        censored,
        unequal_horizons,
        ties,
        one_seed,
        unequal_variances,
        diverged,
        missing,
        reversed_lead,
        search,
    )
}


@pytest.fixture(scope="module", params=list(PLANTED))
def case(request) -> tuple[Planted, dict[str, str]]:
    """Return a planted sweep, and the sentences of its report by topic."""
    planted = PLANTED[request.param]()
    return planted, texts_of(writer.summarize(result_of(planted)))


def result_of(planted: Planted) -> SweepResult:
    """Return the sweep as its report reads it from a store."""
    results = []
    clock = synthetic.STARTED
    for job in planted.jobs:
        updates = max(job.losses)
        steps = np.arange(1, updates + 1)
        values_by_metric = {
            "train/examples_seen": job.batch * steps,
            "train/effective_batch_size": np.full(updates, job.batch),
            "train/learning_rate": np.full(updates, 0.1),
            "perf/update_seconds": np.full(updates, job.seconds),
            "perf/examples_per_second": np.full(updates, job.batch / job.seconds),
            "perf/peak_memory_bytes": np.full(updates, 100 * 2**20),
            "train/loss": np.full(updates, 2.0),
        }
        curves = {}
        for metric, values in values_by_metric.items():
            curves[metric] = Curve(steps, values.astype(float))
        curves["val/loss"] = Curve(
            np.array(list(job.losses)), np.array(list(job.losses.values()))
        )
        ended = clock + 1000 + int(1000 * job.seconds * updates)
        results.append(
            JobResult(
                job.name,
                job.name,
                job.status,
                {
                    "accumulation.factor": str(job.factor),
                    "seed": str(job.seed),
                    "hardware.precision": "float32",
                },
                curves=curves,
                started=clock,
                ended=ended - 500,
                factor=job.factor,
                effective_batch_size=job.batch,
                micro_batch_size=job.micro,
            )
        )
        clock = ended
    results += [JobResult(name) for name in planted.planned]
    best = "factor=4" if planted.search else ""
    return SweepResult(
        *("sqlite:///none.db", "0" * 32, "planted", "FINISHED"),
        *(VARIED, results, best),
        search=planted.search,
    )


def texts_of(findings: list[SweepFinding]) -> dict[str, str]:
    """Return the text of the first finding of each topic."""
    texts: dict[str, str] = {}
    for finding in findings:
        texts.setdefault(finding.topic, finding.text)
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_the_report_of_a_store_has_the_same_sentences(tmp_path, name):
    planted = PLANTED[name]()
    names = [job.name for job in planted.jobs] + planted.planned
    sweep = PlantedSweep(synthetic.store(tmp_path), names, VARIED, "planted")
    for job in planted.jobs:
        updates = max(job.losses)
        sweep.job(
            job.name,
            {"train/loss": [2.0] * updates, "val/loss": job.losses},
            factor=job.factor,
            batch=job.batch,
            seed=job.seed,
            seconds=job.seconds,
            status=job.status,
        )
    if planted.search:
        best = {"loss": 1.4, "overrides": ["accumulation.factor=4"]}
        sweep.client.set_tag(sweep.run_id, "sweep.best", json.dumps(best))
    sweep.end()
    writer.write(sweep.store.uri, sweep.run_id, tmp_path / "report")
    texts: dict[str, str] = {}
    for finding in json.loads((tmp_path / "report" / "findings.json").read_text()):
        texts.setdefault(finding["topic"], finding["text"])
    result = replace(result_of(planted), uri=sweep.store.uri, run_id=sweep.run_id)
    assert texts == texts_of(writer.summarize(result))


# --- the rules, once more ---


def target_of(planted: Planted) -> float:
    """Return the lowest loss that all finished jobs reach, or half of them."""
    finished = [job for job in planted.jobs if job.finished]
    lowest = sorted(min(job.losses.values()) for job in finished)
    start = statistics.median(job.first_loss for job in finished)
    that_all_reach = lowest[-1]
    half_of_the_way = (start - lowest[0]) / 2
    if start - that_all_reach >= half_of_the_way:
        return that_all_reach
    that_half_reach = lowest[(len(lowest) - 1) // 2]
    return that_half_reach


def crossing(job: Job, target: float, axis: str) -> float | None:
    """Return where the loss is at the target; None if it is never, or unknown."""
    before = None
    for update, loss in job.losses.items():
        if loss <= target:
            if before is None:
                return None
            earlier, above = before
            share = (above - target) / (above - loss)
            x_before = job.x(axis, earlier)
            x_after = job.x(axis, update)
            return x_before + share * (x_after - x_before)
        before = (update, loss)
    return None


def is_bounded(job: Job, target: float) -> bool:
    """Return whether the first evaluation is at the target already."""
    return job.first_loss <= target


def loss_at(job: Job, axis: str, budget: float) -> float | None:
    """Return the loss at a budget; None before the first evaluation."""
    points = [(job.x(axis, update), loss) for update, loss in job.losses.items()]
    first_x, _ = points[0]
    if budget < first_x - 1e-9:
        return None
    for before, after in itertools.pairwise(points):
        x_before, loss_before = before
        x_after, loss_after = after
        if budget <= x_after:
            share = (budget - x_before) / (x_after - x_before)
            return loss_before + share * (loss_after - loss_before)
    return job.last_loss


def groups_of(planted: Planted) -> dict[str, list[Job]]:
    groups: dict[str, list[Job]] = {}
    for job in planted.jobs:
        groups.setdefault(job.group, []).append(job)
    return groups


def half_width(differences: list[float], tail: float) -> float:
    """Return half the width of Student's interval for the mean of the differences."""
    count = len(differences)
    error = statistics.stdev(differences) / math.sqrt(count)
    return float(stats.t.ppf(1 - tail, count - 1)) * error


def check_spread(words: tuple[str, str], values: list[float]) -> None:
    """Compare `mean ± deviation` of a sentence with the values."""
    mean = statistics.mean(values)
    if len(values) == 1:
        assert not words[1]
        assert float(words[0]) == pytest.approx(mean, rel=1e-3)
        return
    deviation = statistics.stdev(values)
    # Both have two digits of the deviation.
    tolerance = 0.06 * deviation
    if deviation < 1e-9:
        tolerance = 1e-3 * abs(mean)
    assert float(words[0]) == pytest.approx(mean, abs=tolerance)
    assert float(words[1]) == pytest.approx(deviation, abs=0.06 * deviation + 1e-12)


def check_ranking(
    text: str, values: dict[str, list[float]], leads: str, unit: str
) -> None:
    """Check who is the best, the worst and the next, and by how much."""
    order = sorted(values, key=lambda group: statistics.mean(values[group]))
    best = order[0]
    same = [group for group in order[1:] if values[group] == values[best]]
    distinct = [group for group in order if group not in same]
    title = re.escape(best)
    if same:
        quantity = "time" if unit else "val/loss"
        title += rf" \(and {re.escape(', '.join(same))}, with the same {quantity}\)"

    seeds = len(values[best])
    pattern = (
        rf"{title} {leads} {SPREAD}{unit} \({seeds} seeds?\), (.+?)"
        rf"(?: \(and .*?\))? (?:worst, at|last, after) {SPREAD}{unit}\. "
    )
    match = re.search(pattern, text)
    assert match, (pattern, text)
    check_spread((match[1], match[2]), values[best])
    assert match[3] == distinct[-1]
    check_spread((match[4], match[5]), values[distinct[-1]])

    second = distinct[1]
    differences = [
        other - base for base, other in zip(values[best], values[second], strict=True)
    ]
    lead = statistics.mean(differences)
    if seeds == 1:
        pattern = rf"The next is {second}, {NUMBER}{unit} behind, with one seed\."
        match = re.search(pattern, text)
        assert match, (pattern, text)
        assert float(match[1]) == pytest.approx(lead, rel=1e-3)
        assert "chance" not in text
        return
    width = half_width(differences, 0.025)
    differ = "they differ" if lead > width else "the data do not tell them apart"
    pattern = (
        rf"The next is {second}, {SPREAD}{unit} behind "
        rf"\(95%, over {seeds} pairs with equal seeds\), so {differ}\."
    )
    match = re.search(pattern, text)
    assert match, (pattern, text)
    assert float(match[1]) == pytest.approx(lead, abs=0.06 * width + 1e-9)
    assert float(match[2] or 0) == pytest.approx(width, abs=0.06 * width + 1e-9)
    if lead > width:
        vary = []
        for group in distinct[1:]:
            pairs = zip(values[best], values[group], strict=True)
            apart = [other - base for base, other in pairs]
            if statistics.mean(apart) <= half_width(apart, 0.025):
                vary.append(group)
        words = re.findall(
            r"Not told apart from the best over the seeds: (.*?)\.", text
        )
        assert ", ".join(words) == ", ".join(vary)


def test_the_jobs_are_counted(case):
    planted, texts = case
    finished = len([job for job in planted.jobs if job.finished])
    total = len(planted.jobs) + len(planted.planned)
    assert texts["jobs"].startswith(f"{finished} of {total} jobs finished.")
    for job in planted.jobs:
        assert (job.name in texts["jobs"]) == (not job.finished)
    for name in planted.planned:
        assert f"1 without a run: {name}." in texts["jobs"]


def test_the_time_to_the_target(case):
    planted, texts = case
    text = texts["time_to_target"]
    target = target_of(planted)
    (found,) = re.findall(rf"The target is val/loss ≤ {NUMBER}, ", text)
    assert float(found) == pytest.approx(target, rel=1e-3)

    times = {}
    bounds = {}
    for group, group_jobs in groups_of(planted).items():
        judged = [job for job in group_jobs if job.finished]
        if any(is_bounded(job, target) for job in judged):
            first = [job.x("seconds", min(job.losses)) for job in judged]
            bounds[group] = max(first)
            continue
        costs = [crossing(job, target, "seconds") for job in judged]
        if judged and None not in costs:
            times[group] = costs
    for group, bound in bounds.items():
        (found,) = re.findall(rf"not ranked: {group} \(≤ {NUMBER} s\)", text)
        assert float(found) == pytest.approx(bound, rel=1e-3)
    leads = "gets there first, after"
    if bounds:
        leads = "gets there first among the others, after"
    if len(times) == 1:
        ((group, costs),) = times.items()
        (words,) = re.findall(rf"{group} reached it after {SPREAD} s \(", text)
        check_spread(words, costs)
        return
    assert len(times) > 1
    if len({len(costs) for costs in times.values()}) == 1:
        check_ranking(text, times, leads, " s")


def test_the_final_result(case):
    planted, texts = case
    text = texts["final"]
    ends = {}
    horizons = []
    for group, group_jobs in groups_of(planted).items():
        finished = [job for job in group_jobs if job.finished]
        ends[group] = [job.last_loss for job in finished]
        horizons += [job.x("examples", max(job.losses)) for job in finished]
    if len({len(values) for values in ends.values()}) == 1:
        check_ranking(text, ends, "ends best, at", "")

    caveat = re.findall(rf"the groups saw from {NUMBER} to {NUMBER}\.", text)
    if max(horizons) - min(horizons) > max(job.batch for job in planted.jobs):
        ((fewest, most),) = caveat
        assert float(fewest) == min(horizons)
        assert float(most) == max(horizons)
    else:
        assert not caveat


def test_who_is_ahead_at_the_seeds_of_both_groups(case):
    planted, texts = case
    ends: dict[str, dict[int, float]] = {}
    for job in planted.jobs:
        if job.finished:
            ends.setdefault(job.group, {})[job.seed] = job.last_loss
    order = sorted(ends, key=lambda group: statistics.mean(ends[group].values()))
    best = ends[order[0]]
    second = next(ends[group] for group in order[1:] if ends[group] != best)
    common = set(best) & set(second)
    lead = statistics.mean(second[seed] - best[seed] for seed in common)
    text = texts["final"]
    assert (" ahead on the seeds that both groups have" in text) == (lead < 0)
    assert (" behind" in text) == (lead > 0)


def test_the_verdict(case):
    planted, texts = case
    text = texts["verdict"]
    if planted.search:
        assert text.startswith("No verdict on the factors of a search")
        return

    if planted.planned:
        (name,) = planted.planned
        assert text.startswith(
            f"No verdict yet, as 1 job that it compares has not ended: {name}."
        )
        return

    groups = groups_of(planted)
    for group, group_jobs in list(groups.items()):
        if not all(job.finished for job in group_jobs):
            del groups[group]
            (left_out,) = re.findall(
                r"Left out, as not every seed finished: (.*)", text
            )
            assert group in left_out
    base = groups["factor=1 batch=8"]
    states = set()
    for axis, word in (("seconds", "time"), ("examples", "examples")):
        ends = []
        for group_jobs in groups.values():
            ends += [job.x(axis, max(job.losses)) for job in group_jobs]
        budget = min(ends)
        base_losses = [loss_at(job, axis, budget) for job in base]
        differences: dict[int, list[float]] = {}
        for group_jobs in groups.values():
            losses = [loss_at(job, axis, budget) for job in group_jobs]
            if group_jobs == base or None in losses:
                continue
            pairs = zip(base_losses, losses, strict=True)
            differences[group_jobs[0].factor] = [other - one for one, other in pairs]
        states.add(check_contrast(text, word, differences))

    for state, headline in (
        ({"not"}, "Do not accumulate: "),
        ({"pays"}, "Accumulate by "),
        ({"one seed"}, "There are not enough seeds to tell: "),
    ):
        if states == state:
            assert text.startswith(headline)


def check_contrast(text: str, word: str, differences: dict[int, list[float]]) -> str:
    """Check the clause at one budget; return what it decides."""
    means = {factor: statistics.mean(of) for factor, of in differences.items()}
    best = min(means, key=means.__getitem__)
    if not any(differences[best]):
        assert (
            f"at equal {word} val/loss with factor {best}, the best above 1, is the "
            "same with each seed"
        ) in text
        return "open"
    direction = "lower" if means[best] < 0 else "higher"
    pattern = (
        rf"at equal {word} val/loss with factor {best}, the best above 1, "
        rf"is {direction} by {NUMBER} \((.*?)\)"
    )
    match = re.search(pattern, text)
    assert match, (pattern, text)
    assert float(match[1]) == pytest.approx(abs(means[best]), rel=1e-3, abs=1e-12)

    if len(differences[best]) == 1:
        assert match[2].startswith("one seed; 2 more seeds")
        return "one seed"
    # Below the lowest of the upper ends, each with its share of the chance; above the
    # lowest of the lower ends.
    upper_ends = []
    lower_ends = []
    for factor, values in differences.items():
        tail = FIRST_LOOK / 2
        share = half_width(values, tail / len(differences))
        upper_ends.append(means[factor] + share)
        lower_ends.append(means[factor] - half_width(values, tail))
    interval = [min(lower_ends), min(upper_ends)]
    if interval[0] < 0 < interval[1]:
        words = rf"lower by {NUMBER} to higher by {NUMBER}"
        ends = [-interval[0], interval[1]]
    else:
        words = rf"{NUMBER} to {NUMBER}"
        ends = sorted(abs(end) for end in interval)
    found = re.match(rf"95% over all looks: {words}", match[2])
    assert found, match[2]
    assert float(found[1]) == pytest.approx(ends[0], rel=1e-3, abs=1e-6)
    assert float(found[2]) == pytest.approx(ends[1], rel=1e-3, abs=1e-6)
    if interval[0] > 0 or interval[1] < 0:
        return "pays" if direction == "lower" else "not"
    return "open"


def test_the_largest_batch_that_pays(case):
    planted, texts = case
    if planted.search:
        assert "largest_batch" not in texts
        return
    text = texts["largest_batch"]
    target = target_of(planted)
    costs = {}
    bounded = []
    for group_jobs in groups_of(planted).values():
        judged = [job for job in group_jobs if job.finished]
        if any(is_bounded(job, target) for job in judged):
            bounded.append(group_jobs[0].batch)
            continue
        values = [crossing(job, target, "examples") for job in judged]
        if judged and None not in values:
            costs[group_jobs[0].batch] = statistics.mean(values)
    if bounded:
        assert "cannot be determined if a batch was at the target at its first" in text
        return

    if len(costs) < 2:
        assert (
            "cannot be determined if fewer than two batches reached the target" in text
        )
        return
    fewest = min(costs, key=costs.__getitem__)
    paying = []
    for batch, cost in costs.items():
        saves = all(
            cost / batch < costs[other] / other for other in costs if other < batch
        )
        if cost <= 2 * costs[fewest] and (saves or batch == fewest):
            paying.append(batch)
    largest = max(paying)
    pattern = (
        rf"largest effective batch that still pays is {largest}: it reached the target "
        rf"with {NUMBER} times the fewest examples \({SPREAD}, at {fewest}\)"
    )
    match = re.search(pattern, text)
    assert match, (pattern, text)
    assert float(match[1]) == pytest.approx(costs[largest] / costs[fewest], abs=0.006)
    assert float(match[2]) == pytest.approx(costs[fewest], rel=0.02)
