"""Finds the record and the weights of the run that a command line names.

A run directory on this machine is trusted, like your own files. A record from a store
is not: it passes the gate, and of its model, only the weights are read.
"""

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.checkpoints import files, fork, recorded_config, run_dirs
from pipeline.checkpoints.files import Checkpoint
from pipeline.common import recorded as recorded_files
from pipeline.common.errors import ConfigError, as_config_error, say
from pipeline.config import key_kinds, sizes
from pipeline.config.model_uris import MODEL
from pipeline.config.overrides import keys_set
from pipeline.rerun import adapted_config, recorded_run
from pipeline.rerun.request import Request
from pipeline.tracking import model_registry, provenance, run_paths
from pipeline.tracking.foreign_store import ForeignStore
from pipeline.tracking.journal_file import (
    DATASET_RECORD,
    JOURNAL_NAME,
    Past,
    is_locked,
)
from pipeline.tracking.model_registry import StoredModel
from pipeline.trust.artifact_locations import confined
from pipeline.trust.gate import Gate, strict

BEST = "best"
_TRIES = 10  # to link a checkpoint before the run removes it
_ID = re.compile("[0-9a-f]{4,32}")
_CHOICES = (
    "a run directory",
    "the ID of a run, or at least its first 4 digits",
    "models:/NAME@ALIAS",
    "models:/NAME/VERSION",
)


@dataclass(frozen=True)
class Subject:
    """A run and the weights to evaluate.

    Attributes:
        run_id: the run's ID in MLflow; empty if no store has the run.
        run_dir: its run directory, or None if it was not found.
        weights: the checkpoint, or the model in the store, that has the weights.
        config: the config to compose with the overrides.
        dataset: the record of the run's data; empty if it has none.
        code: the SHA-256 of each file of the user's code that the run was last trained
            with, by the file's name; empty if it was not recorded.
        tags: the tags of the run, as far as they are known here.
        store: the URI of the store of the run.
        gate: the permissions of the config, or None if it is trusted.
    """

    run_id: str
    run_dir: Path | None
    weights: Checkpoint | StoredModel
    config: dict[str, Any]
    dataset: dict[str, Any]
    code: Mapping[str, Any]
    tags: Mapping[str, str]
    store: str
    gate: Gate | None

    @property
    def update(self) -> int:
        """The number of completed updates of the weights."""
        return self.weights.updates_done

    @property
    def name(self) -> str:
        """The run's ID or, if it has none, its directory."""
        return self.run_id or str(self.run_dir)

    def say_changed_code(self) -> None:
        """Name the files of the user's code that have changed since the run.

        Call this once the user's code is imported.
        """
        changed = provenance.changed_code(self.code)
        if changed:
            say(f"code that has changed since the run: {', '.join(changed)}")

    def check_dataset(self, now: dict[str, Any]) -> None:
        """Check that the data are those of the run.

        Raises:
            ConfigError: the data differ.
        """
        if self.dataset:
            provenance.check_dataset(self.dataset, now, self.name)


@contextmanager
def found(request: Request) -> Iterator[Subject]:
    """Yield the subject; within the block, its record may build only what is allowed.

    Raises:
        ConfigError: there is no such run or checkpoint, or its record is rejected.
    """
    with tempfile.TemporaryDirectory() as folder:
        yield from _found(request, Path(folder))


