"""Sweeps with known answers, in a real store or without one.

Their curves are arrays: no training takes place.
"""

from __future__ import annotations

import math
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from mlflow.entities import Metric, Param, RunTag

from pipeline.config.plain import without_seed
from pipeline.report.job_results import Curve, JobResult
from pipeline.report.sweep_result import SweepResult
from pipeline.sweep.parent_run import ParentRun
from pipeline.tracking.store import Store
from tests import shared

STARTED = 1_700_000_000_000  # ms since the epoch
LARGEST = sys.float_info.max  # what an SQL store has in place of infinity


@dataclass
class PlantedSweep:
    """A sweep in a store: `job` adds a child with its curves.

    Attributes:
        store: which holds it.
        names: of all planned jobs.
        varied: the keys that differ between its jobs.
        name: of the sweep.
        clock: when the next job begins, in ms since the epoch.
        run_id: of the parent.
        experiment_id: of the parent and its jobs.
    """

    store: Store
    names: Sequence[str]
    varied: Sequence[str] = ("accumulation.factor",)
    name: str = "made"
    clock: int = STARTED
    run_id: str = ""
    experiment_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.client = self.store.client()
        self.experiment_id = self.store.experiment("made")
        run = self.client.create_run(
            self.experiment_id,
            tags={"sweep.name": self.name},
            run_name=f"sweep {self.name}",
        )
        self.run_id = run.info.run_id
        self.planned = ParentRun(
            self.store.uri,
            self.run_id,
            self.experiment_id,
            self.name,
            varied=list(self.varied),
            metrics=["accuracy"],
        )
        self.planned.plan(self.names, self.varied)

    def job(  # noqa: PLR0913  what a test varies
        self,
        name: str,
        curves: Mapping[str, Sequence[float] | Mapping[int, float]],
        *,
        factor: int = 1,
        batch: int = 64,
        seed: int = 0,
        status: str = "FINISHED",
        seconds: float = 0.01,
        memory: float = 100 * 2**20,
        params: Mapping[str, Any] = {},
        tags: Mapping[str, str] = {},
    ) -> str:
        """Add a job, and return its run's ID.

        Args:
            name: of the job.
            curves: metrics: the values after updates 1, 2, …, or the values by update.
            factor: of accumulation.
            batch: effective batch size.
            seed: of the job.
            status: of the run; RUNNING to leave it open.
            seconds: of each update; the jobs follow each other on the clock.
            memory: bytes at the peak.
            params: further params.
            tags: further tags.
        """
        lengths = [
            len(curve) for curve in curves.values() if not isinstance(curve, Mapping)
        ]
        updates = max(lengths, default=0)
        parent_tags = {
            "mlflow.parentRunId": self.run_id,
            "sweep": self.run_id,
            "sweep.job": name,
            "sweep.repeats": without_seed(name),
        }
        run = self.client.create_run(
            self.experiment_id, self.clock, {**parent_tags, **tags}, name
        )
        run_id = run.info.run_id

        value_by_param = {
            "accumulation.factor": factor,
            "derived.factor": factor,
            "derived.effective_batch_size": batch,
            "derived.micro_batch_size": batch // factor,
            "seed": seed,
            "hardware.precision": "float32",
            **params,
        }
        run_params = [Param(key, str(value)) for key, value in value_by_param.items()]
        self.client.log_batch(run_id, params=run_params)

        common = {
            "train/examples_seen": batch * np.arange(1, updates + 1),
            "train/effective_batch_size": [batch] * updates,
            "train/learning_rate": [0.1] * updates,
            "perf/update_seconds": [seconds] * updates,
            "perf/examples_per_second": [batch / seconds] * updates,
            "perf/peak_memory_bytes": [memory] * updates,
        }
        points = []
        for key, curve in {**common, **curves}.items():
            points += self._points(key, curve)
        log_points(self.store, run_id, points)

        self.clock += 1000 + int(1000 * seconds * updates)
        if status != "RUNNING":
            self.client.set_terminated(run_id, status, self.clock - 500)
        return run_id

    def _points(
        self, key: str, curve: Sequence[float] | Mapping[int, float]
    ) -> list[Metric]:
        """Return the points of a curve, one millisecond an update."""
        if isinstance(curve, Mapping):
            value_by_update = curve
        else:
            value_by_update = dict(enumerate(curve, start=1))
        points = []
        for update, value in value_by_update.items():
            points.append(Metric(key, float(value), self.clock + update, update))
        return points

    def end(self, status: str = "FINISHED") -> None:
        """End the sweep's own run."""
        self.client.set_terminated(self.run_id, status)

    def tag(self, run: str, **tags: str) -> None:
        """Set tags of the run with an ID."""
        run_tags = [RunTag(key, value) for key, value in tags.items()]
        self.client.log_batch(run, tags=run_tags)


