"""The training loop: update, record, evaluate, checkpoint."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any

import keras
import tensorflow as tf

from pipeline.accumulation import Update
from pipeline.accumulation.internals import shapes_compiled
from pipeline.checkpoints import snapshot
from pipeline.checkpoints.files import Checkpoint, Checkpoints
from pipeline.checkpoints.fork import Fork
from pipeline.common.errors import say
from pipeline.training.evaluator import Evaluations, averaged_weights
from pipeline.training.oom_retry import OomRetry
from pipeline.training.profiler import Profiler
from pipeline.training.recorder import TOKENS, Recorder

WORKER_LOST = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
)


class Interrupted(BaseException):
    """The run was asked to end: `Trainer.fit` writes a checkpoint, then raises the reason, which this holds."""


@dataclass(eq=False)
class Trainer:
    """Trains to the end of the recorder's plan, or until a callback sets `model.stop_training`."""

    update: Update  # applies one effective batch; its model is compiled if a callback wants that
    batches: (
        tf.data.Dataset
    )  # effective batches, one per update, from that of the first update here on
    recorder: Recorder  # takes the results of every update; its plan says how many there are, and where epochs end
    _: KW_ONLY
    evaluations: Evaluations = field(
        default_factory=Evaluations
    )  # of the validation and the test split
    callbacks: Mapping[str, keras.callbacks.Callback] = field(
        default_factory=dict
    )  # one update is one batch to them
    checkpoints: Checkpoints | None = (
        None  # writes those that are due, each after the rows of all updates before it
    )
    oom_retry: OomRetry | None = (
        None  # runs an update that does not fit into memory again; else that ends the run
    )
    # Called after each update and each batch of an evaluation. If it returns an exception, that is raised once the rows
    # so far are logged and a checkpoint is written.
    stop: Callable[[], BaseException | None] = lambda: None
    profiler: Profiler = field(default_factory=Profiler)  # traces some of the updates
    agree: Callable[[bool], bool] = (
        bool  # returns, once each worker has called it, whether all gave it true
    )
    done: int = field(default=0, init=False)  # completed updates
    pending: bool = field(
        default=False, init=False
    )  # the evaluation and the callbacks after the last update come yet
    validation: dict[str, float] = field(
        default_factory=dict, init=False
    )  # after the last update; empty without one
    stopped_by: str | None = field(
        default=None, init=False
    )  # the callback that has set `model.stop_training`

    def __post_init__(self) -> None:
        self.model, plan = self.update.model, self.recorder.plan
        watched = [
            each
            for name, own in self.callbacks.items()
            for each in (own, _Watch(self, name))
        ]
        length = {"epochs": plan.epochs, "steps": plan.updates_per_epoch}
        self._hooks = keras.callbacks.CallbackList(
            watched, model=self.model, verbose=0, **length
        )
        self._has_batch_hooks = any(map(_has_batch_hooks, self.callbacks.values()))
        self._next_update = tf.function(self._next_step, autograph=False)

    def fit(self, start: Checkpoint | Fork | None = None) -> float:
        """Train from the first update, or a checkpoint of this or another run; return the last (validation) loss.

        Raises:
            NonFiniteError: as `Recorder.fetch`.
            ConfigError: `start` is of another model or optimizer; no weight was changed.
        """
        self.model.stop_training = False
        self._hooks.on_train_begin()
        with self.profiler, self._checkpoint_on_interruption():
            iterator = iter(self.batches)
            if start is not None:
                self.restore(start, iterator)
            while self.pending or not self.ended:
                if not self.pending:
                    with self.profiler.update(self.done + 1, self.recorder):
                        self.record(self.update_once(iterator))
                    self.raise_if_stopped()
                self.evaluate()
                self.checkpoint(last=self.ended)
            del iterator  # with the batches that it has read ahead
            self.finish()
            self.test()
        self.agree(True)  # no worker leaves while another one is at work
        return (
            self.validation["loss"] if self.validation else self.recorder.last["loss"]
        )

    @property
    def ended(self) -> bool:
        """Whether there is no further update."""
        return bool(self.recorder.plan.ended(self.done) or self.model.stop_training)

    def restore(self, start: Checkpoint | Fork, iterator: Any) -> None:
        """Put back the state of a checkpoint; `iterator` is as in `update_once`."""
        state = (
            snapshot.read(start.folder, start.meta)
            if isinstance(start, Checkpoint)
            else start.states.pop()
        )
        snapshot.adapt(self.update, state)
        self._next_update.get_concrete_function(
            iterator
        )  # before: a layer may draw a seed when it is traced
        self.update.begun.assign(start.update)
        restore = snapshot.restore if isinstance(start, Checkpoint) else start.restore
        loop = restore(state, self.update, self.recorder, self.callbacks)
        self.done, self.pending, self.validation = (
            start.update,
            loop["open"],
            loop["validation"],
        )
        self.stopped_by = loop["stopped_by"]
        if self.evaluations.best is not None and loop["best"] is not None:
            self.evaluations.best.set_state(loop["best"])
        self.recorder.progress.done = self.done

    def update_once(self, iterator: Any) -> tf.Tensor:
        """Apply the next effective batch, in smaller micro-batches if it does not fit; return a vector of results.

        `iterator` is over effective batches; the results are as `Recorder.add` takes them.
        """
        epoch, index = self.recorder.plan.place(self.done)
        if index == 0:
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
        self.recorder.cut(
            self.recorder.plan.halved(self.done, self.update.micro_batch_size)
        )
        self._next_update = tf.function(self._next_step, autograph=False)
        return results

    def record(self, results: tf.Tensor) -> None:
        """Count the update that gave these results; give them to the recorder and to the callbacks' batch hooks."""
        self.recorder.add(
            self.done + 1, results, self._next_update.experimental_get_tracing_count()
        )
        if self._has_batch_hooks:
            logs = dict(zip(self.recorder.names, tf.unstack(results)[:-1], strict=True))
            self._hooks.on_train_batch_end(self.recorder.plan.place(self.done)[1], logs)
        self.done += 1
        self.pending = True

    def raise_if_stopped(self) -> None:
        """Raise `Interrupted` if the run was asked to end."""
        if (reason := self.stop()) is not None:
            raise Interrupted(reason)

    def evaluate(self) -> None:
        """Evaluate the validation split if that is due, and call the callbacks if an epoch ends."""
        results: dict[str, float] = {}
        plan, ended = self.recorder.plan, self.ended
        if self.evaluations.due(self.done, plan, last=ended):
            self.recorder.fetch()
            results = self.validate()
        try:
            if self.callbacks and (ended or plan.ends_epoch(self.done)):
                self.recorder.fetch()
                logs = self.recorder.epoch_means() | {
                    f"val_{name}": value for name, value in results.items()
                }
                self._hooks.on_epoch_end(plan.place(self.done - 1)[0], logs)
            if (
                self.model.stop_training
                and not results
                and self.evaluations.due(self.done, plan, last=True)
            ):
                results = self.validate(
                    pending=False
                )  # a callback has just stopped the run
        finally:  # the row is logged also if a callback raises
            if results:
                self.recorder.evaluated("val", self.done, results)
        self.validation, self.pending = results, False

    def validate(self, *, pending: bool = True) -> dict[str, float]:
        """Return the results over the validation split; write a checkpoint if they are the best so far.

        It can be interrupted only while the callbacks after the update are `pending`.
        """
        evaluate, best = self.evaluations.validation, self.evaluations.best
        assert evaluate is not None
        with averaged_weights(self.update.optimizer, self.model):
            self._hooks.on_test_begin()
            results = evaluate(self.raise_if_stopped if pending else lambda: None)
            self._hooks.on_test_end(results)
        if (
            best is not None
            and best.take(self.done, results)
            and self.checkpoints is not None
        ):
            self._save(pending, results, best=True)
        return results

    def checkpoint(self, *, last: bool = False) -> None:
        """Write a checkpoint if `Checkpoints.due` says so; the `last` one and that of an interruption always are."""
        if self.checkpoints is None or not self.checkpoints.due(
            self.done, last=last or self.pending
        ):
            return
        (self.recorder.finish if last else self.recorder.fetch)()
        self._save(self.pending, self.validation)  # copied now, and written by a thread
        self.recorder.restart_clock()

    def finish(self) -> None:
        """Log what is left, and end the training for the optimizer and the callbacks."""
        self.recorder.finish()
        self.update.optimizer.finalize_variable_values(
            self.model.trainable_variables
        )  # `use_ema`: averages stay
        self._hooks.on_train_end()
        self.recorder.trained(self.done, self.stopped_by, self.evaluations.best)

    def test(self) -> None:
        """Evaluate the test split, if there is one, with the weights of the best evaluation if they were kept."""
        if self.evaluations.test is None:
            return
        kept = self._best_checkpoint()
        weights = (
            nullcontext()
            if kept is None
            else snapshot.lent(snapshot.read(kept.folder, kept.meta), self.update)
        )
        with weights, averaged_weights(self.update.optimizer, self.model):
            results = self.evaluations.test(self.raise_if_stopped)
        self.recorder.evaluated(
            "test", self.done if kept is None else kept.update, results
        )

    def _next_step(self, iterator: Any) -> tf.Tensor:
        if self.oom_retry is None:
            return self._step(next(iterator))
        return self.oom_retry.hold_batch(iterator, self._step)

    def _step(self, batch: Any) -> tf.Tensor:
        count = self.recorder.tokens
        results = self.update(batch) | ({} if count is None else {TOKENS: count(batch)})
        self.recorder.names = tuple(results)
        compiled = shapes_compiled(batch) if self.update.compiled else 0
        self.recorder.traced.set()
        return tf.stack(
            [tf.cast(value, tf.float64) for value in (*results.values(), compiled)]
        )

    @contextmanager
    def _checkpoint_on_interruption(self) -> Iterator[None]:
        """On an interruption, or when a worker is lost, write a checkpoint, unless the state is amid an update."""
        try:
            yield
        except Interrupted as interrupted:
            if self.pending:
                self.recorder.fetch()
                self.checkpoint()
                self.recorder.trained(self.done, None, None)
            raise interrupted.args[0] from None
        except WORKER_LOST:
            with suppress(Exception):  # the device may be lost, too
                if self.pending or (
                    self.oom_retry is not None and self.oom_retry.rollback()
                ):
                    self.checkpoint(last=True)
            raise

    def _save(
        self, pending: bool, validation: Mapping[str, float], *, best: bool = False
    ) -> None:
        assert self.checkpoints is not None
        so_far = (
            None if self.evaluations.best is None else asdict(self.evaluations.best)
        )
        loop = {
            "open": pending,
            "validation": validation,
            "stopped_by": self.stopped_by,
            "best": so_far,
        }
        loop["batch"] = self.recorder.plan.digest(self.done)
        of_run = self.update, self.recorder, self.callbacks, loop
        self.checkpoints.save(self.done, lambda: snapshot.capture(*of_run), best=best)

    def _best_checkpoint(self) -> Checkpoint | None:
        best, checkpoints = self.evaluations.best, self.checkpoints
        if best is None or best.value is None or checkpoints is None:
            return None
        checkpoints.wait()
        self.agree(True)  # one of several workers writes it, and each reads it
        found = checkpoints.best(best.update)
        if self.agree(found is not None):
            return found
        if found is not None:
            say(
                f"not every worker can read {found.folder}: the test split is evaluated with the last weights"
            )
        return None


