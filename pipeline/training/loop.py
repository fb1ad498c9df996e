"""The training loop: update, record, evaluate, checkpoint."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any

import keras
import tensorflow as tf

from pipeline.accumulation import Update
from pipeline.accumulation.internals import shapes_compiled
from pipeline.checkpoints import csv_rows, snapshot
from pipeline.checkpoints.files import Checkpoint, Checkpoints, LoopState
from pipeline.checkpoints.fork import Beginning
from pipeline.common.errors import say
from pipeline.tracking.user_metrics import UserMetrics
from pipeline.training.evaluator import (
    OWN_SPLIT,
    Check,
    Evaluations,
    averaged_weights,
    averaged_weights_for_callbacks,
)
from pipeline.training.monitored import MonitoredMetrics
from pipeline.training.oom_retry import OomRetry, limit_of
from pipeline.training.profiler import Profiler
from pipeline.training.recorder import (
    CUT_COUNTS,
    NOISE_ESTIMATES,
    Recorder,
    UpdateResults,
)

WORKER_LOST = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
)
BATCH_HOOKS = (
    "on_batch_begin",
    "on_batch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
)


class Interrupted(BaseException):
    """Ends the training loop between two updates or evaluation batches.

    The argument is the exception that `Trainer.fit` raises instead, after it has
    written a checkpoint if one is due.
    """


def _never_stop() -> BaseException | None:
    return None


def _do_nothing() -> None:
    pass


@dataclass(eq=False)
class Trainer:
    """Trains to the end of the plan, or until a callback sets `model.stop_training`.

    Attributes:
        updater: applies one effective batch. Its model is compiled if a callback needs
            a compiled model.
        batches: the effective batches, one per update, from the first update of this
            process on.
        recorder: records the results of every update. Its plan determines the number
            of updates and the ends of epochs.
        evaluations: the evaluations of the validation and the test split.
        callbacks: the callbacks, by name. They see each update as one batch.
        checkpoints: writes the checkpoints. Before each one, the results of all earlier
            updates are fetched, and their rows are logged as `log_every` selects.
        oom_retry: if an update does not fit into memory, repeats it in smaller
            micro-batches. If None, such an update ends the run.
        stop: called after each update, and between two batches of an evaluation unless
            the callbacks have been called since the update. If it returns an exception,
            `fit` logs the rows that `log_every` selects, writes a checkpoint if one is
            due, and raises the exception.
        profiler: traces some of the updates.
        agree: waits for all workers; returns whether each of them passed True.
        evaluate_at_start: whether to evaluate before the first update, unless the run
            is resumed.
        count_tokens: counts the tokens in an effective batch. None if the examples are
            not sequences.
        on_traced: called each time the update has been traced.
        user_metrics: logs the metrics from the user's own code.
        done: number of completed updates.
        pending: whether the evaluation and the callbacks after the last update have
            not run yet.
        validation: results of the evaluation after the last update, or {} if there was
            no evaluation.
        stopped_by: name of the callback that has set `model.stop_training`, if any.
    """

    updater: Update
    batches: tf.data.Dataset
    recorder: Recorder
    _: KW_ONLY
    evaluations: Evaluations = field(default_factory=Evaluations)
    callbacks: Mapping[str, keras.callbacks.Callback] = field(default_factory=dict)
    checkpoints: Checkpoints | None = None
    oom_retry: OomRetry | None = None
    stop: Callable[[], BaseException | None] = _never_stop
    profiler: Profiler = field(default_factory=Profiler)
    agree: Callable[[bool], bool] = bool
    evaluate_at_start: bool = False
    count_tokens: Callable[[Any], tf.Tensor] | None = None
    on_traced: Callable[[], None] = _do_nothing
    done: int = field(default=0, init=False)
    pending: bool = field(default=False, init=False)
    validation: dict[str, float] = field(default_factory=dict, init=False)
    stopped_by: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.model = self.updater.model
        self.user_metrics = UserMetrics(self.recorder.tracker)
        hooks: list[keras.callbacks.Callback] = []
        for name, callback in self.callbacks.items():
            hooks.append(callback)
            hooks.append(_Watch(self, name))
        plan = self.recorder.plan
        self._hooks = keras.callbacks.CallbackList(
            hooks,
            model=self.model,
            verbose=0,
            epochs=plan.epochs,
            steps=plan.updates_per_epoch,
        )
        self._first_step: int | None = None
        self._known_logs: set[str] = set()
        self._monitored = MonitoredMetrics(self.evaluations)
        self._has_batch_hooks = any(map(_has_batch_hooks, self.callbacks.values()))
        self._next_update = tf.function(self._next_step, autograph=False)

    def fit(self, start: Checkpoint | Beginning | None = None) -> float:
        """Train, and return the last loss.

        This is the validation loss if there is a validation split, and the training
        loss otherwise. If a callback has stopped training before the first update, and
        nothing was evaluated, the loss is infinite.

        Args:
            start: the checkpoint, of this or of another run, from which to continue.
                None to begin with the current weights.

        Raises:
            NonFiniteError: the loss or the gradient is not finite.
            OutOfMemoryError: an update or an evaluation does not fit into memory, and
                smaller micro-batches do not help or cannot be tried.
            ConfigError: `start` does not fit the model or the optimizer. Only the
                statistics of `Normalization` layers may have changed.
        """
        self.model.stop_training = False
        with (
            self.user_metrics.open(),
            self.profiler,
            self._checkpoint_on_interruption(),
        ):
            if isinstance(start, Checkpoint):
                csv_rows.keep_rows(self.callbacks.values())
            self._hooks.on_train_begin()
            if self.stopped_by is not None:
                say(f"the callback {self.stopped_by} ended training in on_train_begin")
            iterator = iter(self.batches)
            self.recorder.start_clock()
            if start is not None:
                self.restore(start, iterator)
            if self.evaluate_at_start and not isinstance(start, Checkpoint):
                self.evaluate_first(iterator)
            while self.pending or not self.ended:
                if not self.pending:
                    with self.profiler.update(self.done + 1, self.recorder):
                        self.record(self.update_once(iterator))
                    self.raise_if_stopped()
                self.after_update()
                if self.ended:
                    self.recorder.finish()
                self.checkpoint(always=self.ended)
            self.profiler.stop()  # A callback may have ended the run during a trace.
            del iterator  # Free the batches that were read ahead.
            self.finish()
            self.test()

        self.agree(True)  # Wait until every worker has finished computing.
        if "loss" in self.validation:
            return self.validation["loss"]
        return self.recorder.last.get("loss", math.inf)

    @property
    def ended(self) -> bool:
        """Whether there are no further updates."""
        return bool(self.recorder.plan.ended(self.done) or self.model.stop_training)

    def restore(self, start: Checkpoint | Beginning, iterator: Any) -> None:
        """Restore a checkpoint.

        Args:
            start: the checkpoint of this run, or a fork from another run.
            iterator: the iterator that `update_once` reads.
        """
        with self.recorder.paused():
            if isinstance(start, Checkpoint):
                saved = snapshot.read(start)
                restore_state: Any = snapshot.restore
            else:
                saved = start.take()
                restore_state = start.restore
            snapshot.restore_normalization(saved, self.updater)

        # Trace the update first, then restore the state: a layer may draw a seed during
        # tracing, which would change a restored seed.
        self._next_update.get_concrete_function(iterator)
        with self.recorder.paused():
            self.updater.begun.assign(start.updates_done)
            loop = restore_state(saved, self.updater, self.recorder, self.callbacks)

        self.done = start.updates_done
        self.pending = loop.pending
        self.validation = dict(loop.validation)
        self.stopped_by = loop.stopped_by
        if self.evaluations.best is not None and loop.best is not None:
            self.evaluations.best.set_state(loop.best)
        self.recorder.progress.done_before = self.done
        self.user_metrics.update = self.done

        if isinstance(start, Checkpoint):
            snapshot.restore_csv_files(start, self.callbacks)
        first_of_epoch = self.recorder.plan.place(self.done)[1] == 0
        if self.pending or not first_of_epoch:
            self._begin_epoch_again()

    def _begin_epoch_again(self) -> None:
        """Call the `on_epoch_begin` of callbacks that need it; see `snapshot`.

        Their epoch is that of the last update before the checkpoint.
        """
        epoch, _ = self.recorder.plan.place(self.done - 1)
        for callback in snapshot.expecting_epoch_begin(self.callbacks):
            callback.on_epoch_begin(epoch)

    def evaluate_first(self, iterator: Any) -> None:
        """Evaluate all validation sets before the first update of this run.

        The results do not count as the best so far, since no checkpoint of this run has
        their weights. If the evaluation at a fork's checkpoint is pending, nothing is
        done here: `after_update` evaluates all sets then.

        Args:
            iterator: the iterator that `update_once` reads.
        """
        self._first_step = self.done
        names = self._due()
        if self.pending or not names:
            return
        # Trace the update first, as a run without this evaluation does; see `restore`.
        self._next_update.get_concrete_function(iterator)
        with self.recorder.paused():
            results = self._evaluate(names, self.raise_if_stopped)
        self.validation = results
        self.recorder.evaluated("val", self.done, results)

    def update_once(self, iterator: Any) -> tf.Tensor:
        """Apply the next effective batch; return its results for `Recorder.add`.

        With `oom_retry`, an update that does not fit into memory is repeated with
        smaller micro-batches. `iterator` yields effective batches.
        """
        self.user_metrics.update = self.done + 1
        epoch, index = self.recorder.plan.place(self.done)
        if index == 0 and self.callbacks:
            with self.recorder.paused():
                self._hooks.on_epoch_begin(epoch)
        if self._has_batch_hooks:
            self._hooks.on_train_batch_begin(index)

        if self.oom_retry is None:
            return self._next_update(iterator)
        try:
            return self.oom_retry.run(self._next_update, iterator)
        except tf.errors.ResourceExhaustedError as error:
            self.recorder.fetch()
            results = self.oom_retry.retry_halved(error, self.done + 1, self._step)
        limit = limit_of(self.updater)
        self.recorder.cut(self.recorder.plan.halved(self.done, limit))
        self._next_update = tf.function(self._next_step, autograph=False)
        return results

    def record(self, results: tf.Tensor) -> None:
        """Count an update; pass its results to the recorder and to the batch hooks."""
        traces = self._next_update.experimental_get_tracing_count()
        self.recorder.add(self.done + 1, results, traces)
        if self._has_batch_hooks:
            logs = self.recorder.layout.unpack(tf.unstack(results)).metrics
            for name in (*NOISE_ESTIMATES, *CUT_COUNTS):
                logs.pop(name, None)
            _, index = self.recorder.plan.place(self.done)
            self._hooks.on_train_batch_end(index, logs)
        self.done += 1
        self.pending = True

    def raise_if_stopped(self) -> None:
        """Raise `Interrupted` if the run was asked to end."""
        reason = self.stop()
        if reason is not None:
            raise Interrupted(reason)

    def after_update(self) -> None:
        """Evaluate the validation split if due, and call `on_epoch_end` if due.

        The callbacks' `on_epoch_end` is due at the end of an epoch and of the run.
        """
        results: dict[str, float] = {}
        if self._due() or self._epoch_end_is_due():
            with self.recorder.paused():
                results = self._validate_and_end_epoch()
        self.validation = results
        self.pending = False

    def validate(self, names: Sequence[str]) -> dict[str, float]:
        """Return the results over some validation sets; see `Evaluations.evaluate`.

        If the best evaluation is tracked and these results are the best so far, also
        write a checkpoint. `stop` can end the evaluation only while `pending` is True.
        """
        check = self.raise_if_stopped if self.pending else _do_nothing
        results = self._evaluate(names, check)

        best = self.evaluations.best
        is_best = best is not None and best.take(self.done, results)
        if is_best and self.checkpoints is not None:
            self._save(self.checkpoints, results, best=True)
        return results

    def _evaluate(self, names: Sequence[str], check: Check) -> dict[str, float]:
        # Before the first update, the moving averages are zeros.
        weights: AbstractContextManager[None] = nullcontext()
        if self.done:
            weights = averaged_weights(self.updater.optimizer, self.model)
        with weights:
            self._hooks.on_test_begin()
            with self.user_metrics.closed():
                results = self.evaluations.evaluate(names, check)
            self._hooks.on_test_end(results)
        return results

    def checkpoint(self, *, always: bool = False) -> None:
        """Write a checkpoint if one is due.

        Unless the config turns checkpoints off, one is due if `always` is set, and
        while the evaluation or the callbacks after an update are pending. Otherwise
        `Checkpoints.due` decides.
        """
        if self.checkpoints is None:
            return
        if not self.checkpoints.due(self.done, last=always or self.pending):
            return
        with self.recorder.paused():
            # Copy the state now; a thread writes the copy.
            self._save(self.checkpoints, self.validation)

    def finish(self) -> None:
        """Log the remaining rows, finalize the weights, and end the callbacks."""
        self.recorder.finish()
        # With `use_ema`, replace the model's weights by their moving averages. Before
        # the first update, these are zeros.
        if self.done:
            variables = self.model.trainable_variables
            self.updater.optimizer.finalize_variable_values(variables)
            if self.stopped_by is not None:
                say(
                    f"the callback {self.stopped_by} has ended training after update "
                    f"{self.done}"
                )
        self._hooks.on_train_end()
        self.user_metrics.report_other_run("", ended=True)
        self.recorder.log_end(self.done, self.stopped_by, self.evaluations.best)

    def test(self) -> None:
        """Evaluate the test split, if there is one.

        Use the weights of the best evaluation if its checkpoint is kept, and otherwise
        the weights of the model after `finish`.
        """
        if self.evaluations.test is None:
            return
        best = self._best_checkpoint()
        with ExitStack() as weights, self.user_metrics.closed():
            update = self.done
            if best is not None:
                update = best.updates_done
                saved = snapshot.read(best)
                weights.enter_context(snapshot.weights_replaced(saved, self.updater))
                averages = averaged_weights(self.updater.optimizer, self.model)
                weights.enter_context(averages)
            results = self.evaluations.test(self.raise_if_stopped)
        self.recorder.evaluated("test", update, results)

    def _next_step(self, iterator: Any) -> tf.Tensor:
        if self.oom_retry is None:
            return self._step(next(iterator))
        return self.oom_retry.hold_batch(iterator, self._step)

    def _step(self, batch: Any) -> tf.Tensor:
        """Apply one effective batch; return its packed results.

        Tracing this function also sets the names of the results, which the user's own
        metrics must not have.
        """
        results = UpdateResults(self.updater(batch))
        if self.count_tokens is not None:
            results = results._replace(tokens=self.count_tokens(batch))
        if self.updater.compiled:
            shapes = shapes_compiled(batch, whole_batch=self.updater.update_compiled)
            results = results._replace(shapes_compiled=shapes)
            if self.updater.compiled_lengths is not None:
                lengths = self.updater.compiled_lengths
                results = results._replace(lengths_compiled=lengths)
        self.user_metrics.taken = frozenset(results.metrics)
        self.on_traced()
        return self.recorder.layout.pack(results)

    def _due(self) -> list[str]:
        """Return the names of the validation sets that are due now.

        Before the first update of the run, and after its last one, these are all sets.
        """
        plan = self.recorder.plan
        all_sets = self.ended or self.done == self._first_step
        return self.evaluations.due(self.done, plan, last=all_sets)

    def _epoch_end_is_due(self) -> bool:
        if not self.callbacks:
            return False
        return self.ended or self.recorder.plan.ends_epoch(self.done)

    def _validate_and_end_epoch(self) -> dict[str, float]:
        """Evaluate if due, and call `on_epoch_end` if due; return the results.

        If a callback ends the run in `on_epoch_end`, the evaluation of further sets may
        become due. The callbacks do not get the results of these sets.
        """
        results: dict[str, float] = {}
        names = self._due()
        evaluated = list(names)
        if names:
            results = self.validate(names)
        try:
            # A callback may have ended the run during the evaluation.
            if self._epoch_end_is_due():
                self._end_epoch(results)
            others = [name for name in self._due() if name not in names]
            if others:
                self.pending = False  # A resumed run does not call the callbacks again.
                results = results | self.validate(others)
                evaluated += others
        finally:
            # Log the row even if a callback raises an error.
            if results:
                self.recorder.evaluated("val", self.done, results)
                if OWN_SPLIT in evaluated:
                    self.evaluations.show(self.done)
        return results

    def _end_epoch(self, validation: Mapping[str, float]) -> None:
        """Call the callbacks' `on_epoch_end` with means over the epoch.

        With `use_ema`, the callbacks see the averaged weights, as the validation does.
        So `ModelCheckpoint` saves these, and `EarlyStopping` restores them.
        """
        logs = self.recorder.epoch_means()
        for name, value in validation.items():
            logs[self.evaluations.log_name(name)] = value
        epoch, _ = self.recorder.plan.place(self.done - 1)
        self._known_logs = set(logs)
        with averaged_weights_for_callbacks(self.updater.optimizer, self.model):
            self._hooks.on_epoch_end(epoch, logs)

    def _log_additions(
        self, callback: str, epoch: int, logs: Mapping[str, Any]
    ) -> None:
        """Log the values that a callback has added to the logs of `on_epoch_end`.

        Also report if the logs lack the metric that the callback monitors.
        """
        self._monitored.check(callback, self.callbacks[callback], epoch, logs)
        added = {}
        for name, value in logs.items():
            if name not in self._known_logs:
                added[name] = value
        self._known_logs.update(added)
        self.user_metrics.add_logs(callback, added)

    @contextmanager
    def _checkpoint_on_interruption(self) -> Iterator[None]:
        """Write a checkpoint if `stop` ends the block, or another worker is lost.

        If `stop` ends it, write the checkpoint only while `pending` is True. If a
        worker is lost during an update, roll the update back first; if that is
        impossible, write no checkpoint.
        """
        try:
            yield
        except Interrupted as interrupted:
            if self.pending:
                self.recorder.fetch()
                self.checkpoint()
                self.recorder.log_end(self.done, None, None)
            reason = interrupted.args[0]
            raise reason from None
        except WORKER_LOST:
            with suppress(Exception):  # Writing fails if the device is lost, too.
                if self.pending or self._roll_back():
                    self.checkpoint(always=True)
            raise

    def _roll_back(self) -> bool:
        """Undo a failed update; return whether the state before it was restored."""
        return self.oom_retry is not None and self.oom_retry.rollback()

    def _save(
        self,
        checkpoints: Checkpoints,
        validation: Mapping[str, float],
        *,
        best: bool = False,
    ) -> None:
        best_state = None
        if self.evaluations.best is not None:
            best_state = asdict(self.evaluations.best)
        loop = LoopState(
            self.pending,
            validation,
            self.stopped_by,
            best_state,
            self.recorder.plan.digest(self.done),
        )

        def capture() -> Any:
            return snapshot.capture(self.updater, self.recorder, self.callbacks, loop)

        checkpoints.save(self.done, capture, best=best)

    def _best_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint of the best evaluation, or None.

        None is also returned if some worker cannot read the checkpoint, so that all
        workers use the same weights.
        """
        best = self.evaluations.best
        checkpoints = self.checkpoints
        if best is None or best.value is None or checkpoints is None:
            return None
        checkpoints.wait()
        self.agree(True)  # Wait until the chief has written the checkpoint.
        checkpoint = checkpoints.best(best.update)
        if self.agree(checkpoint is not None):
            return checkpoint
        if checkpoint is not None:
            say(
                f"not every worker can read {checkpoint.folder}: "
                "the test split is evaluated with the last weights"
            )
        return None


