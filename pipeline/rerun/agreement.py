"""Decides whether two runs agree, from their points under `train/` and `val/`.

`compare` compares two histories; `compare_runs` first reads them from MLflow.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pipeline.common import rounding
from pipeline.common.errors import count
from pipeline.common.rounding import TF32
from pipeline.config import metric_names
from pipeline.config.key_kinds import DERIVED_CUT
from pipeline.config.plan import HALVED
from pipeline.config.schema import SCHEMA
from pipeline.config.validation_sets import split_key
from pipeline.report.html_page import Plot, Trace, axis, render, trace
from pipeline.tracking import horizons

# The verdicts, which are recorded as the tag `rerun.verdict`.
BIT_EQUAL = "bit-equal"
WITHIN_ROUNDING = "equal within rounding"
DIFFERENT = "different"
NO_POINTS = "nothing to compare"

# A metric that is a share of examples, such as the accuracy, may differ by this many
# examples if it is computed over more examples than that.
MOST_EXAMPLES = 2

# The keys that decide at which steps the metrics with a prefix are logged.
_STEP_KEYS = {
    "train/": ("tracking.log_every",),
    "val/": ("training.evaluate_every", "training.evaluate_at_start"),
}

History = Mapping[str, Mapping[int, float]]  # metric → step → value


@dataclass(frozen=True)
class Point:
    """The values of one metric at one step in two runs.

    A value is None if the run has none at this step.
    """

    metric: str
    step: int
    old: float | None
    new: float | None

    @property
    def relative_difference(self) -> float:
        """The relative difference |new − old| / max(|old|, |new|).

        It is 0 for two equal values or two NaNs. Otherwise it is infinite if a value is
        missing or is not finite.
        """
        if self.old is None or self.new is None:
            return math.inf
        if self.old == self.new or (math.isnan(self.old) and math.isnan(self.new)):
            return 0.0
        if not (math.isfinite(self.old) and math.isfinite(self.new)):
            return math.inf
        return abs(self.new - self.old) / max(abs(self.old), abs(self.new))

    def __str__(self) -> str:
        old = _shown(self.old)
        new = _shown(self.new)
        text = f"{self.metric} at update {self.step}: {old} then, {new} now"
        if math.isinf(self.relative_difference):
            return text
        return f"{text}, {self.relative_difference:.2g} relative"


@dataclass(frozen=True)
class Agreement:
    """The outcome of a comparison.

    Attributes:
        verdict: one of the four verdicts, such as `BIT_EQUAL`.
        text: the verdict, what was compared, and where the runs differ.
    """

    verdict: str
    text: str

    @property
    def runs_agree(self) -> bool:
        return self.verdict in (BIT_EQUAL, WITHIN_ROUNDING)


@dataclass(frozen=True)
class Scope:
    """What is compared of a recorded run and its rerun.

    A metric that only the rerun has is never compared.

    Attributes:
        same_cut: whether both runs have equal numbers of micro-batches and replicas.
            Otherwise, metrics that depend on these numbers are left out.
        until: the last update to compare; infinity if the recorded run finished.
        changed: metrics whose computation has changed since the recorded run. They are
            left out.
        ends: updates at which the recorded run had reached its horizon, before it was
            resumed with a longer one. What it logged after one of these updates is left
            out if the rerun did not log it.
        step_keys: the config keys by which the two runs logged metrics at different
            steps, by the prefix of these metrics, such as `train/`. Such metrics are
            compared only at the steps at which both runs logged them.
    """

    same_cut: bool = True
    until: float = math.inf
    changed: Collection[str] = ()
    ends: Collection[int] = ()
    step_keys: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def metrics(self, old: History) -> list[str]:
        """Return the metrics of the recorded run that are compared."""
        metrics = []
        for metric in old:
            is_comparable = self.same_cut or not _follows_from_cut(metric)
            if is_comparable and metric not in self.changed:
                metrics.append(metric)
        return metrics

    def points(self, old: History, new: History) -> list[Point]:
        """Return the points that are compared, the earliest first."""
        points = []
        for metric in self.metrics(old):
            old_values = old[metric]
            new_values = new.get(metric, {})
            for step in {*old_values, *new_values}:
                point = Point(metric, step, old_values.get(step), new_values.get(step))
                if step <= self.until and not self._may_lack(point, new_values):
                    points.append(point)
        return sorted(points, key=_order)

    def _may_lack(self, point: Point, new_values: Mapping[int, float]) -> bool:
        """Return whether a point is missing in one run, although the runs may agree."""
        if point.new is None and point.step in self.ends:
            return True
        # A metric without any value is missing from the rerun, whatever its steps are.
        has_other_steps = point.metric.startswith(tuple(self.step_keys))
        is_missing = point.old is None or point.new is None
        return is_missing and has_other_steps and bool(new_values)

    def text(self, old: History, new: History) -> str:
        """Return the number of metrics, and what is left out, in words."""
        metrics = self.metrics(old)
        text = count(len(metrics), "metric")
        left_out = sorted({*old, *new} - {*metrics})
        if left_out:
            text += f" (without {', '.join(left_out)})"
        if self.until < math.inf:
            text += f" up to update {self.until}, where the recorded run ended"
        for prefix, keys in self.step_keys.items():
            text += (
                f", with {prefix} only at the steps that both runs logged, since "
                f"{' and '.join(keys)} differed"
            )
        return text


def compare(
    old: History,
    new: History,
    precision: str,
    *,
    examples: Mapping[str, int] = MappingProxyType({}),
    scope: Scope = Scope(),
) -> Agreement:
    """Compare the points of a recorded run and its rerun.

    Args:
        old: the history of the recorded run.
        new: the history of its rerun.
        precision: the coarser precision of the two runs, a key of
            `rounding.BY_PRECISION`.
        examples: the number of examples by split, without splits of unknown size.
        scope: what is compared.
    """
    points = scope.points(old, new)
    compared = f"{count(len(points), 'point')} of {scope.text(old, new)}"
    if precision == TF32:
        compared += ", with the bounds of TF32"

    differing = [point for point in points if point.relative_difference > 0]
    batch_sizes = old.get("train/effective_batch_size", {})
    beyond_rounding = []
    for point in differing:
        if point.metric.startswith("train/"):
            count_of_point = batch_sizes.get(point.step)
        else:
            count_of_point = _evaluated_examples(point.metric, examples)
        if not _is_rounding(point, precision, count_of_point):
            beyond_rounding.append(point)

    if not points:
        return Agreement(NO_POINTS, f"{NO_POINTS}: {compared}")
    if not differing:
        return Agreement(BIT_EQUAL, f"{BIT_EQUAL}: {compared}")
    if not beyond_rounding:
        text = (
            f"{WITHIN_ROUNDING}: {compared}; the first difference: {differing[0]}; "
            f"the largest difference: {_largest(differing)}"
        )
        return Agreement(WITHIN_ROUNDING, text)
    return Agreement(
        DIFFERENT, _text_of_difference(differing, beyond_rounding, compared)
    )


def compare_runs(
    client: Any,
    old: Any,
    new: Any,
    examples: Mapping[str, int],
    in_tf32: bool = False,
    schema: int = SCHEMA,
    segments: Sequence[Mapping[str, Any]] = (),
) -> tuple[Agreement, str]:
    """Compare two runs in MLflow.

    Args:
        client: an MLflow client for the store.
        old: the recorded run.
        new: the rerun.
        examples: the number of examples by split, without splits of unknown size.
        in_tf32: whether one of the runs computed float32 in TF32.
        schema: the schema of the old run's record.
        segments: the segments of both runs; see `provenance.segment`. A run that was
            never resumed has none.

    Returns:
        The agreement, and an HTML page with plots of both runs.
    """
    old_history = _history(client, old)
    new_history = _history(client, new)

    precisions = {run.data.params.get("hardware.precision") for run in (old, new)}
    if in_tf32:
        precisions.add(TF32)
    scope = Scope(
        same_cut=_have_same_cut(old, new, segments),
        until=_last_update(old, old_history),
        changed=metric_names.changed_since(schema),
        ends=[horizon.after for horizon in horizons.of_tags(old.data.tags)],
        step_keys=_different_step_keys(old, new, segments),
    )
    agreement = compare(
        old_history,
        new_history,
        rounding.coarsest(precisions),
        examples=examples,
        scope=scope,
    )

    title = f"{old.info.run_id} and its rerun {new.info.run_id}"
    return agreement, page(old_history, new_history, title, agreement.text)


def page(old: History, new: History, title: str, about: str) -> str:
    """Return a self-contained HTML page with the losses of two runs.

    It plots the losses and their relative differences by update.

    Args:
        old: the history of the recorded run.
        new: the history of its rerun.
        title: the heading.
        about: the text below the heading.
    """
    losses: list[Trace] = []
    differences: list[Trace] = []
    modes = {"train/loss": "lines", "val/loss": "lines+markers"}
    for metric, mode in modes.items():
        then = _finite(old.get(metric, {}))
        now = _finite(new.get(metric, {}))
        color = len(losses)
        losses.append(trace(f"{metric}, then", then, then.values(), color, mode))
        losses.append(trace(f"{metric}, now", now, now.values(), color + 1, mode))

        # Leave out equal values: a logarithmic axis cannot show 0.
        relative = {}
        for step, value in then.items():
            if step in now and value != now[step]:
                point = Point(metric, step, value, now[step])
                relative[step] = point.relative_difference
        differences.append(
            trace(metric, relative, relative.values(), color, "lines+markers")
        )

    updates = axis("updates")
    loss_plot = Plot(
        key="loss",
        section="Losses",
        title="Loss by update",
        caption="",
        data=losses,
        layout={"xaxis": updates, "yaxis": axis("loss")},
    )
    difference_plot = Plot(
        key="apart",
        section="Differences",
        title="Relative difference of the losses by update",
        caption="Updates at which both runs are bit-identical are left out.",
        data=differences,
        layout={"xaxis": updates, "yaxis": axis("relative difference", log=True)},
    )
    plots = [plot for plot in (loss_plot, difference_plot) if plot.has_points()]
    footer = "Computed from the metrics of both runs in MLflow."
    return render(title, about, plots, footer)


def _evaluated_examples(metric: str, examples: Mapping[str, int]) -> int | None:
    """Return the number of examples behind a validation metric, or None if unknown."""
    set_key = split_key(metric.removeprefix("val/").partition("/")[0])
    if set_key in examples:
        return examples[set_key]
    return examples.get("validation")


def _follows_from_cut(metric: str) -> bool:
    return metric_names.treatment_of(metric).of_the_cut


def _shown(value: float | None) -> str:
    if value is None:
        return "absent"
    return repr(value)


def _order(point: Point) -> tuple[int, bool, str]:
    """Return the sort key of a point: by step, the training loss first."""
    return point.step, point.metric != "train/loss", point.metric


def _text_of_difference(
    differing: list[Point], beyond_rounding: list[Point], compared: str
) -> str:
    """Return the message for two runs that differ by more than rounding.

    It names the first and the largest such difference, an earlier difference within
    rounding if there is one, and what was compared.
    """
    first = beyond_rounding[0]
    within = ""
    if differing[0].step < first.step:
        within = f"; the first difference within rounding: {differing[0]}"
    return (
        f"{DIFFERENT} from update {first.step} on: {first}; "
        f"the largest difference: {_largest(beyond_rounding)}{within}; {compared}"
    )


def _largest(points: list[Point]) -> Point:
    return max(points, key=lambda point: point.relative_difference)


def _is_rounding(point: Point, precision: str, examples: float | None) -> bool:
    """Return whether rounding explains the difference of a point.

    Args:
        point: a point at which the runs differ.
        precision: a key of `rounding.BY_PRECISION`.
        examples: the number of examples from which the values are computed; None or 0
            if it is unknown.
    """
    metric = metric_names.treatment_of(point.metric)
    if metric.counted or point.old is None or point.new is None:
        return False
    bound = rounding.BY_PRECISION[precision].bound(point.step) * metric.rounding
    if point.relative_difference <= bound:
        return True

    # A share of examples, such as the accuracy, changes in steps of one example: allow
    # a difference of a few examples.
    if not metric.share or examples is None:
        return False
    if not MOST_EXAMPLES < examples < math.inf:
        return False
    old_count = _count(point.old, examples)
    new_count = _count(point.new, examples)
    if old_count is None or new_count is None:
        return False
    return abs(old_count - new_count) <= MOST_EXAMPLES


def _count(share: float, examples: float) -> int | None:
    """Convert a share to a number of examples.

    Return None if the result is not a whole number from 0 to `examples`.
    """
    total = share * examples
    # The tolerance is twice the rounding error of a float32 division, which is at most
    # 2^-24 of the share. Counts up to 2^24 are exact in float32.
    if 0 <= total <= examples and math.isclose(total, round(total), rel_tol=2**-23):
        return round(total)
    return None


def _history(client: Any, run: Any) -> History:
    """Return, for each metric of a run under `train/` or `val/`, its values by step."""
    history = {}
    for metric in sorted(run.data.metrics):
        if metric.startswith(("train/", "val/")):
            points = client.get_metric_history(run.info.run_id, metric)
            history[metric] = {point.step: point.value for point in points}
    return history


def _have_same_cut(old: Any, new: Any, segments: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether two runs always cut their batches into the same micro-batches.

    Args:
        old, new: the runs. Their params have the cuts with which they began.
        segments: the segments of both runs.
    """
    if old.data.tags.get(HALVED) != new.data.tags.get(HALVED):
        return False
    old_params = old.data.params
    new_params = new.data.params
    if any(old_params.get(key) != new_params.get(key) for key in DERIVED_CUT):
        return False

    cuts = []
    for segment in segments:
        cut = segment.get("cut")
        if cut is not None:
            # Older versions lack an entry that was None in each of their runs.
            cuts.append({name: size for name, size in cut.items() if size is not None})
    return all(cut == cuts[0] for cut in cuts)


