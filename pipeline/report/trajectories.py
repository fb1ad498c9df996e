"""Compares jobs that differ only in how a batch is cut: they should train the same trajectory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from pipeline.report import statistics
from pipeline.report.comparison import Comparison, Curve, JobResult

METRIC = "train/loss"
# The largest relative difference of losses that rounding explains. For comparison, the machine epsilon of float64 is
# 2.2e-16, of float32 1.2e-7, of float16 9.8e-4, of bfloat16 7.8e-3.
AGREEMENT = {"float64": 1e-12, "float32": 1e-6, "mixed_float16": 5e-3, "mixed_bfloat16": 5e-2}
# The same bound at the first update: both jobs have the same weights, so training has not amplified rounding yet.
FIRST = {"float64": 1e-12, "float32": 1e-5, "mixed_float16": 1e-2, "mixed_bfloat16": 1e-1}
# Params that may differ within a trajectory: how a batch is cut, where it runs, what is logged when.
_FREE = ("accumulation.", "derived.factor", "derived.micro_batch_size", "derived.replicas", "tracking.", "hardware.")
_ALSO_FREE = {"training.evaluate_every", "training.checkpoint_every"}


@dataclass(frozen=True)
class Parting:
    """Two jobs that should train one trajectory, and the relative difference of their training losses."""

    base: str  # the name of the job with the smallest factor
    other: str
    precision: str
    curve: Curve  # the difference at each update that both logged
    dependent: set[str]  # names of layers whose output depends on the micro-batch

    @property
    def first(self) -> float:
        return float(self.curve.values[0])

    @property
    def largest(self) -> float:
        return float(self.curve.values.max())

    @property
    def agrees(self) -> bool:
        return self.largest <= AGREEMENT.get(self.precision, AGREEMENT["float32"])

    def above(self, bound: float) -> int | None:
        """Return the first update at which the difference exceeds `bound`; None if it never does."""
        return next(map(int, self.curve.steps[self.curve.values > bound]), None)

    @property
    def from_the_start(self) -> bool:
        """Return whether they differ at the first update by more than rounding."""
        return self.curve.steps[0] == 1 and self.first > FIRST.get(self.precision, FIRST["float32"])


def partings(sweep: Comparison) -> list[Parting]:
    """Pair each job with the one of smallest factor among those of equal effective batch, seed and config."""
    same = defaultdict(list)
    for job in sweep.jobs:
        if job.batch is not None and METRIC in job.curves:
            same[_trajectory(job)].append(job)
    found = []
    for jobs in same.values():
        base, *others = sorted(jobs, key=lambda job: job.factor or 0)
        found += [parting for other in others if (parting := _compare(base, other)) is not None]
    return found


def _trajectory(job: JobResult) -> tuple:
    kept = {key: value for key, value in job.params.items() if not key.startswith(_FREE) and key not in _ALSO_FREE}
    kept |= {"derived.effective_batch_size": str(job.batch), "hardware.precision": _precision(job)}
    return tuple(sorted(kept.items()))


def _precision(job: JobResult) -> str:
    return job.params.get("hardware.precision", "float32")


def _compare(base: JobResult, other: JobResult) -> Parting | None:
    left, right = base.curves[METRIC], other.curves[METRIC]
    steps, of_left, of_right = np.intersect1d(left.steps, right.steps, return_indices=True)
    if not steps.size:
        return None
    differences = statistics.relative_difference(left.values[of_left], right.values[of_right])
    tags = ("model.batch_dependent_layers", "model.cut_dependent_noise")
    dependent = {job.tags.get(tag, "none") for job in (base, other) for tag in tags} - {"none"}
    return Parting(base.name, other.name, _precision(base), Curve(steps, differences), dependent)
