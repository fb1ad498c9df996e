"""Whether jobs that should train the same trajectory do so, and why not."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.common import rounding
from pipeline.common.errors import count
from pipeline.common.rounding import IN_TF32, TF32
from pipeline.config import key_kinds
from pipeline.config.schema import Kind
from pipeline.report import statistics
from pipeline.report.findings import Result, SweepFinding
from pipeline.report.job_results import LOSS, Curve, JobResult, grouped, jobs_with
from pipeline.report.statistics import Array
from pipeline.report.sweep_result import SweepResult
from pipeline.report.wording import joined, number

LEVELS = ("1e-6", "1e-3", "1e-2")  # relative differences of a loss
PRECISION = "hardware.precision"
# Jobs of the same trajectory may differ in these params, and in the params below them.
# In place of the effective batch size, the param that is derived from it is compared.
# Evaluations do not change updates.
_OF_NO_UPDATE = (
    "accumulation.effective_batch_size",
    "training.evaluate_every",
    "training.evaluate_at_start",
    "dataset.validations",
)
# Names of params that stand for what the user has set.
_NAMES = {"derived.effective_batch_size": "effective batch"}
# The largest factor by which training may amplify a difference in one update. In a
# measurement, training doubled rounding errors in each of 20 updates (see
# `rounding.Rounding`); a single update may amplify them more.
_GROWTH = 100.0
# The largest relative difference of two finite losses.
_LARGEST = 2.0

# The settings in the names of jobs that do not change the trajectory.
_CUT_IN_NAMES = {"factor", "micro", "tokens"}
# Tags of a run that list the layers whose output depends on the micro-batch.
_LAYER_TAGS = ("model.batch_dependent_layers", "model.cut_dependent_noise")


@dataclass(frozen=True)
class TrajectoryPair:
    """Two jobs that should train the same trajectory.

    Attributes:
        base: the job with the smallest factor.
        other: the other job.
        precision: a key of `rounding.BY_PRECISION`: the coarsest precision of the two
            jobs, whose rounding may explain their difference.
        curve: the relative difference between their training losses, at each update
            that both logged.
        shares: the same differences, relative to the largest loss so far. So they stay
            small if the losses are 0 apart from rounding.
    """

    base: JobResult
    other: JobResult
    precision: str
    curve: Curve
    shares: Array

    @property
    def largest(self) -> float:
        return float(self.curve.values.max())

    @property
    def first(self) -> float:
        """The difference at the first update that both jobs logged."""
        return float(self.curve.values[0])

    @property
    def begin(self) -> int:
        """The index of the first difference, or 0 if there is none."""
        return int((self.curve.values > 0).argmax())

    @property
    def begin_is_known(self) -> bool:
        """Whether all updates up to the first difference were logged."""
        return int(self.curve.steps[self.begin]) == self.begin + 1

    @cached_property
    def cause(self) -> "Cause":
        """The cause of the difference, and the update that shows it.

        A difference counts as rounding if its first value is at most the bound of the
        precision, and it grows by a factor of at most `_GROWTH` per update.
        """
        steps = self.curve.steps
        values = np.minimum(self.shares, _LARGEST)
        bound = rounding.BY_PRECISION[self.precision].first
        if values[self.begin] > bound:
            if self.begin_is_known:
                return Cause("other", self.begin)
            return Cause("unknown", self.begin)

        largest_before = np.maximum(np.maximum.accumulate(values[:-1]), bound)
        # Limit the exponent: the growth over ten updates exceeds any difference.
        updates = np.minimum(np.diff(steps), 10)
        is_jump = values[1:] > largest_before * _GROWTH**updates
        if is_jump.any():
            return Cause("other", int(is_jump.argmax()) + 1)
        return Cause("rounding", self.begin)


@dataclass(frozen=True)
class Cause:
    """The cause of a difference between two trajectories that should be the same.

    Attributes:
        kind: `rounding`, `other` (the jobs computed different things) or `unknown`.
        index: the index, in the pair's curve, of the difference that shows the cause.
    """

    kind: str
    index: int


def trajectory_pairs(sweep: SweepResult) -> list[TrajectoryPair]:
    """Pair the jobs that should train the same trajectory.

    Such jobs have the same effective batch, seed and training config. Each is paired
    with the job that has the smallest factor among them. A pair is left out if no
    update was logged by both jobs.
    """
    pairs = []
    for jobs in grouped(sweep.jobs, _trajectory).values():
        base, *others = sorted(jobs, key=lambda job: job.factor or 0)
        for other in others:
            pair = _pair(base, other)
            if pair.curve.steps.size:
                pairs.append(pair)
    return pairs


def _pair(base: JobResult, other: JobResult) -> TrajectoryPair:
    """Compare two jobs at the updates that both have logged."""
    first = base.curves[LOSS]
    second = other.curves[LOSS]
    steps, in_first, in_second = np.intersect1d(
        first.steps, second.steps, return_indices=True
    )
    first_losses = first.values[in_first]
    second_losses = second.values[in_second]
    differences = statistics.relative_difference(first_losses, second_losses)

    # The relative difference times the larger loss is the difference.
    sizes = np.maximum(np.abs(first_losses), np.abs(second_losses))
    sizes = np.where(np.isfinite(sizes), sizes, 0.0)
    largest = np.maximum.accumulate(sizes)
    scales = np.divide(sizes, largest, out=np.ones_like(sizes), where=largest > 0)
    shares = differences.copy()
    finite = np.isfinite(differences)
    shares[finite] *= scales[finite]
    return TrajectoryPair(
        base=base,
        other=other,
        precision=_precision(base, other),
        curve=Curve(steps, differences),
        shares=shares,
    )


def _trajectory(job: JobResult) -> tuple | None:
    """Return the settings that decide a job's trajectory, as a key to group jobs.

    Return None for a job without a training loss or an effective batch size.
    """
    if job.effective_batch_size is None or LOSS not in job.curves:
        return None
    settings = {}
    for key, value in job.params.items():
        if _decides_the_updates(key):
            settings[key] = value
    settings["derived.effective_batch_size"] = str(job.effective_batch_size)
    settings[PRECISION] = job.params.get(PRECISION, "float32")
    return tuple(sorted(settings.items()))


def _decides_the_updates(key: str) -> bool:
    """Return whether different values of this param may give other trajectories."""
    if key in key_kinds.DERIVED_CUT:
        return False
    for name in _OF_NO_UPDATE:
        if f"{key}.".startswith(f"{name}."):
            return False
    return key_kinds.kind_of(key) == Kind.TRAINING


def _precision(base: JobResult, other: JobResult) -> str:
    """Return the coarsest precision of two jobs that have equal `PRECISION` params."""
    precisions = {base.params.get(PRECISION, "float32")}
    if IN_TF32 in base.tags or IN_TF32 in other.tags:
        precisions.add(TF32)
    return rounding.coarsest(precisions)


def _is_rounding(pair: TrajectoryPair) -> bool:
    """Return whether rounding explains the difference at every update."""
    bounds = rounding.BY_PRECISION[pair.precision]
    for update, difference in zip(pair.curve.steps, pair.curve.values, strict=True):
        # Rounding never explains a difference that is NaN: `not … <=` catches it.
        if not difference <= bounds.bound(int(update)):
            return False
    return True


def findings(sweep: SweepResult) -> list[SweepFinding]:
    """Report whether jobs that should train the same trajectory do so.

    There are no findings on a sweep without such jobs, such as one over rates.
    """
    if trajectory_pairs(sweep) or _varies_the_cut(sweep.jobs):
        return same_trajectory(sweep)
    return []


def _varies_the_cut(jobs: list[JobResult]) -> bool:
    """Return whether the names of some jobs differ only in how the batch is cut."""
    alike = grouped(jobs, lambda job: job.without(_CUT_IN_NAMES))
    return any(len({job.group for job in of_batch}) > 1 for of_batch in alike.values())


def same_trajectory(sweep: SweepResult) -> list[SweepFinding]:
    """Report whether jobs that should train the same trajectory do so.

    There is one finding per precision, or a single one if there are no pairs of jobs.
    """
    pairs = trajectory_pairs(sweep)
    if not pairs:
        text = f"Trajectories cannot be compared: {_why_no_pair(sweep.jobs)}."
        return [SweepFinding("trajectories", text)]

    pairs_by_precision: dict[str, list[TrajectoryPair]] = {}
    for pair in pairs:
        pairs_by_precision.setdefault(pair.precision, []).append(pair)
    findings = []
    for precision, pairs_of_precision in pairs_by_precision.items():
        differences = PairDifferences(precision, pairs_of_precision)
        findings.append(_trajectory_finding(differences))
    return findings


def _why_no_pair(jobs: list[JobResult]) -> str:
    """Return why no two jobs of a sweep can be compared, and in what they differ."""
    logged = jobs_with(jobs, LOSS)
    if len(logged) < 2:
        return (
            "it takes two jobs with a training loss, and "
            f"{len(logged)} of {count(len(jobs), 'job')} logged one"
        )
    trajectories = [_trajectory(job) for job in logged]
    if len(set(trajectories)) < len(trajectories):
        return "no update was logged by two jobs that share config and seed"

    settings_of_jobs = [dict(trajectory or ()) for trajectory in trajectories]
    keys: dict[str, None] = {}  # an ordered set
    for settings in settings_of_jobs:
        keys.update(dict.fromkeys(settings))
    differing = []
    for key in keys:
        values = dict.fromkeys(
            settings.get(key, "none") for settings in settings_of_jobs
        )
        if len(values) > 1:
            differing.append(f"{_NAMES.get(key, key)} ({joined([*values])})")
    return (
        f"no two of {count(len(logged), 'job')} share effective batch, seed and the "
        f"rest of the config; they differ in {joined(differing)}"
    )


@dataclass(frozen=True)
class PairDifferences(Result):
    """The differences between the training losses of job pairs in one precision."""

    precision: str
    pairs: list[TrajectoryPair]

    @cached_property
    def worst(self) -> TrajectoryPair:
        return max(self.pairs, key=lambda pair: pair.largest)

    @property
    def first(self) -> float:
        """The maximum of `TrajectoryPair.first` over all pairs."""
        return max(pair.first for pair in self.pairs)

    @property
    def largest_at(self) -> int:
        """The update at which the worst pair differs most."""
        curve = self.worst.curve
        return int(curve.steps[curve.values.argmax()])

    @property
    def first_update_above(self) -> dict[str, int | None]:
        """The first update at which a pair exceeds each of `LEVELS`.

        The update is None if no pair does.
        """
        updates: dict[str, int | None] = {}
        for level in LEVELS:
            first_steps = []
            for pair in self.pairs:
                steps = pair.curve.steps[pair.curve.values > float(level)]
                if steps.size:
                    first_steps.append(int(steps[0]))
            updates[level] = min(first_steps, default=None)
        return updates

    @cached_property
    def parted(self) -> list[TrajectoryPair]:
        """The pairs whose differences are not all explained by rounding."""
        return [pair for pair in self.pairs if not _is_rounding(pair)]

    def parted_by(self, kind: str) -> list[TrajectoryPair]:
        """Return the parted pairs whose `Cause.kind` is `kind`."""
        return [pair for pair in self.parted if pair.cause.kind == kind]

    @property
    def agree(self) -> bool:
        """Whether rounding explains the differences of all pairs at every update."""
        return not self.parted

    @property
    def rounding(self) -> bool | None:
        """Whether rounding set all parted pairs apart, or None if that is unknown."""
        if self.parted_by("other"):
            return False
        if self.parted_by("unknown"):
            return None
        return True

    @property
    def amplification(self) -> "Amplification | None":
        """How training amplified the rounding of the worst pair, if that is known."""
        curve = self.worst.curve
        if self.agree or not self.rounding or not self.worst.begin_is_known:
            return None
        if not math.isfinite(self.worst.largest):
            return None
        begin = self.worst.begin
        return Amplification(
            update=int(curve.steps[begin]),
            difference=float(curve.values[begin]),
            times=self.worst.largest / float(curve.values[begin]),
        )

    def figures(self) -> dict[str, Any]:
        figures = {
            "precision": self.precision,
            "pairs": len(self.pairs),
            "updates": int(self.worst.curve.steps.size),
            "agree": self.agree,
            "first": self.first,
            "largest": self.worst.largest,
            "at": self.largest_at,
            "above": self.first_update_above,
            "by_rounding": len(self.parted_by("rounding")),
        }
        if self.amplification is not None:
            figures["amplified"] = self.amplification.times
        if not self.agree:
            figures["rounding"] = self.rounding
        return figures


@dataclass(frozen=True)
class Amplification:
    """How training amplified a difference that rounding had caused.

    Attributes:
        update: the first update with a difference.
        difference: the relative difference at this update.
        times: the largest difference, relative to this one.
    """

    update: int
    difference: float
    times: float


def _trajectory_finding(differences: PairDifferences) -> SweepFinding:
    if differences.agree:
        text = _agreement(differences)
    else:
        text = _how_far_they_part(differences) + _cause_sentence(differences)
    return SweepFinding("trajectories", text, differences, "difference")


def _cause_sentence(differences: PairDifferences) -> str:
    """Return a sentence on what set the pairs apart; empty if nothing can be said."""
    by_other = differences.parted_by("other")
    if by_other:
        return _why_more_than_rounding(by_other)
    by_unknown = differences.parted_by("unknown")
    if by_unknown:
        return _why_unknown(by_unknown[0])
    amplification = differences.amplification
    if amplification is None:
        return ""
    worst = differences.worst
    return (
        f" Rounding set {worst.base.name} and {worst.other.name} apart by "
        f"{number(amplification.difference)} at update {amplification.update}, and "
        f"training amplified that {number(amplification.times)} times."
    )


def _agreement(differences: PairDifferences) -> str:
    updates = count(differences.worst.curve.steps.size, "update")
    return (
        f"In {differences.precision}, {_compared_jobs(differences.pairs)} train the "
        "same trajectory up to floating-point error: their training losses differ by "
        f"at most {number(differences.worst.largest)} of their value, over {updates}."
    )


def _how_far_they_part(differences: PairDifferences) -> str:
    """Describe the first difference, the rise above `LEVELS`, and the maximum.

    The first difference is the maximum over all pairs, each at the first update that
    both of its jobs logged. The sentence names the first update of the worst pair,
    even if the maximum is that of another pair.
    """
    worst = differences.worst
    begin = "the first update"
    first_step = worst.curve.steps[0]
    if first_step != 1:
        begin = f"update {first_step}, the first that was logged"

    levels = []
    for level, update in differences.first_update_above.items():
        if update is not None:
            levels.append(f"above {level} from update {update}")
    rise = "; ".join(levels) or "never above 1e-6"

    who = f"{worst.base.name} and {worst.other.name}"
    update = differences.largest_at
    if math.isfinite(worst.largest):
        end = f"at most {number(worst.largest)}, at update {update} ({who})."
    else:
        end = f"from update {update} only one of {who} is finite."
    return (
        f"In {differences.precision}, the trajectories of "
        f"{_compared_jobs(differences.pairs)} diverge: their training losses differ by "
        f"at most {number(differences.first)} of their value at {begin}; {rise}; {end}"
    )


def _compared_jobs(pairs: list[TrajectoryPair]) -> str:
    """Return the subject of a sentence: the number of jobs, and keys that differ.

    Only keys that affect training or numerics are named.
    """
    bases = {pair.base.name for pair in pairs}
    jobs = count(len(pairs) + len(bases), "job")
    subject = f"{jobs} of equal effective batch, seed and config"

    differing: set[str] = set()
    for pair in pairs:
        for key in pair.base.params | pair.other.params:
            if pair.base.params.get(key) != pair.other.params.get(key):
                differing.add(key)
    differing -= {*key_kinds.DERIVED_CUT, "accumulation.effective_batch_size"}
    shown = []
    for key in sorted(differing):
        if key_kinds.kind_of(key) in (Kind.TRAINING, Kind.NUMERICS):
            shown.append(key)
    if shown:
        subject += f" (but for {joined(shown)})"
    return subject


def _why_more_than_rounding(pairs: list[TrajectoryPair]) -> str:
    """Return sentences on how, and when, pairs began to compute different things."""
    at_first_update = [pair for pair in pairs if pair.cause.index == 0]
    later = [pair for pair in pairs if pair.cause.index > 0]
    text = ""
    if at_first_update:
        text += (
            " That is more than rounding, which cannot have been amplified yet at the "
            f"first update: {_what_differs(at_first_update)}."
        )
    if later:
        text += _jump(later[0])
    return text


def _what_differs(pairs: list[TrajectoryPair]) -> str:
    """Return a clause on the layers that may set jobs apart at their first update."""
    layers: set[str] = set()
    for pair in pairs:
        for job in (pair.base, pair.other):
            for tag in _LAYER_TAGS:
                layers.add(job.tags.get(tag, "none"))
    layers.discard("none")
    if layers:
        named = ", ".join(sorted(layers))
        return f"what these layers do depends on the micro-batch: {named}"
    return (
        "the jobs compute different things, for example dropout, which each "
        "micro-batch draws anew"
    )


def _jump(pair: TrajectoryPair) -> str:
    """Return a sentence on a difference that jumped after the first update."""
    curve = pair.curve
    index = pair.cause.index
    before = float(curve.values[:index].max())
    after = float(curve.values[index])
    until = "equal"
    if before > 0:
        until = f"apart by at most {number(before)}"
    at = f"differ by {number(after)}"
    if not math.isfinite(after):
        at = "only one of them is finite"
    return (
        f" That is more than rounding: {pair.base.name} and {pair.other.name} are "
        f"{until} up to update {curve.steps[index - 1]}, and {at} at update "
        f"{curve.steps[index]}, so the jobs computed different things there."
    )


def _why_unknown(pair: TrajectoryPair) -> str:
    """Return a sentence on a pair that differed before its first common row."""
    return (
        f" Why {pair.base.name} and {pair.other.name} differ is not known, because not "
        "every earlier update was logged: tracking.log_every=1 shows whether it is "
        "rounding."
    )
