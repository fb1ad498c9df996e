"""A run that begins with the checkpoint of another one: `start.run=RUN@UPDATE`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from pipeline.checkpoints import files as checkpoint
from pipeline.checkpoints.files import BEST, Checkpoint
from pipeline.checkpoints.run_dirs import find, recorded_config
from pipeline.common.errors import ConfigError
from pipeline.common.secrets import masked
from pipeline.config import validate as configuration
from pipeline.config.lr_scaling import Rule
from pipeline.config.sizes import Batching, Plan
from pipeline.tracking.journal_file import Past

if TYPE_CHECKING:  # importing these takes seconds
    from pipeline.accumulation import Update
    from pipeline.checkpoints.snapshot import Callbacks, State, Taken
    from pipeline.training.recorder import Recorder

RUN, UPDATE = "start.run", "start.update"  # the tags of a run that says where it began
_RATE = ("optimizer.learning_rate.", "schedule.", "scaling.")  # what a learning rate follows from


@dataclass
class Fork:
    """Where a run begins.

    Attributes:
        run_id: of the other run in MLflow; empty where no store has had it.
        run_dir: of the other run.
        checkpoint: of the other run.
        weights_only: take the model's weights alone.
        own_rate: the config gives another learning rate than the other run's.
    """

    run_id: str
    run_dir: Path
    checkpoint: Checkpoint
    weights_only: bool
    own_rate: bool
    _state: State | None = None

    @property
    def update(self) -> int:
        """Return the completed updates that this run counts on from."""
        return 0 if self.weights_only else self.checkpoint.update

    @property
    def tags(self) -> dict[str, str]:
        """Return the tags that say where the run began."""
        return {RUN: self.run_id or str(self.run_dir), UPDATE: str(self.checkpoint.update)}

    def said(self, callbacks: Callbacks) -> list[str]:
        """Return the lines that say where the run begins."""
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
        """Read the checkpoint, which may be gone a moment later.

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
        """Return what `check` has read, once: its memory is the run's."""
        assert self._state is not None
        taken, self._state = self._state, None
        return taken

    def restore(self, taken: State, update: Update, recorder: Recorder, callbacks: Callbacks) -> dict[str, Any]:
        """Put what is taken of the checkpoint into the run; return what its loop begins with."""
        from pipeline.checkpoints import snapshot

        loop = snapshot.restore(taken, update, recorder, callbacks, self._taken())
        update.model.stop_training = False  # what ended the other run does not end this one
        # The best evaluation of the other run, whose checkpoint is in its directory, is none of this one.
        begun = {"open": loop.get("open", False), "validation": loop.get("validation", {})}
        return {**begun, "stopped_by": None, "best": None}

    def _taken(self) -> Taken:
        from pipeline.checkpoints.snapshot import Taken

        return Taken(self.weights_only, self.own_rate)


def of(config: DictConfig, cut: Batching, run_dir: Path, update: str | None = None) -> Fork | None:
    """Return where the run begins; None where that is at the beginning.

    Args:
        config: checked.
        cut: how its effective batch is cut.
        run_dir: of the run that is to begin.
        update: the one that it began with before, where it was interrupted since.

    Raises:
        ConfigError: there is no such run, or no such checkpoint.
    """
    text, weights_only = config.start.run, config.start.weights_only
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
        _has_own_rate(config, cut, recorded_config(source, RUN), past),
    )


def _checkpoint(folder: Path, text: str, update: str) -> Checkpoint:
    there = {number: place for place in (folder / BEST, folder) for number in checkpoint.updates(place)}
    if not there:
        raise ConfigError(RUN, "must be a run with a checkpoint: see training.checkpoint_every", text)
    if not update:
        if (found := checkpoint.newest(folder, max(there))) is None:
            raise ConfigError(RUN, "must have a whole checkpoint", text)
        return found
    if int(update) not in there:
        raise ConfigError(RUN, "must name an update whose checkpoint is there", text, sorted(there))
    return checkpoint.at(there[int(update)], int(update))


def _has_own_rate(config: DictConfig, cut: Batching, recorded: dict[str, Any], past: Past) -> bool:
    """Return whether the config gives another learning rate than that of the run which a checkpoint is of."""
    both = [configuration.leaves(each) for each in (recorded, masked(configuration.plain(config)))]
    then, now = ({key: leaf for key, leaf in leaves.items() if f"{key}.".startswith(_RATE)} for leaves in both)
    size = past.start["segment"]["cut"]["effective_batch_size"]
    return then != now or (config.scaling.rule != Rule.none and size != cut.effective_batch_size)
