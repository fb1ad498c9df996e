"""`pipeline rerun RUN_ID`: the same run again from what MLflow recorded, then a comparison of the two."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from pipeline import config as configuration
from pipeline import imports, migration, record, trust
from pipeline.errors import ConfigError

DIFFERENT = 3  # exit status
_OWN = ("tracking.", "trust.", "hydra.")  # overrides of these belong to the user's own config as well


@dataclass(frozen=True)
class Recorded:
    """What a run left of itself.

    Attributes:
        run: of MLflow.
        config: resolved, as plain dicts, of the current schema.
        environment, dataset: as `record` wrote them; empty for runs older than they are.
    """

    run: Any
    config: dict[str, Any]
    environment: dict[str, Any]
    dataset: dict[str, Any]


def rerun(arguments: Sequence[str]) -> int:
    """`pipeline rerun RUN_ID [overrides]`: runs it again from its record, and compares the two."""
    parser = argparse.ArgumentParser(prog="pipeline rerun", description=rerun.__doc__, allow_abbrev=False)
    parser.add_argument("run_id", metavar="RUN_ID", help="of the run in the store that tracking.uri names")
    parser.add_argument("--dry", action="store_true", help="show the plan and the differences, and run nothing")
    parser.add_argument("--sweep", action="store_true", help="RUN_ID is a sweep: run all of its jobs again")
    parser.add_argument("--allow", action="append", default=[], metavar="PREFIX", help="dotted name to trust")
    parser.add_argument("--config-dir", help="of your own config, which may have trust.allow")
    if not arguments:
        raise ConfigError("RUN_ID", "must name a run of the store", "")
    options, overrides = parser.parse_known_args(list(arguments))
    own = _own_config(options.config_dir, overrides)
    client = _client(own.tracking.uri)
    if options.sweep:
        return _sweep(client, own, options, overrides)
    recorded = _fetch(client, options.run_id)
    _say_plan(recorded, overrides)
    gate = trust.Gate(
        _run_dir(overrides),
        _data_dir(own, overrides),
        [*own.trust.allow, *options.allow],
        own.tracking.uri,
    )
    config = _checked(recorded, own, gate, overrides)
    if options.dry:
        return 0
    return _run_and_compare(client, recorded, config, gate, overrides)


def _own_config(config_dir: str | None, overrides: Sequence[str]) -> DictConfig:
    """The user's own config: where the store is, and what is trusted. Never the fetched one."""
    from pipeline import composing

    own = [override for override in overrides if override.lstrip("+~").startswith(_OWN)]
    return composing.composed([*(["--config-dir", config_dir] if config_dir else []), *own])


def _client(uri: str) -> Any:
    from pipeline.store import Store, StoreError

    try:
        store = Store(uri)
        if store.is_new:
            store.close()
            raise StoreError("there is no store")
        return store.client()
    except StoreError as error:
        raise ConfigError("tracking.uri", f"must be a store that holds the run ({error})", uri) from error


def _fetch(client: Any, run_id: str) -> Recorded:
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        raise ConfigError("RUN_ID", "must be a run of the store", run_id) from error
    if "sweep.name" in run.data.tags:
        raise ConfigError("RUN_ID", "is a sweep: rerun it with --sweep, or one of its runs", run_id)
    texts = {}
    with tempfile.TemporaryDirectory() as folder:
        present = {artifact.path for artifact in client.list_artifacts(run_id)}
        for name in ("config.yaml", "environment.json", "dataset.json"):
            if name in present:
                texts[name] = Path(client.download_artifacts(run_id, name, folder)).read_text(encoding="utf-8")
    if "config.yaml" not in texts:
        raise ConfigError("RUN_ID", "must be a run that recorded its config (config.yaml)", run_id)
    try:
        config = yaml.safe_load(texts["config.yaml"])
        environment = json.loads(texts.get("environment.json", "{}"))
        dataset = json.loads(texts.get("dataset.json", "{}"))
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError("RUN_ID", f"must have a record that can be read ({error})", run_id) from error
    if not isinstance(config, dict):
        raise ConfigError("RUN_ID", "must have a config that is a mapping", run_id)
    return Recorded(run, migration.migrate(config, run_id, environment), environment, dataset)


def _say_plan(recorded: Recorded, overrides: Sequence[str]) -> None:
    info = recorded.run.info
    print(f"rerun of {info.run_id} ({info.run_name}), {info.status}", file=sys.stderr)
    for override in overrides:
        print(f"  changed: {configuration.mask(override)}", file=sys.stderr)
    for line in record.differences(recorded.environment, record.environment(Path())):
        print(f"  differs: {line}", file=sys.stderr)


