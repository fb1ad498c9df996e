"""One run, from a composed config to a closed run in MLflow."""

from __future__ import annotations

import math
import os
import shlex
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
from pipeline.common.errors import NotShippedError, first_line, say
from pipeline.common.secrets import mask
from pipeline.common.signals import Interruption, Terminated
from pipeline.config import cluster, sizes
from pipeline.config import validate as configuration
from pipeline.config.sizes import Batching
from pipeline.distributed import chief, worker
from pipeline.distributed.chief import Others
from pipeline.run import batch_size_search
from pipeline.run.batch_size_search import Found
from pipeline.tracking import provenance
from pipeline.tracking.journal import Journal
from pipeline.tracking.sync_run import sync_run
from pipeline.tracking.tracker import HALVED, Tracker

if TYPE_CHECKING:  # importing these takes seconds, in which the store is opened
    from pipeline.accumulation import Update
    from pipeline.components.assembly import Parts
    from pipeline.training.recorder import Recorder


def run(
    config: DictConfig,
    overrides: Sequence[str],
    run_dir: Path,
    *,
    tags: Mapping[str, str] = MappingProxyType({}),
    check_dataset: Callable[[dict[str, Any]], None] | None = None,
    resume: bool = False,
) -> tuple[str, float]:
    """Train what `config` says and record it.

    Args:
        config: composed; not yet checked.
        overrides: of the command line.
        run_dir: of this run; exists. It stays as it is when the config is refused.
        tags: of the run, beside its own.
        check_dataset: takes what `provenance.dataset` says of the data, and may refuse it.
        resume: go on with the run in `run_dir`. With `training.resume=auto` that is done where there is one.

    Returns:
        The run's ID in MLflow, and its last loss: of the validation split where there is one.

    Raises:
        ConfigError: the config is wrong; nothing was created.
        NotShippedError: it trained, but the store has not got all of it.
    """
    with Interruption().listening() as interruption, ExitStack() as stack:
        cut = chief.checked(config, overrides)
        team = cluster.of(config, os.environ)
        if team is not None and not team.is_chief:
            worker.take_part(team, config)
            return "", math.inf
        others = stack.enter_context(chief.Others(team, config))
        before = resume_rules.of(run_dir, config, cut, required=resume)
        if before is not None and before.finished:
            return before.run_id, _finished(before, config, others)
        start = _start(config, cut, run_dir, before)
        # Opens the store while TensorFlow is imported.
        tracking = config.tracking
        journal = Journal(
            tracking.uri,
            tracking.experiment,
            patience=tracking.patience,
            when_unreachable=tracking.when_unreachable.name,
        )
        try:
            found = None
            if searching := config.accumulation.micro_batch_size in sizes.SEARCHED:
                journal.ready()  # what takes minutes is not for nothing
                found = batch_size_search.settle(config, cut, 1 if team is None else team.on_machine)
                overrides = [f"{sizes.MICRO}={found.micro_batch_size}" if _is_micro(o) else o for o in overrides]
            cut = sizes.settle_sizes(config)
            others.start(config, run_dir)
            with imports.without_chatter():
                from pipeline.components import assembly

            first = 0 if start is None else start.update
            check_data = check_dataset if before is None else before.check_dataset
            others.gather(config, run_dir, start)
            with others.blamed():
                parts = assembly.assemble(config, cut, check_data, first, team)
            others.arrived = parts.machine.arrived
            update = parts.update()
            if before is not None:
                before.check(update, parts.plan)
            if isinstance(start, Fork):
                start.check(update, parts.plan)
            if not searching:
                journal.ready()
        except BaseException:
            journal.abandon()
            if before is not None:
                before.past.close()
            raise
        tracker = Tracker(journal, run_dir, parts.plan, parts.files)
        begin = _Begin(overrides, tags, before, start, found)
        loss = _train(parts, update, tracker, begin, interruption, others)
    uri = config.tracking.uri
    where = [] if uri == "sqlite:///mlruns/mlflow.db" else [f"tracking.uri={mask(uri)}"]
    say(" ".join(["open it with: pipeline ui", *where]))
    return tracker.run_id, loss


def _is_micro(override: str) -> bool:
    return override.lstrip("+").startswith(f"{sizes.MICRO}=")


def _finished(before: Continuation, config: DictConfig, others: Others) -> float:
    """Say that nothing is left to train, and ship what the store has not got of it; return the last loss."""
    before.past.close()
    say(f"run {before.run_id} has finished in {before.run_dir}: there is nothing to train")
    others.dismiss()
    last = before.past.last
    loss = last.get("val/loss", last.get("train/loss", math.inf))
    if sync_run(str(before.run_dir), config.tracking.uri, config.tracking.patience, named=False):
        raise NotShippedError(_unshipped(before.run_dir), loss)
    return loss


def _start(config: DictConfig, cut: Batching, run_dir: Path, before: Continuation | None) -> Checkpoint | Fork | None:
    """Return what is there before the first update of this process; None where a run begins at its beginning."""
    if before is None:
        return fork.of(config, cut, run_dir)
    if before.checkpoint is not None:
        return before.checkpoint
    try:
        return fork.of(config, cut, run_dir, before.past.start["tags"].get(fork.UPDATE))
    except BaseException:
        before.past.close()
        raise


