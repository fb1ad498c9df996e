"""A run that begins with the checkpoint of another one: `start.run=RUN@UPDATE`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.checkpoints import files
from pipeline.checkpoints.files import BEST, Checkpoint
from pipeline.checkpoints.run_dirs import find, recorded_config
from pipeline.common.errors import ConfigError
from pipeline.config.plain import leaves
from pipeline.config.resolve import RunSpec
from pipeline.config.schema import Rule
from pipeline.config.sizes import Plan
from pipeline.tracking.journal_file import Past

if TYPE_CHECKING:  # importing these takes seconds
    from pipeline.accumulation import Update
    from pipeline.checkpoints.snapshot import Callbacks, State, Taken
    from pipeline.training.recorder import Recorder

RUN, UPDATE = "start.run", "start.update"  # tags: the run and the update whose checkpoint a run began with
_RATE = ("optimizer.learning_rate.", "schedule.", "scaling.")  # the keys that a learning rate depends on


@dataclass
class Fork:
    """The checkpoint of another run that a run begins with.

    Attributes:
        run_id: of the other run in MLflow; empty if no store has it yet.
        run_dir: of the other run.
        checkpoint: of the other run.
        weights_only: restore the model's weights alone.
        own_rate: the learning rate of this config differs from that of the other run.
    """

    run_id: str
    run_dir: Path
    checkpoint: Checkpoint
    weights_only: bool
    own_rate: bool
    _state: State | None = None

    @property
    def update(self) -> int:
        """Return the number of updates from which this run counts on."""
        return 0 if self.weights_only else self.checkpoint.update

    @property
    def tags(self) -> dict[str, str]:
        """Return the tags of a run that began with this checkpoint."""
        return {RUN: self.run_id or str(self.run_dir), UPDATE: str(self.checkpoint.update)}

    def said(self, callbacks: Callbacks) -> list[str]:
        """Return the lines that are printed when the run begins."""
        from pipeline.checkpoints import snapshot

        line = f"of run {self.run_id or self.run_dir} after update {self.checkpoint.update}"
        if self.weights_only:
            return [f"begins with the weights {line}"]
        rate = ", with a learning rate of its own" if self.own_rate else ""
        anew = [
            f"training.callbacks.{name} starts anew: it offers no state" for name in snapshot.without_state(callbacks)
        ]
        return [f"goes on with the state {line}{rate}", *anew]

    def check(self, update: Update, plan: Plan) -> None:
        """Read the checkpoint, as the other run may delete it, and check that it fits.

        Raises:
            ConfigError: it does not fit the model, the horizon does not go beyond it, or it cannot be read.
        """
        from pipeline.checkpoints import snapshot

        if self.update >= plan.updates:
            rule = f"must have a horizon beyond the {self.update} updates of {RUN}"
            raise ConfigError("training", rule, plan.updates)
        snapshot.check(self.checkpoint.meta, update, self._taken())
        try:
            self._state = snapshot.read(self.checkpoint.folder, self.checkpoint.meta)
        except Exception as error:
            rule = "must be there until it is read: the run that it is of has gone on"
            raise ConfigError(f"the checkpoint {self.checkpoint.folder}", rule) from error

    def take(self) -> State:
        """Return the state that `check` read, and keep no reference to it: it takes as much memory as the model."""
        assert self._state is not None
        taken, self._state = self._state, None
        return taken

    def restore(self, taken: State, update: Update, recorder: Recorder, callbacks: Callbacks) -> dict[str, Any]:
        """Restore the state into the run; return the state of its loop."""
        from pipeline.checkpoints import snapshot

        loop = snapshot.restore(taken, update, recorder, callbacks, self._taken())
        update.model.stop_training = False  # a callback may have stopped the other run
        # The best evaluation of the other run does not count here: its checkpoint lies in the other directory.
        begun = {"open": loop.get("open", False), "validation": loop.get("validation", {})}
        return {**begun, "stopped_by": None, "best": None}

    def _taken(self) -> Taken:
        from pipeline.checkpoints.snapshot import Taken

        return Taken(self.weights_only, self.own_rate)


def of(spec: RunSpec, run_dir: Path, update: str | None = None) -> Fork | None:
    """Return the checkpoint of another run that this run begins with; None without `start.run`.

    Args:
        spec: of the run.
        run_dir: of the run.
        update: of the checkpoint that the run began with, where it was interrupted since.

    Raises:
        ConfigError: there is no such run, or no such checkpoint.
    """
    text, weights_only = spec.config.start.run, spec.config.start.weights_only
    if text is None:
        return None
    name, _, last = text.rpartition("@")
    if not (name and last.isascii() and last.isdecimal()):
        name, last = text, ""
    source = find(name, RUN, run_dir)
    past = Past.of(source, RUN, running=True)
    past.close()
    found = _checkpoint(source / "checkpoints", text, update or last)
    return Fork(
        past.run.get("run_id", ""),
        source.absolute(),
        found,
        weights_only,
        _has_own_rate(spec, recorded_config(source, RUN), past),
    )


def _checkpoint(folder: Path, text: str, update: str) -> Checkpoint:
    there = {number: place for place in (folder / BEST, folder) for number in files.updates(place)}
    if not there:
        raise ConfigError(RUN, "must be a run with a checkpoint: see training.checkpoint_every", text)
    if not update:
        if (found := files.newest(folder, max(there))) is None:
            raise ConfigError(RUN, "must have a whole checkpoint", text)
        return found
    if int(update) not in there:
        raise ConfigError(RUN, "must name an update whose checkpoint is there", text, sorted(there))
    return files.at(there[int(update)], int(update))


def _has_own_rate(spec: RunSpec, recorded: dict[str, Any], past: Past) -> bool:
    """Return whether the learning rate of a run differs from that of the run that its checkpoint comes from."""
    both = [leaves(each) for each in (recorded, spec.recorded)]
    then, now = ({key: leaf for key, leaf in values.items() if f"{key}.".startswith(_RATE)} for values in both)
    size = past.start["segment"]["cut"]["effective_batch_size"]
    return then != now or (spec.config.scaling.rule != Rule.none and size != spec.batching.effective_batch_size)
