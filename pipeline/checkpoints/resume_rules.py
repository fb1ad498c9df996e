"""Resuming a run.

Some changes of its config are allowed. Others would make it another run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from pipeline.checkpoints import files
from pipeline.checkpoints.files import Checkpoint
from pipeline.checkpoints.run_dirs import COPY, recorded_config
from pipeline.common.errors import ConfigError, as_config_error, say
from pipeline.common.recorded import read
from pipeline.common.secrets import HIDDEN, mask, remember
from pipeline.common.sqlite_uri import absolute
from pipeline.config import key_kinds
from pipeline.config.plain import leaves, plain
from pipeline.config.plan import Plan
from pipeline.config.resolve import FUSED_ATTENTION, RunSpec
from pipeline.config.schema import Config
from pipeline.config.sizes import EFFECTIVE, FACTOR, HORIZONS
from pipeline.config.stages import CLOCK
from pipeline.tracking import provenance
from pipeline.tracking.journal_file import (
    DESCRIBED,
    JOURNAL_NAME,
    Past,
    has_begun,
)

if TYPE_CHECKING:  # importing these takes seconds
    import keras

    from pipeline.accumulation import Update


@dataclass(frozen=True)
class Continuation:
    """A run that is resumed.

    Attributes:
        run_dir: the run's directory.
        key: the argument or config key that names the run, for errors: RUN of
            `pipeline resume`, else `hydra.run.dir` or `hydra.sweep.dir`.
        spec: the spec. Keys that the config leaves open, such as `auto`, have the
            values of the run.
        past: the run's past, whose journal is locked.
        checkpoint: the checkpoint from which the run goes on; None if the run was
            interrupted before its first one.
        changes: the changes of the config, a line each.
        finished: whether there is nothing left to train.
    """

    run_dir: Path
    key: str
    spec: RunSpec
    past: Past
    checkpoint: Checkpoint | None
    changes: list[str] = field(default_factory=list)
    finished: bool = False

    @property
    def updates_done(self) -> int:
        """The updates of `checkpoint`; 0 without one, as in a finished run."""
        return 0 if self.checkpoint is None else self.checkpoint.updates_done

    @property
    def run_id(self) -> str:
        """The run's ID in MLflow; empty if no store has it yet."""
        return self.past.run.get("run_id", "")

    def check_dataset(self, dataset: dict[str, Any]) -> None:
        """Check that the data are those that the run began with.

        Raises:
            ConfigError: they differ from the record, or it cannot be read.
        """
        file = self.run_dir / DESCRIBED
        if not self.past.described or not file.exists():
            return
        rule = f"must have a {DESCRIBED} that can be read"
        with as_config_error(self.key, rule, str(self.run_dir), COPY):
            recorded = read(file, provenance.DATASET)
        provenance.check_dataset(recorded, dataset, self.run_id)

    def check(self, updater: Update, plan: Plan) -> None:
        """Check that the checkpoint fits the model, and that there is more to train.

        Raises:
            ConfigError: it does not fit, or the horizon is reached.
        """
        from pipeline.checkpoints import snapshot

        if self.checkpoint is None:
            return
        meta = self.checkpoint.meta
        has_finished = self.past.status == "FINISHED"
        if has_finished and meta.values["stop_training"]:
            rule = (
                f"was ended by training.callbacks.{meta.loop.stopped_by} after update "
                f"{self.updates_done}: begin another one there, with "
                f"start.run=RUN@{self.updates_done}"
            )
            raise ConfigError(self.key, rule, str(self.run_dir))
        if self.updates_done > plan.updates or (
            self.updates_done == plan.updates and has_finished
        ):
            rule = f"must have a horizon beyond the {self.updates_done} updates done"
            raise ConfigError("training", rule, plan.updates)
        snapshot.check_variables_fit(meta.arrays, updater)
        if meta.loop.batch_digest != plan.digest(self.updates_done):
            rule = (
                "must give the batches of the run again: that of update "
                f"{self.updates_done} is another one"
            )
            raise ConfigError("dataset", rule, self.spec.dataset["_target_"])

    def messages(self, callbacks: Mapping[str, keras.callbacks.Callback]) -> list[str]:
        """Return the lines that a run prints when it is resumed."""
        from pipeline.checkpoints import snapshot

        lines = [f"goes on after update {self.updates_done}", *self.changes]
        if self.past.damage:
            lines.append(
                f"{JOURNAL_NAME}: {self.past.damage}; what follows is trained again"
            )
        if self.updates_done:
            lines += snapshot.starting_anew(callbacks)
        return lines


