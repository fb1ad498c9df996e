"""The results of updates on their way to the log: kept on the device, fetched in groups, written as rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import tensorflow as tf

from pipeline.accumulation import NoiseScale
from pipeline.config.sizes import Plan
from pipeline.training.best_evaluation import Best
from pipeline.training.progress import Progress

FETCH_SECONDS = 1.0  # how long results may stay on the device
FETCH_UPDATES = 200  # how many results may


class NonFiniteError(ArithmeticError):
    """The loss or the gradient is NaN or infinite."""


class Log(Protocol):
    """Where rows go: `pipeline.tracking.tracker.Tracker`, or nowhere."""

    def update(
        self, update: int, results: Mapping[str, float], performance: Mapping[str, float], at: float
    ) -> None: ...

    def validation(self, update: int, results: Mapping[str, float]) -> None: ...

    def cut(self, plan: Plan) -> None: ...

    def test(self, update: int, results: Mapping[str, float]) -> None: ...

    def trained(self, updates: int, stopped_by: str | None, best: Best | None) -> None: ...


class Nowhere:
    """The log of a worker beside the chief, which logs for all."""

    def update(
        self, update: int, results: Mapping[str, float], performance: Mapping[str, float], at: float
    ) -> None: ...

    def validation(self, update: int, results: Mapping[str, float]) -> None: ...

    def cut(self, plan: Plan) -> None: ...

    def test(self, update: int, results: Mapping[str, float]) -> None: ...

    def trained(self, updates: int, stopped_by: str | None, best: Best | None) -> None: ...


@dataclass
class Recorder:
    """Keeps each update's results on the device and fetches them in groups: reading one waits for the device."""

    log: Log
    plan: Plan
    log_every: int  # updates from one logged row to the next; `finish` logs the last one
    peak_memory: Callable[[], int]  # bytes, so far
    progress: Progress
    skips: bool = False  # the optimizer skips an update whose gradient is not finite, as a `LossScaleOptimizer` does
    raises: bool = True  # of a loss that is not finite; a worker beside the chief leaves that to it
    names: tuple[str, ...] = ()  # of an update's results, in their order
    last: dict[str, float] = field(default_factory=dict)  # results of the latest update that was fetched
    _traced: bool = False  # an update that is cut like this was
    _skipped: int = 0
    _noise: NoiseScale = field(default_factory=NoiseScale)
    _unlogged: tuple[Any, ...] = ()  # the latest row, where `log_every` left it out
    _epoch_sums: dict[str, float] = field(default_factory=dict)
    _epoch_examples: int = 0
    _pending: list[tuple[int, float, tf.Tensor]] = field(default_factory=list)
    _since: float = field(default_factory=time.perf_counter)

    def add(self, update: int, results: tf.Tensor) -> None:
        """Keep the results of `update`, a vector in the order of `names`; fetch when enough are waiting."""
        self._pending.append((update, time.time(), results))
        waited = time.perf_counter() - self._since
        # The first update here is traced as it runs: a group of its own, so that it spoils no other's seconds.
        first, self._traced = not self._traced, True
        if first or waited >= FETCH_SECONDS or len(self._pending) >= FETCH_UPDATES:
            self.fetch()

    def fetch(self) -> None:
        """Write the rows of all kept results.

        Raises:
            NonFiniteError: at the first update whose loss or gradient is not finite; its row is written too.
        """
        if not self._pending:
            return
        pending = list(self._pending)
        fetched = tf.stack([results for _, _, results in pending]).numpy().tolist()
        performance = self._performance([update for update, _, _ in pending])
        for (update, at, _), values in zip(pending, fetched, strict=True):
            del self._pending[0]  # a row at a time: what an interrupt leaves here is fetched at the end of the run
            self.last = self._results(dict(zip(self.names, values, strict=True)))
            wrong = self._non_finite(self.last)
            self._add_to_epoch(update)
            self._unlogged = update, self.last, performance, at
            if wrong or update % self.log_every == 0:
                self._log_last()
            if wrong:
                self._pending.clear()  # of weights that are not finite
                values_of = " and ".join(f"{name}={self.last[name]}" for name in wrong)
                group = f"updates {pending[0][0]} to {pending[-1][0]}"
                raise NonFiniteError(f"{values_of} at update {update}, found when {group} were fetched")
        self.progress.show(pending[-1][0], self.last, performance["examples_per_second"])

    def finish(self) -> None:
        """Fetch what is left, and log the last update whatever `log_every` says."""
        self.fetch()
        self._log_last()

    def cut(self, plan: Plan) -> None:
        """Go on with a plan that is cut otherwise; call it with nothing left to fetch."""
        self.plan, self._traced = plan, False
        self.log.cut(plan)

    def restart_clock(self) -> None:
        """Exclude the time since the last fetch from the update times."""
        self._since = time.perf_counter()

    def epoch_means(self) -> dict[str, float]:
        """Return the means over the epoch, each update weighted by its examples; start the next epoch's."""
        means = {name: total / self._epoch_examples for name, total in self._epoch_sums.items()}
        self._epoch_sums, self._epoch_examples = {}, 0
        return means

    def get_state(self) -> dict[str, Any]:
        """Return all that later rows depend on, as JSON takes it; call it with nothing left to fetch."""
        return {
            "last": dict(self.last),
            "skipped": self._skipped,
            "noise": self._noise.get_state(),
            "unlogged": list(self._unlogged),
            "epoch_sums": dict(self._epoch_sums),
            "epoch_examples": self._epoch_examples,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `get_state` has returned."""
        self.last, self._skipped = dict(state["last"]), state["skipped"]
        self._noise.set_state(state["noise"])
        self._unlogged = tuple(state["unlogged"])
        self._epoch_sums, self._epoch_examples = dict(state["epoch_sums"]), state["epoch_examples"]

    def _performance(self, updates: list[int]) -> dict[str, float]:
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        return {
            "update_seconds": seconds / len(updates),
            "examples_per_second": sum(map(self.plan.batch_size, updates)) / seconds,
            "peak_memory_bytes": self.peak_memory(),
            **({"micro_batch_size": self.plan.batching.micro_batch_size} if self.plan.before else {}),
        }

    def _results(self, results: dict[str, float]) -> dict[str, float]:
        """Return an update's results with the gradient noise scale so far in place of its two estimates."""
        if "gradient_variance" in results:
            self._noise.add(results.pop("gradient_variance"), results.pop("gradient_square"))
            if self._noise.value is not None:
                results["gradient_noise_scale"] = self._noise.value
        return results

    def _non_finite(self, results: dict[str, float]) -> list[str]:
        """Return which results end the run; a skipped update, which ends none, is counted in `results`."""
        wrong = [name for name in ("loss", "gradient_norm") if not math.isfinite(results[name])]
        if self.skips:
            skipped = wrong == ["gradient_norm"]
            self._skipped += skipped
            results["skipped_updates"] = self._skipped
            wrong = [] if skipped else wrong
        return wrong if self.raises else []

    def _log_last(self) -> None:
        row, self._unlogged = self._unlogged, ()
        if row:
            self.log.update(*row)

    def _add_to_epoch(self, update: int) -> None:
        examples = self.plan.batch_size(update)
        self._epoch_examples += examples
        for name, value in self.last.items():
            self._epoch_sums[name] = self._epoch_sums.get(name, 0.0) + value * examples
