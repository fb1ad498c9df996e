"""Decides whether a run can be resumed, and from which checkpoint.

Some changes of the config are allowed. Others are rejected, since they would make the
run a different one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from pipeline.checkpoints import files, recorded_config
from pipeline.checkpoints.files import Checkpoint
from pipeline.checkpoints.run_dirs import resume_command, start_override
from pipeline.common.errors import ConfigError, as_config_error, count, say
from pipeline.common.recorded import read
from pipeline.common.secrets import HIDDEN, mask, remember
from pipeline.common.sqlite_uri import absolute
from pipeline.config import key_kinds
from pipeline.config.model_uris import MODEL
from pipeline.config.overrides import keys_set
from pipeline.config.plain import leaves, plain, value_at
from pipeline.config.plan import RunPlan
from pipeline.config.resolve import FUSED_ATTENTION, XLA_LENGTHS, RunSpec
from pipeline.config.schema import Config
from pipeline.config.sizes import EFFECTIVE, FACTOR, HORIZONS, TOKENS
from pipeline.config.stages import CLOCK
from pipeline.tracking import horizons, provenance, resumed_settings
from pipeline.tracking.journal_file import (
    CONFIG_RECORD,
    DATASET_RECORD,
    JOURNAL_NAME,
    LockedPast,
    Past,
    has_begun,
)

if TYPE_CHECKING:  # only for annotations: importing these modules takes seconds
    import keras

    from pipeline.accumulation import Update

# The config key of the run directory, which names it in errors.
RUN_DIR = "hydra.run.dir"


@dataclass(frozen=True)
class Continuation:
    """A run to resume.

    Attributes:
        run_dir: the run's directory.
        key: the argument or config key that names the run in errors: `RUN` for
            `pipeline resume`, otherwise `hydra.run.dir` or `hydra.sweep.dir`.
        spec: the spec. Values that the config leaves open, such as `auto`, are replaced
            by the recorded values of the run.
        past: the state of the run according to its journal, which is locked.
        checkpoint: the checkpoint from which the run continues. None if the run has no
            usable checkpoint, or is finished.
        changes: one line per change of the config since the last segment.
        settings: the settings that differ from those with which the run began; see
            `resumed_settings`.
        finished: whether there is nothing left to train.
    """

    run_dir: Path
    key: str
    spec: RunSpec
    past: LockedPast
    checkpoint: Checkpoint | None
    changes: list[str] = field(default_factory=list)
    settings: Mapping[str, Any] = field(default_factory=dict)
    finished: bool = False

    @property
    def updates_done(self) -> int:
        """The number of completed updates in `checkpoint`, or 0 if it is None."""
        return 0 if self.checkpoint is None else self.checkpoint.updates_done

    @property
    def run_id(self) -> str:
        """The run's ID in MLflow; empty if no store has it yet."""
        return self.past.run_id

    def check_dataset(self, dataset: dict[str, Any]) -> None:
        """Check that the dataset is the one with which the run began.

        If the run ended before its dataset was recorded, nothing is checked.

        Args:
            dataset: the record of the current dataset; see `provenance.dataset`.

        Raises:
            ConfigError: the dataset differs from the run's record of its dataset, or
                that record cannot be read.
        """
        file = self.run_dir / DATASET_RECORD
        if not self.past.described or not file.exists():
            return
        rule = f"must have a {DATASET_RECORD} that can be read"
        with as_config_error(self.key, rule, str(self.run_dir), recorded_config.COPY):
            recorded = read(file, provenance.DATASET)
        provenance.check_dataset(recorded, dataset, self.run_id)

    def check(self, updater: Update, plan: RunPlan) -> None:
        """Check that the checkpoint and the code fit, and that the run is not complete.

        Call this once the user's code is imported.

        Raises:
            ConfigError: the checkpoint does not fit the model or the batches, or is
                beyond the horizon; or the run has finished, at its horizon or by a
                callback; or the user's code has changed, and
                `training.accept_changed_code` is false.
        """
        if self.checkpoint is not None:
            self._check_checkpoint(self.checkpoint, updater, plan)
        files_changed = self._changed_code()
        if files_changed and not self.spec.config.training.accept_changed_code:
            names = ", ".join(files_changed)
            rule = (
                f"must be resumed with its own code, which has changed since: {names}; "
                "training.accept_changed_code=true continues the run with the changed "
                "code"
            )
            raise ConfigError(self.key, rule, str(self.run_dir))

    def _changed_code(self) -> list[str]:
        """Return the files of the user's code that changed after the last segment."""
        return provenance.changed_code(self.past.last_code)

    def _check_checkpoint(
        self, checkpoint: Checkpoint, updater: Update, plan: RunPlan
    ) -> None:
        from pipeline.checkpoints import snapshot

        meta = checkpoint.meta
        has_finished = self.past.status == "FINISHED"
        if has_finished and meta.values["stop_training"]:
            rule = (
                f"was ended by training.callbacks.{meta.loop.stopped_by} after update "
                f"{self.updates_done}: begin a new run there, with "
                f"{start_override(self.run_dir, self.updates_done)}"
            )
            raise ConfigError(self.key, rule, str(self.run_dir))
        if self.updates_done > plan.updates or (
            self.updates_done == plan.updates and has_finished
        ):
            done = count(self.updates_done, "update")
            rule = f"must have a horizon beyond the {done} completed"
            raise ConfigError("training", rule, plan.updates)
        snapshot.check_variables_fit(meta.arrays, updater)
        if meta.loop.batch_digest != plan.digest(self.updates_done):
            rule = (
                "must yield the batches of the run again, but the batch of update "
                f"{self.updates_done} is different"
            )
            raise ConfigError("dataset", rule, self.spec.dataset["_target_"])

    def messages(self, callbacks: Mapping[str, keras.callbacks.Callback]) -> list[str]:
        """Return the lines to print when the run is resumed."""
        from pipeline.checkpoints import snapshot

        begins = f"continues after update {self.updates_done}"
        if self.checkpoint is None:
            begins = "starts from the beginning, as there is no checkpoint"
        lines = [begins, *self.changes]
        files_changed = self._changed_code()
        if files_changed:
            lines.append(f"code that has changed: {', '.join(files_changed)}")
        if self.past.damage:
            lines.append(
                f"{JOURNAL_NAME}: {self.past.damage}; what follows is trained again"
            )
        if self.updates_done:
            lines += snapshot.starting_anew(callbacks)
        return lines


