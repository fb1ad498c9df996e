"""A run that begins with the checkpoint of another run: `start.run=RUN@UPDATE`.

It may also begin with the weights of a registered model:
`start.run=models:/NAME@ALIAS`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.checkpoints import files, recorded_config
from pipeline.checkpoints.files import BEST, Checkpoint, LoopState
from pipeline.checkpoints.run_dirs import find, start_override
from pipeline.common.errors import ConfigError, count
from pipeline.config import key_kinds
from pipeline.config.model_uris import MODEL
from pipeline.config.plain import leaves
from pipeline.config.plan import RunPlan
from pipeline.config.resolve import RunSpec
from pipeline.config.schema import Rule
from pipeline.config.stages import CLOCK, SCHEDULE
from pipeline.tracking import model_registry
from pipeline.tracking.foreign_store import RUN_ID, ForeignStore
from pipeline.tracking.journal_file import JOURNAL_NAME, Past
from pipeline.tracking.model_registry import StoredModel
from pipeline.trust.artifact_locations import confined

if TYPE_CHECKING:  # only for annotations: importing these modules takes seconds
    from pipeline.accumulation import Update
    from pipeline.checkpoints.snapshot import Callbacks, Snapshot
    from pipeline.training.recorder import Recorder

_KEY = "start.run"  # config key, for errors
# Tags of a forked run: the run that it was forked from (its ID, or its directory if it
# has no ID), and the update of the checkpoint.
RUN_TAG = "start.run"
UPDATE_TAG = "start.update"


@dataclass
class Fork:
    """The checkpoint of another run that a run begins with.

    Attributes:
        run_id: the other run's ID in MLflow, or "" if that run is in no store yet.
        run_dir: the other run's directory.
        checkpoint: the other run's checkpoint.
        weights_only: whether only the weights of the model are restored.
        own_rate: whether this run's learning rate differs from the other run's.
        precisions: the precision of the other run and that of this run.
        snapshot: the snapshot that `load` has read, or None before `load` and after
            `take`.
    """

    run_id: str
    run_dir: Path
    checkpoint: Checkpoint
    weights_only: bool
    own_rate: bool
    precisions: tuple[str, str] = ("", "")
    snapshot: Snapshot | None = None

    @property
    def updates_done(self) -> int:
        """The number of completed updates with which this run begins."""
        return 0 if self.weights_only else self.checkpoint.updates_done

    @property
    def tags(self) -> dict[str, str]:
        """The tags that name the other run and its checkpoint."""
        return {
            RUN_TAG: self.run_id or str(self.run_dir),
            UPDATE_TAG: str(self.checkpoint.updates_done),
        }

    def messages(self, callbacks: Callbacks) -> list[str]:
        """Return the lines to print when this run begins."""
        from pipeline.checkpoints import snapshot

        source = (
            f"of run {self.run_id or self.run_dir} "
            f"after update {self.checkpoint.updates_done}"
        )
        change = ""
        then, now = self.precisions
        if then != now:
            change = f", in {now} instead of {then}"
        if self.weights_only:
            return [f"begins with the weights {source}{change}"]
        line = f"continues from the state {source}"
        if self.own_rate:
            line += ", with a learning rate of its own"
        return [line + change, *snapshot.starting_anew(callbacks)]

    def check(self, updater: Update, plan: RunPlan) -> None:
        """Check that the checkpoint fits the model, the optimizer and the horizon.

        Raises:
            ConfigError: the checkpoint does not fit.
        """
        from pipeline.checkpoints import snapshot

        if self.updates_done >= plan.updates:
            done = count(self.updates_done, "update")
            rule = f"must have a horizon beyond the {done} of {_KEY}"
            raise ConfigError("training", rule, plan.updates)
        snapshot.check_variables_fit(
            self.checkpoint.meta.arrays, updater, self._is_restored
        )

    def load(self) -> None:
        """Read the checkpoint into memory, before the other run deletes it.

        Raises:
            ConfigError: the checkpoint cannot be read.
        """
        from pipeline.checkpoints import snapshot

        try:
            self.snapshot = snapshot.read(self.checkpoint)
        except Exception as error:
            key = f"the checkpoint {self.checkpoint.folder}"
            rule = (
                "must exist until it has been read: its run may have continued and "
                "deleted it"
            )
            raise ConfigError(key, rule) from error

    def take(self) -> Snapshot:
        """Return the snapshot that `load` has read, and release it: it is large."""
        assert self.snapshot is not None
        snapshot = self.snapshot
        self.snapshot = None
        return snapshot

    def restore(
        self, saved: Snapshot, updater: Update, recorder: Recorder, callbacks: Callbacks
    ) -> LoopState:
        """Restore the snapshot `saved`; return the state of the training loop."""
        from pipeline.checkpoints import snapshot

        loop = LoopState()
        if self.weights_only:
            snapshot.restore_variables(saved, updater, self._is_restored)
        else:
            loop = snapshot.restore(
                saved, updater, recorder, callbacks, self._is_restored
            )
            # Continue even if a callback has stopped the other run.
            updater.model.stop_training = False
        # Drop the best evaluation of the other run: its checkpoint is in the other
        # run's directory.
        return replace(loop, stopped_by=None, best=None)

    def _is_restored(self, name: str) -> bool:
        """Return whether the variable called `name` is restored.

        With `weights_only`, only the variables of the model are restored, without its
        seeds. With `own_rate`, all variables but the learning rate are restored.
        """
        if self.weights_only:
            from pipeline.checkpoints import snapshot

            return snapshot.is_weight(name)
        if not self.own_rate:
            return True
        is_rate = name.startswith("optimizer/") and name.endswith("/learning_rate")
        return not is_rate


@dataclass
class ModelStart:
    """The weights of a registered model that a run begins with.

    It has the methods of a `Fork`.

    Attributes:
        model: the model.
        snapshot: the weights that `check` has read, or None before `check` and after
            `take`.
    """

    model: StoredModel
    snapshot: Snapshot | None = None

    @property
    def run_id(self) -> str:
        """The ID of the run that has trained the model."""
        return self.model.run_id

    @property
    def updates_done(self) -> int:
        """The number of completed updates with which this run begins."""
        return 0

    @property
    def tags(self) -> dict[str, str]:
        """The tags that name the run of the model, and its update."""
        return {RUN_TAG: self.run_id, UPDATE_TAG: str(self.model.updates_done)}

    def messages(self, callbacks: Callbacks) -> list[str]:
        """Return the lines to print when this run begins."""
        source = f"of run {self.run_id} after update {self.model.updates_done}"
        return [f"begins with the weights of {self.model.name}, {source}"]

    def check(self, updater: Update, plan: RunPlan) -> None:
        """Load the weights into the model, and keep a copy of them for `take`.

        Raises:
            ConfigError: the weights do not fit, or cannot be downloaded.
        """
        from pipeline.accumulation import internals
        from pipeline.checkpoints import model_archive, snapshot

        for layer in internals.layers_of(updater.model):
            if getattr(layer, "lora_enabled", False):
                rule = (
                    "must be left out for a model with LoRA, because Keras would set "
                    "the LoRA weights to 0: load weights where the model is built"
                )
                raise ConfigError(_KEY, f"{rule} ({layer.name})", self.model.name)

        store = self.model.store
        with (
            confined(store.uri, store.places),
            tempfile.TemporaryDirectory() as folder,
        ):
            archive = self.model.download(Path(folder), _KEY)
            model_archive.load_weights(updater.model, archive, _KEY, self.model.name)
        self.snapshot = snapshot.of_model(updater)

    def load(self) -> None:
        """Do nothing: `check` has read the weights."""

    def take(self) -> Snapshot:
        """Return the weights that `check` has read, and release them."""
        assert self.snapshot is not None
        snapshot = self.snapshot
        self.snapshot = None
        return snapshot

    def restore(
        self, saved: Snapshot, updater: Update, recorder: Recorder, callbacks: Callbacks
    ) -> LoopState:
        """Restore the weights `saved`; return the state of a new training loop."""
        from pipeline.checkpoints import snapshot

        snapshot.restore_variables(saved, updater, snapshot.is_weight)
        return LoopState()


# What a run may begin with, other than a checkpoint of its own.
Beginning = Fork | ModelStart


def find_fork(
    spec: RunSpec, run_dir: Path, updates_done: int | None = None
) -> Fork | ModelStart | None:
    """Return the other run's checkpoint, or the model, with which this run begins.

    Args:
        spec: the spec of this run.
        run_dir: this run's directory.
        updates_done: the number of updates in that checkpoint, if this run has begun
            before. None selects the checkpoint that the config names.

    Returns:
        The checkpoint or the model, or None if `start.run` is not set.
    """
    text = spec.config.start.run
    if text is None:
        return None
    if MODEL.fullmatch(text):
        return _find_model(spec)
    source, checkpoint = named(text, _KEY, run_dir, updates_done)
    past = Past.read(source, _KEY, running=True)
    config = recorded_config.read(source, past, _KEY)
    own_precision = spec.config.hardware.precision.name
    return Fork(
        past.run_id,
        source.absolute(),
        checkpoint,
        spec.config.start.weights_only,
        own_rate=_has_own_rate(spec, config, past),
        precisions=(config["hardware"].get("precision", own_precision), own_precision),
    )


def _find_model(spec: RunSpec) -> ModelStart:
    """Return the registered model that `start.run` names.

    Raises:
        ConfigError: there is no such model in the store of `tracking.uri`.
    """
    uri = spec.config.start.run
    assert uri is not None
    store = ForeignStore.open(spec.config.tracking.uri, spec.config.trust.allow)
    return ModelStart(model_registry.registered(store, uri, _KEY))


def named(
    text: str, key: str, excluding: Path | None = None, updates_done: int | None = None
) -> tuple[Path, Checkpoint]:
    """Return the run directory and the checkpoint that `RUN` or `RUN@UPDATE` names.

    Args:
        text: `RUN` or `RUN@UPDATE`.
        key: the config key or argument that an error names.
        excluding: a run directory to skip.
        updates_done: the number of updates in the checkpoint; it overrides `UPDATE`. If
            neither is given, the newest intact checkpoint is returned, other than that
            of the best evaluation.

    Raises:
        ConfigError: there is no such run or checkpoint.
    """
    name, named_update = _parsed(text)
    if updates_done is None:
        updates_done = named_update
    source = find(name, key, excluding)
    return source, checkpoint_in(source, text, key, updates_done)


def override_to_repeat(spec: RunSpec, tags: Mapping[str, str]) -> str:
    """Return the override that `pipeline rerun` needs to find the other run of a fork.

    It is empty if the rerun finds that run by its ID, or if there is no other run. The
    ID is found if the run's directory lies below the working directory.

    Args:
        spec: the spec of the fork.
        tags: the tags of the fork, of which `RUN_TAG` and `UPDATE_TAG` are read.
    """
    text = spec.config.start.run
    if text is None or MODEL.fullmatch(text) or UPDATE_TAG not in tags:
        return ""
    name, _ = _parsed(text)
    has_id = RUN_ID.fullmatch(tags.get(RUN_TAG, "")) is not None
    source = Path(name)
    if not (source / JOURNAL_NAME).exists():  # it was named by its ID
        return ""
    source = source.resolve()
    if has_id and source.is_relative_to(Path.cwd().resolve()):
        return ""
    return start_override(source, int(tags[UPDATE_TAG]))


def _parsed(text: str) -> tuple[str, int | None]:
    """Return the run and the update that `RUN` or `RUN@UPDATE` names.

    The name of a run directory may itself end like `RUN@UPDATE`.
    """
    if (Path(text) / JOURNAL_NAME).exists():
        return text, None
    name, _, digits = text.rpartition("@")
    if name and digits.isascii() and digits.isdecimal():
        return name, int(digits)
    return text, None


def checkpoint_in(
    run_dir: Path, text: str, key: str, updates_done: int | None = None
) -> Checkpoint:
    """Return a checkpoint of a run directory.

    Args:
        run_dir: the run directory.
        text: the value that names the run, for errors.
        key: the config key or argument that an error names.
        updates_done: the number of updates in the checkpoint. If it is None, the newest
            intact checkpoint is returned, other than that of the best evaluation.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    checkpoints = run_dir / "checkpoints"
    if not files.are_in(checkpoints):
        rule = "must be a run with a checkpoint: see training.checkpoint_every"
        raise ConfigError(key, rule, text)

    if updates_done is None:
        checkpoint = files.newest(checkpoints)
        if checkpoint is None:
            names = [f"{text}@{number}" for number in files.intact(checkpoints)]
            rule = "must have an intact checkpoint"
            if names:
                rule = (
                    "must name an update: only the best evaluation has an intact "
                    "checkpoint"
                )
            raise ConfigError(key, rule, text, names)
        return checkpoint

    damage: ConfigError | None = None
    for folder in (checkpoints, checkpoints / BEST):
        if updates_done in files.saved_updates(folder):
            try:
                return files.at(folder, updates_done)
            except ConfigError as error:
                damage = damage or error
    intact = list(files.intact(checkpoints))
    if damage is None:
        rule = "must name an update whose checkpoint exists"
        raise ConfigError(key, rule, text, intact)
    raise ConfigError(damage.key, damage.rule, text, intact) from damage


def _has_own_rate(spec: RunSpec, recorded: dict[str, Any], past: Past) -> bool:
    """Return whether the learning rate differs from that of the run in `past`."""
    scaled = spec.config.scaling.rule != Rule.none
    if scaled:
        # A scaling rule makes the rate depend on the effective batch and its stages.
        size = past.start.segment["cut"]["effective_batch_size"]
        if size != spec.batching.effective_batch_size:
            return True
    then = _rate_values(recorded, with_stages=scaled)
    return then != _rate_values(spec.recorded, with_stages=scaled)


def _rate_values(config: Any, *, with_stages: bool) -> dict[str, Any]:
    """Return the config values that determine the learning rate, by dotted key."""
    # Add the defaults of the keys for stages, which older records lack.
    values = {CLOCK: "updates", SCHEDULE: None, **leaves(config)}
    rate_values = {}
    for key, value in values.items():
        is_stage = f"{key}.".startswith(f"{SCHEDULE}.")
        if key_kinds.facts_of(key).sets_rate or (with_stages and is_stage):
            rate_values[key] = value
    return rate_values
