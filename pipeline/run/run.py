"""Trains one run, from a composed config to a closed run in MLflow."""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from pipeline.checkpoints import fork, resume_rules
from pipeline.checkpoints.files import BEST, Checkpoint, saved_updates
from pipeline.checkpoints.fork import Beginning, ModelStart
from pipeline.checkpoints.resume_rules import Continuation
from pipeline.checkpoints.run_dirs import resume_command, start_override
from pipeline.common import imports
from pipeline.common.errors import (
    ConfigError,
    NotShippedError,
    count,
    exits_as_failures,
    first_line,
    no_space,
    say,
    say_id,
)
from pipeline.common.secrets import mask
from pipeline.common.signals import Interruption, Terminated
from pipeline.config.plain import leaves
from pipeline.config.plan import recorded_cuts
from pipeline.config.resolve import RunSpec, resolve
from pipeline.distributed import chief, worker
from pipeline.distributed.chief import Chief
from pipeline.run import batch_size_search, ending_lines
from pipeline.run.stop_reason import StopReason
from pipeline.tracking.foreign_store import OwnStore, sync_command
from pipeline.tracking.journal import Journal
from pipeline.tracking.sync_run import sync_run
from pipeline.tracking.tracker import Tracker

if TYPE_CHECKING:  # Importing these takes seconds; do it while the store opens.
    from pipeline.accumulation import Update
    from pipeline.components.assembly import Parts
    from pipeline.config.schema import Config
    from pipeline.dataset.checksums import DataFiles
    from pipeline.run.xla_choice import Choice
    from pipeline.training.recorder import Recorder

XLA_TAG = "xla.found"  # tag of a run: the times by which `hardware.xla` was decided
# Seconds that the end of an interrupted run may take before a line says which
# checkpoint is written.
SOON = 1.0

# Receives the record of the data (see `provenance.dataset`), and raises an error to
# reject the data.
CheckDataset = Callable[[dict[str, Any]], None]


def run(
    composed: DictConfig,
    overrides: Sequence[str],
    run_dir: Path,
    *,
    tags: Mapping[str, str] = MappingProxyType({}),
    check_dataset: CheckDataset | None = None,
    resume: bool = False,
    key: str = resume_rules.RUN_DIR,
) -> tuple[str, float]:
    """Train and record the run that a config describes.

    Args:
        composed: the config, as Hydra composed it from `overrides`.
        overrides: the overrides from the command line.
        run_dir: directory of this run, which exists. It is unchanged if the config is
            rejected.
        tags: additional tags of the run.
        check_dataset: called with the record of the data; raises an error to reject the
            data.
        resume: whether to require and continue the run in `run_dir`. With
            `training.resume=auto`, a run is also continued if there is one.
        key: the argument or config key that names `run_dir` in errors.

    Returns:
        The ID of the run in MLflow, and its last validation loss, or its last training
        loss without a validation split. On a worker other than the chief, an empty ID
        and infinity.

    Raises:
        ConfigError: the config is wrong. Nothing was created.
        NotShippedError: the run trained, but not all of it is in the store.
        StoreError: the store did not accept the run.
    """
    with Interruption().listening() as interruption:
        spec = resolve_for_all(composed, overrides)
        if spec.workers is not None and not spec.workers.is_chief:
            worker.run(spec)
            return "", math.inf
        with Chief(spec) as workers, exits_as_failures():
            before = resume_rules.find_continuation(
                run_dir, spec, required=resume, key=key
            )
            if before is not None and before.finished:
                return before.run_id, _finished(before, workers)
            job = _prepare(spec, run_dir, tags, before, check_dataset, workers)
            loss = _train(job, interruption, workers)
    run_id = job.tracker.run_id
    spec = job.parts.spec
    start = fork.override_to_repeat(spec, _start_tags(job))
    say(ending_lines.open_or_repeat(run_id, spec, job.tracker.horizons, start))
    return run_id, loss