def _different_step_keys(
    old: Any, new: Any, segments: Iterable[Mapping[str, Any]]
) -> dict[str, list[str]]:
    """Return the keys by which two runs logged metrics at different steps.

    They are the keys in `_STEP_KEYS` whose values differ between the runs, or between
    the segments of a run.

    Returns:
        The keys by the prefix of these metrics, without prefixes that have no such key.
    """
    resumed_with: set[str] = set()
    for segment in segments:
        resumed_with.update(segment.get("settings") or {})

    different = {}
    for prefix, keys in _STEP_KEYS.items():
        unequal_keys = []
        for key in keys:
            # An older version may lack a key: the rerun then uses the same value.
            values = [run.data.params.get(key) for run in (old, new)]
            if key in resumed_with or (None not in values and values[0] != values[1]):
                unequal_keys.append(key)
        if unequal_keys:
            different[prefix] = unequal_keys
    return different


def _last_update(run: Any, history: History) -> float:
    """Return the last step of an unfinished run, or infinity if the run finished.

    The result is 0 if an unfinished run has no points.
    """
    if run.info.status == "FINISHED":
        return math.inf
    steps: list[int] = []
    for points in history.values():
        steps += points
    return max(steps, default=0)


def _finite(points: Mapping[int, float]) -> dict[int, float]:
    """Return the points with finite values, which can be plotted."""
    return {step: value for step, value in points.items() if math.isfinite(value)}
