"""Whether two runs are the same: every `train/*` and `val/*` point of both, compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import metric_names

# Relative difference that counts as rounding, by precision: at the first update, where both runs have the same
# weights, and at most. In between it doubles with every update, since training amplifies rounding: SGD(0.1, momentum
# 0.9) in float32 carried 1e-7 to 0.2 in 20 updates. These are choices and no theorem: in float64 120 updates stay
# below 1e-13, in float32 AdamW stays below 1e-5 while a large momentum parts for good, which is then a difference.
FIRST = {"float64": 1e-12, "float32": 1e-5, "mixed_bfloat16": 1e-1, "mixed_float16": 1e-2}
MOST = {"float64": 1e-9, "float32": 1e-3, "mixed_bfloat16": 1e-1, "mixed_float16": 1e-2}
EXAMPLES = 2  # that a metric which counts examples may see otherwise, where there are more than these
CUT = ("derived.factor", "derived.micro_batch_size", "derived.replicas")

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
        beyond: the first point beyond rounding; None where there is none.
        largest: the point that differs most.
        left_out: metrics that were not compared.
        until: the last update that was compared, where the old run came no further.
    """

    points: int
    metrics: int
    first: Difference | None
    beyond: Difference | None
    largest: Difference | None
    left_out: tuple[str, ...] = ()
    until: int | None = None

    @property
    def verdict(self) -> str:
        """`bit-equal`, `equal within rounding`, `different`, or `nothing to compare` where there was no point."""
        if not self.points:
            return "nothing to compare"
        return "bit-equal" if self.first is None else "equal within rounding" if self.beyond is None else "different"

    def __str__(self) -> str:
        what = f"{self.points} points of {self.metrics} metrics"
        if self.left_out:
            what += f" (without {', '.join(self.left_out)})"
        if self.until is not None:
            what += f" up to update {self.until}, where the recorded run ended"
        if self.first is None:
            return f"{self.verdict}: {what}"
        if self.beyond is None:
            return f"equal within rounding: {what}; the first that differs is {self.first}; the most: {self.largest}"
        before = f"; within rounding from {self.first}" if self.first.step < self.beyond.step else ""
        return f"different from update {self.beyond.step} on: {self.beyond}; the most: {self.largest}{before}; {what}"


def compare(
    old: History,
    new: History,
    precision: str,
    *,
    validation: int | None = None,
    same_cut: bool = True,
    until: int | None = None,
) -> Agreement:
    """Compares all points of two runs; a metric that only the new one has is left out.

    Args:
        old, new: of the metrics to compare.
        precision: of the runs; decides what is rounding.
        validation: examples in the validation split, for the metrics that count them.
        same_cut: both cut a batch alike, into as many micro-batches on as many replicas.
        until: the last update that the old run came to, where it was interrupted.

    Returns:
        The differences in the order of updates; within one update the training loss comes first.
    """
    left_out = tuple(
        m for m in sorted({*old, *new}) if m not in old or (metric_names.of(m).of_the_cut and not same_cut)
    )
    old, new = (
        {m: {s: v for s, v in h.items() if until is None or s <= until} for m, h in x.items() if m not in left_out}
        for x in (old, new)
    )
    sizes = old.get("train/effective_batch_size", {})

    def examples(difference: Difference) -> float | None:
        return sizes.get(difference.step) if difference.metric.startswith("train/") else validation

    differences = sorted(_differences(old, new), key=lambda d: (d.step, d.metric != "train/loss", d.metric))
    beyond = [d for d in differences if not _within(d, precision, examples(d))]
    return Agreement(
        points=sum(len({*old[metric], *new.get(metric, {})}) for metric in old),
        metrics=len(old),
        first=differences[0] if differences else None,
        beyond=beyond[0] if beyond else None,
        largest=max(beyond or differences, key=lambda d: d.relative, default=None),
        left_out=left_out,
        until=until,
    )