@dataclass(frozen=True)
class _Begin:
    """What a run begins with, or goes on with."""

    overrides: Sequence[str]
    tags: Mapping[str, str]
    before: Continuation | None
    start: Checkpoint | Fork | None
    found: Found | None

    def link(self, tracker: Tracker) -> None:
        """Name the run in the one that it begins with."""
        if isinstance(self.start, Fork) and self.start.run_id:
            tracker.journal.write({"fork_of": self.start.run_id})

    def __call__(self, tracker: Tracker, parts: Parts) -> None:
        """Create the run, or go on with it, and say which."""
        config, data = parts.config, (parts.data, parts.recorded_data)
        segment = provenance.segment(0 if self.start is None else self.start.update, parts.plan.batching, config)
        if self.before is None:
            dependent = {
                "model.batch_dependent_layers": ", ".join(parts.batch_dependent_layers()) or "none",
                "model.cut_dependent_noise": ", ".join(parts.cut_dependent_noise()) or "none",
            }
            forked = self.start.tags if isinstance(self.start, Fork) else {}
            tags = {**dependent, **forked, **self.tags}
            tracker.start(segment, config, self.overrides, *data, parts.model, tags)
            say(f"{parts.machine.description}; {parts.plan}", *parts.said, *parts.of_the_cut())
        else:
            tracker.resume(self.before.past, segment, config, self.overrides, *data)
            say(f"{parts.machine.description}; {parts.plan}", *self.before.said(parts.objective.callbacks))
        if self.found is not None:
            tracker.table(batch_size_search.TABLE, batch_size_search.COLUMNS, self.found.tries)
            tracker.journal.write({"tags": {batch_size_search.TAG: self.found.how}})
        if isinstance(self.start, Fork):
            say(*self.start.said(parts.objective.callbacks))
        self.link(tracker)
        run = f"MLflow run {tracker.run_id} in {mask(config.tracking.uri)}" if tracker.run_id else "no MLflow run yet"
        say(f"run directory {tracker.run_dir}", run)


def _train(
    parts: Parts, update: Update, tracker: Tracker, begin: _Begin, interruption: Interruption, others: Others
) -> float:
    """Train, from the first update or a checkpoint on, and close the run; return its last loss."""
    from pipeline.checkpoints.files import Checkpoints
    from pipeline.components import devices
    from pipeline.dataset import bad_example
    from pipeline.training import loop
    from pipeline.training.oom_retry import Smaller
    from pipeline.training.progress import Progress
    from pipeline.training.recorder import Recorder

    config, plan = parts.config, parts.plan
    recorder = Recorder(
        tracker,
        plan,
        config.tracking.log_every,
        lambda: devices.peak_memory(parts.machine),
        Progress(plan.updates),
        skips=config.hardware.precision.name == "mixed_float16",
    )
    checkpoints = Checkpoints(tracker.run_dir / "checkpoints", config.training.checkpoint_every, plan)
    with _closing(tracker, recorder) as unshipped, checkpoints:
        begin(tracker, parts)
        if begin.before is not None and (cuts := begin.before.past.tags.get(HALVED)):
            # From here on as the config says again: what the memory was short of may be gone.
            recorder.cut(plan.after(cuts, max([begin.before.update, *begin.before.past.updates])))
        recorder.restart_clock()
        with others.blamed(), bad_example.located(parts.data, parts.files), interruption.between_updates():
            changed = parts.changed()
            loss = loop.train(
                parts.model,
                parts.batches,
                update,
                plan,
                recorder,
                evaluate=parts.evaluate("validation", tracker.evaluation_halved, changed),
                test=parts.evaluate("test", tracker.evaluation_halved, changed),
                evaluate_every=config.training.evaluate_every,
                callbacks=parts.objective.callbacks,
                checkpoints=checkpoints,
                start=begin.start,
                best=parts.best,
                smaller=Smaller(update, changed, parts.batches.element_spec, tries=parts.machine.workers == 1),
                agreed=parts.machine.agree,
                stop=interruption.asked,
            )
        recorder.progress.close()
        tracker.check_files()
        begin.link(tracker)  # once more: two runs that begin at one moment may have written over each other
        if config.tracking.log_model:
            _log_model(parts, tracker)
    if unshipped:
        raise NotShippedError(unshipped[0], loss)
    return loss


@contextmanager
def _closing(tracker: Tracker, recorder: Recorder) -> Iterator[list[str]]:
    """Close the run as FINISHED, FAILED or KILLED, with all that it had logged; one that never began needs none.

    Yield a list, which afterwards has a line where a run that finished is not wholly in the store.
    """
    unshipped: list[str] = []
    try:
        yield unshipped
    except BaseException as error:
        killed = isinstance(error, KeyboardInterrupt | Terminated)
        failure = "".join(traceback.format_exception_only(error)).strip()
        with suppress(Exception):  # no second failure, such as of a device that is gone, hides the first
            recorder.fetch()
        say(*_end(tracker, recorder, "KILLED" if killed else "FAILED", failure))
        raise
    unshipped += _end(tracker, recorder, "FINISHED")


def _end(tracker: Tracker, recorder: Recorder, status: str, failure: str | None = None) -> list[str]:
    """Close the run; return a line that says what to do where something could not be shipped."""
    recorder.progress.close()
    try:
        why = tracker.end(status, failure) if tracker.begun else None
    except BaseException:
        say(_unshipped(tracker.run_dir))
        raise
    return [_unshipped(tracker.run_dir, f" ({why})")] if why else []


def _unshipped(run_dir: Path, why: str = "") -> str:
    return f"not all of the run is in the store{why}: {shlex.join(['pipeline', 'sync', str(run_dir)])}"


def _log_model(parts: Parts, tracker: Tracker) -> None:
    from pipeline.tracking import logged_model

    tracking = parts.config.tracking
    if not tracker.reaches_store():
        tracker.journal.write({"tags": {"model.not_logged": "the store was away"}})
        say("the model was not logged, as the store is away: its weights are in the last checkpoint")
        return
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