def resolve_for_all(composed: DictConfig, overrides: Sequence[str]) -> RunSpec:
    """Return the spec of a config. If it is rejected, notify the other workers.

    Raises:
        ConfigError: the config is rejected.
        SystemExit: the config is rejected, and the chief prints the error.
    """
    try:
        return resolve(composed, overrides)
    except ConfigError as error:
        # Ignore errors while notifying the workers: their addresses may be unknown,
        # since the config or the environment is invalid.
        with suppress(Exception):
            if chief.tell_workers(composed.hardware, error):
                raise SystemExit(2) from None
        raise


@dataclass(frozen=True)
class _Job:
    """A run that is about to train.

    Attributes:
        parts: the parts of the run.
        update: applies one effective batch.
        tracker: records the run.
        tags: additional tags of the run.
        before: the run that is resumed, or None if the run is new.
        start: the checkpoint from which training starts, or None to start anew.
        found: the result of the search for a micro-batch size, or None if there was no
            search.
        choice: whether XLA compiles, and the times that decided it. None if the config
            or a record decides.
    """

    parts: Parts
    update: Update
    tracker: Tracker
    tags: Mapping[str, str]
    before: Continuation | None
    start: Checkpoint | Beginning | None
    found: batch_size_search.Found | None
    choice: Choice | None


def _prepare(
    spec: RunSpec,
    run_dir: Path,
    tags: Mapping[str, str],
    before: Continuation | None,
    check_dataset: CheckDataset | None,
    workers: Chief,
) -> _Job:
    """Build the parts of the run, and open its store.

    The last checks that can reject the run are made here, before it is created.
    """
    with ExitStack() as undo:
        fork_updates_done = None
        if before is not None:
            undo.callback(before.past.close)
            spec = before.spec
            check_dataset = before.check_dataset
            tag = before.past.start.tags.get(fork.UPDATE_TAG)
            if tag is not None:
                fork_updates_done = int(tag)

        start: Checkpoint | Beginning | None = None
        if before is not None:
            start = before.checkpoint
        if start is None:
            start = fork.find_fork(spec, run_dir, fork_updates_done)
        if isinstance(start, ModelStart):
            # Record the version: an alias may name another version later.
            spec = spec.changed({"start.run": start.model.name})

        # Open the store now: another process does so while this one imports TensorFlow.
        tracking = spec.config.tracking
        journal = Journal(
            tracking.uri,
            tracking.experiment,
            patience=tracking.patience,
            when_unreachable=tracking.when_unreachable.name,
            run_dir=run_dir,
        )
        undo.callback(journal.abandon)

        found = None
        if spec.searches:
            # A search takes minutes, so first wait until the store accepts the run.
            journal.ready()
            spec, found = batch_size_search.search(spec)
        parts = _gather(spec, run_dir, start, check_dataset, workers)
        choice = None
        if parts.spec.times_xla:
            if found is None:
                # This takes seconds, so first wait until the store accepts the run.
                journal.ready()
            parts, choice = _choose_xla(parts)
        update = parts.update()
        if before is not None:
            before.check(update, parts.plan)
        if isinstance(start, Beginning):
            start.check(update, parts.plan)
            start.load()
        if found is None and choice is None:
            journal.ready()
        undo.pop_all()
    tracker = Tracker(journal, run_dir, parts.plan, parts.files)
    return _Job(parts, update, tracker, tags, before, start, found, choice)


def _choose_xla(parts: Parts) -> tuple[Parts, Choice]:
    """Choose the faster way for `hardware.xla=fastest`; see `xla_choice.decide`."""
    from pipeline.run import xla_choice  # imports TensorFlow

    return xla_choice.decide(parts)


