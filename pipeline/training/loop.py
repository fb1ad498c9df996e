"""The loop, straight down: update, record, evaluate, checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import tensorflow as tf

from pipeline.accumulation import Update
from pipeline.checkpoints import snapshot
from pipeline.checkpoints.files import Checkpoint, Checkpoints
from pipeline.common.errors import say
from pipeline.config.sizes import Plan
from pipeline.dataset.batches import iterating
from pipeline.training.best_evaluation import Best
from pipeline.training.callbacks import Stopped, watches_updates
from pipeline.training.evaluator import Stop, never
from pipeline.training.oom_retry import Smaller
from pipeline.training.recorder import Recorder

if TYPE_CHECKING:
    from pipeline.checkpoints.fork import Fork

LOST = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, tf.errors.AbortedError)  # one of several workers


def train(
    model: keras.Model,
    batches: tf.data.Dataset,
    update: Update,
    plan: Plan,
    recorder: Recorder,
    *,
    evaluate: Callable[[Stop], dict[str, float]] | None = None,
    test: Callable[[Stop], dict[str, float]] | None = None,
    evaluate_every: int | str = "epoch",
    callbacks: Mapping[str, keras.callbacks.Callback] = MappingProxyType({}),
    checkpoints: Checkpoints | None = None,
    start: Checkpoint | Fork | None = None,
    best: Best | None = None,
    stop: Stop = lambda: None,
    smaller: Smaller | None = None,
    agreed: Callable[[bool], bool] = bool,
) -> float:
    """Train to the end of `plan`, or until a callback sets `model.stop_training`.

    Args:
        model: built, and compiled where a callback wants that.
        batches: effective batches, one an update, from that of the first update here on.
        update: applies one effective batch.
        plan: how many updates, and where epochs end.
        recorder: takes every update's results.
        evaluate: returns the loss and the metrics over the validation split; raises what its argument gives.
        test: the same over the test split, at the end: of the best checkpoint where one is kept.
        evaluate_every: in updates, or `epoch`; the last update is always followed by an evaluation.
        callbacks: by name; one batch of theirs is one update.
        checkpoints: written where they are due; every row up to a checkpoint is in the log before it.
        start: a checkpoint to go on from, so that what follows is what would have followed; or where to begin.
        best: takes every evaluation; the checkpoint of the best one is kept.
        smaller: lets an update that does not fit into memory be tried again; without it that ends the run.
        agreed: returns, once each of several workers has called it, whether it holds for all of them.
        stop: looked at after each update and each batch of an evaluation. Where it gives an exception the rows so far
            are written, then a checkpoint, and it is raised.

    Returns:
        The last loss: of the validation split where there is one, else of the last update.

    Raises:
        NonFiniteError: as `Recorder.fetch`.
        ConfigError: `start` is of another model or optimizer; nothing was changed.
    """
    counts = {"epochs": plan.epochs, "steps": plan.updates_per_epoch}
    stopped = Stopped()
    hooks = keras.callbacks.CallbackList(stopped.watched(callbacks), model=model, verbose=0, **counts)
    watched = any(map(watches_updates, callbacks.values()))
    names: list[str] = []

    def step(batch: Any) -> tf.Tensor:
        results = update(batch)
        names[:] = results
        return tf.stack([tf.cast(value, tf.float64) for value in results.values()])

    def next_step(iterator: Any) -> tf.Tensor:
        return step(next(iterator)) if smaller is None else smaller.begin(iterator, step)

    next_update = tf.function(next_step, autograph=False)

    def fitting(iterator: list[Any], done: int) -> tf.Tensor:
        """Return the results of the next update, in smaller micro-batches where it does not fit into memory."""
        nonlocal next_update
        if smaller is None:
            return next_update(*iterator)
        try:
            return smaller.tried(next_update, *iterator)
        except tf.errors.ResourceExhaustedError as error:
            recorder.fetch()
            results = smaller.again(error, done, step)
        recorder.cut(recorder.plan.halved(done - 1, update.micro_batch_size))
        next_update = tf.function(next_step, autograph=False)
        return results

    def begin(start: Checkpoint | Fork, iterator: list[Any]) -> dict[str, Any]:
        """Put the state back; return what the loop knew."""
        there = snapshot.read(start.folder, start.meta) if isinstance(start, Checkpoint) else start.take()
        snapshot.adapt(update, there)
        next_update.get_concrete_function(*iterator)  # before: a layer may draw a seed when it is traced
        update.begun.assign(start.update)
        if isinstance(start, Checkpoint):
            return snapshot.restore(there, update, recorder, callbacks)
        return start.restore(there, update, recorder, callbacks)

    def validate(done: int, *, open: bool) -> dict[str, float]:
        assert evaluate is not None
        with _averaged(update.optimizer, model):
            hooks.on_test_begin()
            results = evaluate(stop if open else never)
            hooks.on_test_end(results)
        if best is not None and best.take(done, results) and checkpoints is not None:
            save(done, open=open, validation=results, best=True)
        return results

    def update_once(iterator: list[Any], done: int) -> None:
        epoch, index = divmod(done - 1, plan.updates_per_epoch)
        if index == 0:
            hooks.on_epoch_begin(epoch)
        if watched:
            hooks.on_train_batch_begin(index)

        results = fitting(iterator, done)

        recorder.names = tuple(names)
        recorder.add(done, results)
        if watched:
            hooks.on_train_batch_end(index, dict(zip(names, tf.unstack(results), strict=True)))

    def end_of_update(done: int, last: bool) -> dict[str, float]:
        """Evaluate where that is due, call the callbacks where an epoch ends; return the evaluation, if any."""
        validation: dict[str, float] = {}
        if evaluate is not None and (last or _due(done, evaluate_every, plan)):
            recorder.fetch()
            validation = validate(done, open=True)
        try:
            if callbacks and (last or plan.ends_epoch(done)):
                recorder.fetch()
                results = recorder.epoch_means() | {f"val_{name}": value for name, value in validation.items()}
                hooks.on_epoch_end((done - 1) // plan.updates_per_epoch, results)
            if evaluate is not None and model.stop_training and not validation:  # a callback has seen enough
                validation = validate(done, open=False)
        finally:  # a callback that raises takes no row with it
            if validation:
                recorder.log.validation(done, validation)
                recorder.progress.validated(done, validation)
                recorder.restart_clock()
        return validation

    def checkpoint(done: int, *, open: bool = False, last: bool = False) -> None:
        """Write one where it is due; `open` where the evaluation and the callbacks after the update are to come."""
        if checkpoints is None or not checkpoints.due(done, last=last or open):
            return
        (recorder.finish if last else recorder.fetch)()
        save(done, open=open, validation=validation)
        recorder.restart_clock()

    def interrupt(done: int, reason: BaseException) -> NoReturn:
        recorder.fetch()
        checkpoint(done, open=True)
        recorder.log.trained(done, None, None)
        raise reason

    def rescue(done: int, *, open: bool) -> None:
        """Write a checkpoint after a worker was lost, where the update that was lost with it has changed nothing."""
        with suppress(Exception):  # the device may be lost, too
            if open or (smaller is not None and smaller.take_back()):
                checkpoint(done, open=open, last=True)

    def save(done: int, *, open: bool, validation: dict[str, float], best: bool = False) -> None:
        assert checkpoints is not None
        loop = {"open": open, "validation": validation, "stopped_by": stopped.by, "best": best_so_far()}
        checkpoints.save(done, lambda: snapshot.capture(update, recorder, callbacks, loop), best=best)

    def best_so_far() -> dict[str, Any] | None:
        return None if best is None else best.get_state()

    done, open, validation = 0, False, dict[str, float]()
    model.stop_training = False
    hooks.on_train_begin()
    with iterating(batches) as iterator:
        if start is not None:
            loop = begin(start, iterator)
            done, open, validation, stopped.by = start.update, loop["open"], loop["validation"], loop["stopped_by"]
            if best is not None and loop["best"] is not None:
                best.set_state(loop["best"])
            recorder.progress.done = done
        while open or (done < plan.updates and not model.stop_training):
            if not open:
                try:
                    update_once(iterator, done + 1)
                except LOST:
                    rescue(done, open=False)
                    raise
                done += 1
                if (reason := stop()) is not None:
                    interrupt(done, reason)
            try:
                validation, open = end_of_update(done, done == plan.updates or model.stop_training), False
            except LOST:
                rescue(done, open=True)
                raise
            except BaseException as error:
                if error is stop():  # while it evaluated, which is done again
                    interrupt(done, error)
                raise
            checkpoint(done, last=done == plan.updates or model.stop_training)
    recorder.finish()
    update.optimizer.finalize_variable_values(model.trainable_variables)  # with `use_ema` the averages stay
    hooks.on_train_end()
    recorder.log.trained(done, stopped.by, best)
    if test is not None:
        kept = None
        if best is not None and best.value is not None and checkpoints is not None:
            checkpoints.wait()
            agreed(True)  # one of several workers writes it, and each reads it
            kept = checkpoints.best(best.update)
            if not agreed(kept is not None) and kept is not None:
                say(f"not every worker can read {kept.folder}: the test split is evaluated with the last weights")
                kept = None
        weights = nullcontext() if kept is None else snapshot.lent(snapshot.read(kept.folder, kept.meta), update)
        with weights, _averaged(update.optimizer, model):
            results, at = test(stop), done if kept is None else kept.update
        recorder.log.test(at, results)
        recorder.progress.tested(at, results)
    agreed(True)  # none is gone while another one is at work
    return validation["loss"] if validation else recorder.last["loss"]


def _due(update: int, every: int | str, plan: Plan) -> bool:
    return plan.ends_epoch(update) if isinstance(every, str) else update % every == 0


@contextmanager
def _averaged(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> Iterator[None]:
    """With `use_ema` let the model have its averaged weights meanwhile: all rows of a curve are of the same weights."""
    if not getattr(optimizer, "inner_optimizer", optimizer).use_ema:
        yield
        return
    variables = model.trainable_variables
    raw = [tf.identity(variable.value) for variable in variables]
    optimizer.finalize_variable_values(variables)
    try:
        yield
    finally:
        for variable, value in zip(variables, raw, strict=True):
            variable.assign(value)