class _Watch(keras.callbacks.Callback):
    """Follows the callback `name`, and notes in the trainer whether it has stopped the run."""

    async_safe = (
        True  # so that Keras calls the callbacks of a run as it would without this one
    )

    def __init__(self, trainer: Trainer, name: str):
        super().__init__()
        self._trainer, self._name = trainer, name

    def _look(self, *_: Any, **__: Any) -> None:
        if not self.model.stop_training:
            self._trainer.stopped_by = (
                None  # a callback may set it back before the loop reads it
            )
        elif self._trainer.stopped_by is None:
            self._trainer.stopped_by = self._name

    on_train_begin = on_epoch_begin = on_epoch_end = on_test_begin = on_test_end = _look
    on_train_batch_begin = on_train_batch_end = _look


def _has_batch_hooks(callback: keras.callbacks.Callback) -> bool:
    """Return whether the callback overrides a hook of batches: to give it an update's logs waits for the device."""
    names = (
        "on_batch_begin",
        "on_batch_end",
        "on_train_batch_begin",
        "on_train_batch_end",
    )
    hooks = {
        name: getattr(callback, name) for name in names
    }  # LambdaCallback's are of the instance
    return any(
        getattr(hook, "__func__", None) is not getattr(keras.callbacks.Callback, n)
        for n, hook in hooks.items()
    )
