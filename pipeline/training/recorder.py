"""Passes the results of updates to the tracker.

Results are kept on the device, fetched in groups, and logged as rows.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

from pipeline.accumulation import NoiseScale
from pipeline.common.errors import say
from pipeline.config.plan import RunPlan
from pipeline.tracking.journal_lines import LOSS_EXPLODED
from pipeline.tracking.tracker import Tracker
from pipeline.training.evaluator import Best
from pipeline.training.explosion import Explosion
from pipeline.training.progress import Progress

# An update triggers a fetch if the last fetch was at least this many seconds ago.
FETCH_SECONDS = 1.0
FETCH_UPDATES = 200  # maximum number of updates between two fetches
# Results that are logged only as averages over updates.
NOISE_ESTIMATES = ("gradient_variance", "gradient_square")
# Results of a cut by tokens, from which `_CutTotals` computes the logged values.
CUT_COUNTS = ("micro_steps", "tokens", "positions")


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
        metrics: the loss, the metrics and the other measurements of an update, by name.
        tokens: the number of tokens in the effective batch, or NaN if not counted.
        shapes_compiled: identifies the shapes that XLA compiled (see
            `accumulation.internals.shapes_compiled`); 0 without XLA.
        lengths_compiled: in a cut by tokens, an integer whose bit i is set if XLA
            computed a micro-batch of the i-th length; see `Update.compiled_lengths`.
    """

    metrics: dict[str, Any]
    tokens: Any = math.nan
    shapes_compiled: Any = 0.0
    lengths_compiled: Any = 0.0


@dataclass
class ResultLayout:
    """Packs the results of an update into one vector, so that one copy fetches them.

    Attributes:
        names: the names of the metrics, which `pack` sets. The vector holds the metrics
            in this order, then the other fields of `UpdateResults`.
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


class _FetchedUpdate(NamedTuple):
    """An update whose results have been fetched, as numbers."""

    entry: _UnfetchedUpdate
    results: UpdateResults


class _Row(NamedTuple):
    """The row of an update; the arguments of `Tracker.update`."""

    update: int
    results: dict[str, float]
    performance: dict[str, float]
    wall_time: float


class _TimedUpdates(NamedTuple):
    """The updates of a group that compiled nothing, and their total time in seconds."""

    updates: list[_FetchedUpdate]
    seconds: float


@dataclass
class _EpochMeans:
    """Means of results over the updates of one epoch, weighted by examples.

    A result that is missing in some updates is averaged over the others.

    Attributes:
        sums: for each result, the sum over updates of its value times the number of
            examples.
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
        """Restore the fields. Older checkpoints have one number for `examples`."""
        if isinstance(examples, int):
            examples = dict.fromkeys(sums, examples)
        self.sums = dict(sums)
        self.examples = dict(examples)


@dataclass
class _CutTotals:
    """What the updates of a cut by tokens have computed so far, over all replicas.

    Attributes:
        micro_steps: number of micro-batches.
        tokens: number of positions in ragged inputs, without padding.
    """

    micro_steps: int = 0
    tokens: int = 0

    def add(self, results: dict[str, float]) -> "_CutRow":
        """Add the counts of an update, and remove them from its results.

        In a cut by examples, there are none.
        """
        if "positions" not in results:
            return _CutRow({}, {})
        micro_steps, tokens, positions = [results.pop(name) for name in CUT_COUNTS]
        self.micro_steps += round(micro_steps)
        self.tokens += round(tokens)
        training = {
            "micro_steps": self.micro_steps,
            "tokens": tokens,
            "tokens_seen": self.tokens,
            "accumulation_factor": micro_steps,
        }
        return _CutRow(training, {"padding_share": 1 - tokens / positions})