def find_continuation(
    run_dir: Path, spec: RunSpec, *, required: bool, key: str = RUN_DIR
) -> Continuation | None:
    """Return the run in `run_dir`, to be resumed with `spec`.

    Args:
        run_dir: the run's directory.
        spec: the spec of the current config.
        required: whether to raise an error if there is no run, no usable checkpoint or
            nothing left to train.
        key: the argument or config key by which the user named the directory. A job of
            a sweep has `hydra.sweep.dir` in place of `hydra.run.dir`.

    Returns:
        The run, or None if `run_dir` has no run, so that a new run may begin there.

    Raises:
        ConfigError: the run cannot be resumed.
    """
    if not required and not has_begun(run_dir / JOURNAL_NAME):
        return None

    if key == RUN_DIR and spec.config.tracking.sweep is not None:
        key = "hydra.sweep.dir"
    if not required and spec.config.training.resume is None:
        # Reject a new run here: with it, the journal would hold two runs, and the
        # second one would never be shipped.
        rule = (
            "must be a folder without a run in it; training.resume=auto continues that "
            "run"
        )
        raise ConfigError(key, rule, str(run_dir))

    past = LockedPast.open(run_dir, key)
    try:
        return _continuation(run_dir, key, with_own_store(spec, past), past, required)
    except BaseException:
        past.close()
        raise