def find_continuation(
    run_dir: Path, spec: RunSpec, *, required: bool
) -> Continuation | None:
    """Return the run in `run_dir`, to be resumed with `spec`.

    Args:
        run_dir: the run's directory.
        spec: the spec by the current config.
        required: whether the run must exist, and must have a checkpoint.

    Returns:
        None if there is no run, so that one may begin there.

    Raises:
        ConfigError: the run cannot be resumed.
    """
    if not required and not has_begun(run_dir / JOURNAL_NAME):
        return None

    # Errors name what the user has typed.
    if required:
        key = "RUN"
    elif spec.config.tracking.sweep is not None:
        key = "hydra.sweep.dir"
    else:
        key = "hydra.run.dir"
    if not required and spec.config.training.resume is None:
        # A second run in one journal would never be shipped.
        raise ConfigError(key, "must be a folder without a run in it", str(run_dir))

    past = Past.read(run_dir, key)
    try:
        return _continuation(run_dir, key, with_own_store(spec, past), past, required)
    except BaseException:
        past.close()
        raise


def _continuation(
    run_dir: Path, key: str, spec: RunSpec, past: Past, required: bool
) -> Continuation:
    lines: list[str] = []
    if past.described:
        recorded = recorded_config(run_dir, key)
        spec = _with_recorded_choices(spec, recorded, past)
        lines = changes(recorded, spec, past)
        if past.status == "FINISHED" and not _has_other_horizon(recorded, spec):
            if required:
                rule = (
                    "has finished: a longer horizon goes on with it, and "
                    "pipeline sync ships what its store lacks"
                )
                raise ConfigError(key, rule, str(run_dir))
            return Continuation(run_dir, key, spec, past, None, finished=True)

    # The updates whose rows the journal has lost are trained again. Only each update
    # that `log_every` divides has a row, so the ones before the next such update have
    # lost none.
    most = max(past.updates, default=0) + spec.config.tracking.log_every - 1
    latest = files.newest(
        run_dir / "checkpoints", most, lambda checkpoint: _has_rows(past, checkpoint)
    )
    if required and latest is None:
        raise _no_checkpoint(run_dir, key, past, most)
    return Continuation(run_dir, key, spec, past, latest, lines)


def _has_rows(past: Past, checkpoint: Checkpoint) -> bool:
    """Return whether the journal has all rows from before a checkpoint.

    If it has not, one line says so.
    """
    position = checkpoint.meta.journal
    # An old checkpoint has no position.
    if position is None or position in past.positions:
        return True
    say(
        f"the checkpoint {checkpoint.folder} is not used: "
        f"{JOURNAL_NAME} has not all rows from before it"
    )
    return False


def _has_other_horizon(recorded: Mapping[str, Any], spec: RunSpec) -> bool:
    before = recorded["training"]
    now = spec.resolved["training"]
    return any(before.get(unit) != now[unit] for unit in HORIZONS)


def _no_checkpoint(run_dir: Path, key: str, past: Past, most: int) -> ConfigError:
    """Return the error for a run without an intact checkpoint of `most` updates."""
    existing = files.saved_updates(run_dir / "checkpoints")
    if not existing:
        rule = "must have a checkpoint: see training.checkpoint_every"
        return ConfigError(key, rule, str(run_dir))
    rule = (
        f"must have an intact checkpoint after at most {most} updates, of which "
        f"{JOURNAL_NAME} has the rows"
    )
    if past.damage:
        rule += f" ({past.damage})"
    rule += ": training.resume=auto trains it from the start"
    return ConfigError(key, rule, str(run_dir), existing)


def with_own_store(spec: RunSpec, past: Past) -> RunSpec:
    """Return the spec with the run's own store.

    It keeps its store if an override names one, or if the journal hides the password.
    """
    store = past.start["store"]
    if absolute(spec.config.tracking.uri) == store or HIDDEN in store:
        return spec
    for override in spec.overrides:
        if override.lstrip("+").startswith(("tracking.uri=", "tracking=")):
            return spec
    return spec.changed({"tracking.uri": store})


