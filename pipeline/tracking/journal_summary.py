"""The entry for one run in a list of runs, read from its journal in a quick way.

The rows of updates are counted and not parsed, except the last one, and no checksum is
verified. `pipeline.tracking.journal_file.Past` reads a journal completely.
"""

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pipeline.tracking import journal_lines
from pipeline.tracking.journal_file import JOURNAL_NAME
from pipeline.tracking.journal_lines import (
    Created,
    End,
    Resume,
    Row,
    RunStart,
    Start,
    Tags,
)

_UPDATE = b'"train/loss":'  # part of each row of an update, and of no other line
_LATEST = 10**14  # the latest time that can be shown, in the year 5138
_NULL = "null"  # the param of a key that is null
_CREATED = b'"run":'  # part of each line with the IDs of the run
_LOGGED = b'"logged":true'  # part of each row from the user's own code


@dataclass
class JournalSummary:
    """The state of a run according to its journal.

    Attributes:
        start: the description of the run.
        started_at: when the run began, in milliseconds since 1970.
        run_id: the ID of the run, or "" if the run was never in a store.
        moved_to: the URI of the store to which the run was uploaded, or "" if it is
            that of the description.
        uploaded: whether the last line says that the store has all of the journal.
        tags: the tags that were set after the start of the run.
        status: FINISHED, FAILED or KILLED, or None if the last segment has no end.
        updates: number of updates with a row.
        last: the latest value of each metric.
        best: the best value of the metric of `training.keep_best`, by default of the
            validation loss; None if there is none.
        best_update: number of completed updates at the first evaluation with this value.
        resumes: how often the run was resumed.
        damage: why a line cannot be read, or "" if all lines can be read.
    """

    start: RunStart = field(default_factory=RunStart)
    started_at: int = 0
    run_id: str = ""
    moved_to: str = ""
    uploaded: bool = False
    tags: dict[str, str] = field(default_factory=dict)
    status: str | None = None
    updates: int = 0
    last: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_update: int = 0
    resumes: int = 0
    damage: str = ""
    _evaluations: dict[int, float] = field(default_factory=dict)  # by update

    @property
    def store(self) -> str:
        """The URI of the run's store, with secrets masked."""
        return self.moved_to or self.start.store

    @classmethod
    def read(cls, run_dir: Path) -> Self | None:
        """Return the state of the run in `run_dir`.

        Return None if its journal does not begin with the start of a run. Lines after a
        damaged one are left out.
        """
        summary = cls()
        last_update = b""
        # The last piece is empty, or a line that is being written.
        lines = (run_dir / JOURNAL_NAME).read_bytes().split(b"\n")[:-1]
        try:
            for line in lines:
                if _LOGGED in line:
                    continue
                # The first line describes the run, in the user's own words.
                if _UPDATE in line and summary.started_at:
                    summary.updates += 1
                    last_update = line
                else:
                    summary._add(line)
            if last_update:
                summary._add(last_update)
            # Rows are not read in their order, so look at the last line by itself.
            if lines and _CREATED in lines[-1]:
                last = journal_lines.parsed(json.loads(lines[-1]))
                summary.uploaded = isinstance(last, Created) and last.complete is True
        except (ValueError, RecursionError) as error:
            summary.damage = str(error)
        summary._find_best()
        return summary if 0 < summary.started_at < _LATEST else None

    def _add(self, text: bytes) -> None:
        line = journal_lines.parsed(json.loads(text))
        match line:
            case Start(start):
                self.start = start
                self.started_at = line.time or 0
            case Created(run, store):
                self.run_id = run.run_id
                self.moved_to = store or self.moved_to
            case Row():
                self._add_row(line)
            case Tags(tags):
                self.tags |= tags
            case Resume():
                # Keep the evaluations after the checkpoint: the resumed run does not
                # write their rows again.
                self.status = None
                self.resumes += 1
            case End(status):
                self.status = status

    def _add_row(self, row: Row) -> None:
        self.last |= row.metrics
        metric = ranked_metric(self.start.params)
        value = row.metrics.get(metric.name)
        if value is not None:
            self._evaluations[row.step] = value

    def _find_best(self) -> None:
        """Find the best evaluation, ignoring the one before the first update."""
        metric = ranked_metric(self.start.params)
        for update, value in self._evaluations.items():
            # NaN is never the best. It is the only value that is unequal to itself.
            if update == 0 or value != value:
                continue
            if self.best is None or metric.is_better(value, self.best):
                self.best = value
                self.best_update = update


@dataclass(frozen=True)
class RankedMetric:
    """The metric by which the evaluations of a run are compared.

    Attributes:
        name: the name, such as `val/loss`.
        higher_is_better: whether a higher value is better.
    """

    name: str
    higher_is_better: bool

    def is_better(self, value: float, other: float) -> bool:
        """Return whether a value is better than another one."""
        return value > other if self.higher_is_better else value < other

    def or_training_loss(self, logged: Container[str]) -> "RankedMetric":
        """Return this metric if it was logged, or else the training loss.

        Args:
            logged: the names of the metrics that were logged.
        """
        return self if self.name in logged else _TRAINING_LOSS


_TRAINING_LOSS = RankedMetric("train/loss", higher_is_better=False)


def ranked_metric(params: Mapping[str, Any]) -> RankedMetric:
    """Return the metric of `training.keep_best`, by default the validation loss.

    Args:
        params: the params of the run.
    """
    kept = kept_metric(params)
    if kept is None:
        return RankedMetric("val/loss", higher_is_better=False)
    return kept


def kept_metric(params: Mapping[str, Any]) -> RankedMetric | None:
    """Return the metric of `training.keep_best`, or None if a run has none.

    Args:
        params: the params of the run.
    """
    metric = params.get("training.keep_best.metric", _NULL)
    if metric == _NULL:
        return None
    mode = params.get("training.keep_best.mode")
    return RankedMetric(str(metric), higher_is_better=mode == "max")
