"""`pipeline rerun RUN_ID`: the same run again from what MLflow recorded, then a comparison of the two."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pipeline import config as configuration
from pipeline import hydra_errors, imports
from pipeline.errors import ConfigError, first_line, printable
from pipeline.masking import HIDDEN, mask
from pipeline.rerun import migration
from pipeline.rerun.recorded_run import Recorded, fetch, relinked
from pipeline.rerun.request import Request, parsed
from pipeline.tracking import provenance
from pipeline.trust import artifact_locations
from pipeline.trust.gate import Gate, check_config, strict

DIFFERENT = 3  # exit status
# What says where the data are or how they are read, and not which they are.
_SAME_DATA = re.compile(r"dataset\.(data_dir|download|in_memory|shuffle_buffer|augment)(\.|$)")
_OWN = ("tracking.", "tracking=", "trust.")  # overrides of these belong to the user's own config as well


def rerun(arguments: Sequence[str]) -> int:
    """`pipeline rerun RUN_ID [overrides]`: runs it again from its record, and compares the two."""
    request = parsed(arguments, rerun.__doc__)
    own = _own_config(request)
    client = _client(own.tracking.uri)
    if request.sweep:
        return _sweep(own, request)
    with artifact_locations.confined(own.tracking.uri):
        recorded = fetch(client, request.run_id)
        allowed = [*own.trust.allow, *request.allow]
        gate = Gate(
            _run_dir(request),
            _data_dir(own, request),
            allowed,
            own.tracking.uri,
            downloads=request.values().get("dataset.download") is True,
        )
        said = _say_plan(recorded, gate, request)
        experiment = _experiment(client, recorded, own, request)
        status = _run(client, recorded, _checked(recorded, own, experiment, gate, request), gate, request)
        _say_differences(recorded, said)  # of CUDA and cuDNN only TensorFlow knows, which is loaded by now
        return status


def _own_config(request: Request) -> DictConfig:
    """The user's own config: where the store is, and what is trusted. Never the fetched one."""
    from pipeline import compose

    own = [override for override in request.overrides if override.lstrip("+~").startswith(_OWN)]
    return compose.composed([*request.own, *own])


def _client(uri: str) -> Any:
    from pipeline.tracking.store import Store, StoreError

    try:
        store = Store(uri)
        if store.is_new:
            store.close()
            raise StoreError("there is no store")
        return store.client()
    except StoreError as error:
        raise ConfigError("tracking.uri", f"must be a store that holds the run ({error})", uri) from error


def _say_plan(recorded: Recorded, gate: Gate, request: Request) -> list[str]:
    info = recorded.run.info
    _say(f"rerun of {info.run_id} ({info.run_name}), {info.status}")
    if not recorded.is_whole():
        _say("  differs: the record: its config is not the one that its tag config.hash was taken of")
    for override in request.changing:
        _say(f"  changed: {override}")
    dataset = recorded.config.get("dataset")
    then = dataset.get("data_dir") if isinstance(dataset, dict) else None
    if isinstance(then, str) and gate.data_dir is None:
        _say(f"  differs: dataset.data_dir: {then} then, its default now: an override dataset.data_dir=… changes it")
    return _say_differences(recorded, [])


def _say_differences(recorded: Recorded, said: list[str]) -> list[str]:
    """Says what differs of the surroundings and was not said yet; returns all of it."""
    lines = provenance.differences(recorded.environment, provenance.environment(Path()))
    for line in (line for line in lines if line not in said):
        _say(f"  differs: {line}")
    return lines


def _run_dir(request: Request) -> Path:
    now = datetime.now()
    named = request.values().get("hydra.run.dir", f"outputs/{now:%Y-%m-%d}/{now:%H-%M-%S-%f}")
    if not isinstance(named, str) or "${" in named:
        raise ConfigError("hydra.run.dir", "must be a folder, named as it is", named)
    return Path(named).absolute()


def _data_dir(own: DictConfig, request: Request) -> Path | None:
    found = request.values().get("dataset.data_dir", OmegaConf.select(own, "dataset.data_dir"))
    return None if found is None else Path(str(found)).absolute()


