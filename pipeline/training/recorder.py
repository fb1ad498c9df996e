"""Passes the results of updates to the tracker.

Results are kept on the device, fetched in groups, and logged as one row per update.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any, NamedTuple

import tensorflow as tf

from pipeline.accumulation import NoiseScale
from pipeline.config.plan import Plan
from pipeline.tracking.tracker import Tracker
from pipeline.tracking.user_metrics import UserMetrics
from pipeline.training.evaluator import Best
from pipeline.training.progress import Progress

FETCH_SECONDS = 1.0  # time after which an update triggers a fetch of the results
FETCH_UPDATES = 200  # maximum number of updates between two fetches
TOKENS = "tokens"  # name of the token count among the results of an update


class NonFiniteError(ArithmeticError):
    """The loss or the gradient is NaN or infinite.

    Args:
        message: the message, in one line.
        update: the number of the first update that is not finite.
    """

    def __init__(self, message: str, update: int):
        super().__init__(message)
        self.update = update


class _UnfetchedUpdate(NamedTuple):
    """An update whose results are still on the device.

    Attributes:
        update: the update's number.
        wall_time: the timestamp of its row, in seconds since the Unix epoch.
        results: the vector of results, see `Recorder.add`.
        traces: number of times the update function had been traced so far.
        called_at: when the results were added, on the clock of `time.perf_counter`.
    """

    update: int
    wall_time: float
    results: tf.Tensor
    traces: int
    called_at: float


@dataclass
class Recorder:
    """Keeps the results of updates on the device and fetches them in groups.

    Reading a result in Python waits for the device, so reading a group waits only once.

    Attributes:
        tracker: logs the rows. None on a worker other than the chief, which logs for
            all workers.
        plan: counts examples, epochs and micro-steps of each update.
        log_every: updates between two logged rows. `finish` logs the last row anyway.
        peak_memory: returns the peak memory so far, in bytes.
        progress: shows the rows.
        skips: whether the optimizer skips an update whose gradient is not finite, as a
            `LossScaleOptimizer` does.
        share_of_peak: the fraction of the devices' peak FLOP/s that a training speed of
            one example per second uses, or 0 if unknown.
        tokens: counts the tokens in an effective batch, or None if examples are not
            sequences.
        names: names of the results of an update, in the order of the vector.
        traced: set once the update has been traced for the first time.
        last: results of the last update that was fetched.
        compile_seconds: total time of the updates that were traced or compiled.
        user_metrics: takes what the user's own code logs.
    """

    tracker: Tracker | None
    plan: Plan
    log_every: int
    peak_memory: Callable[[], int]
    progress: Progress
    skips: bool = False
    share_of_peak: float = 0.0
    tokens: Callable[[Any], tf.Tensor] | None = None
    names: tuple[str, ...] = ()
    traced: Event = field(default_factory=Event)
    last: dict[str, float] = field(default_factory=dict)
    compile_seconds: float = 0.0
    # Kinds of updates so far: pairs of the number of traces and the result of
    # `shapes_compiled`. The first update of a kind includes tracing or compilation.
    _compiled_kinds: set[tuple[int, float]] = field(default_factory=set)
    _skipped: int = 0
    _noise: NoiseScale = field(default_factory=NoiseScale)
    # The arguments of `Tracker.update` for the last row; empty once it is logged.
    _unlogged: tuple[Any, ...] = ()
    _epoch_sums: dict[str, float] = field(default_factory=dict)
    _epoch_examples: int = 0
    _unfetched: list[_UnfetchedUpdate] = field(default_factory=list)
    _last_fetch: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.user_metrics = UserMetrics(self.tracker)

    def add(self, update: int, results: tf.Tensor, traces: int) -> None:
        """Keep the results of an update; fetch all kept results if that is due.

        Args:
            update: the update's number, counted from 1.
            results: a vector in the order of `names`, followed by the result of
                `shapes_compiled`, or by 0 without XLA.
            traces: number of times the update function has been traced so far.
        """
        now = time.perf_counter()
        self._unfetched.append(
            _UnfetchedUpdate(update, time.time(), results, traces, now)
        )
        count = len(self._unfetched)
        if self._compiled_kinds:
            due = now - self._last_fetch >= FETCH_SECONDS or count >= FETCH_UPDATES
        else:
            # Do not fetch after the first update alone: its time includes tracing.
            due = count > 1
        if due:
            self.fetch()

    def fetch(self) -> None:
        """Fetch all kept results from the device, and log their rows.

        Raises:
            NonFiniteError: the loss or the gradient of an update is not finite. The row
                of that update has been logged.
        """
        if not self._unfetched:
            return
        group = list(self._unfetched)
        values_by_update = tf.stack([entry.results for entry in group]).numpy().tolist()
        performance = self._performance(group, values_by_update)
        for entry, values in zip(group, values_by_update, strict=True):
            # Remove results one at a time, so that after an interruption, the remaining
            # ones are fetched at the end of the run.
            del self._unfetched[0]
            self.last = dict(zip(self.names, values, strict=True))
            self.last.pop(TOKENS, None)
            self._smooth_noise(self.last)
            non_finite = self._non_finite(self.last)
            self._add_to_epoch(entry.update, self.last)

            self._unlogged = (entry.update, self.last, performance, entry.wall_time)
            if non_finite or entry.update % self.log_every == 0:
                self._log_last()
            if non_finite:
                self._unfetched.clear()  # Later updates have non-finite weights.
                results = [f"{name}={self.last[name]}" for name in non_finite]
                raise NonFiniteError(
                    f"{' and '.join(results)} at update {entry.update}, found when "
                    f"updates {group[0].update} to {group[-1].update} were fetched",
                    entry.update,
                )
        examples_per_second = performance.get("examples_per_second")
        self.progress.show(group[-1].update, self.last, examples_per_second)

    def finish(self) -> None:
        """Fetch the remaining results. Log the last row in spite of `log_every`."""
        self.fetch()
        self._log_last()

    def evaluated(self, split: str, update: int, results: Mapping[str, float]) -> None:
        """Log the results over a split; exclude the evaluation from the update times.

        Args:
            split: `val` or `test`.
            update: completed updates before the evaluation.
            results: the loss and the metrics.
        """
        if self.tracker is not None:
            if split == "test":
                self.tracker.test(update, results)
            else:
                self.tracker.validation(update, results)
        self.progress.evaluated(split, update, results)
        self.restart_clock()

    def trained(self, updates: int, stopped_by: str | None, best: Best | None) -> None:
        """Record that training has ended or was interrupted after `updates` updates."""
        if self.tracker is not None:
            self.tracker.summary(updates, stopped_by, best)

    def cut(self, plan: Plan) -> None:
        """Continue with a plan that has other micro-batches. Call `fetch` first."""
        self.plan = plan
        self._compiled_kinds = set()
        if self.tracker is not None:
            self.tracker.change_plan(plan)

    def restart_clock(self) -> None:
        """Exclude the time since the last fetch from the update times."""
        self._last_fetch = time.perf_counter()

    def epoch_means(self) -> dict[str, float]:
        """Return the mean results over the epoch, and start a new epoch.

        Each update is weighted by its number of examples.
        """
        means = {}
        for name, total in self._epoch_sums.items():
            means[name] = total / self._epoch_examples
        self._epoch_sums = {}
        self._epoch_examples = 0
        return means

    def get_state(self) -> dict[str, Any]:
        """Return the state that later rows depend on, for JSON. Call `fetch` first."""
        return {
            "last": dict(self.last),
            "skipped": self._skipped,
            "noise": self._noise.get_state(),
            "unlogged": list(self._unlogged),
            "epoch_sums": dict(self._epoch_sums),
            "epoch_examples": self._epoch_examples,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `get_state` returned."""
        self.last = dict(state["last"])
        self._skipped = state["skipped"]
        self._noise.set_state(state["noise"])
        self._unlogged = tuple(state["unlogged"])
        self._epoch_sums = dict(state["epoch_sums"])
        self._epoch_examples = state["epoch_examples"]

    def _smooth_noise(self, results: dict[str, float]) -> None:
        """Replace the noise estimates of an update by averages and the noise scale.

        Results without noise estimates are left unchanged.
        """
        if "gradient_variance" not in results:
            return
        variance = results.pop("gradient_variance")
        self._noise.add(variance, results.pop("gradient_square"))
        averages = self._noise.averages
        if averages is not None:
            results["gradient_variance"] = averages.variance
            results["gradient_squared_norm"] = averages.square
        if self._noise.value is not None:
            results["gradient_noise_scale"] = self._noise.value

    def _add_to_epoch(self, update: int, results: Mapping[str, float]) -> None:
        examples = self.plan.batch_size(update)
        self._epoch_examples += examples
        for name, value in results.items():
            total = self._epoch_sums.get(name, 0.0)
            self._epoch_sums[name] = total + value * examples

    def _performance(
        self, group: Sequence[_UnfetchedUpdate], values_by_update: list[list[float]]
    ) -> dict[str, float]:
        """Return the performance over a group of updates.

        The last value of each update, from `shapes_compiled`, is removed from
        `values_by_update`.
        """
        computed: list[int] = []  # positions of updates that compiled nothing
        compiling = 0.0  # seconds
        called_before = self._last_fetch
        for i, entry in enumerate(group):
            kind = (entry.traces, values_by_update[i].pop())
            if kind in self._compiled_kinds:
                computed.append(i)
            else:
                compiling += entry.called_at - called_before
            self._compiled_kinds.add(kind)
            called_before = entry.called_at

        now = time.perf_counter()
        seconds = now - self._last_fetch - compiling
        self._last_fetch = now
        self.compile_seconds += compiling

        performance: dict[str, float] = {
            "compile_seconds": self.compile_seconds,
            "peak_memory_bytes": self.peak_memory(),
        }
        if computed:
            # Measure the speed without updates that were traced or compiled.
            sizes = [self.plan.batch_size(group[i].update) for i in computed]
            examples = sum(sizes)
            performance["update_seconds"] = seconds / len(computed)
            performance["examples_per_second"] = examples / seconds
            if TOKENS in self.names:
                column = self.names.index(TOKENS)
                tokens = sum(values_by_update[i][column] for i in computed)
                performance["tokens_per_second"] = tokens / seconds
            if self.share_of_peak:
                utilization = self.share_of_peak * examples / seconds
                performance["model_flops_utilization"] = utilization
        if self.plan.before:
            micro_batch_size = self.plan.batching.micro_batch_size
            performance["micro_batch_size"] = micro_batch_size
        return performance

    def _non_finite(self, results: dict[str, float]) -> list[str]:
        """Return the names of non-finite results that end the run.

        An update that the optimizer skips for its gradient does not end the run; it is
        counted as `skipped_updates` in `results`. Only the chief ends the run: on other
        workers, the list is empty.
        """
        non_finite = []
        for name in ("loss", "gradient_norm"):
            if not math.isfinite(results[name]):
                non_finite.append(name)
        if self.skips:
            if non_finite == ["gradient_norm"]:
                self._skipped += 1
                non_finite = []
            results["skipped_updates"] = self._skipped
        if self.tracker is None:
            return []  # Only the chief ends the run.
        return non_finite

    def _log_last(self) -> None:
        row = self._unlogged
        self._unlogged = ()
        if row and self.tracker is not None:
            self.tracker.update(*row)