def of_runs(client: Any, old: Any, new: Any, validation: int | None, page: Path) -> Agreement:
    """Compare two runs of a store and draw their losses.

    Args:
        client: of the store.
        old, new: runs of MLflow.
        validation: examples in their validation split.
        page: the HTML file to write.
    """
    before, after = (_histories(client, run) for run in (old, new))
    then, now = old.data.params, new.data.params
    precisions = {params.get("hardware.precision") for params in (then, now)} & set(MOST)
    found = compare(
        before,
        after,
        max(precisions, key=MOST.__getitem__, default="float32"),
        validation=validation,
        same_cut=all(then.get(key) == now.get(key) for key in CUT),
        until=None if old.info.status == "FINISHED" else max((max(h, default=0) for h in before.values()), default=0),
    )
    page.write_text(drawn(before, after, f"{old.info.run_id} and its rerun {new.info.run_id}", str(found)))
    return found


def _histories(client: Any, run: Any) -> dict[str, dict[int, float]]:
    """Return the `train/*` and `val/*` metrics of a run."""
    keys = [key for key in run.data.metrics if key.startswith(("train/", "val/"))]
    return {
        key: {point.step: point.value for point in client.get_metric_history(run.info.run_id, key)}
        for key in sorted(keys)
    }


def drawn(old: History, new: History, title: str, about: str) -> str:
    """Return an HTML page that needs no other file: both runs' losses by update, and how far they are apart."""
    from pipeline.report.document import document
    from pipeline.report.plotly_figure import Plot, axis, trace

    losses: list[dict[str, Any]] = []
    apart: list[dict[str, Any]] = []
    for metric, mode in (("train/loss", "lines"), ("val/loss", "lines+markers")):
        then, now = (
            {step: value for step, value in history.get(metric, {}).items() if math.isfinite(value)}
            for history in (old, new)
        )
        for points, name in ((then, f"{metric}, then"), (now, f"{metric}, now")):
            losses.append(trace(name, points, points.values(), len(losses), mode))
        differ = {s: Difference(metric, s, then[s], now[s]).relative for s in then if s in now and then[s] != now[s]}
        apart.append(trace(metric, differ, differ.values(), len(losses) - 2, "lines+markers"))
    caption = "Updates at which both runs are equal to the bit are left out."
    by_update, parted = {"xaxis": axis("updates"), "yaxis": axis("loss")}, axis("relative difference", log=True)
    plots = [
        Plot("loss", "Losses", "Loss by update", "", losses, by_update),
        Plot("apart", "Differences", "How far the runs part", caption, apart, by_update | {"yaxis": parted}),
    ]
    plots = [plot for plot in plots if any(one["x"] for one in plot.data)]
    return document(title, about, plots, "Computed from the metrics of both runs in MLflow.")


def _differences(old: History, new: History) -> Iterator[Difference]:
    for metric in {*old, *new}:
        then, now = old.get(metric, {}), new.get(metric, {})
        for step in {*then, *now}:
            one, two = then.get(step), now.get(step)
            if one != two and not (one is not None and two is not None and math.isnan(one) and math.isnan(two)):
                yield Difference(metric, step, one, two)


def _within(difference: Difference, precision: str, examples: float | None) -> bool:
    """Whether rounding explains it."""
    treated = metric_names.of(difference.metric)
    if treated.counted or difference.old is None or difference.new is None:
        return False
    # 60 doublings pass every bound, and a power of a million would be no float.
    bound = min(MOST[precision], FIRST[precision] * 2.0 ** min(difference.step - 1, 60))
    if difference.relative <= bound * treated.rounding:
        return True
    # A share of the examples, such as the accuracy, cannot move by less than one of them.
    if examples is None or examples <= EXAMPLES or not treated.share:
        return False
    then, now = (_count(value, examples) for value in (difference.old, difference.new))
    return then is not None and now is not None and abs(then - now) <= EXAMPLES


def _count(share: float, examples: float) -> int | None:
    """The k of which `share` is k / `examples`, where it is one.

    In float32 a count is exact up to 2^24 and the one division rounds by at most 2^-24 of its result, so twice that
    is allowed; of nothing else than the count 0 is the share 0.
    """
    if not 0 <= share <= 1:
        return None
    count = round(share * examples)
    return count if abs(share * examples - count) <= 2**-23 * count else None
