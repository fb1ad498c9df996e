"""A sweep as recorded in a store: its parent run, and the latest run of each job."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from pipeline.common.errors import ConfigError
from pipeline.common.secrets import mask
from pipeline.tracking.foreign_store import RUN_ID, ForeignStore

DEFAULT_STORE = "sqlite:///mlruns/mlflow.db"
MULTIRUN = "multirun"  # the name of a sweep without a file


@dataclass
class SweepRecord:
    """The parent run of a sweep."""

    uri: str  # of the store
    run_id: str
    experiment_id: str

    def client(self) -> Any:
        """Return MLflow's client of the store."""
        return ForeignStore(self.uri).client()

    def children(self) -> dict[str, Any]:
        """Return the latest run of each job, by the job's name.

        Raises:
            ConfigError: a run does not name its job.
        """
        runs = self.client().search_runs(
            [self.experiment_id], f"tags.sweep = '{self.run_id}'", max_results=50000, order_by=["start_time ASC"]
        )
        for run in runs:
            if "sweep.job" not in run.data.tags or not RUN_ID.fullmatch(run.info.run_id):
                raise ConfigError("SWEEP", "must have runs with MLflow's IDs and a tag sweep.job", run.info.run_id)
        return {run.data.tags["sweep.job"]: run for run in runs}


def again_command(name: str, run_id: str, uri: str) -> str:
    """Return the command that runs the rest of the sweep `run_id`, as far as the store `uri` can tell."""
    store = [] if uri == DEFAULT_STORE else [f"tracking.uri={mask(uri)}"]
    if name == MULTIRUN:
        return f"pipeline train -m … {shlex.join([f'tracking.sweep={run_id}', *store])}"
    return shlex.join(["pipeline", "sweep", name, "--again", run_id, *store])