def _found(request: Request, folder: Path) -> Iterator[Subject]:
    """Yield the subject; `folder` may hold its checkpoint."""
    name, selected = _parsed(request.run_id)
    is_model = MODEL.fullmatch(request.run_id) is not None
    if not is_model and (Path(name) / JOURNAL_NAME).exists():
        named_dir = Path(name).absolute()
        checkpoint = _lasting_checkpoint(named_dir, selected, request.run_id, folder)
        yield _in_run_dir(named_dir, checkpoint, request)
        return
    if not is_model and not _ID.fullmatch(name):
        rule = "must name a run"
        meant = run_paths.meant_run(name)
        raise ConfigError("RUN", rule, request.run_id, _CHOICES, meant=meant)

    own_config = request.own_config()
    store = ForeignStore.open(own_config.tracking.uri, own_config.trust.allow)
    with confined(store.uri, store.places):
        model = None
        if is_model:
            model = model_registry.registered(store, request.run_id, "RUN")
            name = model.run_id
        recorded = recorded_run.fetch(store, name)
        gate = adapted_config.gate_of(request, own_config)
        recorded = replace(recorded, config=_without_training(recorded.config))
        run_dir = run_dirs.by_id("RUN").get(recorded.run_id)
        with _offering(run_dir):
            config = adapted_config.adapt(
                recorded, request, own_config, gate, str(own_config.tracking.experiment)
            )
        weights: Checkpoint | StoredModel
        if model is not None:
            weights = model
        elif run_dir is not None:
            weights = _lasting_checkpoint(run_dir, selected, request.run_id, folder)
        else:
            weights = _logged_model(store, recorded.run, selected)
        subject = Subject(
            run_id=recorded.run_id,
            run_dir=run_dir,
            weights=weights,
            config=_on_one_replica(config),
            dataset=recorded.dataset,
            code=recorded.last_code,
            tags=recorded.run.data.tags,
            store=store.uri,
            gate=gate,
        )
        with strict(gate):
            yield subject


@contextmanager
def _offering(run_dir: Path | None) -> Iterator[None]:
    """If the store's record names code that is not allowed, suggest the run directory.

    The directory needs no `--allow`, as it is trusted like your own files.
    """
    try:
        yield
    except ConfigError as error:
        if run_dir is not None and error.key.endswith("._target_"):
            error.rule += f", or name the run by its directory, {run_dir}"
        raise


def _parsed(text: str) -> tuple[str, str]:
    """Return the run that RUN, RUN@UPDATE or RUN@best names, and the text after `@`.

    The name of a run directory may itself end like this.
    """
    if (Path(text) / JOURNAL_NAME).exists():
        return text, ""
    name, _, selected = text.rpartition("@")
    is_update = selected.isascii() and selected.isdecimal()
    if name and (is_update or selected == BEST):
        return name, selected
    return text, ""


def _lasting_checkpoint(
    run_dir: Path, selected: str, text: str, folder: Path
) -> Checkpoint:
    """Return a checkpoint that stays until the command ends.

    A run that is training removes its checkpoints as it writes newer ones. So the
    checkpoint is linked into `folder`. If it is removed before that, the next one is
    linked.
    """
    if not is_locked(run_dir / JOURNAL_NAME):
        return _checkpoint(run_dir, selected, text)
    failure: Exception | None = None
    for _ in range(_TRIES):
        try:
            return files.linked(_checkpoint(run_dir, selected, text), folder)
        except (OSError, ConfigError) as error:
            failure = error
    if isinstance(failure, ConfigError):
        raise failure
    rule = "must have a checkpoint that exists for long enough to be read"
    raise ConfigError("RUN", rule, text) from failure


def _checkpoint(run_dir: Path, selected: str, text: str) -> Checkpoint:
    """Return the checkpoint of an update, of the best evaluation, or the last one."""
    if selected == BEST:
        update = files.best_update(run_dir / "checkpoints")
        if update is None:
            rule = (
                "must be a run that has written a best checkpoint: this takes "
                "training.keep_best, and an evaluation"
            )
            raise ConfigError("RUN", rule, text)
        _check_is_best(run_dir, update, text)
        return files.at(run_dir / "checkpoints" / files.BEST, update)
    if selected:
        return fork.checkpoint_in(run_dir, text, "RUN", int(selected))
    checkpoint = fork.checkpoint_in(run_dir, text, "RUN")
    _say_if_not_last(run_dir, checkpoint.updates_done)
    return checkpoint


def _say_if_not_last(run_dir: Path, saved: int) -> None:
    """Print a line if a finished run lacks the checkpoint of its last update.

    The disk may have been full when it was to be written.
    """
    past = Past.read(run_dir, running=True)
    updates = past.tags.get("updates", "")
    if past.status == "FINISHED" and updates.isdecimal() and int(updates) > saved:
        say(
            f"these are the weights after update {saved}: the run has finished after "
            f"update {updates}, but has no checkpoint of it"
        )


