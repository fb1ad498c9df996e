"""A sweep: one parent run in MLflow, a child for each job, and a table of what became of them.

The launchers in `hydra_plugins.pipeline_launcher` call `begin` before the first job starts; the command line calls
`close` when the last one has ended, however it ended.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig

from pipeline.errors import ConfigError

LETTERS = {"effective_batch_size": "batch", "micro_batch_size": "micro", "learning_rate": "rate"}
LONGEST_TAG = 5000  # characters; what every MLflow store takes
PATIENCE = 90.0  # seconds for a job's shipper to close its run after the job died


@dataclass(frozen=True)
class Job:
    """One job of a sweep.

    Attributes:
        name: by what differs, such as `factor=8 batch=256`; unique in its sweep.
        overrides: of Hydra, that make this job.
    """

    name: str
    overrides: tuple[str, ...]


@dataclass
class Sweep:
    """The parent run, and what is known of its jobs.

    Attributes:
        uri: of the store.
        run_id, experiment_id: of the parent.
        names: of all jobs, in the order in which they were planned.
        lost: why a job left no run, by its name.
    """

    uri: str
    run_id: str
    experiment_id: str
    names: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)

    def children(self) -> dict[str, Any]:
        """The latest run of each job, by the job's name."""
        runs = _client(self.uri).search_runs(
            [self.experiment_id], f"tags.sweep = '{self.run_id}'", max_results=50000, order_by=["start_time ASC"]
        )
        return {run.data.tags["sweep.job"]: run for run in runs}

    def finished(self) -> set[str]:
        """Names of the jobs that need not run again."""
        return {name for name, run in self.children().items() if run.info.status == "FINISHED"}

    def plan(self, jobs: Sequence[Job], varied: Sequence[str]) -> None:
        """Notes jobs before they start; a sweeper that searches plans some more after each batch."""
        self.names += [job.name for job in jobs if job.name not in self.names]
        client = _client(self.uri)
        for key, value in (("sweep.varied", list(varied)), ("sweep.jobs", self.names)):
            text = json.dumps(value)
            if len(text) <= LONGEST_TAG:
                client.set_tag(self.run_id, key, text)

    def close(self, interrupted: bool = False) -> int:
        """Ends the parent run and prints what became of the jobs.

        Returns:
            0 when every job finished, else 1.
        """
        children = self._settled()
        rows = []
        for name in self.names:
            run = children.get(name)
            if run is None:
                rows.append((name, "NOT RUN" if interrupted else "NO RUN", self.lost.get(name, "")))
            else:
                rows.append((name, run.info.status, run.data.tags.get("failure", "").split("\n")[0]))
        width = max((len(name) for name, *_ in rows), default=0)
        for name, status, why in rows:
            print(f"  {name:{width}}  {status:8}  {why}".rstrip(), file=sys.stderr)
        done = sum(status == "FINISHED" for _, status, _ in rows)
        print(f"sweep {self.run_id}: {done} of {len(rows)} jobs finished", file=sys.stderr)
        if done < len(rows):
            print("run what is missing with: pipeline sweep NAME --again " + self.run_id, file=sys.stderr)
        whole = done == len(rows)
        status = "KILLED" if interrupted else "FINISHED" if whole else "FAILED"
        _client(self.uri).set_terminated(self.run_id, status)
        return 0 if whole else 1

    def _settled(self) -> dict[str, Any]:
        """The children once none of them is RUNNING: a job's shipper outlives the job by some seconds."""
        until = time.monotonic() + PATIENCE
        while True:
            children = self.children()
            if all(run.info.status != "RUNNING" for run in children.values()) or time.monotonic() > until:
                return children
            time.sleep(0.5)


_current: Sweep | None = None


def begin(config: DictConfig, name: str, jobs: Sequence[Job], varied: Sequence[str]) -> Sweep:
    """The sweep of this process: its parent run is created, or taken up again, on the first call.

    Args:
        config: what all jobs share.
        name: of the sweep.
        jobs: that are about to start.
        varied: config keys in which they differ.
    """
    global _current
    if _current is None:
        _current = _again(config) if config.tracking.sweep else _create(config, name, len(jobs))
    _current.plan(jobs, varied)
    return _current


def take() -> Sweep | None:
    """The sweep that `begin` began in this process, once."""
    global _current
    taken, _current = _current, None
    return taken


def find(uri: str, sweep: str) -> Any:
    """The parent run of `sweep`.

    Args:
        uri: of the store.
        sweep: the parent's run ID, the start of it, or its run name.

    Raises:
        ConfigError: there is none, or several.
    """
    client = _client(uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, "tags.`sweep.name` != ''", max_results=1000)
    found = [run for run in runs if run.info.run_id.startswith(sweep) or run.info.run_name == sweep]
    if len(found) != 1:
        rule = "must name one sweep of the store" if not found else f"must name one sweep, not {len(found)}"
        choices = [f"{run.info.run_id} ({run.info.run_name})" for run in (found or runs)[:10]]
        raise ConfigError("SWEEP", rule, sweep, choices)
    return found[0]


def names_of(values: Sequence[Mapping[str, Any]], batches: Sequence[int]) -> list[str]:
    """A unique name for each job by what differs, such as `factor=8 batch=256`.

    Args:
        values: of each job, by config key.
        batches: effective batch size of each job.
    """
    names = []
    for job, batch in zip(values, batches, strict=True):
        parts = [f"{LETTERS.get(last, last)}={value}" for key, value in job.items() if (last := key.split(".")[-1])]
        if len(set(batches)) > 1 and not any(part.startswith("batch=") for part in parts):
            parts.append(f"batch={batch}")
        names.append(" ".join(parts) or "job")
    if len(set(names)) < len(names):
        names = [f"{name} #{number}" for number, name in enumerate(names)]
    return names


def _create(config: DictConfig, name: str, jobs: int) -> Sweep:
    from pipeline.store import Store, StoreError

    try:
        store = Store(config.tracking.uri)
        experiment_id = store.experiment(config.tracking.experiment)
    except StoreError as error:
        raise ConfigError("tracking.uri", f"must be a store that answers ({error})", config.tracking.uri) from error
    tags = {
        "sweep.name": name,
        "sweep.overrides": json.dumps(list(config.hydra.overrides.task)),
        "mlflow.source.name": "pipeline",
    }
    run = store.client().create_run(experiment_id, tags=tags, run_name=f"sweep {name}")
    sweep = Sweep(config.tracking.uri, run.info.run_id, experiment_id)
    client = store.client()
    for key, value in {"sweep": name, "jobs": jobs, "dataset._target_": config.dataset.get("_target_")}.items():
        client.log_param(sweep.run_id, key, value)
    print(f"sweep {sweep.run_id} ({name}): {jobs} jobs", file=sys.stderr)
    return sweep


def _again(config: DictConfig) -> Sweep:
    parent = find(config.tracking.uri, config.tracking.sweep)
    client = _client(config.tracking.uri)
    client.update_run(parent.info.run_id, "RUNNING")
    names = json.loads(parent.data.tags.get("sweep.jobs", "[]"))
    return Sweep(config.tracking.uri, parent.info.run_id, parent.info.experiment_id, names)


def _client(uri: str) -> Any:
    from pipeline import store  # noqa: F401  (first: it sets what MLflow reads when it is imported)

    from mlflow.tracking import MlflowClient  # isort: skip

    return MlflowClient(uri)