class _CutRow(NamedTuple):
    """The part of an update's row that is about its cut by tokens.

    Attributes:
        training: metrics to log as `train/…`.
        performance: metrics to log as `perf/…`.
    """

    training: dict[str, float]
    performance: dict[str, float]


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
        train_seconds: total time of the other updates.
        updates: number of updates in this process whose results were fetched.
    """

    tracker: Tracker | None
    plan: RunPlan
    log_every: int
    peak_memory: Callable[[], int]
    progress: Progress
    skips: bool = False
    share_of_peak: float = 0.0
    layout: ResultLayout = field(default_factory=ResultLayout)
    last: dict[str, float] = field(default_factory=dict)
    compile_seconds: float = 0.0
    train_seconds: float = 0.0
    updates: int = 0
    _explosion: Explosion = field(default_factory=Explosion)
    _began: float = field(default_factory=time.perf_counter)
    # The programs of the updates so far; see `_programs_of`.
    _compiled_programs: set[tuple[Any, ...]] = field(default_factory=set)
    _skipped: int = 0
    _noise: NoiseScale = field(default_factory=NoiseScale)
    _unlogged: _Row | None = None  # the last row, until it is logged
    _epoch: _EpochMeans = field(default_factory=_EpochMeans)
    _cut_totals: _CutTotals = field(default_factory=_CutTotals)
    _unfetched: list[_UnfetchedUpdate] = field(default_factory=list)
    # The time from which the time of updates is counted, by `time.perf_counter`: that
    # of the last fetch, moved forward by the pauses since then.
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
        if self._compiled_programs:
            due = now - self._clock_start >= FETCH_SECONDS or count >= FETCH_UPDATES
        else:
            # Do not fetch after the first update alone: its time includes tracing.
            due = count > 1
        if due:
            self.fetch()

    def fetch(self) -> None:
        """Fetch all kept results from the device, and log their rows.

        Raises:
            NonFiniteError: on the chief, the loss or the gradient of an update is not
                finite, and the optimizer has not skipped the update. The row of the
                update has been logged.
        """
        if not self._unfetched:
            return
        group = list(self._unfetched)
        vectors = tf.stack([entry.results for entry in group]).numpy().tolist()
        fetched = []
        for entry, vector in zip(group, vectors, strict=True):
            fetched.append(_FetchedUpdate(entry, self.layout.unpack(vector)))
        performance = self._performance(self._count_time(fetched))
        for entry, results in fetched:
            # Remove each entry just before it is logged, so that after an interruption,
            # the remaining entries are fetched at the end of the run.
            del self._unfetched[0]
            self.updates += 1
            self.last = results.metrics
            self._check_for_explosion(entry.update)
            self._smooth_noise(self.last)
            cut_row = self._cut_totals.add(self.last)
            self._add_to_epoch(entry.update, self.last)
            non_finite = _non_finite(self.last)
            if self.skips:
                # The optimizer has skipped an update with a non-finite gradient: the
                # run continues.
                if non_finite == ["gradient_norm"]:
                    self._skipped += 1
                    non_finite = []
                self.last["skipped_updates"] = self._skipped

            self._unlogged = _Row(
                entry.update,
                self.last | cut_row.training,
                performance | cut_row.performance,
                entry.wall_time,
            )
            # Only the chief, which has a tracker, ends the run.
            fails = bool(non_finite) and self.tracker is not None
            if fails or entry.update % self.log_every == 0:
                self._log_last()
            if fails:
                self._unfetched.clear()  # Later updates use non-finite weights.
                values = [f"{name}={self.last[name]}" for name in non_finite]
                raise NonFiniteError(
                    f"{' and '.join(values)} at update {entry.update}, found when "
                    f"updates {group[0].update} to {group[-1].update} were fetched",
                    entry.update,
                )
        examples_per_second = performance.get("examples_per_second")
        self.progress.show(
            group[-1].update, self.last, examples_per_second, self.compile_seconds
        )

    def finish(self) -> None:
        """Fetch the remaining results. Log the last row, whatever `log_every` is."""
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

    def log_end(self, updates: int, stopped_by: str | None, best: Best | None) -> None:
        """Log that training has ended or was interrupted after `updates` updates."""
        if self.tracker is not None:
            self.tracker.summary(updates, stopped_by, best)

    def cut(self, plan: RunPlan) -> None:
        """Continue with a plan that has other micro-batches. Call `fetch` first."""
        self.plan = plan
        self._compiled_programs = set()
        if self.tracker is not None:
            self.tracker.change_plan(plan)

    def start_clock(self) -> None:
        """Count the time from now on as the time of updates."""
        self._clock_start = time.perf_counter()
        self._began = self._clock_start
        self.progress.start_clock()

    def total_seconds(self) -> float:
        """Return the time since `start_clock`."""
        return time.perf_counter() - self._began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent in the block from the time of updates.

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
        unlogged: list[Any] = []
        if self._unlogged is not None:
            unlogged = list(self._unlogged)
        return {
            "last": dict(self.last),
            "skipped": self._skipped,
            "noise": self._noise.get_state(),
            "unlogged": unlogged,
            "epoch_sums": dict(self._epoch.sums),
            "epoch_examples": dict(self._epoch.examples),
            "explosion": asdict(self._explosion),
            "cut": asdict(self._cut_totals),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `get_state` returned."""
        self.last = dict(state["last"])
        self._skipped = state["skipped"]
        self._noise.set_state(state["noise"])
        self._unlogged = None
        if state["unlogged"]:
            self._unlogged = _Row(*state["unlogged"])
        self._epoch.set_state(state["epoch_sums"], state["epoch_examples"])
        # Older checkpoints lack it: the next loss then counts as the first one.
        explosion = state.get("explosion") or {}
        self._explosion = Explosion(explosion.get("first"), explosion.get("update"))
        # Older checkpoints lack it: no batches were cut by tokens.
        self._cut_totals = _CutTotals(**(state.get("cut") or {}))

    def _check_for_explosion(self, update: int) -> None:
        """Print and tag once that the loss has exploded; the run continues."""
        description = self._explosion.add(update, self.last["loss"])
        if description and self.tracker is not None:
            say(f"the loss has exploded: {description}")
            self.tracker.tag({LOSS_EXPLODED: description})

    def _smooth_noise(self, results: dict[str, float]) -> None:
        """Replace the noise estimates of an update by averages and the noise scale.

        In an update that was not measured, the estimates are NaN, and the last averages
        are logged again. Without `noise_scale_every`, there are no estimates, and the
        results are left unchanged.
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

    def _count_time(self, group: Sequence[_FetchedUpdate]) -> _TimedUpdates:
        """Count the time of a group of updates up to now, and start the clock again.

        The time of updates that were traced or compiled is added to `compile_seconds`.
        The other updates are returned with their time.
        """
        computed: list[_FetchedUpdate] = []
        compiling = 0.0  # seconds
        called_before = self._clock_start
        for fetched in group:
            entry = fetched.entry
            programs = _programs_of(fetched)
            if programs <= self._compiled_programs:
                computed.append(fetched)
            else:
                compiling += entry.called_at - called_before
            self._compiled_programs |= programs
            called_before = entry.called_at

        now = time.perf_counter()
        seconds = now - self._clock_start - compiling
        self._clock_start = now
        self.compile_seconds += compiling
        self.train_seconds += seconds
        return _TimedUpdates(computed, seconds)

    def _performance(self, timed: _TimedUpdates) -> dict[str, float]:
        """Return the performance up to now; the speed is that of the timed updates."""
        performance: dict[str, float] = {
            "compile_seconds": self.compile_seconds,
            "peak_memory_bytes": self.peak_memory(),
        }
        if timed.updates:
            examples = 0
            tokens = 0.0
            for entry, results in timed.updates:
                examples += self.plan.batch_size(entry.update)
                tokens += results.tokens
            performance["update_seconds"] = timed.seconds / len(timed.updates)
            performance["examples_per_second"] = examples / timed.seconds
            if not math.isnan(tokens):
                performance["tokens_per_second"] = tokens / timed.seconds
            if self.share_of_peak:
                utilization = self.share_of_peak * examples / timed.seconds
                performance["model_flops_utilization"] = utilization
        if self.plan.before:
            cut = self.plan.batching
            unit = "size" if cut.micro_batch_tokens is None else "tokens"
            performance[f"micro_batch_{unit}"] = cut.limit
        return performance

    def _log_last(self) -> None:
        row = self._unlogged
        self._unlogged = None
        if row is not None and self.tracker is not None:
            self.tracker.update(*row)


def _programs_of(fetched: _FetchedUpdate) -> set[tuple[Any, ...]]:
    """Return what identifies the programs that an update has run.

    The first update with a program includes the time of its tracing or compilation.
    """
    traces = fetched.entry.traces
    programs: set[tuple[Any, ...]] = {(traces, fetched.results.shapes_compiled)}
    lengths = int(fetched.results.lengths_compiled)
    for index in range(lengths.bit_length()):
        if lengths >> index & 1:
            programs.add((traces, "length", index))
    return programs


def _non_finite(results: Mapping[str, float]) -> list[str]:
    """Return which of the loss and the gradient norm are not finite."""
    non_finite = []
    for name in ("loss", "gradient_norm"):
        if not math.isfinite(results[name]):
            non_finite.append(name)
    return non_finite