def log_points(store: Store, run_id: str, points: Sequence[Metric]) -> None:
    """Put the points of a new run into an SQLite store, as MLflow's `log_batch` does.

    That takes a hundred times as long.
    """
    rows = []
    latest: dict[str, tuple[tuple, tuple]] = {}
    for point in points:
        is_nan = math.isnan(point.value)
        value = 0.0 if is_nan else max(-LARGEST, min(point.value, LARGEST))
        row = (point.key, value, point.timestamp, run_id, point.step, is_nan)
        rows.append(row)
        order = (point.step, point.timestamp, value)
        if point.key not in latest or order > latest[point.key][0]:
            latest[point.key] = (order, row)

    columns = (
        "(key, value, timestamp, run_uuid, step, is_nan) VALUES (?, ?, ?, ?, ?, ?)"
    )
    assert store.database is not None
    with closing(sqlite3.connect(store.database, timeout=60)) as database, database:
        database.executemany(f"INSERT INTO metrics {columns}", rows)
        latest_rows = [row for _, row in latest.values()]
        database.executemany(f"INSERT INTO latest_metrics {columns}", latest_rows)


def job(
    name: str,
    ends: float,
    *,
    factor: int = 1,
    batch: int = 8,
    seconds: float = 0.01,
    epochs: int = 6,
    start: float = 5.0,
) -> JobResult:
    """Return a finished job without a store, of 1024 examples an epoch.

    Args:
        name: of the job, and its run's ID.
        ends: where the losses end; they fall straight from `start`.
        factor: of accumulation.
        batch: effective batch size.
        seconds: for eight examples.
        epochs: its length.
        start: where the losses start.
    """
    numbers = np.arange(1, epochs + 1)
    steps = 1024 // batch * numbers
    losses = start + (ends - start) * numbers / epochs
    values_by_metric = {
        "train/loss": losses,
        "val/loss": losses,
        "train/examples_seen": batch * steps.astype(float),
        "perf/update_seconds": np.full(epochs, seconds * batch / 8),
        "perf/peak_memory_bytes": np.full(epochs, (100 + factor) * 2.0**20),
    }
    return JobResult(
        name,
        name,
        "FINISHED",
        curves={key: Curve(steps, values) for key, values in values_by_metric.items()},
        factor=factor,
        effective_batch_size=batch,
        micro_batch_size=batch // factor,
    )


def swept(jobs: list[JobResult]) -> SweepResult:
    """Return a finished sweep of `jobs`, without a store."""
    return SweepResult("sqlite:///none.db", "0" * 32, "made", "FINISHED", [], jobs)


def store(folder: Path) -> Store:
    """Return a new store, where a command in `folder` looks for it."""
    shared.place_store(folder)
    return Store(f"sqlite:///{folder}/mlruns/mlflow.db")