def _check_is_best(run_dir: Path, kept: int, text: str) -> None:
    """Reject the kept best checkpoint of a run whose best evaluation was another one.

    The disk may have been full when the later checkpoint was to be written.
    """
    past = Past.read(run_dir, running=True)
    best = past.last.get("best/update")
    # Only a run that has finished has its final best evaluation in its journal.
    if past.status == "FINISHED" and best is not None and int(best) != kept:
        rule = (
            f"must have the checkpoint of its best evaluation, after update {int(best)}, "
            "which was not written"
        )
        raise ConfigError("RUN", rule, text, [f"{run_dir}@{kept}"])


def _logged_model(store: ForeignStore, run: Any, selected: str) -> StoredModel:
    """Return the model that a run logged after the selected update.

    Without a selected update, return its last model.
    """
    models = model_registry.of_run(store, run, "RUN")
    if not selected:
        return models[max(models)]
    if selected == BEST:
        # A run without this metric keeps no best checkpoint.
        update = int(run.data.metrics.get("best/update", -1))
    else:
        update = int(selected)
    if update not in models:
        rule = (
            "must be the update of a logged model, since the run directory was not "
            "found"
        )
        raise ConfigError("RUN", rule, selected, list(models))
    return models[update]


def _in_run_dir(run_dir: Path, checkpoint: Checkpoint, request: Request) -> Subject:
    past = Past.read(run_dir, running=True)
    config = _without_training(recorded_config.read(run_dir, past, "RUN"))
    recorded_config.complete(config, past, keys_set(request.overrides))
    adapted_config.remove_replaced(config, request)
    if "dataset.data_dir" in request.values:
        config["dataset"]["data_dir"] = request.values["dataset.data_dir"]

    dataset: dict[str, Any] = {}
    file = run_dir / DATASET_RECORD
    if past.described and file.exists():
        rule = f"must have a {DATASET_RECORD} that can be read"
        with as_config_error("RUN", rule, str(run_dir), recorded_config.COPY):
            dataset = recorded_files.read(file, provenance.DATASET)
    return Subject(
        run_id=past.run_id,
        run_dir=run_dir,
        weights=checkpoint,
        config=_on_one_replica(config),
        dataset=dataset,
        code=past.last_code,
        tags=past.tags,
        store=past.store,
        gate=None,
    )


def _without_training(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded config without the values that only training uses.

    So nothing is built from these values, and none of them has to be trusted.
    """
    kept = dict(config)
    # Without these groups, the schema's defaults apply: no scaling, and a new start.
    kept.pop("scaling", None)
    kept.pop("start", None)
    training = {**(config.get("training") or {}), "resume": None}
    training["callbacks"] = {}
    training["shown"] = {}
    training.pop("keep_best", None)
    kept["training"] = training
    kept["schedule"] = {
        "_target_": "pipeline.components.optimizer.constant",
        "learning_rate": 0.0,
        "clock": "updates",
    }
    tracking = config.get("tracking") or {}
    kept["tracking"] = {**tracking, **key_kinds.outside_a_sweep(), "show": None}
    return kept


def _on_one_replica(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config for one replica, with the batch sizes of the first updates."""
    hardware = dict(config.get("hardware") or {})
    replicas = hardware.get("replicas", 1) * (hardware.get("workers") or 1)
    hardware["replicas"] = 1
    hardware["workers"] = 1
    accumulation = {**config["accumulation"], "batch_schedule": None}
    factor = accumulation.get("factor")
    effective = accumulation.get("effective_batch_size")
    micro = accumulation.get("micro_batch_size")
    if effective is not None and micro is None and factor is not None:
        micro = sizes.ceil_div(sizes.ceil_div(effective, replicas), factor)
    elif effective is None and isinstance(micro, int) and factor is not None:
        effective = micro * factor * replicas
    # The batches of a user's loader have no size in the config.
    if effective is not None and micro is not None:
        accumulation["effective_batch_size"] = effective
        accumulation["micro_batch_size"] = micro
        accumulation["factor"] = None
    return {**config, "hardware": hardware, "accumulation": accumulation}
