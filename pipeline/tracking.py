"""What a run leaves in MLflow, and under which name. How it gets there is `pipeline.journal`'s."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from pipeline import config as configuration
from pipeline.batching import Plan
from pipeline.journal import Journal

if TYPE_CHECKING:
    import keras

    from pipeline.dataset import Data


class Tracker:
    """One run in MLflow: `start`, then rows, then `end`.

    Args:
        journal: carries everything there.
        run_dir: of this run; exists.
        plan: turns updates into the other counters.
    """

    def __init__(self, journal: Journal, run_dir: Path, plan: Plan):
        self.journal, self.run_dir, self.plan = journal, run_dir, plan
        self.run_id = self.experiment_id = ""

    def start(self, config: DictConfig, overrides: Sequence[str], data: Data, model: keras.Model, tags: dict) -> None:
        """Creates the run with its params, tags, inputs and the artifacts that are known before it starts."""
        resolved = configuration.plain(config)
        params = {key: _text(value) for key, value in configuration.leaves(resolved).items()}
        derived = {
            "derived.effective_batch_size": self.plan.batching.effective_batch_size,
            "derived.factor": self.plan.batching.factor,
            "derived.micro_batch_size": self.plan.batching.micro_batch_size,
            "derived.replicas": self.plan.batching.replicas,
            "derived.updates": self.plan.updates,
            "derived.parameters": sum(_size(variable.shape) for variable in model.trainable_variables),
        }
        run = {
            "experiment": config.tracking.experiment,
            "name": config.tracking.run_name or f"{data.name} {model.name} {self.plan.batching}",
            "params": params | derived,
            "tags": {**_origin(), "config.hash": config_hash(resolved), **_place(config.tracking), **tags},
            "inputs": _inputs(data),
            "system_metrics": config.tracking.system_metrics,
        }
        answer = self.journal.start(self.run_dir / "journal.jsonl", run)
        self.run_id, self.experiment_id = answer["run_id"], answer["experiment_id"]
        # The config keeps the store's own URI for this machine; what is logged has no password in it.
        (self.run_dir / "config.yaml").write_text(configuration.mask(OmegaConf.to_yaml(OmegaConf.create(resolved))))
        (self.run_dir / "overrides.yaml").write_text(configuration.mask(OmegaConf.to_yaml(list(overrides))))
        (self.run_dir / "environment.json").write_text(json.dumps(environment(), indent=1) + "\n")
        for name in ("config.yaml", "overrides.yaml", "environment.json"):
            self.journal.write({"artifact": str((self.run_dir / name).absolute())})
        self.journal.flush()

    def update(self, update: int, results: Mapping[str, float], performance: Mapping[str, float], at: float) -> None:
        """The row of one update.

        Args:
            update: completed updates, from 1 on.
            results: what the update returned, each under its name without `train/`.
            performance: each under its name without `perf/`.
            at: seconds since the epoch.
        """
        plan = self.plan
        row = {f"train/{name}": value for name, value in results.items()}
        row["train/effective_batch_size"] = plan.batch_size(update)
        row["train/micro_steps"] = plan.micro_steps(update)
        row["train/examples_seen"] = plan.examples_seen(update)
        row["train/epoch"] = plan.epoch(update)
        row |= {f"perf/{name}": value for name, value in performance.items()}
        self.journal.metrics(update, row, int(at * 1000))

    def validation(self, update: int, results: Mapping[str, float]) -> None:
        """The row of one evaluation after `update` updates."""
        self.journal.metrics(update, {f"val/{name}": value for name, value in results.items()})

    def flush(self) -> None:
        self.journal.flush()

    def end(self, status: str, failure: str | None = None) -> str | None:
        """Closes the run as FINISHED, FAILED or KILLED; returns why something could not be shipped, if so."""
        if failure:
            self.journal.write({"tags": {"failure": configuration.mask(failure)[:5000]}})
        return self.journal.close(status)


def log_model(uri: str, experiment_id: str, run_id: str, model: keras.Model, example: Any) -> None:
    """Logs the model with its signature, so that `mlflow.pyfunc.load_model` predicts the same.

    Args:
        uri: of the store that holds the run.
        experiment_id: of the run.
        run_id: of the run that trained it.
        model: saved in Keras' own format.
        example: a few inputs, as NumPy arrays with the examples on axis 0.
    """
    from pipeline import store  # noqa: F401  (first: it sets what MLflow reads when it is imported)

    import mlflow  # isort: skip
    from mlflow.models import Model, infer_signature  # isort: skip

    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment(experiment_id=experiment_id)  # else the model belongs to the default experiment
    signature = infer_signature(example, model(example, training=False).numpy())
    # Named, because MLflow finds requirements out by loading the model in another process.
    requirements = [f"{name}=={metadata.version(name)}" for name in ("keras", "tensorflow", "mlflow", "numpy")]
    Model.log(
        artifact_path=None,
        name="model",
        flavor=mlflow.tensorflow,
        run_id=run_id,
        model=model,
        signature=signature,
        input_example=example,
        pip_requirements=requirements,
    )


def config_hash(resolved: Mapping[str, Any]) -> str:
    """SHA-256 that two runs share when they were asked for the same training, wherever they were logged."""
    same = {key: value for key, value in resolved.items() if key != "tracking"}
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()


def environment() -> dict[str, Any]:
    """Interpreter, machine and the version of every installed distribution."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "packages": {dist.name: dist.version for dist in sorted(metadata.distributions(), key=lambda d: d.name or "")},
    }


def _origin() -> dict[str, str]:
    tags = {
        "mlflow.user": getpass.getuser(),
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": configuration.mask(" ".join(["pipeline", *sys.argv[1:]])),
    }
    commit = _git("rev-parse", "HEAD")
    if commit:
        clean = _git("status", "--porcelain") == ""
        tags |= {"git.commit": commit, "git.clean": str(clean).lower(), "mlflow.source.git.commit": commit}
    return tags


def _place(tracking: DictConfig) -> dict[str, str]:
    if tracking.sweep is None:
        return {}
    return {"mlflow.parentRunId": tracking.sweep, "sweep": tracking.sweep, "sweep.job": tracking.job or ""}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _inputs(data: Data) -> list[dict[str, Any]]:
    inputs = []
    for context, split in (("training", data.train), ("validation", data.validation)):
        if split is None:
            continue
        schema = str(split.element_spec)
        examples = int(split.cardinality())
        identity = f"{data.name} {data.version} {context} {examples} {schema}"
        inputs.append(
            {
                "name": data.name,
                "digest": hashlib.sha256(identity.encode()).hexdigest()[:8],
                "source": {"tags": {"version": data.version}},
                "schema": {"elements": schema},
                "profile": {"num_examples": examples},
                "context": context,
            }
        )
    return inputs


def _text(value: Any) -> str:
    return configuration.mask(value if isinstance(value, str) else json.dumps(value))


def _size(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