def _continuation(
    run_dir: Path, key: str, spec: RunSpec, past: LockedPast, required: bool
) -> Continuation:
    lines: list[str] = []
    settings: dict[str, Any] = {}
    recorded = None
    # A run that was killed while it was described has its config already.
    if past.described or (run_dir / CONFIG_RECORD).exists():
        in_force = horizons.of_run(past.start, past.resumed)
        first = recorded_config.read(run_dir, past, key)
        recorded = horizons.with_last(first, in_force)
        recorded = resumed_settings.with_last(recorded, past.resumed)
        spec = _with_recorded_choices(spec, recorded, past)
        lines = changes(recorded, spec, past)
        settings = resumed_settings.changed(first, spec.recorded, _schema_values())
        if past.status == "FINISHED" and not _has_other_horizon(recorded, spec):
            if required:
                raise ConfigError(key, _finished_rule(run_dir, past), str(run_dir))
            return Continuation(run_dir, key, spec, past, None, finished=True)

    # Use a checkpoint from before the first lost row, so that the updates with lost
    # rows are trained again.
    latest = files.newest_of_run(
        run_dir / "checkpoints",
        is_usable=lambda checkpoint: _has_rows(past, spec, checkpoint),
    )
    if required and latest is None:
        raise _no_checkpoint(run_dir, key, past)
    if recorded is not None:
        _check_rows_stay_true(recorded, spec, past, latest, run_dir, key)
    return Continuation(run_dir, key, spec, past, latest, lines, settings)


def _check_rows_stay_true(
    recorded: Mapping[str, Any],
    spec: RunSpec,
    past: Past,
    checkpoint: Checkpoint | None,
    run_dir: Path,
    key: str,
) -> None:
    """Reject another horizon if updates that have rows are trained again.

    The learning rates of these updates may depend on the horizon. Their rows cannot be
    replaced in MLflow, so the run would keep rows that do not describe its updates.

    Args:
        recorded: the recorded config.
        spec: the spec of the current config.
        past: the state of the run according to its journal.
        checkpoint: the checkpoint from which the run would continue.
        run_dir: the run's directory.
        key: the argument or config key that names the run in errors.

    Raises:
        ConfigError: the horizon differs, and there are rows after the checkpoint.
    """
    done = 0 if checkpoint is None else checkpoint.updates_done
    last = max(past.updates, default=0)
    if last <= done or not _has_other_horizon(recorded, spec):
        return
    if done and past.status == "FINISHED":
        rule = _lost_weights_rule(run_dir, done, last)
        raise ConfigError(key, rule, str(run_dir))
    way_on = "train into another folder"
    if done:
        way_on = f"begin a new run there, with {start_override(run_dir, done)}"
    rule = (
        f"must be resumed with its own horizon, since {count(last - done, 'update')} "
        f"after update {done} will be trained again and already have rows; for another "
        f"horizon, {way_on}"
    )
    values = spec.resolved["training"]
    horizon = {unit: values[unit] for unit in HORIZONS if values[unit] is not None}
    raise ConfigError(key, rule, horizon)


def _finished_rule(run_dir: Path, past: Past) -> str:
    """Return the rule of the error about a finished run that has its horizon already."""
    folder = run_dir / "checkpoints"
    saved = files.saved_updates(folder) or files.saved_updates(folder / files.BEST)
    last = max(past.updates, default=0)
    if saved and saved[-1] < last:
        return _lost_weights_rule(run_dir, saved[-1], last)
    if not saved:
        return (
            "has finished: it has no checkpoint from which a longer horizon could "
            "continue it, and pipeline sync uploads what its store lacks"
        )
    return (
        "has finished: a longer horizon continues it, and pipeline sync uploads what "
        "its store lacks"
    )


def _lost_weights_rule(run_dir: Path, saved: int, last: int) -> str:
    """Return the rule of the error about a finished run without its last checkpoint.

    The disk may have been full when the checkpoint was to be written.

    Args:
        run_dir: the run's directory.
        saved: the update of the last checkpoint.
        last: the last update with a row.
    """
    return (
        f"cannot be continued: it has finished, with rows up to update {last}, but its "
        f"last checkpoint is that of update {saved}. To train on from there, begin a "
        f"new run with the same overrides and {start_override(run_dir, saved)}"
    )


def _has_rows(past: Past, spec: RunSpec, checkpoint: Checkpoint) -> bool:
    """Return whether the journal has all rows from before a checkpoint.

    If rows are missing, print a message.
    """
    position = checkpoint.meta.journal
    if position is not None:
        has_rows = position in past.positions
    else:
        # A checkpoint of an older version has no position. Since only multiples of
        # `log_every` have rows, it may be up to `log_every - 1` updates after the last
        # row.
        last_row = max(past.updates, default=0)
        most = last_row + spec.config.tracking.log_every - 1
        has_rows = checkpoint.updates_done <= most
    if not has_rows:
        say(
            f"the checkpoint {checkpoint.folder} is not used: {JOURNAL_NAME} does not "
            "have all rows from before it"
        )
    return has_rows


