"""Going on with a run: which changes of its config it bears, and which make it another run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, open_dict

from pipeline.checkpoints import files as checkpoint
from pipeline.checkpoints.files import Checkpoint
from pipeline.checkpoints.run_dirs import recorded_config
from pipeline.common.errors import ConfigError
from pipeline.common.secrets import mask, masked, remember
from pipeline.config import validate as configuration
from pipeline.config.sizes import EFFECTIVE, HORIZONS, SEARCHED, Batching, Plan
from pipeline.tracking import provenance
from pipeline.tracking.journal_file import DESCRIBED, NAME, Past, absolute, has_begun

if TYPE_CHECKING:  # importing these takes seconds
    import keras

    from pipeline.accumulation import Update

_TRAINING = ("loss", "loss_weights", "class_weight", "metrics", "weighted_metrics")
# What makes a run what it is; the effective batch, which several keys give, is checked by its size.
_SAME = (
    *("dataset", "model", "optimizer", "schedule", "scaling", "seed", "schema", "start", "hardware.precision"),
    *(f"training.{name}" for name in _TRAINING),
)
_FREE = (
    *(
        "dataset.data_dir",
        "dataset.download",
        "dataset.checksum",
        "tracking",
        "trust",
        "training.resume",
        "training.checkpoint_every",
    ),
    *("hardware.parallel_jobs", "hardware.gpus_per_job", "hardware.memory"),
)
_SIZES = ("accumulation.effective_batch_size", "accumulation.factor", "accumulation.micro_batch_size")


@dataclass(frozen=True)
class Continuation:
    """What goes on.

    Attributes:
        past: of the journal, locked.
        checkpoint: to go on from; None for one that was interrupted before its first.
        changes: of the config, a line each.
        finished: whether there is nothing left to train.
    """

    run_dir: Path
    past: Past
    checkpoint: Checkpoint | None
    changes: list[str] = field(default_factory=list)
    finished: bool = False

    @property
    def update(self) -> int:
        """Return the completed updates."""
        return 0 if self.checkpoint is None else self.checkpoint.update

    @property
    def run_id(self) -> str:
        """Return the run's ID in MLflow; empty where no store has had it."""
        return self.past.run.get("run_id", "")

    def check_dataset(self, now: dict[str, Any]) -> None:
        """Refuse data that are not those that the run began with."""
        file = self.run_dir / DESCRIBED
        if self.past.described and file.exists():
            provenance.check_dataset(json.loads(file.read_text(encoding="utf-8")), now, self.run_id)

    def check(self, update: Update, plan: Plan) -> None:
        """Refuse a model that the checkpoint does not fit, and a horizon that it has reached."""
        from pipeline.checkpoints import snapshot

        if self.checkpoint is None:
            return
        if self.past.status == "FINISHED" and self.checkpoint.meta["values"]["stop_training"]:
            by = self.checkpoint.meta["values"]["loop"]["stopped_by"]
            rule = f"was ended by training.callbacks.{by} after update {self.update}: begin another one there, with "
            raise ConfigError("RUN", f"{rule}start.run=RUN@{self.update}", str(self.run_dir))
        reached = self.update > plan.updates or (self.update == plan.updates and self.past.status == "FINISHED")
        if reached:
            raise ConfigError("training", f"must have a horizon beyond the {self.update} updates done", plan.updates)
        snapshot.check(self.checkpoint.meta, update)

    def said(self, callbacks: Mapping[str, keras.callbacks.Callback]) -> list[str]:
        """Return the lines that say what goes on, and with which changes."""
        from pipeline.checkpoints import snapshot

        anew = [
            f"training.callbacks.{name} starts anew: it offers no state" for name in snapshot.without_state(callbacks)
        ]
        damage = [f"{NAME}: {self.past.damage}; what follows is trained again"] if self.past.damage else []
        return [f"goes on after update {self.update}", *self.changes, *damage, *(anew if self.update else [])]


