"""The lines that a run prints at its end: results, times, and the next commands."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.common.errors import ConfigError, count
from pipeline.config.plain import leaves
from pipeline.config.resolve import RunSpec
from pipeline.tracking import horizons
from pipeline.tracking.foreign_store import store_argument
from pipeline.tracking.horizons import RecordedHorizon, described
from pipeline.tracking.journal_summary import JournalSummary, ranked_metric
from pipeline.trust import trusted_names

if TYPE_CHECKING:  # importing it takes seconds
    from pipeline.training.recorder import Recorder


def results_and_times(run_dir: Path, recorder: Recorder) -> list[str]:
    """Return a line about the last and the best result, and one about the times.

    The results are those of the whole run, the times those of this process. Without a
    row, there is no line about results. Without a completed update in this process,
    there are no lines.
    """
    summary = JournalSummary.read(run_dir)
    if summary is None or not recorder.updates:
        return []
    return [*_results(summary), _times(recorder)]


def open_or_repeat(
    run_id: str,
    spec: RunSpec,
    in_force: Sequence[RecordedHorizon] = (),
    start: str = "",
) -> str:
    """Return a line with the command that shows a finished run.

    The command that repeats the run follows, with the options that allow the user's own
    code. It is left out if the run has a target that a rerun rejects even then. If the
    run's horizon changed and its learning rates depended on it, the line says instead
    that no rerun repeats the run.

    Args:
        run_id: the ID of the run.
        spec: the spec of the run.
        in_force: the horizons of the run, if it was resumed.
        start: the override that a rerun of this fork needs; see
            `fork.override_to_repeat`.
    """
    store = store_argument(spec.config.tracking.uri)
    line = f"open it with: {shlex.join(['pipeline', 'ui', *store])}"
    if len(in_force) > 1 and horizons.decides_rates(spec.resolved, spec.links):
        line += f"; no rerun repeats it, since its horizon was {described(in_force)}"
        return line

    packages = _packages_to_allow(spec)
    if packages is not None:
        options: list[str] = []
        for package in packages:
            options += ["--allow", package]
        repeat = shlex.join(["pipeline", "rerun", run_id, *options, *store])
        line += f"; repeat it with: {repeat}"
        if start:
            line += f" {start}"
    return line


def _packages_to_allow(spec: RunSpec) -> list[str] | None:
    """Return the packages that `pipeline rerun` accepts only with `--allow`.

    Return None if it does not accept all targets even then. Callbacks that write files
    do not count: a rerun leaves them out.
    """
    targets = {}
    for key, value in leaves(spec.resolved).items():
        if key.endswith("_target_") and value not in trusted_names.WRITERS:
            targets[key] = str(value)
    packages = trusted_names.packages_to_allow(targets.values(), ())
    try:
        for key, target in targets.items():
            trusted_names.check_name(target, key, packages)
    except ConfigError:
        return None
    return packages


def _results(summary: JournalSummary) -> list[str]:
    ranked = ranked_metric(summary.start.params)
    metric = ranked.or_training_loss(summary.last).name
    if metric not in summary.last:  # no row was due yet
        return []
    line = f"last {metric} {summary.last[metric]:.4f}"
    if summary.best is not None:
        line += f", best {summary.best:.4f} after update {summary.best_update}"
    return [line]


def _times(recorder: Recorder) -> str:
    seconds = recorder.total_seconds()
    rest = max(0.0, seconds - recorder.train_seconds - recorder.compile_seconds)
    return (
        f"{count(recorder.updates, 'update')} in {seconds:.1f} s: "
        f"training {recorder.train_seconds:.1f} s, "
        f"compilation {recorder.compile_seconds:.1f} s, "
        f"evaluation and the rest {rest:.1f} s"
    )
