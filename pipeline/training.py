"""The loop, straight down: update, record, evaluate, checkpoint."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import keras
import tensorflow as tf

from pipeline.accumulation import Evaluation, NoiseScale, Update
from pipeline.progress import Progress
from pipeline.sizes import Plan

FETCH_SECONDS = 1.0  # how long results may stay on the device
FETCH_UPDATES = 200  # how many results may


class NonFiniteError(ArithmeticError):
    """The loss or the gradient is no longer a number."""


class Log(Protocol):
    """Where rows go: `pipeline.tracking.Tracker`, or nowhere."""

    def update(
        self, update: int, results: Mapping[str, float], performance: Mapping[str, float], at: float
    ) -> None: ...

    def validation(self, update: int, results: Mapping[str, float]) -> None: ...

    def flush(self) -> None: ...


@dataclass
class Recorder:
    """Keeps each update's results on the device and fetches them in groups: reading one waits for the device.

    Attributes:
        log: where the rows go.
        plan: of the run.
        log_every: updates from one logged row to the next; `finish` logs the last one.
        peak_memory: bytes at the peak so far.
        progress: what a person sees.
        noise: the gradient noise scale so far; each row has its latest value.
        last: the latest row that was fetched.
        unlogged: what `log.update` takes of the latest update, where `log_every` left it out.
        skips: whether the optimizer skips an update whose gradient is not finite, as a `LossScaleOptimizer` does.
    """

    log: Log
    plan: Plan
    log_every: int
    peak_memory: Callable[[], int]
    progress: Progress
    skips: bool = False
    skipped: int = 0
    names: tuple[str, ...] = ()
    last: dict[str, float] = field(default_factory=dict)
    unlogged: tuple[int, dict[str, float], dict[str, float], float] | None = None
    noise: NoiseScale = field(default_factory=NoiseScale)
    _epoch_sums: dict[str, float] = field(default_factory=dict)
    _epoch_examples: int = 0
    _pending: list[tuple[int, float, tf.Tensor]] = field(default_factory=list)
    _since: float = field(default_factory=time.perf_counter)

    def add(self, update: int, results: tf.Tensor) -> None:
        """Keeps the results of `update`, a vector in the order of `names`; fetches when enough are waiting."""
        self._pending.append((update, time.time(), results))
        waited = time.perf_counter() - self._since
        # The first update is traced as it runs: a group of its own, so that it spoils no other's seconds.
        if update == 1 or waited >= FETCH_SECONDS or len(self._pending) >= FETCH_UPDATES:
            self.fetch()

    def fetch(self) -> None:
        """Writes the rows of all kept results.

        Raises:
            NonFiniteError: at the first update whose loss or gradient is not finite; its row is written too.
        """
        if not self._pending:
            return
        pending = list(self._pending)
        fetched = tf.stack([results for _, _, results in pending]).numpy().tolist()
        now = time.perf_counter()
        seconds, self._since = (now - self._since) / len(pending), now
        peak = self.peak_memory()
        examples = sum(self.plan.batch_size(update) for update, _, _ in pending)
        performance: dict[str, float] = {
            "update_seconds": seconds,
            "examples_per_second": examples / (seconds * len(pending)),
            "peak_memory_bytes": peak,
        }
        for (update, at, _), values in zip(pending, fetched, strict=True):
            del self._pending[0]  # a row at a time: what an interrupt leaves here is fetched at the end of the run
            row = dict(zip(self.names, values, strict=True))
            if "gradient_variance" in row:
                self.noise.add(row.pop("gradient_variance"), row.pop("gradient_square"))
                if self.noise.value is not None:
                    row["gradient_noise_scale"] = self.noise.value
            bad = [name for name in ("loss", "gradient_norm") if not math.isfinite(row[name])]
            if self.skips:
                self.skipped += bad == ["gradient_norm"]
                row["skipped_updates"] = self.skipped
                bad = [] if bad == ["gradient_norm"] else bad
            self.unlogged = None if update % self.log_every == 0 or bad else (update, row, performance, at)
            if self.unlogged is None:
                self.log.update(update, row, performance, at)
            self._epoch_examples += self.plan.batch_size(update)
            for name, value in row.items():
                self._epoch_sums[name] = self._epoch_sums.get(name, 0.0) + value * self.plan.batch_size(update)
            if bad:
                self.log.flush()
                group = f"updates {pending[0][0]} to {pending[-1][0]}"
                values_of = " and ".join(f"{name}={row[name]}" for name in bad)
                raise NonFiniteError(f"{values_of} at update {update}, found when {group} were fetched")
        self.log.flush()
        self.last = row
        self.progress.show(pending[-1][0], row, performance["examples_per_second"])

    def finish(self) -> None:
        """Fetches what is left, and logs the last update whatever `log_every` says."""
        self.fetch()
        if self.unlogged is not None:
            self.log.update(*self.unlogged)
            self.log.flush()

    def restart_clock(self) -> None:
        """Leaves what happened since the last fetch out of the updates' seconds."""
        self._since = time.perf_counter()

    def epoch_means(self) -> dict[str, float]:
        """Means over the epoch, each update weighted by its examples; starts the next epoch's."""
        means = {name: total / self._epoch_examples for name, total in self._epoch_sums.items()}
        self._epoch_sums, self._epoch_examples = {}, 0
        return means


