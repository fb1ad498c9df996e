"""Sweeps with known answers, in a real store: curves are given as arrays, no training takes place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from mlflow.entities import Metric, Param, RunTag

from pipeline.config.plain import without_seed
from pipeline.report.comparison import Comparison
from pipeline.report.job_results import Curve, JobResult
from pipeline.sweep.parent_run import ParentRun
from pipeline.tracking.store import Store
from tests import shared

STARTED = 1_700_000_000_000  # ms since the epoch
MOST = 1000  # metrics that one call of `log_batch` takes


@dataclass
class Made:
    """One sweep: `job` adds a child with its curves.

    Attributes:
        store: which holds it.
        names: of all planned jobs.
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
        sweep = self.store.uri, self.run_id, self.experiment_id, self.name
        self.planned = ParentRun(*sweep, varied=list(self.varied), metrics=["accuracy"])
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
        """Adds a run; its ID. Each curve holds the values after updates 1, 2, …, or by update.

        Args:
            seconds: of each update; the jobs follow each other on the clock.
            memory: bytes at the peak.
        """
        updates = max(
            (len(c) for c in curves.values() if not isinstance(c, Mapping)), default=0
        )
        parent = {
            "mlflow.parentRunId": self.run_id,
            "sweep": self.run_id,
            "sweep.job": name,
            "sweep.repeats": without_seed(name),
        }
        run = self.client.create_run(
            self.experiment_id, self.clock, {**parent, **tags}, name
        ).info.run_id
        given = {
            "accumulation.factor": factor,
            "derived.factor": factor,
            "derived.effective_batch_size": batch,
        }
        given |= {
            "derived.micro_batch_size": batch // factor,
            "seed": seed,
            "hardware.precision": "float32",
            **params,
        }
        every = {
            "train/examples_seen": [batch * (update + 1) for update in range(updates)],
            "train/effective_batch_size": [batch] * updates,
            "train/learning_rate": [0.1] * updates,
            "perf/update_seconds": [seconds] * updates,
            "perf/examples_per_second": [batch / seconds] * updates,
            "perf/peak_memory_bytes": [memory] * updates,
        }
        points = []
        for key, curve in {**every, **curves}.items():
            rows = (
                curve.items()
                if isinstance(curve, Mapping)
                else enumerate(curve, start=1)
            )
            points += [
                Metric(key, float(value), self.clock + update, update)
                for update, value in rows
            ]
        self.client.log_batch(
            run, params=[Param(key, str(value)) for key, value in given.items()]
        )
        for first in range(0, len(points), MOST):
            self.client.log_batch(run, metrics=points[first : first + MOST])
        self.clock += 1000 + int(1000 * seconds * updates)
        if status != "RUNNING":
            self.client.set_terminated(run, status, self.clock - 500)
        return run

    def end(self, status: str = "FINISHED") -> None:
        self.client.set_terminated(self.run_id, status)

    def tag(self, run: str, **tags: str) -> None:
        self.client.log_batch(
            run, tags=[RunTag(key, value) for key, value in tags.items()]
        )


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
    """Return a finished job without a store, whose val/loss falls straight from `start` to `ends`.

    It sees 1024 examples an epoch, and takes `seconds` for eight of them.
    """
    steps = 1024 // batch * np.arange(1, epochs + 1)
    losses = start + (ends - start) * np.arange(1, epochs + 1) / epochs
    curves = {
        "train/loss": losses,
        "val/loss": losses,
        "train/examples_seen": batch * steps.astype(float),
    }
    curves["perf/update_seconds"] = np.full(epochs, seconds * batch / 8)
    curves["perf/peak_memory_bytes"] = np.full(epochs, (100 + factor) * 2.0**20)
    made = {key: Curve(steps, values) for key, values in curves.items()}
    return JobResult(
        name,
        name,
        "FINISHED",
        curves=made,
        factor=factor,
        batch=batch,
        micro=batch // factor,
    )


def swept(jobs: list[JobResult]) -> Comparison:
    """Return a finished sweep of `jobs`, without a store."""
    return Comparison("sqlite:///none.db", "0" * 32, "made", "FINISHED", [], jobs)