class _Watch(keras.callbacks.Callback):
    """Runs after a callback's hooks, and observes their effects.

    It records whether the callback stopped training, logs what the callback added to
    the epoch's logs, and reports whether the callback logged to another MLflow run.
    """

    # Without this flag, Keras would call the hooks of all callbacks synchronously.
    async_safe = True

    def __init__(self, trainer: Trainer, name: str):
        super().__init__()
        self._trainer = trainer
        self._name = name

    def _look(self, *_: Any, **__: Any) -> None:
        if not self.model.stop_training:
            # Forget the name: a callback may have reset the flag before the loop read
            # it.
            self._trainer.stopped_by = None
        elif self._trainer.stopped_by is None:
            self._trainer.stopped_by = self._name
        self._trainer.user_metrics.report_other_run(self._name)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._trainer._log_additions(self._name, epoch, logs or {})
        self._look()

    on_train_begin = on_epoch_begin = on_test_begin = on_test_end = _look
    on_train_batch_begin = on_train_batch_end = _look


def _has_batch_hooks(callback: keras.callbacks.Callback) -> bool:
    """Return whether the callback overrides a batch hook.

    Batch hooks are called only if a callback has one, since passing the results of an
    update to a hook may wait for the device.
    """
    for name in BATCH_HOOKS:
        hook = getattr(callback, name)  # LambdaCallback sets plain functions.
        inherited = getattr(keras.callbacks.Callback, name)
        if getattr(hook, "__func__", None) is not inherited:
            return True
    return False
