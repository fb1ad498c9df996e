"""The training of a run's parts, on the chief and on every other worker."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from pipeline.accumulation import Update
from pipeline.checkpoints.files import Checkpoint, Checkpoints
from pipeline.checkpoints.fork import Fork
from pipeline.components import devices, utilization
from pipeline.components.assembly import Parts
from pipeline.config.plan import ENDLESS, UNCUT
from pipeline.dataset import bad_example
from pipeline.tracking.tracker import Tracker
from pipeline.training.evaluator import Evaluations
from pipeline.training.loop import Trainer
from pipeline.training.oom_retry import OomRetry
from pipeline.training.profiler import Profiler
from pipeline.training.progress import Progress
from pipeline.training.recorder import Recorder

# Callbacks of Keras that write files, which is the chief's task.
WRITING = {
    "ModelCheckpoint",
    "OrbaxCheckpoint",
    "BackupAndRestore",
    "CSVLogger",
    "TensorBoard",
    "RemoteMonitor",
}


def recorder(parts: Parts, tracker: Tracker | None = None) -> Recorder:
    """Return the recorder of a run; without a tracker, as on a worker other than the chief, it logs nothing."""
    config, logs = parts.spec.config, tracker is not None
    known = parts.plan.updates % ENDLESS
    progress = Progress(
        known, logs, parts.plan.examples_seen if parts.plan.stages else float
    )
    skips = config.hardware.precision.name == "mixed_float16"
    of_run = (
        tracker,
        parts.plan,
        config.tracking.log_every,
        lambda: devices.peak_memory(parts.devices),
        progress,
    )
    share = (
        utilization.share_of_peak(parts, devices.gpu_names())
        if logs and parts.devices.on_gpu
        else 0.0
    )
    return Recorder(*of_run, skips=skips, share_of_peak=share, tokens=parts.tokens())


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
    stop: Callable[[], BaseException | None] = lambda: None,
) -> float:
    """Train from `start` to the end of the plan; return the last loss, of the validation split if there is one.

    Without a tracker, as on a worker other than the chief, nothing is written. `stop` returns an exception if the run
    is asked to end.
    """
    with bad_example.located(parts.data, parts.files):
        tracker, changed, callbacks = (
            recorder.tracker,
            parts.assigned_by_forward(),
            parts.objective.callbacks,
        )
        told: dict[str, Any] = {}
        retry, profiler = None, Profiler()
        if tracker is None:
            kinds = {
                name: {kind.__name__ for kind in type(each).__mro__}
                for name, each in callbacks.items()
            }
            callbacks = {
                name: each
                for name, each in callbacks.items()
                if WRITING.isdisjoint(kinds[name])
            }
        else:
            told = {"on_halved": tracker.evaluation_halved, "changed": changed}
            if (asked := parts.spec.config.hardware.profile) is not None:
                log = lambda name: tracker.journal.write({"artifact": name})  # noqa: E731
                profiler = Profiler(
                    tracker.run_dir, asked["start"], asked["updates"], log
                )
            if parts.plan.micro_batch_size != UNCUT:
                retry = OomRetry(
                    update,
                    changed,
                    parts.batches.element_spec,
                    parts.devices.workers == 1,
                )
        validation, test = (
            parts.evaluate(name, **told) for name in ("validation", "test")
        )
        evaluations = Evaluations(
            validation, test, parts.spec.config.training.evaluate_every, parts.best
        )
        if parts.devices.on_gpu:  # what came before, such as the model's initialization, is left out of the peak
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
        ).fit(start)
