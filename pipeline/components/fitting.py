"""Trains with the parts of a run, on the chief and on every other worker."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from pipeline.accumulation import Evaluation, Update, internals
from pipeline.checkpoints import snapshot
from pipeline.checkpoints.files import Checkpoint, Checkpoints
from pipeline.checkpoints.fork import Beginning
from pipeline.components import devices, utilization
from pipeline.components.assembly import Parts
from pipeline.config.plan import ENDLESS, UNCUT
from pipeline.dataset import bad_example, non_finite, tokens
from pipeline.dataset.batches import first_examples
from pipeline.shown.functions import Functions
from pipeline.shown.observer import Observer
from pipeline.shown.plan import Settings
from pipeline.shown.show import Show
from pipeline.tracking.journal import Journal
from pipeline.tracking.tracker import Tracker
from pipeline.training.evaluator import (
    EvaluatedSet,
    Evaluations,
    SplitEvaluator,
    averaged_weights,
)
from pipeline.training.loop import Trainer
from pipeline.training.oom_retry import OomRetry
from pipeline.training.profiler import Profiler
from pipeline.training.progress import Progress
from pipeline.training.recorder import NonFiniteError, Recorder

# Keras callbacks that write files or send reports. Only the chief runs them.
WRITING = {
    "ModelCheckpoint",
    "OrbaxCheckpoint",
    "BackupAndRestore",
    "CSVLogger",
    "TensorBoard",
    "RemoteMonitor",
}


def recorder(parts: Parts, tracker: Tracker | None = None) -> Recorder:
    """Return the recorder of a run.

    Without a tracker, the recorder logs nothing. Only the chief has a tracker.
    """
    config = parts.spec.config
    plan = parts.plan
    logs = tracker is not None
    updates = plan.updates % ENDLESS  # 0 if the number of updates is unknown
    # The effective batches of stages differ in size, so measure progress in examples.
    work = plan.examples_seen if plan.changes else float
    progress = Progress(updates, logs, work)
    share_of_peak = 0.0
    if logs and parts.devices.on_gpu:
        share_of_peak = utilization.share_of_peak(parts, devices.gpu_names())
    return Recorder(
        tracker,
        plan,
        config.tracking.log_every,
        peak_memory=lambda: devices.peak_memory(parts.devices),
        progress=progress,
        skips=config.hardware.precision.name == "mixed_float16",
        share_of_peak=share_of_peak,
    )


def checkpoints(
    parts: Parts, run_dir: Path, journal: Journal | None = None
) -> Checkpoints:
    """Return the checkpoints in a run directory.

    `training.checkpoint_every` sets how often a checkpoint is written; the checkpoint
    of the best evaluation is written in addition. Without a journal, no checkpoint is
    written. Only the chief has a journal.
    """
    writes = journal is not None
    every = parts.spec.config.training.checkpoint_every if writes else None
    return Checkpoints(
        run_dir / "checkpoints", every, parts.plan, writes=writes, journal=journal
    )


def fit(
    parts: Parts,
    update: Update,
    recorder: Recorder,
    checkpoints: Checkpoints,
    start: Checkpoint | Beginning | None,
    stop: Callable[[], BaseException | None] = lambda: None,
    on_traced: Callable[[], None] = lambda: None,
) -> float:
    """Train to the end of the plan.

    If the recorder has no tracker, callbacks that write files are left out, and no
    update is profiled or retried. Only the chief has a tracker.

    Args:
        parts: the parts of the run.
        update: applies one effective batch.
        recorder: records the results of updates.
        checkpoints: the checkpoints of the run.
        start: the checkpoint to start from, or None to start anew.
        stop: returns the exception that ends the run, or None to continue.
        on_traced: called each time the update has been traced.

    Returns:
        The last validation loss, or the last training loss without a validation split.
    """
    tracker = recorder.tracker
    with (
        bad_example.errors_located(parts.data, parts.files),
        _non_finite_data_named(parts),
    ):
        assigned = parts.assigned_by_forward()
        callbacks: Mapping[str, keras.callbacks.Callback] = parts.objective.callbacks
        profiler = Profiler()
        retry = None
        if tracker is None:
            callbacks = _without_writing(callbacks)
        else:
            profiler = _profiler(parts, tracker)
            retry = _oom_retry(parts, update, assigned)
        validation = _evaluator(parts, "validation", tracker, assigned)
        evaluations = Evaluations(
            validation,
            _evaluator(parts, "test", tracker, assigned),
            parts.spec.config.training.evaluate_every,
            parts.best,
            _evaluated_sets(parts, tracker, assigned),
        )
        if validation is not None and validation.show is not None:
            evaluations = replace(evaluations, show=validation.show)
        # Measure the peak from here on, without the initialization of the model.
        if parts.devices.on_gpu:
            tf.config.experimental.reset_memory_stats("GPU:0")
        return Trainer(
            update,
            parts.batches,
            recorder,
            evaluations=evaluations,
            callbacks=callbacks,
            checkpoints=checkpoints,
            oom_retry=retry,
            stop=stop,
            profiler=profiler,
            agree=parts.devices.agree,
            evaluate_at_start=parts.spec.config.training.evaluate_at_start,
            count_tokens=_token_counter(parts),
            on_traced=on_traced,
        ).fit(start)


@contextmanager
def _non_finite_data_named(parts: Parts) -> Iterator[None]:
    """If an update in the block is not finite, check its batch.

    The batches of a user's own loader cannot be read again, so they are not checked.

    Raises:
        NonFiniteError: an update is not finite. If its batch has a NaN or an infinite
            value, the message names the part of the batch that has it.
    """
    try:
        yield
    except NonFiniteError as error:
        if parts.data.loaders:
            raise
        batch = next(iter(parts.effective_batches(error.update - 1)))
        part = non_finite.non_finite_part(batch)
        if not part:
            raise
        raise NonFiniteError(
            f"{error}: the {part} of update {error.update} contain a value that is NaN "
            "or infinite",
            error.update,
        ) from error


def _token_counter(parts: Parts) -> Callable[[Any], tf.Tensor] | None:
    """Return a function that counts the tokens in an effective batch.

    Return None if the examples are not sequences, or if masked tokens do not count and
    each worker has only its own share of the batch.
    """
    pad = parts.spec.dataset.get("pad")
    layers = internals.layers_of(parts.model)
    masks_zeros = any(getattr(layer, "mask_zero", False) for layer in layers)
    # Batches that are cut by tokens are ragged, and every worker has them whole.
    has_shares = parts.reader is not None and not parts.spec.cuts_by_tokens
    if masks_zeros and has_shares:
        return None
    inputs = parts.data.train.element_spec[0]
    padding = None if pad is None else pad["value"]
    return tokens.counter(inputs, padding, masks_zeros)


def _without_writing(
    callbacks: Mapping[str, keras.callbacks.Callback],
) -> dict[str, keras.callbacks.Callback]:
    kept = {}
    for name, callback in callbacks.items():
        classes = {cls.__name__ for cls in type(callback).__mro__}
        if WRITING.isdisjoint(classes):
            kept[name] = callback
    return kept


def _profiler(parts: Parts, tracker: Tracker) -> Profiler:
    profile = parts.spec.config.hardware.profile
    if profile is None:
        return Profiler()
    start = profile["start"]
    updates = profile["updates"]
    return Profiler(tracker.run_dir, start, updates, log=tracker.file)


def _oom_retry(
    parts: Parts, update: Update, assigned: Sequence[tf.Variable]
) -> OomRetry | None:
    if parts.plan.micro_batch_size == UNCUT:
        return None
    alone = parts.devices.workers == 1
    return OomRetry(update, assigned, parts.batches.element_spec, alone)


@contextmanager
def best_weights(
    parts: Parts, update: Update, checkpoints: Checkpoints
) -> Iterator[int | None]:
    """Within the block, give the model the weights of the best evaluation.

    Yield the number of updates before that evaluation. If its checkpoint is not kept,
    or cannot be read, yield None and leave the weights as they are.
    """
    best = parts.best
    checkpoint = None
    if best is not None and best.value is not None:
        checkpoints.wait()
        checkpoint = checkpoints.best(best.update)
    if checkpoint is None:
        yield None
        return
    saved = snapshot.read(checkpoint)
    with (
        snapshot.weights_replaced(saved, update),
        averaged_weights(update.optimizer, parts.model),
    ):
        yield checkpoint.updates_done


def _evaluator(
    parts: Parts, name: str, tracker: Tracker | None, assigned: Sequence[tf.Variable]
) -> SplitEvaluator | None:
    """Return the evaluator of a split, or None if the split is missing."""
    batches = parts.evaluation_batches(name, parts.reader)
    if batches is None:
        return None
    alone = parts.devices.workers == 1
    if tracker is None:
        return SplitEvaluator(parts.evaluation(), batches, name, retry=alone)
    observer = None
    if name == "validation" and parts.shown is not None and parts.shown.observes:
        observer = Observer(parts.objective.evaluation, parts.shown.has_losses)
    evaluation = parts.evaluation(observer)
    show = None
    if name == "validation" and parts.shown is not None:
        show = Show(parts.shown, tracker, _shown_functions(parts, evaluation, assigned))
    return SplitEvaluator(
        evaluation,
        batches,
        name,
        on_halved=tracker.evaluation_halved,
        changed=assigned,
        retry=alone,
        show=show,
    )


def _shown_functions(
    parts: Parts, evaluation: Evaluation, assigned: Sequence[tf.Variable]
) -> Functions | None:
    """Return the user's functions of `training.shown`, or None if there are none."""
    if not parts.objective.shown or parts.shown is None:
        return None
    count = parts.shown.settings.examples or Settings().examples
    batch = first_examples(
        parts.data, "validation", count, parts.spec.dataset.get("pad")
    )
    return Functions(parts.objective.shown, batch, evaluation, assigned)


def _evaluated_sets(
    parts: Parts, tracker: Tracker | None, assigned: Sequence[tf.Variable]
) -> dict[str, EvaluatedSet]:
    """Return the evaluators of the sets in `dataset.validations`, by name."""
    config = parts.spec.config
    evaluated = {}
    for validation_set in parts.validation_sets:
        evaluator = _evaluator(parts, validation_set.split_key, tracker, assigned)
        assert evaluator is not None
        every = validation_set.every
        if every is None:
            every = config.training.evaluate_every
        evaluated[validation_set.name] = EvaluatedSet(evaluator, every)
    return evaluated