def _with_recorded_choices(
    spec: RunSpec, recorded: dict[str, Any], past: Past
) -> RunSpec:
    """Return the spec with the run's own choices for what the config leaves open."""
    spec = _with_recorded_order(spec, recorded["dataset"])
    spec = _without_new_keys(spec, recorded)
    if spec.config.hardware.fused_attention == "auto":
        # Missing from a record of before the key: attention was Keras' own.
        is_fused = recorded["hardware"].get("fused_attention", False)
        spec = spec.changed({FUSED_ATTENTION: is_fused})
    if spec.searches:
        # The run's size may exceed the share of a replica in the effective batch, as
        # each replica has a smaller share if there are more of them now.
        size = past.start["segment"]["cut"]["micro_batch_size"]
        spec = spec.with_micro_batch(min(size, spec.largest.share))
    return spec


def _with_recorded_order(spec: RunSpec, recorded: Mapping[str, Any]) -> RunSpec:
    """Return the spec with the order of the examples in the `recorded` dataset.

    The order depends on whether the dataset is shuffled in memory or by a buffer.
    """
    node = spec.dataset
    if node.get("in_memory") != "auto":
        return spec
    values = {"dataset.in_memory": recorded.get("in_memory", True)}
    if node.get("shuffle_buffer") is None and "shuffle_buffer" in recorded:
        values["dataset.shuffle_buffer"] = recorded["shuffle_buffer"]
    return spec.changed(values)


def _without_new_keys(spec: RunSpec, recorded: Mapping[str, Any]) -> RunSpec:
    """Return the spec without keys that are newer than the `recorded` config.

    `changes` would list or reject them, as the schema has no default for them.
    """
    new_keys = []
    for key in ("shuffle_files", "checksum", "batched"):
        if key not in recorded["dataset"]:
            new_keys.append(f"dataset.{key}")
    is_default_clock = spec.resolved["schedule"].get("clock") == "updates"
    if is_default_clock and CLOCK not in leaves(recorded):
        new_keys.append(CLOCK)
    if not new_keys:
        return spec
    return spec.changed({}, without=new_keys)


def changes(recorded: dict[str, Any], spec: RunSpec, past: Past) -> list[str]:
    """Return a line for each change from the `recorded` config to that of `spec`.

    Raises:
        ConfigError: a change makes it another run.
    """
    _check_store(spec.config.tracking.uri, past)
    _check_effective_batch(recorded, spec, past)

    values_then = leaves(recorded)
    values_now = leaves(spec.recorded)
    # A missing key meant the schema's default.
    defaults = _schema_defaults()
    new_keys = [key for key in values_now if key not in values_then]
    lines = []
    for key in [*values_then, *new_keys]:
        then = values_then.get(key, defaults.get(key))
        now = values_now.get(key)
        facts = key_kinds.facts_of(key)
        if then == now or facts.kind in key_kinds.WHERE_AND_HOW:
            continue
        if facts.fixed:
            raise ConfigError(key, f"must be that of the run, {then!r}", now)
        lines.append(f"{key} {now} (was {then})")
    return lines


@cache
def _schema_defaults() -> dict[str, Any]:
    return leaves(plain(OmegaConf.structured(Config)))


def _check_store(uri: str, past: Past) -> None:
    # The record may hide what only the URI shows to be a secret.
    remember(uri)
    store = past.start["store"]
    if past.run and mask(absolute(uri)) != mask(store):
        raise ConfigError("tracking.uri", f"must be the store of the run, {store}", uri)


def _check_effective_batch(recorded: dict[str, Any], spec: RunSpec, past: Past) -> None:
    cut = spec.batching
    if spec.dataset.get("batched"):
        # The elements of the dataset are batches, `factor` of which are an update.
        factor = recorded["accumulation"]["factor"]
        if cut.factor != factor:
            rule = f"must be that of the run, {factor}"
            raise ConfigError(FACTOR, rule, cut.factor)
        return
    size = past.start["segment"]["cut"]["effective_batch_size"]
    if cut.effective_batch_size != size:
        rule = f"must be that of the run, {size}"
        raise ConfigError(EFFECTIVE, rule, cut.effective_batch_size)