def _experiment(client: Any, recorded: Recorded, own: DictConfig, request: Request) -> str:
    """That the new run belongs to: the recorded one, unless another is asked for or its artifacts lie elsewhere.

    Raises:
        ConfigError: the artifacts of the user's own experiment lie elsewhere, too.
    """
    mine, tracking = str(own.tracking.experiment), recorded.config.get("tracking")
    theirs = tracking.get("experiment") if isinstance(tracking, dict) else None
    if "tracking.experiment" in request.values() or not isinstance(theirs, str):
        theirs = mine
    try:
        _check_experiment(client, theirs, own.tracking.uri)
    except ConfigError as error:
        if theirs == mine:
            raise
        _say(f"  changed: tracking.experiment={mine}, since {error}")
        _check_experiment(client, mine, own.tracking.uri)
        return mine
    return theirs


def _check_experiment(client: Any, name: str, tracking_uri: str) -> None:
    found = client.get_experiment_by_name(name)
    if found is not None:  # else the run creates it
        artifact_locations.check(found.artifact_location, tracking_uri)


def _checked(recorded: Recorded, own: DictConfig, experiment: str, gate: Gate, request: Request) -> dict[str, Any]:
    """The recorded config with what belongs to this place put in, once the gate has let it through."""
    values, groups = request.values(), request.groups()
    config = _placed(recorded, own, experiment, gate)
    migration.check(config, request.run_id, recorded.environment)
    # What an override replaces is neither read nor checked.
    for key, value in values.items():
        if key in request.deleted:  # by Hydra, which must find it
            continue
        if key in groups or (key != "dataset.data_dir" and not isinstance(value, dict)):
            _drop(config, key.split("."))
    # As text, before anything else reads it: YAML makes an endless config of a small file.
    config = check_config(config, gate, recorded_run_dir=recorded.run_dir, imports=False)
    config = migration.migrate(config, request.run_id)
    for key, value in configuration.leaves(config).items():
        # The store's address is the user's own, and an experiment's name is masked in the store as well.
        deleted = any(f"{key}.".startswith(f"{name}.") for name in request.deleted)
        if isinstance(value, str) and HIDDEN in value and not key.startswith("tracking.") and not deleted:
            raise ConfigError(key, "was a secret and is not in the record: give it again as an override", value)
    with imports.without_chatter():
        check_config(config, gate)
    if (
        "optimizer.learning_rate" in values
        and not recorded.links
        and not any(key.startswith("sched") for key in values)
    ):
        rule = "must come with an override of the schedule: this record does not say what follows it"
        raise ConfigError("optimizer.learning_rate", rule, values["optimizer.learning_rate"])
    return relinked(config, recorded.links, values)


def _placed(recorded: Recorded, own: DictConfig, experiment: str, gate: Gate) -> dict[str, Any]:
    config: dict[str, Any] = {
        key: dict(value) if isinstance(value, dict) else value for key, value in recorded.config.items()
    }
    config.pop("trust", None)
    config["tracking"] = config.get("tracking") or {}
    if not isinstance(config["tracking"], dict):
        raise ConfigError("tracking", "must be a mapping", type(config["tracking"]).__name__)
    name = printable(f"rerun of {recorded.run.info.run_name}")
    here = {"sweep": None, "job": None, "uri": own.tracking.uri, "experiment": experiment, "run_name": name}
    config["tracking"] |= here
    if isinstance(config.get("dataset"), dict) and "data_dir" in config["dataset"]:
        config["dataset"]["data_dir"] = None if gate.data_dir is None else str(gate.data_dir)
    return config


def _drop(node: Any, path: list[str]) -> None:
    *parents, last = path
    for part in parents:
        node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(last, None)


