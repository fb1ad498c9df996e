"""Passes the results of updates to the tracker.

Results are kept on the device, fetched in groups, and logged as rows.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

from pipeline.accumulation import NoiseScale
from pipeline.config.plan import Plan
from pipeline.tracking.tracker import Tracker
from pipeline.training.evaluator import Best
from pipeline.training.progress import Progress

# An update triggers a fetch if the last fetch was at least this many seconds ago.
FETCH_SECONDS = 1.0
FETCH_UPDATES = 200  # maximum number of updates between two fetches
# Results of single updates, of which only averages over updates are logged.
NOISE_ESTIMATES = ("gradient_variance", "gradient_square")


class NonFiniteError(ArithmeticError):
    """The loss or the gradient is NaN or infinite.

    Args:
        message: the message, in one line.
        update: the number of the first update that is not finite.
    """

    def __init__(self, message: str, update: int):
        super().__init__(message)
        self.update = update


class UpdateResults(NamedTuple):
    """The results of an update, as scalar tensors or, once fetched, as numbers.

    Attributes:
        metrics: the loss, the metrics, and what else an update measures, by name.
        tokens: the number of tokens in the effective batch, or NaN if not counted.
        shapes_compiled: identifies the shapes that XLA compiled, see
            `accumulation.internals.shapes_compiled`; 0 without XLA.
    """

    metrics: dict[str, Any]
    tokens: Any = math.nan
    shapes_compiled: Any = 0.0


@dataclass
class ResultLayout:
    """Packs the results of an update into one vector, so that one copy fetches them.

    Attributes:
        names: the names of the metrics, in the order of the vector. `pack` sets them;
            the metrics are followed by the other fields of `UpdateResults`.
    """

    names: tuple[str, ...] = ()

    def pack(self, results: UpdateResults) -> tf.Tensor:
        """Return a float64 vector of the results."""
        metrics, *others = results
        self.names = tuple(metrics)
        values = [*metrics.values(), *others]
        return tf.stack([tf.cast(value, tf.float64) for value in values])

    def unpack(self, vector: Sequence[Any]) -> UpdateResults:
        """Return the results that were packed into a vector."""
        count = len(self.names)
        metrics = dict(zip(self.names, vector[:count], strict=True))
        return UpdateResults(metrics, *vector[count:])


class _UnfetchedUpdate(NamedTuple):
    """An update whose results are still on the device.

    Attributes:
        update: the update's number.
        wall_time: the timestamp of its row, in seconds since the Unix epoch.
        results: the packed results.
        traces: number of times the update function had been traced so far.
        called_at: when the results were added, on the clock of `time.perf_counter`.
    """

    update: int
    wall_time: float
    results: tf.Tensor
    traces: int
    called_at: float


@dataclass
class _EpochMeans:
    """Means of results over the updates of one epoch, weighted by examples.

    A result that is missing in some updates is averaged over the others.

    Attributes:
        sums: the sums of each result times the number of examples in the update.
        examples: the number of examples in each sum.
    """

    sums: dict[str, float] = field(default_factory=dict)
    examples: dict[str, int] = field(default_factory=dict)

    def add(self, results: Mapping[str, float], examples: int) -> None:
        """Add the results of an update of `examples` examples."""
        for name, value in results.items():
            self.sums[name] = self.sums.get(name, 0.0) + value * examples
            self.examples[name] = self.examples.get(name, 0) + examples

    def means(self) -> dict[str, float]:
        means = {}
        for name, total in self.sums.items():
            means[name] = total / self.examples[name]
        return means

    def set_state(self, sums: dict[str, float], examples: dict[str, int] | int) -> None:
        """Restore the fields. Older checkpoints have one number of examples for all."""
        if isinstance(examples, int):
            examples = dict.fromkeys(sums, examples)
        self.sums = dict(sums)
        self.examples = dict(examples)


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
        layout: packs and unpacks the results of an update.
        last: results of the last update that was fetched.
        compile_seconds: total time of the updates that were traced or compiled.
    """

    tracker: Tracker | None
    plan: Plan
    log_every: int
    peak_memory: Callable[[], int]
    progress: Progress
    skips: bool = False
    share_of_peak: float = 0.0
    layout: ResultLayout = field(default_factory=ResultLayout)
    last: dict[str, float] = field(default_factory=dict)
    compile_seconds: float = 0.0
    # Kinds of updates so far: pairs of the number of traces and the result of
    # `shapes_compiled`. The first update of a kind includes tracing or compilation.
    _compiled_kinds: set[tuple[int, float]] = field(default_factory=set)
    _skipped: int = 0
    _noise: NoiseScale = field(default_factory=NoiseScale)
    # The arguments of `Tracker.update` for the last row, or () once the row is logged.
    _unlogged: tuple[Any, ...] = ()
    _epoch: _EpochMeans = field(default_factory=_EpochMeans)
    _unfetched: list[_UnfetchedUpdate] = field(default_factory=list)
    # When the last fetch ended, on the clock of `time.perf_counter`, plus the time of the
    # pauses since then.
    _clock_start: float = field(default_factory=time.perf_counter)

    def add(self, update: int, results: tf.Tensor, traces: int) -> None:
        """Keep the results of an update; fetch all kept results if that is due.

        Args:
            update: the update's number, counted from 1.
            results: the update's results, packed by `layout`.
            traces: number of times the update function has been traced so far.
        """
        now = time.perf_counter()
        self._unfetched.append(
            _UnfetchedUpdate(update, time.time(), results, traces, now)
        )
        count = len(self._unfetched)
        if self._compiled_kinds:
            due = now - self._clock_start >= FETCH_SECONDS or count >= FETCH_UPDATES
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
        vectors = tf.stack([entry.results for entry in group]).numpy().tolist()
        fetched = [self.layout.unpack(vector) for vector in vectors]
        performance = self._performance(group, fetched)
        for entry, results in zip(group, fetched, strict=True):
            # Remove each entry just before it is logged, so that after an interruption,
            # the remaining entries are fetched at the end of the run.
            del self._unfetched[0]
            self.last = results.metrics
            self._smooth_noise(self.last)
            self._add_to_epoch(entry.update, self.last)
            non_finite = self._non_finite(self.last)

            self._unlogged = (entry.update, self.last, performance, entry.wall_time)
            if non_finite or entry.update % self.log_every == 0:
                self._log_last()
            if non_finite:
                self._unfetched.clear()  # Later updates use non-finite weights.
                values = [f"{name}={self.last[name]}" for name in non_finite]
                raise NonFiniteError(
                    f"{' and '.join(values)} at update {entry.update}, found when "
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
        """Log the results over a split.

        Args:
            split: `val` or `test`.
            update: number of updates completed before the evaluation.
            results: the loss and the metrics.
        """
        if self.tracker is not None:
            if split == "test":
                self.tracker.test(update, results)
            else:
                self.tracker.validation(update, results)
        self.progress.evaluated(split, update, results)

    def trained(self, updates: int, stopped_by: str | None, best: Best | None) -> None:
        """Log that training has ended or was interrupted after `updates` updates."""
        if self.tracker is not None:
            self.tracker.trained(updates, stopped_by, best)

    def cut(self, plan: Plan) -> None:
        """Continue with a plan that has other micro-batches. Call `fetch` first."""
        self.plan = plan
        self._compiled_kinds = set()
        if self.tracker is not None:
            self.tracker.cut(plan)

    def start_clock(self) -> None:
        """Count the time from now on as the time of updates."""
        self._clock_start = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block, do not count the time as the time of updates.

        All kept results are fetched first, so that the device has computed them. Do not
        nest such blocks.
        """
        self.fetch()
        paused_at = time.perf_counter()
        yield
        self._clock_start += time.perf_counter() - paused_at

    def epoch_means(self) -> dict[str, float]:
        """Return the mean results over the epoch of the last update that was fetched.

        Each update is weighted by its number of examples. `skipped_updates` is not a
        mean, but the number since the start of the run.
        """
        means = self._epoch.means()
        if self.skips:
            means["skipped_updates"] = self._skipped
        return means

    def get_state(self) -> dict[str, Any]:
        """Return the state on which later rows depend, as JSON. Call `fetch` first."""
        return {
            "last": dict(self.last),
            "skipped": self._skipped,
            "noise": self._noise.get_state(),
            "unlogged": list(self._unlogged),
            "epoch_sums": dict(self._epoch.sums),
            "epoch_examples": dict(self._epoch.examples),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `get_state` returned."""
        self.last = dict(state["last"])
        self._skipped = state["skipped"]
        self._noise.set_state(state["noise"])
        self._unlogged = tuple(state["unlogged"])
        self._epoch.set_state(state["epoch_sums"], state["epoch_examples"])

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
        """Add the results of an update to the means over its epoch."""
        _, index = self.plan.place(update - 1)
        if index == 0:
            self._epoch = _EpochMeans()
        self._epoch.add(results, self.plan.batch_size(update))

    def _performance(
        self, group: Sequence[_UnfetchedUpdate], fetched: Sequence[UpdateResults]
    ) -> dict[str, float]:
        """Return the performance over a group of updates and their results."""
        computed: list[int] = []  # positions of updates that compiled nothing
        compiling = 0.0  # seconds
        called_before = self._clock_start
        for i, entry in enumerate(group):
            kind = (entry.traces, fetched[i].shapes_compiled)
            if kind in self._compiled_kinds:
                computed.append(i)
            else:
                compiling += entry.called_at - called_before
            self._compiled_kinds.add(kind)
            called_before = entry.called_at

        now = time.perf_counter()
        seconds = now - self._clock_start - compiling
        self._clock_start = now
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
            tokens = sum(fetched[i].tokens for i in computed)
            if not math.isnan(tokens):
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
