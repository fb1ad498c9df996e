"""Sorts the list of `pipeline runs` by a column or by the last value of a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.common.errors import ConfigError

if TYPE_CHECKING:  # `runs` imports this module
    from pipeline.cli.runs import ListedRun

STARTED = "started_at"
_TEXTS = ("status", "experiment", "name")
_RESULTS = ("last", "best")
COLUMNS = (STARTED, *_TEXTS, *_RESULTS)


@dataclass(frozen=True)
class Entry:
    """A run of the list, with what it may be sorted by.

    Attributes:
        run: the run.
        metrics: the last value of each metric.
        params: the params.
    """

    run: ListedRun
    metrics: Mapping[str, float]
    params: Mapping[str, Any]


def sorted_runs(
    entries: Sequence[Entry], key: str = STARTED, reverse: bool = False
) -> list[ListedRun]:
    """Return the runs in the order of a column, or of a metric, the best one first.

    Runs without a value come last. Of runs with equal values, the newest comes first.
    If the key is a metric, the runs show this metric.

    Args:
        entries: the runs.
        key: one of `COLUMNS`, or a metric. `started_at` has the newest run first. Text
            is in alphabetical order.
        reverse: whether to return the opposite order. Runs without a value still come
            last.

    Raises:
        ConfigError: no run has this metric, or the column `last` or `best` has values
            of several metrics.
    """
    newest_first = [entry.run for entry in entries]
    newest_first.sort(key=lambda run: run.started_at, reverse=True)
    if key == STARTED or not entries:
        return newest_first[::-1] if reverse else newest_first
    if key in _TEXTS:
        texts = [str(getattr(run, key)) for run in newest_first]
        return _by_value(newest_first, texts, ascending=not reverse)
    if key in _RESULTS:
        metric = _metric_of(newest_first, key)
        values = [getattr(run, key) for run in newest_first]
        ascending = _is_lower_better(metric, entries) != reverse
        return _by_value(newest_first, values, ascending)

    _check_metric(key, entries)
    shown = [_showing(entry, key) for entry in entries]
    shown.sort(key=lambda run: run.started_at, reverse=True)
    values = [run.last for run in shown]
    return _by_value(shown, values, _is_lower_better(key, entries) != reverse)


def _metric_of(runs: Sequence[ListedRun], column: str) -> str:
    """Return the metric whose values a column shows; empty if it shows none."""
    metrics = {run.metric for run in runs if getattr(run, column) is not None}
    if len(metrics) > 1:
        rule = "must be a metric, since this column has values of several metrics"
        raise ConfigError("--sort", rule, column, sorted(metrics))
    return "".join(metrics)


def _check_metric(key: str, entries: Sequence[Entry]) -> None:
    """Reject a name that is not a metric of any run."""
    names: set[str] = set()
    for entry in entries:
        names.update(entry.metrics)
    if key not in names:
        rule = "must be a column or a metric of a listed run"
        raise ConfigError("--sort", rule, key, [*COLUMNS, *sorted(names)])


def _showing(entry: Entry, metric: str) -> ListedRun:
    """Return a run whose shown metric is `metric`."""
    if entry.run.metric == metric:
        return entry.run
    last = entry.metrics.get(metric)
    return replace(entry.run, metric=metric, last=last, best=None)


def _is_lower_better(metric: str, entries: Sequence[Entry]) -> bool:
    """Return whether lower values of a metric are better, by the rule of reports."""
    from pipeline.report import metric_direction  # imports NumPy

    params_of_runs = []
    for entry in entries:
        params_of_runs.append({key: str(text) for key, text in entry.params.items()})
    return metric_direction.lower_by_params(metric, params_of_runs)


def _by_value(
    runs: Sequence[ListedRun], values: Sequence[Any], ascending: bool
) -> list[ListedRun]:
    """Return the runs by their values; those without a number or a text come last."""
    with_value = []
    without = []
    for run, value in zip(runs, values, strict=True):
        is_nan = isinstance(value, float) and math.isnan(value)
        if value is None or is_nan:
            without.append(run)
        else:
            with_value.append((value, run))
    # The sort keeps the order of equal values.
    with_value.sort(key=lambda pair: pair[0], reverse=not ascending)
    return [*(run for _, run in with_value), *without]