def _gather(
    spec: RunSpec,
    run_dir: Path,
    start: Checkpoint | Beginning | None,
    check_dataset: CheckDataset | None,
    workers: Chief,
) -> Parts:
    """Return the parts of the run, once all workers have started and connected."""
    workers.start(spec, run_dir)
    with imports.without_chatter():
        from pipeline.components import assembly

    spec = workers.gather(spec, run_dir, start)
    with workers.as_worker_error():
        parts = assembly.assemble(spec, check_dataset, _updates_before(start))
    workers.reductions_ready = parts.devices.reductions_ready
    return parts


def _updates_before(start: Checkpoint | Beginning | None) -> int:
    return 0 if start is None else start.updates_done


def _finished(before: Continuation, workers: Chief) -> float:
    """Send the rest of a finished run's records to its store; return its last loss.

    Raises:
        NotShippedError: the store still lacks some of the records.
    """
    before.past.close()
    say(
        f"run {before.run_id} in {before.run_dir} has finished: "
        "there is nothing left to train"
    )
    workers.dismiss()
    last = before.past.last
    loss = last.get("val/loss", last.get("train/loss", math.inf))
    tracking = before.spec.config.tracking
    store = OwnStore(tracking.uri)
    if sync_run(str(before.run_dir), store, tracking.patience, named=False):
        raise NotShippedError(_unshipped_line(before.run_dir, tracking.uri), loss)
    return loss


def _train(job: _Job, interruption: Interruption, workers: Chief) -> float:
    """Train, log the model, and close the run; return the last loss.

    Raises:
        NotShippedError: the run trained, but not all of it is in the store.
    """
    from pipeline.components import fitting

    tracker = job.tracker
    recorder = fitting.recorder(job.parts, tracker)
    config = job.parts.spec.config
    log_model = config.tracking.log_model
    with (
        _closing(tracker, recorder, config) as closing,
        fitting.checkpoints(job.parts, tracker.run_dir, tracker.journal) as checkpoints,
    ):
        _begin(job)
        _continue_counting(job, recorder)
        traced = threading.Event()
        mlflow_import = threading.Thread(target=_warm_up, args=(traced,), daemon=True)
        if log_model:
            mlflow_import.start()
        stop = StopReason(interruption, tracker.journal)
        with workers.as_worker_error(), interruption.between_updates():
            loss = fitting.fit(
                job.parts,
                job.update,
                recorder,
                checkpoints,
                job.start,
                stop,
                traced.set,
            )
        recorder.progress.close()
        _check_files(job.parts.files)
        # Write the link again: another run that began at the same time may have
        # overwritten it.
        _link_fork(job)
        if log_model:
            traced.set()  # Start the import even if no update was traced.
            mlflow_import.join()  # A signal does not interrupt the imports in a thread.
            with fitting.best_weights(job.parts, job.update, checkpoints) as best:
                _log_model(job.parts, tracker, best)
    if closing.unshipped is not None:
        raise NotShippedError(closing.unshipped, loss)
    return loss


def _check_files(files: DataFiles) -> None:
    """Wait for the checksums of the data's files, and check that no file changed.

    An interruption ends the wait, and the checksums are left out.

    Raises:
        DataError: a file has changed since the run began.
    """
    try:
        files.wait()
    except (KeyboardInterrupt, Terminated):  # do not fail a run that has trained
        say("the checksums of the data are left out")
    files.check()


