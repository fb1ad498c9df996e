"""Whether two runs are the same: every `train/*` and `val/*` point of both, compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Relative difference that rounding alone is believed to make, by precision. Training amplifies rounding, so this
# is a choice and not a theorem: in float64 120 updates stay below 1e-13, in float32 AdamW stays below 1e-5 while
# SGD with a large momentum parts for good, which is then reported as a difference.
BOUNDS = {"float64": 1e-9, "float32": 1e-3, "mixed_bfloat16": 5e-2, "mixed_float16": 1e-2}
EXAMPLES = 2  # that a metric which counts may see otherwise within the bound

History = Mapping[str, Mapping[int, float]]  # value by step, by metric


@dataclass(frozen=True)
class Difference:
    """One point that differs.

    Attributes:
        metric, step: of the point.
        old, new: the values; None where a run lacks the point.
    """

    metric: str
    step: int
    old: float | None
    new: float | None

    @property
    def relative(self) -> float:
        """|new − old| / max(|old|, |new|); infinite where a run lacks the point or a value is not finite."""
        if self.old is None or self.new is None or not (math.isfinite(self.old) and math.isfinite(self.new)):
            return math.inf
        return abs(self.new - self.old) / max(abs(self.old), abs(self.new))

    def __str__(self) -> str:
        shown = ["absent" if value is None else repr(value) for value in (self.old, self.new)]
        by = "" if math.isinf(self.relative) else f", {self.relative:.2g} relative"
        return f"{self.metric} at update {self.step}: {shown[0]} then, {shown[1]} now{by}"


@dataclass(frozen=True)
class Agreement:
    """The outcome of a comparison.

    Attributes:
        points, metrics: how many were compared.
        first: the first point that is not equal to the bit; None where all are.
        beyond: the first point beyond the bound; None where there is none.
        largest: the point that differs most.
        bound: the relative difference that counts as rounding.
    """

    points: int
    metrics: int
    first: Difference | None
    beyond: Difference | None
    largest: Difference | None
    bound: float

    @property
    def verdict(self) -> str:
        """`bit-equal`, `equal within rounding` or `different`."""
        return "bit-equal" if self.first is None else "equal within rounding" if self.beyond is None else "different"

    def __str__(self) -> str:
        what = f"{self.points} points of {self.metrics} metrics"
        if self.first is None:
            return f"bit-equal: {what}"
        if self.beyond is None:
            return f"equal within rounding ({self.bound:g} relative): {what}; the first that differs is {self.first}"
        return f"different from update {self.beyond.step} on: {self.beyond}; the most: {self.largest}"


def compare(old: History, new: History, precision: str, examples: float) -> Agreement:
    """Compares all points of two runs.

    Args:
        old, new: of the metrics to compare.
        precision: of the runs; decides the bound.
        examples: in an update: a metric that counts moves by one of them at least.

    Returns:
        With the differences in the order of updates, and within one update of metrics.
    """
    bound = BOUNDS[precision]
    differences = sorted(_differences(old, new), key=lambda d: (d.step, d.metric))
    beyond = [d for d in differences if not _within(d, bound, examples)]
    return Agreement(
        points=sum(len({*old.get(metric, {}), *new.get(metric, {})}) for metric in {*old, *new}),
        metrics=len({*old, *new}),
        first=differences[0] if differences else None,
        beyond=beyond[0] if beyond else None,
        largest=max(beyond, key=lambda d: d.relative) if beyond else None,
        bound=bound,
    )


def histories(client: Any, run_id: str) -> dict[str, dict[int, float]]:
    """The `train/*` and `val/*` metrics of a run."""
    keys = [key for key in client.get_run(run_id).data.metrics if key.startswith(("train/", "val/"))]
    return {key: {p.step: p.value for p in client.get_metric_history(run_id, key)} for key in sorted(keys)}


def plot(old: History, new: History, path: Path, title: str) -> None:
    """Both runs' losses by update, and what is between them, as an image."""
    from matplotlib.figure import Figure  # no pyplot: it holds global state and looks for a display

    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for metric, style in (("train/loss", "-"), ("val/loss", "o-")):
        for history, name, width in ((old, "then", 3.0), (new, "now", 1.2)):
            points = history.get(metric, {})
            above.plot(list(points), list(points.values()), style, lw=width, ms=3, label=f"{metric}, {name}")
        both = [step for step in old.get(metric, {}) if step in new.get(metric, {})]
        apart = [Difference(metric, step, old[metric][step], new[metric][step]) for step in both]
        below.plot(both, [d.relative if d.old != d.new else 0.0 for d in apart], style, ms=3, label=metric)
    above.set(title=title, ylabel="loss")
    below.set(xlabel="updates", ylabel="relative difference", yscale="symlog")
    below.set_yscale("symlog", linthresh=1e-16)
    above.legend()
    below.legend()
    figure.savefig(path, dpi=120)


def _differences(old: History, new: History) -> Iterator[Difference]:
    for metric in {*old, *new}:
        then, now = old.get(metric, {}), new.get(metric, {})
        for step in {*then, *now}:
            one, two = then.get(step), now.get(step)
            if one != two and not (one is not None and two is not None and math.isnan(one) and math.isnan(two)):
                yield Difference(metric, step, one, two)


def _within(difference: Difference, bound: float, examples: float) -> bool:
    if difference.relative <= bound:
        return True
    counts = difference.metric.split("/")[-1] not in ("loss", "gradient_norm", "learning_rate", "gradient_noise_scale")
    if difference.old is None or difference.new is None or not counts:
        return False
    return abs(difference.new - difference.old) <= EXAMPLES / examples