def store(folder: Path) -> Store:
    """Return a new store, where a command in `folder` looks for it."""
    shared.place_store(folder)
    return Store(f"sqlite:///{folder}/mlruns/mlflow.db")


def at_fixed_micro_batch(
    store: Store,
    seeds: Sequence[int] = (0, 1, 2),
    critical: float = 200.0,
    noise_scale: float = 190.0,
) -> Made:
    """Batches of 32 to 512 whose examples to a loss follow E = 3200 · (1 + B / critical), in units of 2 − loss.

    The losses fall straight from 2, at a rate per example of 1 / E; each seed is 1% slower than the one before.
    All see the same examples, so that the slowest one ends a little below a loss of 1: that is the lowest that all
    reach. An update of 32 examples takes 10 ms: 3200 examples take a second in every job. The noise scale is
    negative until a loss of 1.4, as an estimate may be, `noise_scale` until 0.8, then ten times that.
    """
    factors = (1, 2, 4, 8, 16)
    names = [
        f"factor={f} batch={32 * f} seed={seed}" for f in factors for seed in seeds
    ]
    made = Made(
        store, names, ["accumulation.factor", "seed"], "factor_at_fixed_micro_batch"
    )
    horizon = 512 * int(np.ceil(3200 * (1 + 512 / critical) * 1.03 / 512))
    for factor in factors:
        for seed in seeds:
            batch, name = (
                32 * factor,
                f"factor={factor} batch={32 * factor} seed={seed}",
            )
            examples = batch * np.arange(1, horizon // batch + 1)
            loss = np.maximum(2 - examples / cost_of(batch, seed, critical), 0.01)
            steps = np.unique(np.linspace(1, len(loss), 40).astype(int))
            validated = {int(step): float(loss[step - 1]) for step in steps}
            wave = 1 + 0.03 * np.sin(np.arange(len(loss)) * 2.4) / np.sqrt(factor)
            curves: dict[str, Any] = {
                "train/loss": loss * wave,
                "train/accuracy": 1 - loss / 2,
                "val/loss": validated,
            }
            curves["val/accuracy"] = {
                step: 1 - value / 2 for step, value in validated.items()
            }
            if factor > 1:
                scales = np.where(loss > 0.8, noise_scale, 10 * noise_scale)
                curves["train/gradient_noise_scale"] = np.where(loss > 1.4, -5, scales)
            seconds, memory = 0.01 * factor, (300 + factor) * 2**20
            made.job(
                name,
                curves,
                factor=factor,
                batch=batch,
                seed=seed,
                seconds=seconds,
                memory=memory,
            )
    made.end()
    return made


def cost_of(batch: int, seed: int, critical: float = 200.0) -> float:
    """Examples in which the loss of `at_fixed_micro_batch` falls by 1."""
    return 3200 * (1 + batch / critical) * (1 + 0.01 * seed)


def at_fixed_batch(store: Store, precision: str, updates: int = 120) -> Made:
    """Factors 1, 2, 4 at a batch of 64, in `precision`; the loss falls from 1.98 by 1% an update.

    In float32 factor 2 is apart by 1e-7 · 1.1^(update−1) and factor 4 by half of
    that, so that factor 2 exceeds 1e-6 first at update 26, 1e-3 at 98, and 1e-2 never within 120; in float64 both
    are apart by 1e-15 throughout.
    """
    names = [f"factor={factor}" for factor in (1, 2, 4)]
    made = Made(
        store,
        names,
        ["accumulation.factor"],
        f"factor_at_fixed_effective_batch {precision}",
    )
    steps = np.arange(updates)
    for factor, share in ((1, 0.0), (2, 1.0), (4, 0.5)):
        apart = share * (
            1e-7 * 1.1**steps if precision == "float32" else 1e-15 + 0 * steps
        )
        curves = {"train/loss": 2 * 0.99 ** (steps + 1) * (1 - apart)}
        settings = {"hardware.precision": precision}
        made.job(
            f"factor={factor}",
            curves,
            factor=factor,
            seconds=0.01 * (1 + factor / 10),
            params=settings,
        )
    made.end()
    return made
