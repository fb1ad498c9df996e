"""Resuming a run: which changes of its config are allowed, and which would make it another run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from pipeline.checkpoints import files
from pipeline.checkpoints.files import Checkpoint
from pipeline.checkpoints.run_dirs import recorded_config
from pipeline.common.errors import ConfigError, refused
from pipeline.common.recorded import read
from pipeline.common.secrets import HIDDEN, mask, remember
from pipeline.config import key_kinds
from pipeline.config.plain import leaves, plain
from pipeline.config.plan import Plan
from pipeline.config.resolve import RunSpec
from pipeline.config.schema import Config
from pipeline.config.sizes import EFFECTIVE, FACTOR, HORIZONS
from pipeline.config.stages import CLOCK, SCHEDULE
from pipeline.tracking import provenance
from pipeline.tracking.journal_file import DESCRIBED, NAME, Past, absolute, has_begun

if TYPE_CHECKING:  # importing these takes seconds
    import keras

    from pipeline.accumulation import Update


@dataclass(frozen=True)
class Continuation:
    """A run that is resumed."""

    run_dir: Path
    spec: RunSpec  # keys that are left open, such as `auto`, have the values of the run
    past: Past  # its journal is locked
    checkpoint: (
        Checkpoint | None
    )  # None if it was interrupted before its first checkpoint
    changes: list[str] = field(default_factory=list)  # of the config, a line each
    finished: bool = False  # whether there is nothing left to train

    @property
    def update(self) -> int:  # completed updates
        return 0 if self.checkpoint is None else self.checkpoint.update

    @property
    def run_id(self) -> str:  # empty if no store has the run yet
        return self.past.run.get("run_id", "")

    def check_dataset(self, now: dict[str, Any]) -> None:
        """Refuse data that differ from those that the run began with."""
        file = self.run_dir / DESCRIBED
        if self.past.described and file.exists():
            with refused(
                "RUN", f"must have a {DESCRIBED} that can be read", str(self.run_dir)
            ):
                recorded = read(file, provenance.DATASET)
            provenance.check_dataset(recorded, now, self.run_id)

    def check(self, update: Update, plan: Plan) -> None:
        """Refuse a model that the checkpoint does not fit, and a horizon that is already reached."""
        from pipeline.checkpoints import snapshot

        if self.checkpoint is None:
            return
        if (
            self.past.status == "FINISHED"
            and self.checkpoint.meta["values"]["stop_training"]
        ):
            by = self.checkpoint.meta["values"]["loop"]["stopped_by"]
            rule = f"was ended by training.callbacks.{by} after update {self.update}: begin another one there, with "
            raise ConfigError(
                "RUN", f"{rule}start.run=RUN@{self.update}", str(self.run_dir)
            )
        # With AdaScale an update counts for several; the row of the last one says for how many all of them did.
        done = max(
            self.update, int(self.past.last.get("train/scale_invariant_updates", 0))
        )
        if self.update > plan.updates or (
            done >= plan.updates and self.past.status == "FINISHED"
        ):
            raise ConfigError(
                "training",
                f"must have a horizon beyond the {done} updates done",
                plan.updates,
            )
        snapshot.check(self.checkpoint.meta, update)
        if self.checkpoint.meta["values"]["loop"].get("batch") != plan.digest(
            self.update
        ):
            rule = f"must give the batches of the run again: that of update {self.update} is another one"
            if plan.stages:
                raise ConfigError(
                    SCHEDULE,
                    f"{rule}; a longer horizon moves the stages of seesaw",
                    plan.changes,
                )
            raise ConfigError("dataset", rule, self.spec.dataset["_target_"])
        last, seen = (
            max(self.past.updates, default=0),
            self.past.last.get("train/examples_seen"),
        )
        if (
            plan.stages
            and seen is not None
            and last > self.update
            and plan.examples_seen(last) != seen
        ):
            rule = f"must give the rows of the run again, up to update {last}"
            raise ConfigError(
                SCHEDULE,
                f"{rule}; a longer horizon moves the stages of seesaw",
                plan.changes,
            )

    def said(self, callbacks: Mapping[str, keras.callbacks.Callback]) -> list[str]:
        from pipeline.checkpoints import snapshot

        anew = snapshot.starting_anew(callbacks) if self.update else []
        damage = (
            [f"{NAME}: {self.past.damage}; what follows is trained again"]
            if self.past.damage
            else []
        )
        return [f"goes on after update {self.update}", *self.changes, *damage, *anew]


def of(run_dir: Path, spec: RunSpec, *, required: bool) -> Continuation | None:
    """Return the run in `run_dir`, to be resumed with `spec`; None if there is none, so that one may begin there.

    If `required`, the run must exist, and must have a checkpoint. A `ConfigError` says why it cannot be resumed.
    """
    if not required and not has_begun(run_dir / NAME):
        return None
    if (
        not required and spec.config.training.resume is None
    ):  # a second run in one journal would never be shipped
        key = (
            "hydra.run.dir" if spec.config.tracking.sweep is None else "hydra.sweep.dir"
        )
        raise ConfigError(key, "must be a folder without a run in it", str(run_dir))
    past = Past.of(run_dir, "RUN" if required else "hydra.run.dir")
    try:
        return _of(run_dir, with_own_store(spec, past), past, required)
    except BaseException:
        past.close()
        raise


def _of(run_dir: Path, spec: RunSpec, past: Past, required: bool) -> Continuation:
    found: list[str] = []
    if past.described:
        recorded = recorded_config(run_dir, "RUN")
        spec = _with_order(spec, recorded["dataset"])
        if (
            CLOCK not in leaves(recorded)
            and spec.resolved["schedule"].get("clock") == "updates"
        ):
            spec = spec.changed({}, without=[CLOCK])
        if spec.searches:
            then = past.start["segment"]["cut"]["micro_batch_size"]
            spec = spec.with_micro_batch(
                min(then, spec.largest.share)
            )  # on more replicas each gets less
        found = changes(recorded, spec, past)
        longer = any(
            recorded["training"].get(unit) != spec.resolved["training"][unit]
            for unit in HORIZONS
        )
        if past.status == "FINISHED" and not longer:
            if required:
                rule = "has finished: a longer horizon goes on with it, and pipeline sync ships what its store lacks"
                raise ConfigError("RUN", rule, str(run_dir))
            return Continuation(run_dir, spec, past, None, finished=True)
    # The updates whose rows a damaged journal has lost are trained again.
    most = max(past.updates, default=0) + spec.config.tracking.log_every - 1
    latest = files.newest(run_dir / "checkpoints", most)
    if required and latest is None:
        if not (there := files.updates(run_dir / "checkpoints")):
            raise ConfigError(
                "RUN",
                "must have a checkpoint: see training.checkpoint_every",
                str(run_dir),
            )
        rule = f"must have an intact checkpoint after at most {most} updates, of which {NAME} has the rows"
        wrong = f" ({past.damage})" if past.damage else ""
        raise ConfigError(
            "RUN",
            f"{rule}{wrong}: training.resume=auto trains it from the start",
            str(run_dir),
            there,
        )
    return Continuation(run_dir, spec, past, latest, found)


def with_own_store(spec: RunSpec, past: Past) -> RunSpec:
    """Return the spec with the run's own store, unless an override names one or the journal hides its password."""
    store, named = past.start["store"], ("tracking.uri=", "tracking=")
    same = absolute(spec.config.tracking.uri) == store or HIDDEN in store
    given = any(text.lstrip("+").startswith(named) for text in spec.overrides)
    return spec if same or given else spec.changed({"tracking.uri": store})


