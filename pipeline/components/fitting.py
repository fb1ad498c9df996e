"""The training of a run's parts, on the chief and on every other worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.accumulation import Update
from pipeline.checkpoints.files import Checkpoint, Checkpoints
from pipeline.checkpoints.fork import Fork
from pipeline.components import devices
from pipeline.components.assembly import Parts
from pipeline.dataset import bad_example
from pipeline.tracking.tracker import Tracker
from pipeline.training.evaluator import Evaluations
from pipeline.training.loop import Trainer
from pipeline.training.oom_retry import OomRetry
from pipeline.training.progress import Progress
from pipeline.training.recorder import Recorder

# Keras callbacks that write files, which is the chief's task.
WRITING = ("ModelCheckpoint", "BackupAndRestore", "CSVLogger", "TensorBoard", "RemoteMonitor")


def recorder(parts: Parts, tracker: Tracker | None = None) -> Recorder:
    """Return the recorder of a run; without a tracker, as on a worker other than the chief, it logs nothing."""
    config, plan, logs = parts.spec.config, parts.plan, tracker is not None
    return Recorder(
        tracker,
        plan,
        config.tracking.log_every,
        (lambda: devices.peak_memory(parts.devices)) if logs else (lambda: 0),
        Progress(plan.updates) if logs else Progress(plan.updates, shown=False),
        skips=config.hardware.precision.name == "mixed_float16",
        raises=logs,
    )


def checkpoints(parts: Parts, run_dir: Path, *, writes: bool = True) -> Checkpoints:
    """Return the checkpoints in a run directory; they are written when the config says, if this process `writes`."""
    every = parts.spec.config.training.checkpoint_every if writes else None
    return Checkpoints(run_dir / "checkpoints", every, parts.plan, writes=writes)


def fit(
    parts: Parts,
    update: Update,
    recorder: Recorder,
    checkpoints: Checkpoints,
    start: Checkpoint | Fork | None,
    tracker: Tracker | None = None,
    stop: Callable[[], BaseException | None] = lambda: None,
) -> float:
    """Train to the end of the plan; return the last loss, of the validation split if there is one.

    Args:
        parts: of the run.
        update: applies one effective batch.
        recorder: takes the results.
        checkpoints: of the run.
        start: the checkpoint to start from; None for the first update.
        tracker: None on a worker other than the chief, which writes nothing.
        stop: returns an exception if the run is asked to end.
    """
    with bad_example.located(parts.data, parts.files):
        changed, callbacks = parts.assigned_by_forward(), parts.objective.callbacks
        told: tuple[Any, ...] = ()
        if tracker is None:
            of_chief = {
                name for name, each in callbacks.items() if any(k.__name__ in WRITING for k in type(each).__mro__)
            }
            callbacks = {name: callback for name, callback in callbacks.items() if name not in of_chief}
        else:
            told = tracker.evaluation_halved, changed
        evaluations = Evaluations(
            parts.evaluate("validation", *told),
            parts.evaluate("test", *told),
            parts.spec.config.training.evaluate_every,
            parts.best,
        )
        retry = None
        if tracker is not None:
            retry = OomRetry(update, changed, parts.batches.element_spec, retry=parts.devices.workers == 1)
        return Trainer(
            update,
            parts.batches,
            recorder,
            evaluations=evaluations,
            callbacks=callbacks,
            checkpoints=checkpoints,
            oom_retry=retry,
            stop=stop,
            agree=parts.devices.agree,
        ).fit(start)
