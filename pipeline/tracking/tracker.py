"""What a run logs to MLflow, and under which name. `pipeline.tracking.journal` gets it there."""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from pipeline.common import nvidia, rounding
from pipeline.common.errors import say
from pipeline.common.secrets import mask
from pipeline.common.signals import Terminated
from pipeline.config import key_kinds, plain
from pipeline.config.plan import ENDLESS, Plan
from pipeline.config.resolve import RunSpec
from pipeline.config.schema import Precision
from pipeline.config.stages import STAGES
from pipeline.dataset.checksums import Files
from pipeline.tracking import provenance
from pipeline.tracking.journal import Journal
from pipeline.tracking.journal_file import DESCRIBED, MODEL, NAME, Past

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from pipeline.dataset.splits import Data
    from pipeline.training.evaluator import Best


class Tracker:
    """One run in MLflow: `start`, then rows, then `end`. The plan turns updates into the other counters."""

    def __init__(
        self, journal: Journal, run_dir: Path, plan: Plan, files: Files | None = None
    ):
        self.journal, self.run_dir, self.plan, self._files = (
            journal,
            run_dir,
            plan,
            files or Files(),
        )
        self.begun, self.run_id = (
            False,
            "",
        )  # the ID stays empty while the run is kept offline
        self._written: Mapping[
            str, Container[int]
        ] = {}  # steps of rows from before the run was resumed, by kind
        self._late_checksums = False

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
        """Create the run with its params, tags, inputs and the artifacts that exist before it trains.

        `after` updates were completed before; `dataset` is the record of `data`; `gpus` are places among the visible.
        """
        resolved, tracking = spec.recorded, spec.config.tracking
        values = plain.leaves(resolved).items()
        params = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in values
        }
        sizes = ("effective_batch_size", "factor", "micro_batch_size", "replicas")
        derived = {
            **{f"derived.{name}": getattr(self.plan.batching, name) for name in sizes},
            **(
                {}
                if self.plan.updates == ENDLESS
                else {"derived.updates": self.plan.updates}
            ),
            "derived.parameters": sum(
                math.prod(variable.shape) for variable in model.trainable_variables
            ),
        }
        sweep = tracking.sweep
        place = (
            {
                "mlflow.parentRunId": sweep,
                "sweep": sweep,
                "sweep.job": tracking.job or "",
            }
            if sweep
            else {}
        )
        own = tracking.tags | (
            {}
            if tracking.description is None
            else {"mlflow.note.content": tracking.description}
        )
        config_hash = provenance.config_hash(resolved, str(self.run_dir.absolute()))
        staged = {STAGES: json.dumps(self.plan.changes)} if self.plan.stages else {}
        run = {
            "experiment": resolved["tracking"]["experiment"],
            "name": tracking.run_name
            or _name(spec.overrides, data.name)
            or f"{data.name} {model.name}",
            "params": params | derived,
            "tags": {
                **own,
                **provenance.origin(),
                "config.hash": config_hash,
                **place,
                **staged,
                **_tf32_tag(spec, gpus),
                **tags,
            },
            "system_metrics": tracking.system_metrics,
            "gpus": list(gpus),
            "segment": provenance.segment(after, spec),
        }
        # The dataset's name and tags may hold a secret as well as the config.
        self._begin(self.journal.start(self.run_dir / NAME, plain.mapped(run, mask)))
        self._describe(spec, data, dataset)

    def resume(
        self, past: Past, after: int, spec: RunSpec, data: Data, dataset: dict[str, Any]
    ) -> None:
        """Resume the run of `past`, whose rows are not written again; the other arguments are as for `start`."""
        self._written, segment = past.steps, provenance.segment(after, spec)
        self._begin(self.journal.go_on(past, segment))
        if not past.described:
            self._describe(spec, data, dataset)
        elif dataset["files"]:  # which the run may not have had yet
            self._artifact(DESCRIBED, _text(dataset))
        segments = [past.start["segment"], *past.resumed, segment]
        self._artifact("segments.json", _text(segments))
        staged = (
            {STAGES: json.dumps(self.plan.changes)} if self.plan.stages else {}
        )  # a horizon may move seesaw's
        self.journal.write({"tags": {"segments": str(len(segments)), **staged}})

    def _begin(self, ids: dict[str, str]) -> None:
        self.begun = True
        self.run_id = ids.get("run_id", "")

    def update(
        self,
        update: int,
        results: Mapping[str, float],
        performance: Mapping[str, float],
        at: float,
    ) -> None:
        """Write the row of one update: results (`train/`) and performance (`perf/`); `at` is in seconds since 1970."""
        plan, steps = self.plan, self.plan.micro_steps(update)
        counts = {"epoch": plan.epoch(update), "micro_steps": steps}
        counts |= {
            "effective_batch_size": plan.batch_size(update),
            "examples_seen": plan.examples_seen(update),
        }
        if plan.stages:
            counts["accumulation_factor"] = steps - plan.micro_steps(update - 1)
        row = {
            f"train/{name}": value
            for name, value in [*results.items(), *counts.items()]
        }
        row |= {f"perf/{name}": value for name, value in performance.items()}
        self._row("train", {"time": int(at * 1000), "step": update, "metrics": row})

    def cut(self, plan: Plan) -> None:
        """Use a plan with other micro-batches from now on, and tag the run with when it was cut how."""
        self.plan = plan
        self.journal.write({"tags": plan.tags})

    def evaluation_halved(self, name: str, micro_batch_size: int) -> None:
        """Tag the run with the micro-batch size that a split is evaluated with, after a larger one did not fit."""
        self.journal.write(
            {"tags": {f"micro_batch_size.{name}": str(micro_batch_size)}}
        )

    def table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        """Log a table, as MLflow's `log_table` does."""
        self._artifact(name, json.dumps({"columns": columns, "data": rows}) + "\n")
        self.journal.write(
            {
                "tags": {
                    "mlflow.loggedArtifacts": json.dumps(
                        [{"path": name, "type": "table"}]
                    )
                }
            }
        )

    def validation(self, update: int, results: Mapping[str, float]) -> None:
        """Write the row of the evaluation after `update` updates."""
        row = {f"val/{name}": value for name, value in results.items()}
        row["val/examples_seen"] = self.plan.examples_seen(
            update
        )  # MLflow's charts take an x axis from the same rows
        self._row("val", {"step": update, "metrics": row})

    def test(self, update: int, results: Mapping[str, float]) -> None:
        """Write the row of the test split, for the weights after `update` updates."""
        self._row(
            "test",
            {
                "step": update,
                "metrics": {f"test/{name}": value for name, value in results.items()},
            },
        )

    def _row(self, kind: str, line: dict[str, Any]) -> None:
        if line["step"] not in self._written.get(kind, ()):
            self.journal.write(line)

    def trained(self, updates: int, stopped_by: str | None, best: Best | None) -> None:
        """Write the summary of a run that ended after `updates` updates, perhaps by the callback `stopped_by`."""
        tags = {"updates": str(updates)}
        if stopped_by is not None:
            tags["stopped_by"] = (
                f"training.callbacks.{stopped_by} after update {updates}"
            )
        self.journal.write({"tags": tags})
        if best is not None and (row := best.row()):
            self._row("best", {"step": best.update, "metrics": row})

    def check_files(self) -> None:
        """Wait for the checksums of the data's files; a file that has changed meanwhile is a `DataError`."""
        try:
            self._files.wait()
        except (KeyboardInterrupt, Terminated):  # the run itself is done
            say("the checksums of the data are left out")
        self._files.check()

    def log_model(self, model: keras.Model, example: Any, code: Sequence[str]) -> None:
        """Log the trained model, as `logged_model.save` writes it."""
        from pipeline.tracking import logged_model

        self.journal.ship_now()  # while the model is saved
        name = uuid.uuid4().hex
        logged_model.save(self.run_dir / MODEL.format(name), model, example, code)
        self.journal.write({"model": name})

    def end(self, status: str, failure: str | None = None) -> str | None:
        """Close the run as FINISHED, FAILED or KILLED; return why something could not be shipped, or None."""
        if self._late_checksums and self._files.checksums:
            self.journal.write({"artifact": DESCRIBED})
        if failure:
            self.journal.write({"tags": {"failure": mask(failure)[:5000]}})
        return self.journal.close(status)

    def _describe(self, spec: RunSpec, data: Data, dataset: dict[str, Any]) -> None:
        """Log the inputs and the artifacts that exist before a run trains; `DESCRIBED` is the last one."""
        for name, split in data.splits.items():
            context = {"train": "training"}.get(name, name)
            line = {
                "dataset": _dataset(data, context, split, data.count(name)),
                "context": context,
            }
            self.journal.write(plain.mapped(line, mask))
        surroundings = provenance.environment(self.run_dir)
        texts = {
            "config.yaml": OmegaConf.to_yaml(OmegaConf.create(spec.recorded)),
            "links.json": _text(spec.links),
            "overrides.yaml": OmegaConf.to_yaml(
                plain.mapped(spec.overrides, mask)
            ),  # before YAML folds a long one
            "environment.json": _text(surroundings),
        }
        if surroundings["git"].get("clean") is False:
            texts["git.diff"] = provenance.diff()
        texts[DESCRIBED] = _text(dataset)
        for name, text in texts.items():
            self._artifact(name, text)
        self._late_checksums = (
            dataset["checksum"] == "full" and bool(data.files) and not dataset["files"]
        )
        if self._late_checksums:
            self._files.compute(
                lambda found: self._describe_files({**dataset, "files": found})
            )

    def _describe_files(self, dataset: dict[str, Any]) -> None:
        """Write the checksums to the run directory, where a resumed run looks for them; `end` logs them."""
        new = self.run_dir / f".{DESCRIBED}"
        new.write_text(mask(_text(dataset)), encoding="utf-8")
        new.replace(self.run_dir / DESCRIBED)

    def _artifact(self, name: str, text: str) -> None:
        (self.run_dir / name).write_text(mask(text), encoding="utf-8")
        self.journal.write({"artifact": name})


