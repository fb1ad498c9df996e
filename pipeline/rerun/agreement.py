"""Compares every `train/*` and `val/*` point of two runs, and decides whether they agree."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipeline.common import rounding
from pipeline.common.rounding import TF32
from pipeline.config import metric_names
from pipeline.config.key_kinds import DERIVED_CUT
from pipeline.config.plan import HALVED
from pipeline.config.schema import SCHEMA

EXAMPLES = 2  # by which a count of examples may differ, if there are more than these

History = Mapping[str, Mapping[int, float]]  # value by step, by metric


@dataclass(frozen=True)
class Point:
    """One point of two runs; a value is None if that run lacks it."""

    metric: str
    step: int
    old: float | None
    new: float | None

    @property
    def relative(self) -> float:
        """Return |new − old| / max(|old|, |new|); infinite if only one is a finite number."""
        if self.old is None or self.new is None:
            return math.inf
        if self.old == self.new or (math.isnan(self.old) and math.isnan(self.new)):
            return 0.0
        if not (math.isfinite(self.old) and math.isfinite(self.new)):
            return math.inf
        return abs(self.new - self.old) / max(abs(self.old), abs(self.new))

    def __str__(self) -> str:
        shown = [
            "absent" if value is None else repr(value) for value in (self.old, self.new)
        ]
        by = "" if math.isinf(self.relative) else f", {self.relative:.2g} relative"
        return (
            f"{self.metric} at update {self.step}: {shown[0]} then, {shown[1]} now{by}"
        )


class Agreement(NamedTuple):
    """The outcome of a comparison."""

    verdict: str  # `bit-equal`, `equal within rounding`, `different`, or `nothing to compare` without any point
    text: str  # the verdict, what was compared, and where the runs differ


def compare(
    old: History,
    new: History,
    precision: str,
    *,
    validation: int = 0,
    same_cut: bool = True,
    until: float = math.inf,
    changed: Collection[str] = (),
) -> Agreement:
    """Compare all points of the recorded run and its rerun, except for metrics that only the new one has.

    `validation` counts the examples of that split, where it is known; with `same_cut` both runs cut a batch into as
    many micro-batches on as many replicas; `until` is the last update of the old run, if it was interrupted; `changed`
    are metrics that are computed otherwise since the old run, which are left out.
    """
    kept = [
        metric
        for metric in old
        if metric not in changed
        and (same_cut or not metric_names.of(metric).of_the_cut)
    ]
    pairs = [(metric, old[metric], new.get(metric, {})) for metric in kept]
    points = [
        Point(key, n, then.get(n), now.get(n))
        for key, then, now in pairs
        for n in {*then, *now}
        if n <= until
    ]
    # Within one update the training loss comes first.
    points.sort(
        key=lambda point: (point.step, point.metric != "train/loss", point.metric)
    )
    sizes = old.get("train/effective_batch_size", {})
    differing = [point for point in points if point.relative > 0]
    counts = [
        sizes.get(point.step) if point.metric.startswith("train/") else validation
        for point in differing
    ]
    beyond = [
        p
        for p, examples in zip(differing, counts, strict=True)
        if not _is_rounding(p, precision, examples)
    ]
    what = f"{len(points)} points of {len(kept)} metrics"
    if left_out := sorted({*old, *new} - {*kept}):
        what += f" (without {', '.join(left_out)})"
    if until < math.inf:
        what += f" up to update {until}, where the recorded run ended"
    if precision == TF32:
        what += ", with the bounds of TF32"
    if not differing:
        verdict = "bit-equal" if points else "nothing to compare"
        return Agreement(verdict, f"{verdict}: {what}")
    first, most = (
        differing[0],
        max(beyond or differing, key=lambda point: point.relative),
    )
    if not beyond:
        text = f"equal within rounding: {what}; the first that differs is {first}; the most: {most}"
        return Agreement("equal within rounding", text)
    since = f"; within rounding from {first}" if first.step < beyond[0].step else ""
    text = f"different from update {beyond[0].step} on: {beyond[0]}; the most: {most}{since}; {what}"
    return Agreement("different", text)


def of_runs(
    client: Any,
    old: Any,
    new: Any,
    validation: int | None,
    in_tf32: bool = False,
    schema: int = SCHEMA,
) -> tuple[Agreement, str]:
    """Compare two MLflow runs with `validation` examples in that split; return the outcome and an HTML page.

    `schema` is that of the old run's record.
    """

    def history(run: Any) -> History:
        keys = [
            key
            for key in sorted(run.data.metrics)
            if key.startswith(("train/", "val/"))
        ]
        return {
            key: {
                at.step: at.value
                for at in client.get_metric_history(run.info.run_id, key)
            }
            for key in keys
        }

    before, after = history(old), history(new)
    then, now = old.data.params, new.data.params
    precisions = {params.get("hardware.precision") for params in (then, now)} | (
        {TF32} if in_tf32 else set()
    )
    precision = rounding.coarsest(precisions)
    same = old.data.tags.get(HALVED) == new.data.tags.get(HALVED) and all(
        then.get(key) == now.get(key) for key in DERIVED_CUT
    )
    last = max((step for points in before.values() for step in points), default=0)
    until = math.inf if old.info.status == "FINISHED" else last
    found = compare(
        before,
        after,
        precision,
        validation=validation or 0,
        same_cut=same,
        until=until,
        changed=metric_names.changed_since(schema),
    )
    return found, page(
        before, after, f"{old.info.run_id} and its rerun {new.info.run_id}", found.text
    )


def page(old: History, new: History, title: str, about: str) -> str:
    """Return a self-contained HTML page: the losses of both runs by update, and their difference."""
    from pipeline.report.html_page import Plot, axis, render, trace

    losses, apart = list[dict[str, Any]](), list[dict[str, Any]]()
    for metric, mode in (("train/loss", "lines"), ("val/loss", "lines+markers")):
        both = [history.get(metric, {}).items() for history in (old, new)]
        then, now = (
            {step: value for step, value in points if math.isfinite(value)}
            for points in both
        )
        for points, name in ((then, f"{metric}, then"), (now, f"{metric}, now")):
            losses.append(trace(name, points, points.values(), len(losses), mode))
        differ = {
            s: Point(metric, s, then[s], now[s]).relative
            for s in then
            if s in now and then[s] != now[s]
        }
        apart.append(
            trace(metric, differ, differ.values(), len(losses) - 2, "lines+markers")
        )
    caption = "Updates at which both runs are equal to the bit are left out."
    by_update, parted = (
        {"xaxis": axis("updates"), "yaxis": axis("loss")},
        axis("relative difference", log=True),
    )
    loss = Plot("loss", "Losses", "Loss by update", "", losses, by_update)
    part = Plot(
        "apart",
        "Differences",
        "How far the runs part",
        caption,
        apart,
        by_update | {"yaxis": parted},
    )
    plots = [plot for plot in (loss, part) if any(one["x"] for one in plot.data)]
    return render(
        title, about, plots, "Computed from the metrics of both runs in MLflow."
    )


def _is_rounding(point: Point, precision: str, examples: float | None) -> bool:
    metric = metric_names.of(point.metric)
    if metric.counted or point.old is None or point.new is None:
        return False
    bound = rounding.BY_PRECISION[precision].bound(point.step) * metric.rounding
    if point.relative <= bound:
        return True
    # A share of the examples, such as the accuracy, changes by at least one of them.
    if not metric.share or examples is None or not EXAMPLES < examples < math.inf:
        return False
    totals = [share * examples for share in (point.old, point.new)]
    # In float32 a count is exact up to 2^24, and its division by the examples rounds by at most 2^-24 of the share.
    counts = all(
        0 <= total <= examples and math.isclose(total, round(total), rel_tol=2**-23)
        for total in totals
    )
    return counts and abs(round(totals[0]) - round(totals[1])) <= EXAMPLES
