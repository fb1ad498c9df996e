"""The parent run of a sweep in MLflow, whose tags record the planned jobs."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.tracking.foreign_store import LONGEST_TAG, SweepRecord


@dataclass
class ParentRun(SweepRecord):
    """The parent run of a sweep.

    Attributes:
        name: the name of the sweep file, or `multirun`.
        job_names: the names of all planned jobs, in order.
        varied: config keys that the sweep varies.
        metrics: names of the validation metrics of the jobs besides the loss, without
            `val/`.
    """

    name: str
    job_names: list[str] = field(default_factory=list)
    varied: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)

    def plan(self, names: Iterable[str], varied: Sequence[str]) -> None:
        """Record jobs in the tags of the parent run, before the jobs start.

        Called once per batch; the names are added to those of earlier batches.
        """
        self.job_names += [name for name in names if name not in self.job_names]
        set_tag(self, "sweep.varied", json.dumps(list(varied)))
        set_tag(self, "sweep.jobs", json.dumps(self.job_names))


def finished_losses(children: Mapping[str, Any]) -> dict[str, float]:
    """Return the last loss of each finished job, by the job's name.

    It is the validation loss, or else the training loss, or infinity if neither was
    logged.

    Args:
        children: the runs of the sweep's jobs, by the job's name.
    """
    losses = {}
    for name, run in children.items():
        if run.info.status == "FINISHED":
            metrics = run.data.metrics
            loss = metrics.get("train/loss", math.inf)
            losses[name] = metrics.get("val/loss", loss)
    return losses


def set_tag(parent: SweepRecord, key: str, text: str) -> None:
    """Set a tag of the parent run of a sweep.

    A text longer than `LONGEST_TAG` is continued in the tags KEY.1, KEY.2 and so on;
    `foreign_store.listed` reads them.
    """
    for number, start in enumerate(range(0, len(text), LONGEST_TAG)):
        part_key = key
        if number > 0:
            part_key = f"{key}.{number}"
        part = text[start : start + LONGEST_TAG]
        parent.client().set_tag(parent.run_id, part_key, part)