def _has_other_horizon(recorded: Mapping[str, Any], spec: RunSpec) -> bool:
    before = recorded["training"]
    now = spec.resolved["training"]
    return any(before.get(unit) != now[unit] for unit in HORIZONS)


def _no_checkpoint(run_dir: Path, key: str, past: Past) -> ConfigError:
    """Return the error for a run without a usable checkpoint.

    Args:
        run_dir: the run's directory.
        key: the argument or config key that names the run.
        past: the state of the run according to its journal.
    """
    existing = files.are_in(run_dir / "checkpoints")
    command = resume_command(run_dir, from_start=True)
    if not existing and past.status == "FINISHED":
        rule = "must have a checkpoint from which to train to a longer horizon"
        return ConfigError(key, rule, str(run_dir))
    if not existing:
        rule = f"must have a checkpoint; to train the run from the start: {command}"
        return ConfigError(key, rule, str(run_dir))
    rule = f"must have an intact checkpoint with all of its rows in {JOURNAL_NAME}"
    if past.damage:
        rule += f" ({past.damage})"
    rule += f"; to train the run from the start: {command}"
    return ConfigError(key, rule, str(run_dir))


def with_own_store(spec: RunSpec, past: Past) -> RunSpec:
    """Return the spec with the store that the run's journal names.

    The spec is returned unchanged if an override sets the store, or if the store's URI
    in the journal has a masked password.
    """
    store = past.store
    if absolute(spec.config.tracking.uri) == store or HIDDEN in store:
        return spec
    if not keys_set(spec.overrides).isdisjoint(("tracking.uri", "tracking")):
        return spec
    return spec.changed({"tracking.uri": store})


def _with_recorded_choices(
    spec: RunSpec, recorded: dict[str, Any], past: Past
) -> RunSpec:
    """Return the spec with the run's values for keys that the config leaves open."""
    spec = _with_recorded_order(spec, recorded["dataset"])
    spec = _without_new_keys(spec, recorded)
    spec = _with_recorded_version(spec, recorded)
    if spec.config.hardware.fused_attention == "auto":
        # An older record lacks this key: Keras computed the attention.
        is_fused = recorded["hardware"].get("fused_attention", False)
        spec = spec.changed({FUSED_ATTENTION: is_fused})
    if spec.config.hardware.xla_lengths == "auto":
        # An older record lacks this key: a cut by tokens was not compiled.
        lengths = recorded["hardware"].get("xla_lengths")
        spec = spec.changed({XLA_LENGTHS: lengths})
    if spec.times_xla:
        # An older record lacks this key: nothing was compiled.
        spec = spec.with_xla(recorded["hardware"].get("xla", False))
    if spec.searches:
        # Use at most a replica's share of the effective batch: the shares are smaller
        # than before if there are more replicas now.
        size = past.start.segment["cut"]["micro_batch_size"]
        spec = spec.with_micro_batch(min(size, spec.largest.share))
    return spec


def _with_recorded_order(spec: RunSpec, recorded: Mapping[str, Any]) -> RunSpec:
    """Return the spec that orders the examples as the `recorded` dataset config does.

    The order depends on whether the examples are shuffled in memory or in a buffer.
    Only with `in_memory: auto` does the config leave this open.
    """
    node = spec.dataset
    if node.get("in_memory") != "auto":
        return spec
    values = {"dataset.in_memory": recorded.get("in_memory", True)}
    if node.get("shuffle_buffer") is None and "shuffle_buffer" in recorded:
        values["dataset.shuffle_buffer"] = recorded["shuffle_buffer"]
    return spec.changed(values)


def _with_recorded_version(spec: RunSpec, recorded: Mapping[str, Any]) -> RunSpec:
    """Return the spec with the version of the model that the run began with.

    The alias in `start.run=models:/NAME@ALIAS` may name another version by now.
    """
    now = MODEL.fullmatch(str(spec.config.start.run))
    then_text = (recorded.get("start") or {}).get("run")
    then = MODEL.fullmatch(str(then_text))
    if now and then and now["alias"] and now["name"] == then["name"]:
        return spec.changed({"start.run": then_text})
    return spec


