"""Logs the results of `pipeline evaluate` to a run that has ended.

If the run's journal is on this machine, a line is appended to it, which is shipped like
all others. Otherwise, the results are sent to the store.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common.errors import ConfigError
from pipeline.tracking.journal_file import LockedPast
from pipeline.tracking.journal_lines import EVALUATED, Evaluated


@dataclass(frozen=True)
class Evaluation:
    """The results over one split.

    Attributes:
        name: the name under which they are logged, as `eval/<name>/…`.
        update: the number of completed updates of the checkpoint.
        checksum: identifies the data.
        results: the loss and the metrics by name.
    """

    name: str
    update: int
    checksum: str
    results: Mapping[str, float]

    @property
    def tag(self) -> str:
        """The key of the run's tag that has the checksum of the data."""
        return EVALUATED.format(name=self.name, step=self.update)

    @property
    def metrics(self) -> dict[str, float]:
        """The results by the names under which they are logged."""
        return {f"eval/{self.name}/{key}": self.results[key] for key in self.results}

    def is_logged(self, tags: Mapping[str, str]) -> bool:
        """Return whether a run with these tags has this evaluation already.

        Raises:
            ConfigError: the run has an evaluation of other data under this name and
                after this update.
        """
        checksum = tags.get(self.tag)
        if checksum not in (None, self.checksum):
            rule = (
                "must be a new name: under this name, the run already has an "
                "evaluation of other data after the same update"
            )
            raise ConfigError("--name", rule, self.name)
        return checksum is not None


def append(run_dir: Path, evaluations: list[Evaluation]) -> None:
    """Append evaluations to the journal of a run that has ended.

    Evaluations that the run has already, for example from a command that ran at the
    same time, are left out.

    Raises:
        ConfigError: the run is running, or its journal is damaged.
        OSError: the disk is full.
    """
    past = LockedPast.open(run_dir)
    if past.damage:
        past.close()
        rule = f"must have an intact journal ({past.damage})"
        raise ConfigError("RUN", rule, str(run_dir))
    writer = past.truncated_writer()
    try:
        for evaluation in evaluations:
            if evaluation.is_logged(past.tags):
                continue
            origin = {"name": evaluation.name, "checksum": evaluation.checksum}
            row = Evaluated(evaluation.update, evaluation.metrics, evaluation=origin)
            writer.write(row.content())
        writer.flush()
        writer.sync()
    finally:
        writer.close()


def send(client: Any, run_id: str, evaluations: list[Evaluation]) -> None:
    """Log evaluations to a run in the store, in one request for each."""
    from mlflow.entities import Metric, RunTag

    for evaluation in evaluations:
        now = int(time.time() * 1000)
        points = []
        for key, value in evaluation.metrics.items():
            points.append(Metric(key, value, now, evaluation.update))
        tag = RunTag(evaluation.tag, evaluation.checksum)
        client.log_batch(run_id, metrics=points, tags=[tag])
