"""Logs a run to MLflow: its metrics, params, tags, inputs and files.

Everything is written to the run's journal; see `pipeline.tracking.journal`.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import uuid
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from pipeline.common import durable, nvidia, rounding
from pipeline.common.secrets import mask
from pipeline.config import key_kinds, plain
from pipeline.config.plan import ENDLESS, RunPlan
from pipeline.config.resolve import RunSpec
from pipeline.config.schema import Precision
from pipeline.config.stages import STAGES
from pipeline.dataset.checksums import DataFiles
from pipeline.tracking import horizons, provenance, shown_files
from pipeline.tracking.foreign_store import (
    INTERRUPTIONS,
    LONGEST_TAG,
    MOST_INTERRUPTIONS,
    NOTE,
)
from pipeline.tracking.horizons import RecordedHorizon
from pipeline.tracking.journal import Journal
from pipeline.tracking.journal_file import (
    CONFIG_RECORD,
    DATASET_RECORD,
    JOURNAL_NAME,
    MODEL,
    SHOWN,
    LockedPast,
)
from pipeline.tracking.journal_lines import (
    NOT_LOGGED,
    Artifact,
    Fork,
    Input,
    Model,
    Row,
    RunIds,
    RunStart,
    Shown,
    Tags,
)
from pipeline.tracking.older_copy import SEGMENTS

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from pipeline.dataset.splits import Data, ValidationSplit
    from pipeline.tracking.shown_files import EncodedPicture
    from pipeline.training.evaluator import Best


# Maximum numbers of characters.
LONGEST_NAME = 200  # in a run's name; MLflow's limit is 250
LONGEST_DATASET_NAME = 500  # in a dataset's name in MLflow
LONGEST_VALUE = 40  # in an override's value within a run's name


class Tracker:
    """Logs one run. Call `start` or `resume`, then the methods for rows, then `end`.

    Args:
        journal: the journal, whose lines are shipped to the store.
        run_dir: the folder for the journal and the artifacts.
        plan: converts a number of updates to epochs, micro-steps and examples.
        files: the files of the data. Their checksums may be computed in the background
            while the run trains.

    Attributes:
        begun: whether the run was started or resumed.
        run_id: the run's ID in MLflow, or "" if no store has the run (yet).
        horizons: the horizons of the run. Resuming it may add one.
        updates_done: the number of completed updates; 0 until `summary` is called.
        has_model: whether the trained model was logged.
    """

    def __init__(
        self,
        journal: Journal,
        run_dir: Path,
        plan: RunPlan,
        files: DataFiles | None = None,
    ):
        self.journal = journal
        self.run_dir = run_dir
        self.plan = plan
        self.begun = False
        self.run_id = ""
        self.horizons: list[RecordedHorizon] = []
        self.updates_done = 0
        self.has_model = False
        self._files = files or DataFiles()
        # The steps of rows that were written before the run was resumed, by the prefix
        # of their metrics.
        self._written: Mapping[str, Container[int]] = {}
        # The steps of the user's own metrics, by name: those that were logged before
        # the run was resumed, and those that this process has logged.
        self._logged_before: Mapping[str, Container[int]] = {}
        self._logged: dict[str, set[int]] = {}
        self._computes_checksums = False
        self._validated_at = 0  # time of the last evaluation, in milliseconds
        self._has_pictures = False

    def start(
        self,
        after: int,
        spec: RunSpec,
        data: Data,
        dataset: dict[str, Any],
        model: keras.Model,
        tags: dict[str, str],
        gpus: Sequence[int] = (),
    ) -> None:
        """Create the run, and log its params, tags, inputs and first artifacts.

        Args:
            after: the number of updates completed before this run; 0 unless the run was
                forked from another run.
            spec: the spec of the run.
            data: the data of the run.
            dataset: the record of the data; see `provenance.dataset`.
            model: the model to train.
            tags: tags in addition to the tracker's own.
            gpus: the GPUs of the run, as indices into the visible GPUs.
        """
        tracking = spec.config.tracking
        recorded = spec.recorded
        name = tracking.run_name or name_by_overrides(spec.overrides, data.name)
        run = {
            "experiment": recorded["tracking"]["experiment"],
            "name": name or f"{data.name} {model.name}",
            "params": self._params(recorded, model),
            "tags": self._tags(spec, recorded) | _tf32_tag(spec, gpus) | tags,
            "system_metrics": tracking.system_metrics,
            "gpus": list(gpus),
            "segment": self._segment(after, spec),
        }
        # Mask everything: not only the config, but also the dataset's name and the tags
        # may hold a secret.
        masked = plain.mapped(run, mask)
        path = self.run_dir / JOURNAL_NAME
        self._begin(self.journal.start(path, RunStart(**masked)))
        # Write the config at once: if the run is killed while it is described, a
        # resumed run still compares its own config with it.
        self._write_config(recorded)
        self._describe(spec, data, dataset)

    def resume(
        self,
        past: LockedPast,
        after: int,
        spec: RunSpec,
        data: Data,
        dataset: dict[str, Any],
        settings: Mapping[str, Any],
    ) -> None:
        """Resume a run. Rows that its journal already has are not written again.

        Args:
            past: the state of the run according to its journal.
            after: the number of updates completed before this segment of the run.
            spec: the spec of the run.
            data: the data of the run.
            dataset: the record of the data; see `provenance.dataset`.
            settings: the settings that differ from those with which the run began; see
                `resumed_settings`.
        """
        segment = self._segment(after, spec)
        if settings:
            segment["settings"] = dict(settings)
        interruptions = list(past.interruptions)
        if past.last_time is not None:
            interruptions.append((past.last_time, time.time_ns() // 10**6))
        self._written = past.steps
        self._logged_before = past.logged
        self._begin(self.journal.resume(past, segment))
        if not past.described:
            if not (self.run_dir / CONFIG_RECORD).exists():
                self._write_config(spec.recorded)
            self._describe(spec, data, dataset)
        elif dataset["files"]:
            # Log the record again: the run may have ended before it logged the
            # checksums.
            self._artifact(DATASET_RECORD, _json(dataset))

        segments = [past.start.segment, *past.resumed, segment]
        self._artifact("segments.json", _json(segments))
        self.horizons = horizons.of_run(past.start, [*past.resumed, segment])
        tag = horizons.tag(past.start, self.horizons, past.tags)
        tag[SEGMENTS] = str(len(segments))
        tag[INTERRUPTIONS] = json.dumps(interruptions[-MOST_INTERRUPTIONS:])
        self.tag(tag)

    def forked_from(self, run_id: str) -> None:
        """Record in the run with the ID `run_id` that this run was forked from it."""
        self.journal.write(Fork(run_id))

    def tag(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        self.journal.write(Tags(tags))

    def file(self, name: str) -> None:
        """Log a file that is already in the run directory."""
        self.journal.write(Artifact(name))

    def update(
        self,
        update: int,
        results: Mapping[str, float],
        performance: Mapping[str, float],
        at: float,
    ) -> None:
        """Write the row of one update.

        Args:
            update: the number of completed updates.
            results: the metrics to log as `train/…`, in addition to the counters.
            performance: the metrics to log as `perf/…`.
            at: the time of the row, in seconds since 1970. It is taken when the update
                has been dispatched, which may be before the device has computed it.
        """
        plan = self.plan
        training = dict(results)
        training["epoch"] = plan.epoch(update)
        if plan.batching.micro_batch_tokens is None:
            # In a cut by tokens, the update has counted them.
            micro_steps = plan.micro_steps(update)
            factor = micro_steps - plan.micro_steps(update - 1)
            training["micro_steps"] = micro_steps
            training["accumulation_factor"] = factor
        if not plan.changes:
            training.pop("accumulation_factor", None)
        training["effective_batch_size"] = plan.batch_size(update)
        training["examples_seen"] = plan.examples_seen(update)
        row = _prefixed("train", training) | _prefixed("perf", performance)
        self._row("train", Row(update, row, time=int(at * 1000)))

    def change_plan(self, plan: RunPlan) -> None:
        """Use a plan with other micro-batch sizes from now on, and tag the run with it.

        The plan's tags record the sizes and the update of each change.
        """
        self.plan = plan
        self.tag(plan.tags)

    def evaluation_halved(self, name: str, limit: int) -> None:
        """Tag the run with the reduced micro-batches for the evaluation of a split.

        They are reduced if larger ones do not fit into memory. `limit` is their new
        `Batching.limit`.
        """
        unit = "" if self.plan.batching.micro_batch_tokens is None else " tokens"
        self.tag({f"micro_batch_size.{name}": f"{limit}{unit}"})

    def table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        """Log a table in the format of MLflow's `log_table`."""
        self._artifact(name, json.dumps({"columns": columns, "data": rows}) + "\n")
        logged = json.dumps([{"path": name, "type": "table"}])
        self.tag({"mlflow.loggedArtifacts": logged})

    def validation(self, update: int, results: Mapping[str, float]) -> None:
        """Write the row of the evaluations after `update` updates.

        Args:
            update: the number of completed updates.
            results: the metrics to log as `val/…`: of the validation split, and of
                further sets, such as `late/loss`. Only one row is written for a step.
        """
        row = _prefixed("val", results)
        # Repeat the counter: MLflow's charts need the x-axis metric at the same steps.
        row["val/examples_seen"] = self.plan.examples_seen(update)
        self._validated_at = int(time.time() * 1000)
        self._row("val", Row(update, row, time=self._validated_at))

    def has_shown(self, update: int) -> bool:
        """Return whether `show` was called for this evaluation before a resume."""
        return update in self._written.get(SHOWN, ())

    def show(
        self,
        update: int,
        pictures: Mapping[str, EncodedPicture],
        tables: Mapping[str, str],
    ) -> None:
        """Log pictures and tables of the evaluation after `update` updates.

        Args:
            update: the number of completed updates.
            pictures: the pictures by key, such as `shown/worst`.
            tables: tables as CSV, which MLflow's page shows as tables, by name.
        """
        names = shown_files.Names(self.journal.id, update, self._validated_at)
        files = names.picture_files(pictures) | names.table_files(tables)
        durable.write_new(self.run_dir, files)
        if pictures and not self._has_pictures:
            self._has_pictures = True
            self.tag({"mlflow.loggedImages": "True"})
        self.journal.write(Shown(update, list(files)))

    def test(self, update: int, results: Mapping[str, float]) -> None:
        """Write the row of the test split, for the weights after `update` updates."""
        self._row("test", Row(update, _prefixed("test", results)))

    def user_metric(self, update: int, name: str, value: float) -> bool:
        """Write a metric from the user's own code, under the name `train/…`.

        A value for a step that was logged before the run was resumed is not written
        again.

        Returns:
            Whether this is the first value of the metric for this update in this
            process. Any later value is ignored.
        """
        key = f"train/{name}"
        steps = self._logged.setdefault(key, set())
        if update in steps:
            return False
        steps.add(update)
        if update not in self._logged_before.get(key, ()):
            self.journal.write(Row(update, {key: value}, logged=True))
        return True

    def summary(self, updates: int, stopped_by: str | None, best: Best | None) -> None:
        """Tag the run with the end of its training, and log the best evaluation.

        Args:
            updates: the number of completed updates.
            stopped_by: the name of the callback that ended training, or None.
            best: the best evaluation, or None to write no row.
        """
        self.updates_done = updates
        tags = {"updates": str(updates)}
        if stopped_by is not None:
            callback = f"training.callbacks.{stopped_by}"
            tags["stopped_by"] = f"{callback} after update {updates}"
        self.tag(tags)
        if best is not None:
            row = best.row()
            if row:
                self._row("best", Row(best.update, row))

    def log_model(
        self,
        model: keras.Model,
        example: Any,
        code: Sequence[str],
        update: int | None = None,
        register: str | None = None,
    ) -> None:
        """Save the trained model to the run directory, and log it.

        Args:
            model, example, code: see `logged_model.save`.
            update: the number of completed updates of the weights; None for all.
            register: the name under which the model is registered, or None.
        """
        from pipeline.tracking import logged_model

        self.journal.ship_now()  # ship the lines while the model is being saved
        name = uuid.uuid4().hex
        folder = self.run_dir / MODEL.format(name)
        logged_model.save(folder, model, example, code)
        # Sync before writing the line: if the folder is missing, the shipper assumes
        # that the model was shipped.
        durable.sync_tree(folder)
        durable.sync(self.run_dir)
        if update is None:
            update = self.updates_done
        self.journal.write(Model(name, update, register))
        self.has_model = True

    def model_not_logged(self, reason: str) -> None:
        """Record why the run has no logged model."""
        self.tag({NOT_LOGGED: mask(reason)})

    def end(self, status: str, failure: str | None = None) -> str | None:
        """Close the run as FINISHED, FAILED or KILLED.

        Args:
            status: the status of the run.
            failure: the text of the tag `failure`, or None to set no tag.

        Returns:
            The reason why lines were not shipped, or None if all lines were shipped.
        """
        if self._computes_checksums and self._files.checksums:
            self.file(DATASET_RECORD)
        if failure:
            self.tag({"failure": mask(failure)[:LONGEST_TAG]})
        return self.journal.close(status)

    def _params(self, recorded: dict[str, Any], model: keras.Model) -> dict[str, Any]:
        """Return all leaves of the config, and the derived sizes, as params."""
        params: dict[str, Any] = dict(plain.leaf_texts(recorded))
        for name, value in asdict(self.plan.batching).items():
            params[f"derived.{name}"] = value
        # Either the factor is derived, or it differs between updates.
        if self.plan.batching.micro_batch_tokens is None:
            del params["derived.micro_batch_tokens"]
        else:
            del params["derived.factor"]
        if self.plan.updates != ENDLESS:
            params["derived.updates"] = self.plan.updates
        sizes = [math.prod(variable.shape) for variable in model.trainable_variables]
        params["derived.parameters"] = sum(sizes)
        return params

    def _tags(self, spec: RunSpec, recorded: dict[str, Any]) -> dict[str, str]:
        """Return all tags with which the run is created.

        These are the user's tags and description, and tags for the origin, the config's
        hash, the sweep and the stages.
        """
        tracking = spec.config.tracking
        tags = dict(tracking.tags)
        if tracking.description is not None:
            tags[NOTE] = tracking.description
        tags |= provenance.origin()
        run_dir = str(self.run_dir.absolute())
        tags[provenance.HASH_TAG] = provenance.config_hash(recorded, run_dir)
        if tracking.sweep:
            tags["mlflow.parentRunId"] = tracking.sweep
            tags["sweep"] = tracking.sweep
            tags["sweep.job"] = tracking.job or ""
            # MLflow's UI groups runs by this tag to average over seeds.
            tags["sweep.repeats"] = plain.without_seed(tags["sweep.job"])
        if self.plan.changes:
            tags[STAGES] = json.dumps(self.plan.changes)
        return tags

    def _segment(self, after: int, spec: RunSpec) -> dict[str, Any]:
        horizon = horizons.of_segment(after, spec.horizon, self.plan.updates)
        return provenance.segment(after, spec) | horizon.entry()

    def _begin(self, ids: RunIds | None) -> None:
        self.begun = True
        if ids is not None:
            self.run_id = ids.run_id

    def _describe(self, spec: RunSpec, data: Data, dataset: dict[str, Any]) -> None:
        """Log the inputs and the first artifacts.

        Also start to compute the checksums of the data's files, unless the config turns
        checksums off or `dataset` has them already.
        """
        for name, split in data.splits.items():
            context = "training" if name == "train" else name
            entry = _dataset_entry(data, context, split, data.count(name))
            masked = plain.mapped(entry, mask)
            self.journal.write(Input(masked, mask(context)))

        environment = provenance.environment(self.run_dir)
        # Mask the overrides now: YAML could break a secret in a long override across
        # lines.
        overrides = plain.mapped(spec.overrides, mask)
        self.file(CONFIG_RECORD)
        texts = {
            "links.json": _json(spec.links),
            "overrides.yaml": OmegaConf.to_yaml(overrides),
            "environment.json": _json(environment),
        }
        if environment["git"].get("clean") is False:
            texts["git.diff"] = provenance.diff()
        # This file comes last: its line marks the end of the description.
        texts[DATASET_RECORD] = _json(dataset)
        for name, text in texts.items():
            self._artifact(name, text)

        is_wanted = dataset["checksum"] == "full" and bool(data.all_files)
        self._computes_checksums = is_wanted and not dataset["files"]
        if self._computes_checksums:
            self._files.compute(
                lambda checksums: self._write_checksums(dataset, checksums)
            )

    def _write_config(self, recorded: dict[str, Any]) -> None:
        text = mask(OmegaConf.to_yaml(recorded))
        durable.write_text(self.run_dir / CONFIG_RECORD, text)

    def _write_checksums(
        self, dataset: dict[str, Any], checksums: dict[str, str]
    ) -> None:
        """Write the checksums to the run directory. Later, `end` logs the file.

        If the run is killed before `end`, a resumed run still compares its data with
        the checksums in the file.
        """
        text = _json({**dataset, "files": checksums})
        durable.write_text(self.run_dir / DATASET_RECORD, mask(text))

    def _artifact(self, name: str, text: str) -> None:
        """Write a file to the run directory, then a line that logs it."""
        durable.write_text(self.run_dir / name, mask(text))
        self.file(name)

    def _row(self, kind: str, row: Row) -> None:
        """Write a row, unless it was written before the run was resumed."""
        if row.step not in self._written.get(kind, ()):
            self.journal.write(row)