def _begin(job: _Job) -> None:
    """Create or continue the run in the store, and print the first messages."""
    from pipeline.components import description

    tracker = job.tracker
    parts = job.parts
    spec = parts.spec
    callbacks = parts.objective.callbacks
    updates = _updates_before(job.start)
    if job.before is None:
        tags = description.tags(parts)
        if isinstance(job.start, Beginning):
            tags = tags | job.start.tags
        tracker.start(
            updates,
            spec,
            parts.data,
            parts.record.dataset,
            parts.model,
            tags | dict(job.tags),
            parts.devices.gpus,
        )
        lines = description.first_lines(parts)
    else:
        tracker.resume(
            job.before.past,
            updates,
            spec,
            parts.data,
            parts.record.dataset,
            job.before.settings,
        )
        lines = job.before.messages(callbacks)
    say(f"{parts.devices.description}; {parts.plan}", *lines)

    if job.found is not None:
        columns = batch_size_search.COLUMNS
        tracker.table(batch_size_search.TABLE, columns, job.found.tries)
        tracker.tag({batch_size_search.TAG: job.found.how})
    if job.choice is not None:
        tracker.tag({XLA_TAG: job.choice.why})
    if isinstance(job.start, Beginning):
        say(*job.start.messages(callbacks))
    _link_fork(job)

    run = "no MLflow run yet"
    if tracker.run_id:
        run = f"MLflow run {tracker.run_id} in {mask(spec.config.tracking.uri)}"
    say(f"run directory {tracker.run_dir}", run)
    say_id(tracker.run_id)


def _start_tags(job: _Job) -> Mapping[str, str]:
    """Return tags that name the checkpoint of another run with which this run began."""
    if job.before is not None:
        return job.before.past.start.tags
    if isinstance(job.start, Beginning):
        return job.start.tags
    return {}


def _link_fork(job: _Job) -> None:
    """Record this run among the forks of the run from which it was forked."""
    if isinstance(job.start, Beginning) and job.start.run_id:
        job.tracker.forked_from(job.start.run_id)


def _continue_counting(job: _Job, recorder: Recorder) -> None:
    """Restore the micro-batch sizes of earlier updates, to count their micro-steps.

    The sizes of a resumed run differ from the config if micro-batches were halved. New
    updates use the size in the config.
    """
    before = job.before
    if before is None:
        return
    cuts = recorded_cuts(before.past.tags)
    if cuts:
        last = max([before.updates_done, *before.past.updates])
        recorder.cut(job.parts.plan.after(cuts, last))


@dataclass
class _Closing:
    """The outcome of closing a run.

    Attributes:
        unshipped: a line about records that were not shipped, or None if all were.
    """

    unshipped: str | None = None


@contextmanager
def _closing(
    tracker: Tracker, recorder: Recorder, config: Config
) -> Iterator[_Closing]:
    """Close the run when the block ends.

    The run is also closed if the block ends with an error or is interrupted. Unless the
    block ends with an error, print the results and the times. After an interruption,
    print how to resume the run. The jobs of a sweep print neither: a sweep has a
    report, and prints the command that resumes all of its jobs.
    """
    closing = _Closing()
    is_job_of_sweep = config.tracking.sweep is not None
    status = "FINISHED"
    failure = None
    try:
        yield closing
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt | Terminated)
        status = "KILLED" if interrupted else "FAILED"
        failure = "".join(traceback.format_exception_only(error)).strip()
        if interrupted:
            cause = str(error) or "Ctrl-C"
            failure = f"interrupted by {cause}"
        # Suppress further errors, such as those of a lost device, to raise the first
        # one.
        with suppress(Exception):
            recorder.fetch()
        raise
    finally:
        recorder.progress.close()
        why = None
        try:
            announcing: AbstractContextManager[None] = nullcontext()
            if status == "KILLED" and not is_job_of_sweep:
                announcing = _announcing_checkpoint(tracker.run_dir)
            if tracker.begun:
                with announcing:
                    why = tracker.end(status, failure)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt | Terminated)
            if status != "FINISHED" or not interrupted:
                say(_unshipped_line(tracker.run_dir, tracker.journal.uri))
                raise
            # Training is complete: an interruption only leaves records unsent, which
            # `pipeline sync` sends later.
            why = "interrupted"
        if why:
            uri = tracker.journal.uri
            closing.unshipped = _unshipped_line(tracker.run_dir, uri, f" ({why})")
            if failure is not None:
                say(closing.unshipped)
        if status != "FAILED" and not is_job_of_sweep:
            # A second signal leaves these lines out, but not those that follow.
            with suppress(KeyboardInterrupt, Terminated):
                say(*ending_lines.results_and_times(tracker.run_dir, recorder))
        if status == "FINISHED":
            say(*_unsaved_weights(tracker, config))
        if status == "KILLED" and not is_job_of_sweep:
            every = config.training.checkpoint_every
            say(_resume_line(tracker.run_dir, every, recorder.updates))


