"""Results of updates on their way to the tracker: kept on the device, fetched in groups, logged as rows."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import tensorflow as tf

from pipeline.accumulation import NoiseScale
from pipeline.config.plan import Plan
from pipeline.tracking.tracker import Tracker
from pipeline.training.evaluator import Best
from pipeline.training.progress import Progress

FETCH_SECONDS = 1.0  # for which results stay on the device, at most
FETCH_UPDATES = 200  # whose results stay there, at most
TOKENS = "tokens"  # a result of an update that is logged by the second


class NonFiniteError(ArithmeticError):
    """The loss or the gradient is NaN or infinite."""


@dataclass
class Recorder:
    """Keeps the results of updates on the device and fetches them in groups, as reading one waits for the device."""

    tracker: (
        Tracker | None
    )  # takes the rows; None in a worker other than the chief, which logs for all
    plan: Plan
    log_every: (
        int  # updates between two logged rows; `finish` logs the last one in any case
    )
    peak_memory: Callable[[], int]  # in bytes, so far
    progress: Progress
    skips: bool = False  # the optimizer skips an update whose gradient is not finite, as a `LossScaleOptimizer` does
    share_of_peak: float = (
        0.0  # of the devices' FLOP/s, that one example a second takes; 0 if unknown
    )
    tokens: Callable[[Any], tf.Tensor] | None = (
        None  # counts those of an effective batch, where examples are sequences
    )
    names: tuple[str, ...] = ()  # of an update's results, in their order
    traced: Event = field(
        default_factory=Event
    )  # set once the update is traced for the first time
    last: dict[str, float] = field(
        default_factory=dict
    )  # results of the latest update that was fetched
    compile_seconds: float = 0.0  # of all updates that were traced or compiled
    _compiled: set[tuple[int, float]] = field(
        default_factory=set
    )  # traces and `shapes_compiled` of updates so far
    _skipped: int = 0
    _noise: NoiseScale = field(default_factory=NoiseScale)
    _unlogged: tuple[Any, ...] = ()  # the latest row, if `log_every` left it out
    _epoch_sums: dict[str, float] = field(default_factory=dict)
    _epoch_examples: int = 0
    _pending: list[tuple[int, float, tf.Tensor, int, float]] = field(
        default_factory=list
    )
    _since: float = field(default_factory=time.perf_counter)

    def add(self, update: int, results: tf.Tensor, traces: int) -> None:
        """Keep the results of `update`, after so many `traces` of it; fetch when enough are waiting.

        `results` is a vector in the order of `names`, then what `shapes_compiled` returns, or 0 without XLA.
        """
        now, count = time.perf_counter(), len(self._pending) + 1
        self._pending.append((update, time.time(), results, traces, now))
        # The first one is traced, and tells nothing of the seconds of an update.
        if (
            (now - self._since >= FETCH_SECONDS or count >= FETCH_UPDATES)
            if self._compiled
            else count > 1
        ):
            self.fetch()

    def fetch(self) -> None:
        """Write the rows of all kept results; raise NonFiniteError after the first that is of no finite update."""
        if not self._pending:
            return
        pending = list(self._pending)
        fetched = tf.stack([results for _, _, results, *_ in pending]).numpy().tolist()
        performance = self._performance(pending, fetched)
        for (update, at, *_), values in zip(pending, fetched, strict=True):
            del self._pending[
                0
            ]  # one at a time: what an interrupt leaves here is fetched at the end of the run
            self.last = dict(zip(self.names, values, strict=True))
            self.last.pop(TOKENS, None)
            if "gradient_variance" in self.last:
                self._noise.add(
                    self.last.pop("gradient_variance"), self.last.pop("gradient_square")
                )
                if self._noise.value is not None:
                    self.last["gradient_noise_scale"] = self._noise.value
            wrong = self._non_finite(self.last)
            examples = self.plan.batch_size(update)
            self._epoch_examples += examples
            for name, value in self.last.items():
                self._epoch_sums[name] = (
                    self._epoch_sums.get(name, 0.0) + value * examples
                )
            self._unlogged = update, self.last, performance, at
            if wrong or update % self.log_every == 0:
                self._log_last()
            if wrong:
                self._pending.clear()  # of weights that are not finite
                values_of = " and ".join(f"{name}={self.last[name]}" for name in wrong)
                group = f"updates {pending[0][0]} to {pending[-1][0]}"
                raise NonFiniteError(
                    f"{values_of} at update {update}, found when {group} were fetched"
                )
        self.progress.show(
            pending[-1][0], self.last, performance.get("examples_per_second")
        )

    def finish(self) -> None:
        """Fetch what is left, and log the last update also if `log_every` leaves it out."""
        self.fetch()
        self._log_last()

    def evaluated(self, split: str, update: int, results: Mapping[str, float]) -> None:
        """Log the results over `val` or `test`, after `update` updates, and exclude the time from the update times."""
        if self.tracker is not None:
            (self.tracker.test if split == "test" else self.tracker.validation)(
                update, results
            )
        self.progress.evaluated(split, update, results)
        self.restart_clock()

    def trained(self, updates: int, stopped_by: str | None, best: Best | None) -> None:
        """Log that the training has ended or was interrupted, as `Tracker.trained` takes it."""
        if self.tracker is not None:
            self.tracker.trained(updates, stopped_by, best)

    def cut(self, plan: Plan) -> None:
        """Continue with a plan of other micro-batches; call it with nothing left to fetch."""
        self.plan, self._compiled = plan, set()
        if self.tracker is not None:
            self.tracker.cut(plan)

    def restart_clock(self) -> None:
        """Exclude the time since the last fetch from the update times."""
        self._since = time.perf_counter()

    def epoch_means(self) -> dict[str, float]:
        """Return the means over the epoch, each update weighted by its examples; start the next epoch's."""
        means = {
            name: total / self._epoch_examples
            for name, total in self._epoch_sums.items()
        }
        self._epoch_sums, self._epoch_examples = {}, 0
        return means

    def get_state(self) -> dict[str, Any]:
        """Return all that later rows depend on, as JSON; call it with nothing left to fetch."""
        state = {
            "last": dict(self.last),
            "skipped": self._skipped,
            "noise": self._noise.get_state(),
        }
        epoch = {
            "epoch_sums": dict(self._epoch_sums),
            "epoch_examples": self._epoch_examples,
        }
        return {**state, "unlogged": list(self._unlogged), **epoch}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `get_state` returned."""
        self.last, self._skipped = dict(state["last"]), state["skipped"]
        self._noise.set_state(state["noise"])
        self._unlogged = tuple(state["unlogged"])
        self._epoch_sums, self._epoch_examples = (
            dict(state["epoch_sums"]),
            state["epoch_examples"],
        )

    def _performance(
        self, pending: Sequence[Any], results: Sequence[list[float]]
    ) -> dict[str, float]:
        """Return the performance in these updates; take what `shapes_compiled` returned from their `results`."""
        computed, compiling, called = list[int](), 0.0, self._since
        for place, ((_, _, _, traces, at), values) in enumerate(
            zip(pending, results, strict=True)
        ):
            if (kind := (traces, values.pop())) in self._compiled:
                computed.append(place)
            else:
                compiling += at - called
            self._compiled.add(kind)
            called = at
        now = time.perf_counter()
        seconds, self._since = now - self._since - compiling, now
        self.compile_seconds += compiling
        found = {
            "compile_seconds": self.compile_seconds,
            "peak_memory_bytes": self.peak_memory(),
        }
        if computed:  # how fast they were is not known of those that were compiled
            examples = sum(
                self.plan.batch_size(pending[place][0]) for place in computed
            )
            found |= {
                "update_seconds": seconds / len(computed),
                "examples_per_second": examples / seconds,
            }
            if TOKENS in self.names:
                tokens = self.names.index(TOKENS)
                found["tokens_per_second"] = (
                    sum(results[place][tokens] for place in computed) / seconds
                )
            if self.share_of_peak:
                found["model_flops_utilization"] = (
                    self.share_of_peak * examples / seconds
                )
        if self.plan.before:
            found["micro_batch_size"] = self.plan.batching.micro_batch_size
        return found

    def _non_finite(self, results: dict[str, float]) -> list[str]:
        """Return which results end the run; a skipped update, which ends none, is counted in `results`."""
        wrong = [
            name
            for name in ("loss", "gradient_norm")
            if not math.isfinite(results[name])
        ]
        if self.skips:
            skipped = wrong == ["gradient_norm"]
            self._skipped += skipped
            results["skipped_updates"] = self._skipped
            wrong = [] if skipped else wrong
        return (
            [] if self.tracker is None else wrong
        )  # a worker leaves that to the chief

    def _log_last(self) -> None:
        row, self._unlogged = self._unlogged, ()
        if row and self.tracker is not None:
            self.tracker.update(*row)