def train(
    model: keras.Model,
    batches: tf.data.Dataset,
    update: Update,
    plan: Plan,
    recorder: Recorder,
    *,
    evaluate: Callable[[], dict[str, float]] | None = None,
    evaluate_every: int | str = "epoch",
    callbacks: Sequence[keras.callbacks.Callback] = (),
    checkpoint: Callable[[int], None] | None = None,
) -> float:
    """Trains to the end of `plan`, or until a callback sets `model.stop_training`.

    Args:
        model: built, and compiled where a callback wants that.
        batches: effective batches, one an update.
        update: applies one effective batch.
        plan: how many updates, and where epochs end.
        recorder: takes every update's results.
        evaluate: over the validation split.
        evaluate_every: in updates, or `epoch`; the last update is always followed by one.
        callbacks: one batch of theirs is one update.
        checkpoint: called with the number of completed updates, between two updates.

    Returns:
        The last loss: of the validation split where there is one, else of the last update.

    Raises:
        NonFiniteError: as `Recorder.fetch`.
    """
    counts = {"epochs": plan.epochs, "steps": plan.updates_per_epoch}
    hooks = keras.callbacks.CallbackList(list(callbacks), model=model, verbose=0, **counts)
    watched = any(map(_watches_updates, callbacks))
    names: list[str] = []

    @tf.function(autograph=False)
    def next_update(iterator: Any) -> tf.Tensor:
        results = update(next(iterator))
        names[:] = results
        return tf.stack([tf.cast(value, tf.float64) for value in results.values()])

    def validate() -> dict[str, float]:
        assert evaluate is not None
        hooks.on_test_begin()
        results = evaluate()
        hooks.on_test_end(results)
        return results

    model.stop_training = False
    hooks.on_train_begin()
    with _iterating(batches) as iterator:
        for done in range(1, plan.updates + 1):
            epoch, index = divmod(done - 1, plan.updates_per_epoch)
            if index == 0:
                hooks.on_epoch_begin(epoch)
            if watched:
                hooks.on_train_batch_begin(index)

            results = next_update(*iterator)

            recorder.names = tuple(names)
            recorder.add(done, results)
            if watched:
                hooks.on_train_batch_end(index, dict(zip(names, tf.unstack(results), strict=True)))

            last = done == plan.updates or model.stop_training
            validation: dict[str, float] = {}
            if evaluate is not None and (last or _due(done, evaluate_every, plan)):
                recorder.fetch()
                if last:
                    _finalize(update, model)
                validation = validate()

            try:
                if callbacks and (last or plan.ends_epoch(done)):
                    recorder.fetch()
                    hooks.on_epoch_end(epoch, recorder.epoch_means() | {f"val_{k}": v for k, v in validation.items()})
                if model.stop_training and not last:  # a callback has seen enough in what was evaluated
                    last = True
                    if evaluate is not None and (_finalize(update, model) or not validation):
                        validation = validate()  # in place of that of other weights: a step has one
            finally:  # a callback that raises takes no row with it
                if validation:
                    recorder.log.validation(done, validation)
                    recorder.progress.validated(done, validation)
                    recorder.restart_clock()

            if checkpoint is not None:
                checkpoint(done)
            if last:
                break
    recorder.finish()
    if evaluate is None:
        _finalize(update, model)
    hooks.on_train_end()
    return validation["loss"] if validation else recorder.last["loss"]


@contextmanager
def _iterating(batches: tf.data.Dataset) -> Iterator[list[Any]]:
    """A list of one iterator over `batches`, whose end nobody waits for; keep no other reference to it.

    TensorFlow 2.21 wakes the thread that tunes an iterator before it notes that this is the end: one time in four to
    twenty that thread slept on, for as long as it had lived, up to a minute. A process may end in the meantime.
    """
    held = [iter(batches)]
    try:
        yield held
    finally:
        with suppress(RuntimeError):  # no thread is to be had
            threading.Thread(target=held.clear, daemon=True).start()


def evaluator(evaluation: Evaluation, batches: tf.data.Dataset) -> Callable[[], dict[str, float]]:
    """A function that gives the loss and the metrics over all of `batches`, each example weighted exactly."""

    @tf.function(autograph=False)
    def next_batch(iterator: Any) -> Any:
        return evaluation(next(iterator))

    count = int(batches.cardinality())

    def evaluate() -> dict[str, float]:
        for metric in evaluation.metrics:
            metric.reset_state()
        with _iterating(batches) as iterator:
            sums = next_batch(*iterator)
            for _ in range(count - 1):
                sums = tf.nest.map_structure(tf.add, sums, next_batch(*iterator))
        results = {metric.name: float(metric.result()) for metric in evaluation.metrics}
        return {"loss": float(sums.mean_loss()), **results}

    return evaluate


def _due(update: int, every: int | str, plan: Plan) -> bool:
    return plan.ends_epoch(update) if isinstance(every, str) else update % every == 0


def _watches_updates(callback: keras.callbacks.Callback) -> bool:
    """Whether the callback has a hook of batches: handing it an update's logs waits for the device."""
    names = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
    hooks = {name: getattr(callback, name) for name in names}  # LambdaCallback's are of the instance
    return any(getattr(hook, "__func__", None) is not getattr(keras.callbacks.Callback, n) for n, hook in hooks.items())


def _finalize(update: Update, model: keras.Model) -> bool:
    """With `use_ema` the averaged weights are the result: they are evaluated and saved, as in `fit`.

    Returns:
        Whether the weights are others than before.
    """
    optimizer = update.optimizer
    optimizer.finalize_variable_values(model.trainable_variables)
    return bool(getattr(optimizer, "inner_optimizer", optimizer).use_ema)