@contextmanager
def _announcing_checkpoint(run_dir: Path) -> Iterator[None]:
    """Print the update of the last checkpoint if the block takes longer than `SOON`.

    The store may be away, and the machine may be taken away before the wait ends. If
    the store answers, the line that follows soon after has the update.
    """
    saved = saved_updates(run_dir / "checkpoints")
    lines = [f"the checkpoint of update {update} is written" for update in saved[-1:]]
    timer = threading.Timer(SOON, say, lines)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _unsaved_weights(tracker: Tracker, config: Config) -> list[str]:
    """Return a line if neither a checkpoint nor a logged model has the last weights.

    The disk may have been full when they were to be written.
    """
    saved = saved_updates(tracker.run_dir / "checkpoints")
    writes_checkpoints = config.training.checkpoint_every is not None
    has_last = tracker.updates_done in (0, *saved)
    if has_last or not writes_checkpoints or tracker.has_model:
        return []
    last_saved = "there is no checkpoint"
    if saved:
        start = start_override(tracker.run_dir, saved[-1])
        last_saved = (
            f"the last checkpoint is that of update {saved[-1]}; to train on from "
            f"there, begin a new run with the same overrides and {start}"
        )
    return [f"the weights after update {tracker.updates_done} are lost: {last_saved}"]


def _resume_line(run_dir: Path, every: int | str | None, trained: int) -> str:
    """Return a line about how an interrupted run can be resumed, and what it lost.

    Args:
        run_dir: the run directory.
        every: the value of `training.checkpoint_every`.
        trained: the number of updates that this process has completed.
    """
    folder = run_dir / "checkpoints"
    saved = saved_updates(folder) or saved_updates(folder / BEST)
    if saved:
        return f"resume from update {saved[-1]}: {resume_command(run_dir)}"
    command = resume_command(run_dir, from_start=True)
    lost = ""
    if trained:
        value = "null" if every is None else every
        lost = (
            f" (training.checkpoint_every={value}): {count(trained, 'update')} "
            "will be trained again"
        )
    return f"interrupted before the first checkpoint{lost}; to train from the start: {command}"


def _unshipped_line(run_dir: Path, uri: str, why: str = "") -> str:
    command = sync_command(str(run_dir), uri)
    return f"not all of the run is in the store {mask(uri)}{why}: {command}"


def _warm_up(traced: threading.Event) -> None:
    """Import and prepare MLflow for `_log_model`, once the update is traced.

    While the update is traced, Python is busy; afterwards it is idle while the device
    trains.
    """
    traced.wait()
    # Ignore errors here: they recur when the model is logged.
    with suppress(Exception), imports.without_collections():
        from pipeline.tracking import logged_model

        logged_model.warm_up()


def _log_model(parts: Parts, tracker: Tracker, update: int | None) -> None:
    """Log the trained model. If that fails, print the reason, and set it as a tag.

    `update` is the number of completed updates of its weights, or None for all.
    """
    from pipeline.components import description
    from pipeline.tracking import logged_model  # imports TensorFlow

    try:
        code = parts.spec.config.tracking.code
        if code is None:
            targets = []
            for key, value in leaves(parts.spec.resolved).items():
                if key.endswith("_target_"):
                    targets.append(str(value))
            code = logged_model.code_to_save(parts.model, targets)
        tracker.log_model(
            parts.model,
            description.example_inputs(parts),
            code,
            update,
            parts.spec.config.tracking.register,
        )
    except Exception as error:  # The run is valid without a logged model.
        reason = no_space(error) or first_line(error)
        tracker.model_not_logged(reason)
        say(f"the model was not logged: {reason}")