def _without_new_keys(spec: RunSpec, recorded: Mapping[str, Any]) -> RunSpec:
    """Return the spec without keys that are newer than the `recorded` config.

    The schema has no defaults for these keys, so `changes` would count them as changes.
    """
    new_keys = []
    for key in ("shuffle_files", "checksum", "batched"):
        if key not in recorded["dataset"]:
            new_keys.append(f"dataset.{key}")
    is_default_clock = spec.resolved["schedule"].get("clock") == "updates"
    if is_default_clock and CLOCK not in leaves(recorded):
        new_keys.append(CLOCK)
    excludes_none = spec.resolved["optimizer"].get("exclude_from_decay") == []
    if excludes_none and "exclude_from_decay" not in recorded["optimizer"]:
        new_keys.append("optimizer.exclude_from_decay")
    if not new_keys:
        return spec
    return spec.changed({}, without=new_keys)


def changes(recorded: dict[str, Any], spec: RunSpec, past: Past) -> list[str]:
    """Return one line per change from the `recorded` config to the config of `spec`.

    Keys that decide only where the run takes place or how it is logged are left out.

    Raises:
        ConfigError: a change would make the run a different one, or the store is not
            that of the run.
    """
    _check_store(spec.config.tracking.uri, past)
    _check_effective_batch(recorded, spec, past)
    _check_unit_of_cut(spec, past)

    values_then = leaves(recorded)
    values_now = leaves(spec.recorded)
    # Use the schema's default for a key that the recorded config lacks.
    defaults = leaves(_schema_values())
    new_keys = [key for key in values_now if key not in values_then]
    lines = []
    for key in [*values_then, *new_keys]:
        then = values_then.get(key, defaults.get(key))
        now = values_now.get(key)
        facts = key_kinds.facts_of(key)
        if then == now or facts.kind in key_kinds.WHERE_AND_HOW:
            continue
        # The lines of the entries say that a mapping is no longer empty.
        if then == {} and value_at(spec.recorded, key):
            continue
        if facts.fixed:
            raise ConfigError(key, f"must be that of the run, {then!r}", now)
        lines.append(f"{key} {now} (was {then})")
    return lines


@cache
def _schema_values() -> dict[str, Any]:
    """Return the schema's default of each key that has one, as a plain config."""
    return plain(OmegaConf.structured(Config))


def _check_store(uri: str, past: Past) -> None:
    # Register the secrets in the URI first, so that they are masked in both URIs before
    # the URIs are compared.
    remember(uri)
    store = past.store
    if past.run_id and mask(absolute(uri)) != mask(store):
        raise ConfigError("tracking.uri", f"must be the store of the run, {store}", uri)


def _check_unit_of_cut(spec: RunSpec, past: Past) -> None:
    """Reject a change from a cut by examples to a cut by tokens, or back.

    The limit may change. But the two cuts count micro-steps in different ways, and a
    run must count them in the same way in all of its rows.
    """
    then = past.start.segment["cut"].get("micro_batch_tokens")
    now = spec.batching.micro_batch_tokens
    if (then is None) == (now is None):
        return
    rule = (
        "must be null, as in the run; to cut by tokens, begin a new run with start.run"
    )
    if then is not None:
        rule = f"must be a number, as in the run: {then}"
    raise ConfigError(TOKENS, rule, now)


def _check_effective_batch(recorded: dict[str, Any], spec: RunSpec, past: Past) -> None:
    cut = spec.batching
    if spec.dataset.get("batched"):
        # Compare the factors instead: each element of the dataset is a batch, and an
        # update takes `factor` batches.
        factor = recorded["accumulation"]["factor"]
        if cut.factor != factor:
            rule = f"must be that of the run, {factor}"
            raise ConfigError(FACTOR, rule, cut.factor)
        return
    size = past.start.segment["cut"]["effective_batch_size"]
    if cut.effective_batch_size != size:
        rule = f"must be that of the run, {size}"
        raise ConfigError(EFFECTIVE, rule, cut.effective_batch_size)