def of(run_dir: Path, config: DictConfig, cut: Batching, *, required: bool) -> Continuation | None:
    """Return what goes on in `run_dir`; None where there is no run, which may begin.

    Args:
        run_dir: of the run.
        config: what it is to go on with, checked.
        cut: how its effective batch is cut.
        required: whether the run must be there, and must have a checkpoint.

    Raises:
        ConfigError: the run in the directory is not to go on, or cannot.
    """
    if not required and not has_begun(run_dir / NAME):
        return None
    if not required and config.training.resume is None:  # a second run in one journal would never be shipped
        key = "hydra.run.dir" if config.tracking.sweep is None else "hydra.sweep.dir"
        raise ConfigError(key, "must be a folder without a run in it", str(run_dir))
    past = Past.of(run_dir, "RUN" if required else "hydra.run.dir")
    try:
        return _of(run_dir, config, cut, past, required)
    except BaseException:
        past.close()
        raise


def _of(run_dir: Path, config: DictConfig, cut: Batching, past: Past, required: bool) -> Continuation:
    found: list[str] = []
    if past.described:
        recorded = recorded_config(run_dir, "RUN")
        _keep_in_memory(config, recorded["dataset"])
        if config.accumulation.micro_batch_size in SEARCHED:
            then = past.start["segment"]["cut"]["micro_batch_size"]
            config.accumulation.micro_batch_size = min(then, cut.share)  # on more replicas each gets less
        found = changes(recorded, config, cut, past)
        longer = any(recorded["training"].get(name) != config.training[name] for name in HORIZONS)
        if past.status == "FINISHED" and not longer:
            if required:
                rule = "has finished: a longer horizon goes on with it, and pipeline sync ships what its store lacks"
                raise ConfigError("RUN", rule, str(run_dir))
            return Continuation(run_dir, past, None, finished=True)
    # A journal that is damaged has lost rows, which are trained again.
    most = max(past.updates, default=0) + config.tracking.log_every - 1
    latest = checkpoint.newest(run_dir / "checkpoints", most)
    if required and latest is None:
        raise ConfigError("RUN", "must have a checkpoint: see training.checkpoint_every", str(run_dir))
    return Continuation(run_dir, past, latest, found)


def _keep_in_memory(config: DictConfig, recorded: Mapping[str, Any]) -> None:
    """Let the order of the examples be that of the run where the config leaves it open, or the run knew no such key."""
    node = config.dataset
    with open_dict(node):
        if node.get("in_memory") == "auto":
            node.in_memory = recorded.get("in_memory", True)
            if node.get("shuffle_buffer") is None and "shuffle_buffer" in recorded:
                node.shuffle_buffer = recorded["shuffle_buffer"]
        if "shuffle_files" not in recorded:
            node.pop("shuffle_files", None)
        if "checksum" not in recorded:
            node.pop("checksum", None)


def changes(recorded: dict[str, Any], config: DictConfig, cut: Batching, past: Past) -> list[str]:
    """Return a line for each change that a run bears.

    Args:
        recorded: what the run began with.
        config: what it is to go on with, checked.
        cut: how its effective batch is cut.
        past: of the run.

    Raises:
        ConfigError: a change makes it another run, or the store is another one.
    """
    uri, first = config.tracking.uri, past.start["segment"]["cut"]["effective_batch_size"]
    remember(uri)  # the record may hide what only its URI shows to be a secret
    if past.run and mask(absolute(uri)) != mask(past.start["store"]):
        raise ConfigError("tracking.uri", f"must be the store of the run, {past.start['store']}", uri)
    if cut.effective_batch_size != first:
        raise ConfigError(EFFECTIVE, f"must be that of the run, {first}", cut.effective_batch_size)
    then, now = configuration.leaves(recorded), configuration.leaves(masked(configuration.plain(config)))
    found = []
    for key in [*then, *(key for key in now if key not in then)]:
        old, new = then.get(key), now.get(key)
        if old == new or _in(key, _FREE):
            continue
        if _in(key, _SAME):
            raise ConfigError(key, f"must be that of the run, {old!r}", new)
        found.append(f"{key} {new} (was {old})")
    return found


def _in(key: str, names: tuple[str, ...]) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in names)
