"""One run, from a composed config to a closed run in MLflow."""

from __future__ import annotations

import math
import shlex
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from pipeline.checkpoints import fork, resume_rules
from pipeline.checkpoints.files import Checkpoint
from pipeline.checkpoints.fork import Fork
from pipeline.checkpoints.resume_rules import Continuation
from pipeline.common import imports
from pipeline.common.errors import (
    ConfigError,
    NotShippedError,
    exits_as_failures,
    first_line,
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
from pipeline.run import batch_size_search
from pipeline.tracking.foreign_store import OwnStore, store_argument, sync_command
from pipeline.tracking.journal import Journal
from pipeline.tracking.sync_run import sync_run
from pipeline.tracking.tracker import Tracker

if TYPE_CHECKING:  # importing these takes seconds, in which the store is opened
    from pipeline.accumulation import Update
    from pipeline.components.assembly import Parts
    from pipeline.training.recorder import Recorder

CheckDataset = Callable[[dict[str, Any]], None]


def run(
    composed: DictConfig,
    overrides: Sequence[str],
    run_dir: Path,
    *,
    tags: Mapping[str, str] = MappingProxyType({}),
    check_dataset: CheckDataset | None = None,
    resume: bool = False,
) -> tuple[str, float]:
    """Train by a config and record it; return the run's ID in MLflow and its last (validation) loss.

    Args:
        composed: the config, as Hydra composed it from `overrides`.
        run_dir: of this run; exists. It stays as it is if the config is refused.
        tags: of the run, in addition to its own.
        check_dataset: takes the record of the data, as `provenance.dataset` returns it, and may refuse it.
        resume: continue the run in `run_dir`. With `training.resume=auto` that is done if there is one.

    Raises:
        ConfigError: the config is wrong; nothing was created.
        NotShippedError: it trained, but the store did not get all of it.
    """
    with Interruption().listening() as interruption:
        spec = resolve_for_all(composed, overrides)
        if spec.workers is not None and not spec.workers.is_chief:
            worker.run(spec)
            return "", math.inf
        with (
            Chief(spec) as workers,
            ExitStack() as undo,
            exits_as_failures(),
        ):  # a refused run leaves no trace
            before = resume_rules.of(run_dir, spec, required=resume)
            if before is not None:
                if before.finished:
                    return before.run_id, _finished(before, workers)
                undo.callback(before.past.close)
                spec, check_dataset = before.spec, before.check_dataset
            began_with = (
                None if before is None else before.past.start["tags"].get(fork.UPDATE)
            )
            start = (before and before.checkpoint) or fork.of(spec, run_dir, began_with)
            asked, found = spec.config.tracking, None
            when = asked.when_unreachable.name
            journal = Journal(
                asked.uri,
                asked.experiment,
                patience=asked.patience,
                when_unreachable=when,
            )
            undo.callback(journal.abandon)  # it opens while TensorFlow is imported
            if spec.searches:
                journal.ready()  # before: the search takes minutes, which a store that refuses the run would waste
                spec, found = batch_size_search.search(spec)
            parts = _gather(spec, run_dir, start, check_dataset, workers)
            update = parts.update()
            for began in (before, start):
                if isinstance(began, Continuation | Fork):
                    began.check(update, parts.plan)
            if found is None:
                journal.ready()
            undo.pop_all()
            tracker = Tracker(journal, run_dir, parts.plan, parts.files)
            loss = _train(
                parts,
                update,
                tracker,
                _Beginning(tags, before, start, found),
                interruption,
                workers,
            )
    say(f"open it with: {shlex.join(['pipeline', 'ui', *store_argument(asked.uri)])}")
    return tracker.run_id, loss


def resolve_for_all(composed: DictConfig, overrides: Sequence[str]) -> RunSpec:
    """Return the spec of a composed config; if it is refused, tell the other workers."""
    try:
        return resolve(composed, overrides)
    except ConfigError as error:
        with suppress(
            Exception
        ):  # the environment may be wrong, or the config too wrong to name the workers
            if chief.tell_workers(composed.hardware, error):
                raise SystemExit(2) from None
        raise


def _finished(before: Continuation, workers: Chief) -> float:
    before.past.close()
    say(
        f"run {before.run_id} has finished in {before.run_dir}: there is nothing to train"
    )
    workers.dismiss()
    last, tracking = before.past.last, before.spec.config.tracking
    loss = last.get("val/loss", last.get("train/loss", math.inf))
    if sync_run(
        str(before.run_dir), OwnStore(tracking.uri), tracking.patience, named=False
    ):
        raise NotShippedError(_unshipped_line(before.run_dir, tracking.uri), loss)
    return loss


def _gather(
    spec: RunSpec,
    run_dir: Path,
    start: Checkpoint | Fork | None,
    check_dataset: CheckDataset | None,
    workers: Chief,
) -> Parts:
    workers.start(spec, run_dir)
    with imports.without_chatter():
        from pipeline.components import assembly

    spec = workers.gather(spec, run_dir, start)
    with workers.as_worker_error():
        parts = assembly.assemble(
            spec, check_dataset, 0 if start is None else start.update
        )
    workers.reductions_ready = parts.devices.reductions_ready
    return parts


@dataclass(frozen=True)
class _Beginning:
    tags: Mapping[str, str]  # in addition to the run's own
    before: Continuation | None  # the run that is resumed; None for a new one
    start: Checkpoint | Fork | None  # the checkpoint that the training starts from
    found: (
        dict[str, Any] | None
    )  # how a micro-batch size was found that was searched for

    def link(self, tracker: Tracker) -> None:
        """Name the run in the one whose checkpoint it starts from."""
        if isinstance(self.start, Fork) and self.start.run_id:
            tracker.journal.write({"fork_of": self.start.run_id})

    def begin(self, tracker: Tracker, parts: Parts) -> None:
        """Create the run, or continue it, and print which."""
        from pipeline.components import description

        spec, callbacks = parts.spec, parts.objective.callbacks
        record = (0 if self.start is None else self.start.update), spec
        data = parts.data, parts.record.dataset
        if self.before is None:
            tags = (
                description.tags(parts)
                | (self.start.tags if isinstance(self.start, Fork) else {})
                | dict(self.tags)
            )
            tracker.start(*record, *data, parts.model, tags, parts.devices.gpus)
            lines = description.first_lines(parts)
        else:
            tracker.resume(self.before.past, *record, *data)
            lines = self.before.said(callbacks)
        say(f"{parts.devices.description}; {parts.plan}", *lines)
        if self.found is not None:
            tracker.table(
                batch_size_search.TABLE, batch_size_search.COLUMNS, self.found["tries"]
            )
            tracker.journal.write({"tags": {batch_size_search.TAG: self.found["how"]}})
        if isinstance(self.start, Fork):
            say(*self.start.said(callbacks))
        self.link(tracker)
        where = mask(spec.config.tracking.uri)
        run = (
            f"MLflow run {tracker.run_id} in {where}"
            if tracker.run_id
            else "no MLflow run yet"
        )
        say(f"run directory {tracker.run_dir}", run)
        say_id(tracker.run_id)


def _train(
    parts: Parts,
    update: Update,
    tracker: Tracker,
    beginning: _Beginning,
    interruption: Interruption,
    workers: Chief,
) -> float:
    from pipeline.components import fitting

    recorder = fitting.recorder(parts, tracker)
    with (
        _closing(tracker, recorder) as unshipped,
        fitting.checkpoints(parts, tracker.run_dir) as checkpoints,
    ):
        beginning.begin(tracker, parts)
        if (before := beginning.before) is not None and (
            cuts := recorded_cuts(before.past.tags)
        ):
            # The updates that were cut smaller keep their micro-steps; from here on the config cuts.
            recorder.cut(
                parts.plan.after(cuts, max([before.update, *before.past.updates]))
            )
        recorder.restart_clock()
        warming = threading.Thread(
            target=_warm_up, args=(recorder.traced,), daemon=True
        )
        if parts.spec.config.tracking.log_model:
            warming.start()
        with workers.as_worker_error(), interruption.between_updates():
            loss = fitting.fit(
                parts,
                update,
                recorder,
                checkpoints,
                beginning.start,
                interruption.asked,
            )
        recorder.progress.close()
        tracker.check_files()
        beginning.link(
            tracker
        )  # again: two runs that begin at one moment may have overwritten each other's link
        if parts.spec.config.tracking.log_model:
            recorder.traced.set()  # also if there was nothing left to train
            warming.join()  # what it imports is not looked at meanwhile
            _log_model(parts, tracker)
    if unshipped:
        raise NotShippedError(unshipped[0], loss)
    return loss


@contextmanager
def _closing(tracker: Tracker, recorder: Recorder) -> Iterator[list[str]]:
    """Close the run; the list gets a line if it has finished but the store did not get all of it."""
    unshipped: list[str] = []
    status, failure = "FINISHED", None
    try:
        yield unshipped
    except BaseException as error:
        status = (
            "KILLED" if isinstance(error, KeyboardInterrupt | Terminated) else "FAILED"
        )
        failure = "".join(traceback.format_exception_only(error)).strip()
        with suppress(
            Exception
        ):  # a second failure, such as of a lost device, must not hide the first
            recorder.fetch()
        raise
    finally:
        recorder.progress.close()
        try:
            why = tracker.end(status, failure) if tracker.begun else None
        except BaseException:
            say(_unshipped_line(tracker.run_dir, tracker.journal.uri))
            raise
        unshipped += (
            [_unshipped_line(tracker.run_dir, tracker.journal.uri, f" ({why})")]
            if why
            else []
        )
        if failure is not None:
            say(*unshipped)


def _unshipped_line(run_dir: Path, uri: str, why: str = "") -> str:
    return f"not all of the run is in the store{why}: {sync_command(str(run_dir), uri)}"


def _warm_up(traced: threading.Event) -> None:
    """Prepare MLflow for `_log_model` while the update is compiled and the device trains, after it is traced."""
    traced.wait()
    # A failure is seen again when the model is logged.
    with suppress(Exception), imports.without_collections():
        from pipeline.tracking import logged_model

        logged_model.warm_up()


def _log_model(parts: Parts, tracker: Tracker) -> None:
    """Log the trained model; one that cannot be logged does not undo the run."""
    from pipeline.components import description
    from pipeline.tracking import logged_model  # imports TensorFlow

    try:
        code = parts.spec.config.tracking.code
        if code is None:
            resolved = leaves(parts.spec.resolved).items()
            targets = [
                str(value) for key, value in resolved if key.endswith("_target_")
            ]
            code = logged_model.own_code(parts.model, targets)
        tracker.log_model(parts.model, description.example_inputs(parts), code)
    except Exception as error:  # the run is trained and recorded all the same
        tracker.journal.write({"tags": {"model.not_logged": mask(first_line(error))}})
        say(f"the model was not logged: {first_line(error)}")