def _tf32_tag(spec: RunSpec, gpus: Sequence[int]) -> dict[str, str]:
    """Return the tag of a float32 run that computes in TF32 on a GPU, else no tags."""
    in_float32 = spec.config.hardware.precision == Precision.float32
    if gpus and in_float32 and nvidia.computes_in_tf32():
        return {rounding.IN_TF32: "true"}
    return {}


def name_by_overrides(overrides: Sequence[str], dataset: str) -> str:
    """Return a run's name derived from its overrides, such as `text rate=0.1 seed=2`.

    It begins with the value of the override `experiment`, or else with `dataset`. It is
    empty if no override decides what runs. Secrets are masked before a value is cut,
    since a part of a secret would no longer be recognized.
    """
    experiment = ""
    parts = []
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if key.startswith("hydra") or not key_kinds.decides_what_runs(key):
            continue
        if key == "experiment":
            experiment = value
            continue
        setting = plain.short(key, mask(value)[:LONGEST_VALUE])
        if override.startswith("~"):  # the key is removed
            setting = f"~{setting.removesuffix('=')}"
        parts.append(setting)
    if not parts and not experiment:
        return ""
    return mask(" ".join([experiment or dataset, *parts]))[:LONGEST_NAME]


def _prefixed(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}


def _json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def _dataset_entry(
    data: Data, context: str, split: tf.data.Dataset, examples: int | None
) -> dict[str, str]:
    """Return the fields of MLflow's `Dataset` for one split."""
    source: Data | ValidationSplit = data.validations.get(context, data)
    schema = str(split.element_spec)
    identity = f"{source.name} {source.version} {context} {examples} {schema}"
    return {
        "name": mask(source.name)[:LONGEST_DATASET_NAME],
        "digest": hashlib.sha256(identity.encode()).hexdigest()[:8],
        "source_type": "code",
        "source": json.dumps({"tags": {"version": source.version}}),
        "schema": json.dumps({"elements": schema}),
        "profile": json.dumps({"num_examples": examples}),
    }
