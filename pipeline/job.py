"""One run, from a composed config to a closed run in MLflow."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from pipeline import config as configuration
from pipeline import imports
from pipeline.errors import ConfigError, first_line, say
from pipeline.masking import mask
from pipeline.tracking.journal import Journal

if TYPE_CHECKING:  # importing these takes seconds, in which the store is opened
    from pipeline.assembly import Parts
    from pipeline.recorder import Recorder
    from pipeline.tracking.tracker import Tracker


class Terminated(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt no `except Exception` swallows it."""


def run(
    config: DictConfig,
    overrides: Sequence[str],
    run_dir: Path,
    *,
    tags: Mapping[str, str] = MappingProxyType({}),
    check_dataset: Callable[[dict[str, Any]], None] = lambda _: None,
) -> tuple[str, float]:
    """Train what `config` says and record it.

    Args:
        config: composed; not yet checked.
        overrides: of the command line.
        run_dir: of this run; exists. It stays empty when the config is refused.
        tags: of the run, beside its own.
        check_dataset: takes what `provenance.dataset` says of the data, and may refuse it.

    Returns:
        The run's ID in MLflow, and its last loss: of the validation split where there is one.

    Raises:
        ConfigError: the config is wrong; nothing was created.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    cut = configuration.check(config, overrides)
    if (run_dir / "journal.jsonl").exists():  # a second run in one journal would never be shipped
        key = "hydra.run.dir" if config.tracking.sweep is None else "hydra.sweep.dir"
        raise ConfigError(key, "must be a folder without a run in it", str(run_dir))
    journal = Journal(config.tracking.uri, config.tracking.experiment)  # opens the store while TensorFlow is imported
    try:
        with imports.without_chatter():
            from pipeline import assembly, hardware, training
            from pipeline.checkpoint import Checkpoints
            from pipeline.progress import Progress
            from pipeline.recorder import Recorder
            from pipeline.tracking.tracker import Tracker

        parts = assembly.assemble(config, cut, check_dataset)
        dependent = {"model.batch_dependent_layers": ", ".join(parts.batch_dependent_layers()) or "none"}
        journal.ready()
    except BaseException:
        journal.abandon()
        raise
    tracker = Tracker(journal, run_dir, parts.plan)
    recorder = Recorder(
        tracker,
        parts.plan,
        config.tracking.log_every,
        lambda: hardware.peak_memory(parts.machine),
        Progress(parts.plan.updates),
        skips=config.hardware.precision.name == "mixed_float16",
    )
    checkpoints = Checkpoints(run_dir / "checkpoints", config.training.checkpoint_every, parts.plan)
    with _closing(tracker, recorder), checkpoints:
        tracker.start(config, overrides, parts.data, parts.recorded_data, parts.model, {**dependent, **tags})
        say(f"{parts.machine.description}; {parts.plan}")
        say(f"run directory {run_dir}", f"MLflow run {tracker.run_id} in {mask(config.tracking.uri)}")
        recorder.restart_clock()
        loss = training.train(
            parts.model,
            parts.batches,
            parts.update(),
            parts.plan,
            recorder,
            evaluate=parts.evaluate(),
            evaluate_every=config.training.evaluate_every,
            callbacks=parts.objective.callbacks,
            checkpoints=checkpoints,
        )
        recorder.progress.close()
        if config.tracking.log_model:
            _log_model(parts, tracker)
    uri = config.tracking.uri
    where = [] if uri == "sqlite:///mlruns/mlflow.db" else [f"tracking.uri={mask(uri)}"]
    say(" ".join(["open it with: pipeline ui", *where]))
    return tracker.run_id, loss


@contextmanager
def _closing(tracker: Tracker, recorder: Recorder) -> Iterator[None]:
    """Close the run as FINISHED, FAILED or KILLED, with all that it had logged; one that never began needs none."""
    status, failure = "FINISHED", None
    try:
        yield
    except BaseException as error:
        killed = isinstance(error, KeyboardInterrupt | Terminated)
        status = "KILLED" if killed else "FAILED"
        failure = "".join(traceback.format_exception_only(error)).strip()
        with suppress(Exception):  # no second failure, such as of a device that is gone, hides the first
            recorder.fetch()
        raise
    finally:
        recorder.progress.close()
        unshipped = tracker.end(status, failure) if tracker.run_id else None
        if unshipped:
            say(f"MLflow did not take everything ({unshipped}); the rest is in {tracker.run_dir / 'journal.jsonl'}")


def _log_model(parts: Parts, tracker: Tracker) -> None:
    from pipeline.tracking import logged_model

    tracking = parts.config.tracking
    try:
        code = tracking.code
        if code is None:
            leaves = configuration.leaves(configuration.plain(parts.config))
            targets = [str(value) for key, value in leaves.items() if key.endswith("_target_")]
            code = logged_model.own_code(parts.model, targets)
        logged_model.log(tracking.uri, tracker.experiment_id, tracker.run_id, parts.model, parts.example(), code)
    except Exception as error:  # the training is done and recorded: a model that cannot be saved does not undo it
        first = first_line(error)
        tracker.journal.write({"tags": {"model.not_logged": mask(first)}})
        say(f"the model was not logged: {first}")


def _terminate(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough: a second would interrupt the closing of the run
    raise Terminated("SIGTERM")