def _tf32_tag(spec: RunSpec, gpus: Sequence[int]) -> dict[str, str]:
    """Return the tag of a run in float32 that computes in TF32; without it, it does not."""
    in_float32 = spec.config.hardware.precision == Precision.float32
    if gpus and in_float32 and nvidia.computes_in_tf32():
        return {rounding.IN_TF32: "true"}
    return {}


def _name(overrides: Sequence[str], dataset: str) -> str:
    """Return the experiment, or dataset, and what was overridden, as `text rate=0.1 seed=2`; empty if nothing was."""
    given = [
        (key.lstrip("+~"), value)
        for key, _, value in (text.partition("=") for text in overrides)
    ]
    of_run = [
        (key, value)
        for key, value in given
        if not key.startswith("hydra") and key_kinds.decides_what_runs(key)
    ]
    experiment = dict(of_run).get("experiment", dataset)
    changed = [
        plain.short(key, value[:40]) for key, value in of_run if key != "experiment"
    ]
    return (
        " ".join([experiment, *changed])[:200] if of_run else ""
    )  # MLflow takes 250 characters


def _text(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def _dataset(
    data: Data, context: str, split: tf.data.Dataset, examples: int | None
) -> dict[str, str]:
    schema = str(split.element_spec)
    return {
        "name": data.name[:500],  # MLflow takes no more
        "digest": hashlib.sha256(
            f"{data.name} {data.version} {context} {examples} {schema}".encode()
        ).hexdigest()[:8],
        "source_type": "code",
        "source": json.dumps({"tags": {"version": data.version}}),
        "schema": json.dumps({"elements": schema}),
        "profile": json.dumps({"num_examples": examples}),
    }