def _run(client: Any, recorded: Recorded, config: dict[str, Any], gate: Gate, request: Request) -> int:
    from pipeline import compose, job

    old, outcomes = recorded.run.info.run_id, []
    other_data = [key for key in request.values() if f"{key}.".startswith("dataset.") and not _SAME_DATA.match(key)]
    command = " ".join(["pipeline rerun", request.run_id, *map(mask, request.overrides)])
    tags = {"rerun.of": old, "mlflow.source.name": command}

    def check_dataset(now: dict[str, Any]) -> None:
        if not any(key.startswith("train/") for key in recorded.run.data.metrics):
            raise ConfigError("RUN_ID", "must have logged an update, to compare its rerun with", old)
        try:
            if recorded.dataset:
                provenance.check_dataset(recorded.dataset, now, old)
        except ConfigError as error:
            if not other_data:
                raise
            _say(f"  differs: {error}")

    def task(composed: DictConfig, overrides: list[str], run_dir: Path) -> float:
        with strict(gate):
            with hydra_errors.refusing():
                resolved = configuration.plain(composed)
            check_config(resolved, gate, imports=False)  # once more: a link of the record led somewhere
            if request.dry:
                return _dry(composed, overrides, check_dataset)
            done = job.run(composed, overrides, run_dir, tags=tags, check_dataset=check_dataset)
        outcomes.append(done.run_id)
        return done.loss

    compose.run_recorded(config, request.for_hydra(gate.run_dir), task, request.folders[1:])
    return 0 if request.dry else _compare(client, recorded, request, outcomes[0])


def _dry(config: DictConfig, overrides: Sequence[str], check_dataset: Any) -> float:
    """All that can be said without running: the config's errors, and whether the data are those of the record."""
    configuration.check(config, overrides)
    with imports.without_chatter():
        from pipeline import dataset

        try:
            check_dataset(provenance.dataset(dataset.load(config.dataset, prepare=False)))
        except ConfigError as error:
            _say(f"  differs: {error}")
    return 0.0


def _compare(client: Any, recorded: Recorded, request: Request, run_id: str) -> int:
    from pipeline.rerun import agreement

    old, new = recorded.run.info.run_id, client.get_run(run_id)
    validation = (recorded.dataset.get("examples") or {}).get("validation")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "comparison.html"
        found = agreement.of_runs(client, recorded.run, new, validation, page)
        client.log_artifact(run_id, str(page), "rerun")
    client.set_tag(run_id, "rerun.verdict", found.verdict)
    _say(f"rerun {run_id} of {old}: {found}")
    deterministic = new.data.params.get("hardware.deterministic") == "true"
    if found.verdict != "bit-equal" and not request.changing and not deterministic:
        _say("equal to the bit on one machine is guaranteed with hardware.deterministic=true only")
    _link_back(client, old, run_id)
    return 0 if found.verdict in ("bit-equal", "equal within rounding") else DIFFERENT


def _link_back(client: Any, old: str, new: str) -> None:
    """The verdict stands in the new run: an old one that is read-only by now does not undo it."""
    try:
        earlier = client.get_run(old).data.tags.get("rerun.by")
        client.set_tag(old, "rerun.by", f"{earlier}, {new}" if earlier else new)
    except Exception as error:
        _say(f"run {old} has no link to its rerun: {first_line(error)}")


def _sweep(own: DictConfig, request: Request) -> int:
    """All jobs of a sweep, one after the other, each in a process of its own."""
    from pipeline.sweep import parent_run

    parent = parent_run.find(own.tracking.uri, request.run_id)
    children = parent_run.ParentRun(own.tracking.uri, parent.info.run_id, parent.info.experiment_id).children()
    if not children:
        raise ConfigError("RUN_ID", "must be a sweep with runs", request.run_id)
    options = [*request.own, *(f"--allow={prefix}" for prefix in request.allow), *(["--dry"] if request.dry else [])]
    given = [override for override in request.overrides if not override.startswith("hydra.run.dir=")]
    folder, statuses = _run_dir(request), []
    for number, (name, run) in enumerate(children.items()):
        if not re.fullmatch("[0-9a-f]{32}", run.info.run_id):  # it becomes an argument, and comes from the store
            raise ConfigError("RUN_ID", "must be a sweep of runs with MLflow's own IDs", run.info.run_id)
        _say(f"{name}:")
        quoted = str(folder / str(number)).replace("'", "\\'")
        command = [run.info.run_id, *options, *given, f"hydra.run.dir='{quoted}'"]
        statuses.append(subprocess.call([sys.executable, "-m", "pipeline", "rerun", *command]))
    same = sum(status == 0 for status in statuses)
    verdict = "can be run again" if request.dry else "agree"
    _say(f"rerun of sweep {parent.info.run_id}: {same} of {len(statuses)} runs {verdict}")
    return max(statuses, key=lambda status: (status not in (0, DIFFERENT), status))


def _say(line: str) -> None:
    """One line, also where what a store said would make another."""
    print(printable(mask(line)), file=sys.stderr, flush=True)