def at_fixed_micro_batch(
    store: Store,
    seeds: Sequence[int] = (0, 1, 2),
    critical: float = 200.0,
    noise_scale: float = 190.0,
) -> PlantedSweep:
    """Make a sweep over batches of 32 to 512, with a critical batch size.

    The losses fall straight from 2, by 1 in the examples of `cost_of`. All jobs see
    equally many examples. The slowest one ends a little below a loss of 1, the lowest
    that all reach. An update of 32 examples takes 10 ms: 3200 examples take a second in
    every job.

    Args:
        store: that gets the sweep.
        seeds: of each batch; each is 1% slower than the one before.
        critical: the critical batch size.
        noise_scale: logged between the losses of 1.4 and 0.8. Before, the logged one is
            negative, as an estimate may be; after, it is ten times as large.
    """
    jobs = []
    for factor in (1, 2, 4, 8, 16):
        for seed in seeds:
            jobs.append((factor, seed))
    sweep = PlantedSweep(
        store,
        [_name(factor, seed) for factor, seed in jobs],
        ["accumulation.factor", "seed"],
        "factor_at_fixed_micro_batch",
    )
    horizon = 512 * int(np.ceil(3200 * (1 + 512 / critical) * 1.03 / 512))
    for factor, seed in jobs:
        batch = 32 * factor
        examples = batch * np.arange(1, horizon // batch + 1)
        loss = np.maximum(2 - examples / cost_of(batch, seed, critical), 0.01)
        sweep.job(
            _name(factor, seed),
            _curves(loss, factor, noise_scale),
            factor=factor,
            batch=batch,
            seed=seed,
            seconds=0.01 * factor,
            memory=(300 + factor) * 2**20,
        )
    sweep.end()
    return sweep


def cost_of(batch: int, seed: int, critical: float = 200.0) -> float:
    """Return the examples in which the loss of `at_fixed_micro_batch` falls by 1.

    They follow E = 3200 · (1 + B / critical), of which each seed takes 1% more.
    """
    return 3200 * (1 + batch / critical) * (1 + 0.01 * seed)


def _name(factor: int, seed: int) -> str:
    return f"factor={factor} batch={32 * factor} seed={seed}"


def _curves(loss: np.ndarray, factor: int, noise_scale: float) -> dict[str, Any]:
    """Return the curves of a job of `at_fixed_micro_batch` from its losses."""
    validated = {}
    for step in np.unique(np.linspace(1, len(loss), 40).astype(int)):
        validated[int(step)] = float(loss[step - 1])
    wave = 1 + 0.03 * np.sin(np.arange(len(loss)) * 2.4) / np.sqrt(factor)
    curves = {
        "train/loss": loss * wave,
        "train/accuracy": 1 - loss / 2,
        "val/loss": validated,
        "val/accuracy": {step: 1 - value / 2 for step, value in validated.items()},
    }
    if factor > 1:
        scales = np.where(loss > 0.8, noise_scale, 10 * noise_scale)
        curves["train/gradient_noise_scale"] = np.where(loss > 1.4, -5, scales)
    return curves


def at_fixed_batch(store: Store, precision: str, updates: int = 120) -> PlantedSweep:
    """Make a sweep over factors 1, 2 and 4 at a batch of 64, in `precision`.

    The loss falls from 1.98 by 1% an update. In float32, factor 2 differs from factor 1
    by 1e-7 · 1.1^(update-1), and factor 4 by half of that, so factor 2 exceeds 1e-6
    first at update 26, 1e-3 at 98, and 1e-2 never within 120 updates. In float64 both
    differ by 1e-15 throughout.
    """
    names = {factor: f"factor={factor}" for factor in (1, 2, 4)}
    sweep = PlantedSweep(
        store,
        list(names.values()),
        ["accumulation.factor"],
        f"factor_at_fixed_effective_batch {precision}",
    )
    steps = np.arange(updates)
    if precision == "float32":
        difference = 1e-7 * 1.1**steps
    else:
        difference = np.full(updates, 1e-15)
    for factor, share in ((1, 0.0), (2, 1.0), (4, 0.5)):
        loss = 2 * 0.99 ** (steps + 1) * (1 - share * difference)
        sweep.job(
            names[factor],
            {"train/loss": loss},
            factor=factor,
            seconds=0.01 * (1 + factor / 10),
            params={"hardware.precision": precision},
        )
    sweep.end()
    return sweep