def _run_dir(overrides: Sequence[str]) -> Path:
    named = [override.split("=", 1)[1] for override in overrides if override.startswith("hydra.run.dir=")]
    now = datetime.now()
    return Path(named[-1]) if named else Path("outputs") / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S-%f}"


def _data_dir(own: DictConfig, overrides: Sequence[str]) -> Path | None:
    named = [override.split("=", 1)[1] for override in overrides if override.startswith("dataset.data_dir=")]
    found = named[-1] if named else OmegaConf.select(own, "dataset.data_dir")
    return Path(found).absolute() if found not in (None, "null") else None


def _checked(recorded: Recorded, own: DictConfig, gate: trust.Gate, overrides: Sequence[str]) -> dict[str, Any]:
    """The recorded config with what belongs to this place put in, once the gate has let it through."""
    config = dict(recorded.config)
    config.pop("trust", None)
    tracking = {**config.get("tracking", {}), "sweep": None, "job": None, "uri": own.tracking.uri}
    tracking["run_name"] = f"rerun of {recorded.run.info.run_name}"
    config["tracking"] = tracking
    if isinstance(config.get("dataset"), dict) and "data_dir" in config["dataset"]:
        config["dataset"] = {**config["dataset"], "data_dir": None if gate.data_dir is None else str(gate.data_dir)}
    named = {override.lstrip("+~").split("=", 1)[0] for override in overrides}
    for key, value in configuration.leaves(config).items():
        if isinstance(value, str) and configuration.HIDDEN in value and key not in named | {"tracking.uri"}:
            raise ConfigError(key, "was a secret and is not in the record: give it again as an override", value)
    with imports.without_chatter():
        return trust.check_config(config, gate, recorded_run_dir=recorded.environment.get("run_dir"))


def _run_and_compare(
    client: Any, recorded: Recorded, config: Mapping[str, Any], gate: trust.Gate, overrides: Sequence[str]
) -> int:
    from pipeline import agreement, composing, job

    old = recorded.run.info.run_id
    outcomes: list[job.Outcome] = []

    def check_dataset(now: dict[str, Any]) -> None:
        if recorded.dataset:
            record.check_dataset(recorded.dataset, now, old)

    def task(composed: DictConfig, task_overrides: list[str], run_dir: Path) -> float:
        with trust.strict(gate):
            done = job.run(composed, task_overrides, run_dir, tags={"rerun.of": old}, check_dataset=check_dataset)
        outcomes.append(done)
        return done.loss

    composing.run_recorded(config, [*_without_run_dir(overrides), f"hydra.run.dir={gate.run_dir}"], task)
    new = outcomes[0].run_id
    earlier = client.get_run(old).data.tags.get("rerun.by")
    client.set_tag(old, "rerun.by", f"{earlier}, {new}" if earlier else new)
    before, after = agreement.histories(client, old), agreement.histories(client, new)
    batch = float(recorded.run.data.params.get("derived.effective_batch_size", 1))
    found = agreement.compare(before, after, config["hardware"]["precision"], batch)
    client.set_tag(new, "rerun.verdict", found.verdict)
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "comparison.png"
        agreement.plot(before, after, picture, f"{old} and its rerun {new}: {found.verdict}")
        client.log_artifact(new, str(picture), "rerun")
    print(f"rerun {new} of {old}: {found}", file=sys.stderr)
    return DIFFERENT if found.verdict == "different" else 0


def _without_run_dir(overrides: Sequence[str]) -> list[str]:
    return [override for override in overrides if not override.startswith("hydra.run.dir=")]


def _sweep(client: Any, own: DictConfig, options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """All jobs of a sweep, one after the other, each in a process of its own."""
    from pipeline import sweep

    parent = sweep.find(own.tracking.uri, options.run_id)
    children = sweep.Sweep(own.tracking.uri, parent.info.run_id, parent.info.experiment_id).children()
    if not children:
        raise ConfigError("RUN_ID", "must be a sweep with runs", options.run_id)
    command = [sys.executable, "-m", "pipeline", "rerun"]
    allowed = [f"--allow={prefix}" for prefix in options.allow] + (["--dry"] if options.dry else [])
    statuses = []
    for name, run in children.items():
        print(f"{name}:", file=sys.stderr)
        statuses.append(subprocess.call([*command, run.info.run_id, *allowed, *overrides]))
    same = sum(status == 0 for status in statuses)
    print(f"rerun of sweep {parent.info.run_id}: {same} of {len(statuses)} runs agree", file=sys.stderr)
    return max(statuses, key=lambda status: (status not in (0, DIFFERENT), status))