def _with_order(spec: RunSpec, recorded: Mapping[str, Any]) -> RunSpec:
    """Return the spec with the order of the examples of the `recorded` dataset group, without keys unknown to it."""
    node, values = spec.dataset, dict[str, Any]()
    if node.get("in_memory") == "auto":
        values["dataset.in_memory"] = recorded.get("in_memory", True)
        if node.get("shuffle_buffer") is None and "shuffle_buffer" in recorded:
            values["dataset.shuffle_buffer"] = recorded["shuffle_buffer"]
    unknown = [
        f"dataset.{key}"
        for key in ("shuffle_files", "checksum", "batched")
        if key not in recorded
    ]
    return spec.changed(values, without=unknown)


def changes(recorded: dict[str, Any], spec: RunSpec, past: Past) -> list[str]:
    """Return a line for each change from `recorded` to `spec` that the run allows; refuse one that makes it another."""
    uri, first, cut = (
        spec.config.tracking.uri,
        past.start["segment"]["cut"]["effective_batch_size"],
        spec.batching,
    )
    remember(uri)  # the record may hide what only its URI shows to be a secret
    if past.run and mask(absolute(uri)) != mask(past.start["store"]):
        raise ConfigError(
            "tracking.uri", f"must be the store of the run, {past.start['store']}", uri
        )
    if spec.dataset.get("batched"):
        then = recorded["accumulation"]["factor"]
        if cut.factor != then:
            raise ConfigError(FACTOR, f"must be that of the run, {then}", cut.factor)
    elif cut.effective_batch_size != first:
        raise ConfigError(
            EFFECTIVE, f"must be that of the run, {first}", cut.effective_batch_size
        )
    then, now, before = (
        leaves(recorded),
        leaves(spec.recorded),
        leaves(plain(OmegaConf.structured(Config))),
    )
    found = []
    for key in [*then, *(key for key in now if key not in then)]:
        old, new = (
            then.get(key, before.get(key)),
            now.get(key),
        )  # the schema's defaults are what was done before
        facts = key_kinds.facts_of(key)
        if old == new or facts.kind in key_kinds.WHERE_AND_HOW:
            continue
        if facts.fixed:
            raise ConfigError(key, f"must be that of the run, {old!r}", new)
        found.append(f"{key} {new} (was {old})")
    return found
