"""A run that begins with the checkpoint of another one: `start.run=RUN@UPDATE`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.checkpoints import files
from pipeline.checkpoints.files import BEST, Checkpoint
from pipeline.checkpoints.run_dirs import find, recorded_config
from pipeline.common.errors import ConfigError
from pipeline.config import key_kinds
from pipeline.config.plain import leaves
from pipeline.config.plan import Plan
from pipeline.config.resolve import RunSpec
from pipeline.config.schema import Rule
from pipeline.config.stages import CLOCK, SCHEDULE, SEESAW, SEESAW_MAX
from pipeline.tracking.journal_file import Past

if TYPE_CHECKING:  # importing these takes seconds
    from pipeline.accumulation import Update
    from pipeline.checkpoints.snapshot import Callbacks, State
    from pipeline.training.recorder import Recorder

RUN, UPDATE = (
    "start.run",
    "start.update",
)  # tags: the run and the update whose checkpoint a run began with
_STAGES: dict[str, Any] = {
    SCHEDULE: None,
    "accumulation.scale_rate": True,
    SEESAW_MAX: None,
}  # and where it is scaled


@dataclass
class Fork:
    """The checkpoint of another run that a run begins with."""

    run_id: str  # of the other run in MLflow; empty if no store has it yet
    run_dir: Path  # of the other run
    checkpoint: Checkpoint
    weights_only: bool  # restore the model's weights alone
    own_rate: (
        bool  # the learning rate of this config differs from that of the other run
    )
    states: list[State] = field(
        default_factory=list
    )  # that `check` read; the training removes it, as it is large

    @property
    def update(self) -> int:  # from which this run counts on
        return 0 if self.weights_only else self.checkpoint.update

    @property
    def tags(self) -> dict[str, str]:
        return {
            RUN: self.run_id or str(self.run_dir),
            UPDATE: str(self.checkpoint.update),
        }

    def said(self, callbacks: Callbacks) -> list[str]:
        from pipeline.checkpoints import snapshot

        line = f"of run {self.run_id or self.run_dir} after update {self.checkpoint.update}"
        if self.weights_only:
            return [f"begins with the weights {line}"]
        rate = ", with a learning rate of its own" if self.own_rate else ""
        return [
            f"goes on with the state {line}{rate}",
            *snapshot.starting_anew(callbacks),
        ]

    def check(self, update: Update, plan: Plan) -> None:
        """Read the checkpoint, as the other run may delete it, and check that it fits the model and the horizon."""
        from pipeline.checkpoints import snapshot

        if self.update >= plan.updates:
            rule = f"must have a horizon beyond the {self.update} updates of {RUN}"
            raise ConfigError("training", rule, plan.updates)
        snapshot.check(self.checkpoint.meta, update, self._takes)
        try:
            self.states = [snapshot.read(self.checkpoint.folder, self.checkpoint.meta)]
        except Exception as error:
            rule = "must be there until it is read: the run that it is of has gone on"
            raise ConfigError(
                f"the checkpoint {self.checkpoint.folder}", rule
            ) from error

    def restore(
        self, taken: State, update: Update, recorder: Recorder, callbacks: Callbacks
    ) -> dict[str, Any]:
        """Restore the state into the run; return the state of its loop."""
        from pipeline.checkpoints import snapshot

        loop: dict[str, Any] = {"open": False, "validation": {}}
        if self.weights_only:
            snapshot.restore_variables(taken, update, self._takes)
        else:
            loop |= snapshot.restore(taken, update, recorder, callbacks, self._takes)
            update.model.stop_training = (
                False  # a callback may have stopped the other run
            )
        # The best evaluation of the other run does not count here: its checkpoint lies in the other directory.
        return loop | {"stopped_by": None, "best": None}

    def _takes(self, name: str) -> bool:
        """Return whether the variable `name` is restored; either side may lack a learning rate that is not."""
        if self.weights_only:
            return name.startswith("model/") and not name.endswith(
                "/seed_generator_state"
            )
        return not (
            self.own_rate
            and name.startswith("optimizer/")
            and name.endswith("/learning_rate")
        )


def of(spec: RunSpec, run_dir: Path, update: str | None = None) -> Fork | None:
    """Return the checkpoint of another run that this one begins with, at `update` if it did so before; None if none."""
    text, weights_only = spec.config.start.run, spec.config.start.weights_only
    if text is None:
        return None
    source, found = named(text, RUN, run_dir, update)
    past = Past.of(source, RUN, running=True)
    past.close()
    own_rate = _has_own_rate(spec, recorded_config(source, RUN), past)
    return Fork(
        past.run.get("run_id", ""), source.absolute(), found, weights_only, own_rate
    )


def named(
    text: str, key: str, but: Path | None = None, update: str | None = None
) -> tuple[Path, Checkpoint]:
    """Return the run directory and the checkpoint that `RUN` or `RUN@UPDATE` names, as the argument `key`.

    The checkpoint is that of `update` if given, else the newest one. The run directory `but` is passed over.
    """
    name, _, last = text.rpartition("@")
    if not (name and last.isascii() and last.isdecimal()):
        name, last = text, ""
    source = find(name, key, but)
    folder, last = source / "checkpoints", update or last
    there = {
        number: place
        for place in (folder / BEST, folder)
        for number in files.updates(place)
    }
    if not there:
        raise ConfigError(
            key, "must be a run with a checkpoint: see training.checkpoint_every", text
        )
    if last and int(last) not in there:
        raise ConfigError(
            key, "must name an update whose checkpoint is there", text, sorted(there)
        )
    found = (
        files.at(there[int(last)], int(last))
        if last
        else files.newest(folder, max(there))
    )
    if found is None:
        raise ConfigError(key, "must have a whole checkpoint", text)
    return source, found


def _has_own_rate(spec: RunSpec, recorded: dict[str, Any], past: Past) -> bool:
    # Records of before there were stages lack their keys.
    both = [
        {CLOCK: "updates", **_STAGES, **leaves(each)}
        for each in (recorded, spec.recorded)
    ]
    scaled = spec.config.scaling.rule != Rule.none or any(
        values[SCHEDULE] == SEESAW for values in both
    )
    stages = tuple(f"{key}." for key in _STAGES if scaled)
    then, now = (
        {
            key: leaf
            for key, leaf in values.items()
            if key_kinds.facts_of(key).sets_rate or f"{key}.".startswith(stages)
        }
        for values in both
    )
    size = past.start["segment"]["cut"]["effective_batch_size"]
    return then != now or (scaled and size != spec.batching.effective_batch_size)
