"""`pipeline rerun RUN_ID`: the same run again from what MLflow recorded, then a comparison of the two."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from pipeline import artifacts, imports, migration, record, refusal, trust
from pipeline import config as configuration
from pipeline.errors import ConfigError
from pipeline.masking import HIDDEN, mask
from pipeline.recorded import Recorded, fetch, relinked

DIFFERENT = 3  # exit status
_PLACE = ("dataset.data_dir=", "hydra", "tracking", "trust.")  # what does not change a run
# What says where the data are or how they are read, and not which they are.
_SAME_DATA = re.compile(r"dataset\.(data_dir|download|in_memory|shuffle_buffer|augment)(\.|$)")
_OWN = ("tracking.", "tracking=", "trust.")  # overrides of these belong to the user's own config as well


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        run_id: of the run, or of the sweep.
        dry, sweep: flags.
        allow: dotted prefixes that the record may name.
        config_dir, config_name: of the user's own config.
        overrides: in Hydra's grammar.
    """

    run_id: str
    dry: bool
    sweep: bool
    allow: list[str]
    config_dir: str | None
    config_name: str | None
    overrides: list[str]

    @property
    def own(self) -> list[str]:
        """Hydra's options that find the user's own config."""
        named = {"--config-dir": self.config_dir, "--config-name": self.config_name}
        return [text for option, value in named.items() if value for text in (option, value)]

    @property
    def changing(self) -> list[str]:
        """The overrides of the run itself, and not of where it runs."""
        return [override for override in self.overrides if not override.lstrip("+~").startswith(_PLACE)]

    @property
    def folders(self) -> list[str]:
        """Of config groups."""
        return [configuration.directory(), *([str(Path(self.config_dir).absolute())] if self.config_dir else [])]

    def values(self) -> dict[str, Any]:
        """The overrides' values by their keys."""
        with refusal.refusing(self.overrides, self.folders):
            parsed = OverridesParser.create().parse_overrides(self.overrides)
        return {override.key_or_group: override.value() for override in parsed}

    def groups(self) -> dict[str, str]:
        """The overrides that choose another option of a config group, as `optimizer=lion` does."""
        known = refusal.groups(self.folders)
        return {key: value for key, value in self.values().items() if key in known and isinstance(value, str)}


def rerun(arguments: Sequence[str]) -> int:
    """`pipeline rerun RUN_ID [overrides]`: runs it again from its record, and compares the two."""
    request = _parsed(arguments)
    own = _own_config(request)
    client = _client(own.tracking.uri)
    if request.sweep:
        return _sweep(own, request)
    with artifacts.confined(own.tracking.uri):
        recorded = fetch(client, request.run_id)
        _say_plan(recorded, request)
        allowed = [*own.trust.allow, *request.allow]
        gate = trust.Gate(_run_dir(request), _data_dir(own, request), allowed, own.tracking.uri)
        experiment = _experiment(client, recorded, own, request)
        return _run(client, recorded, _checked(recorded, own, experiment, gate, request), gate, request)


def _parsed(arguments: Sequence[str]) -> Request:
    parser = argparse.ArgumentParser(prog="pipeline rerun", description=rerun.__doc__, allow_abbrev=False)
    parser.add_argument("run_id", metavar="RUN_ID", help="of the run in the store that tracking.uri names")
    parser.add_argument("--dry", action="store_true", help="show the plan and the differences, and run nothing")
    parser.add_argument("--sweep", action="store_true", help="RUN_ID is a sweep: run all of its jobs again")
    parser.add_argument("--allow", action="append", default=[], metavar="PREFIX", help="dotted name to trust")
    parser.add_argument("--config-dir", "-cd", help="of your own config, which may have trust.allow")
    parser.add_argument("--config-name", "-cn", help="of your own config")
    parser.add_argument("overrides", nargs="*", help="in Hydra's grammar")

    def refuse(message: str) -> NoReturn:
        raise ConfigError("arguments", f"must be RUN_ID [overrides] ({message})", " ".join(arguments))

    parser.error = refuse  # type: ignore[method-assign]
    return Request(**vars(parser.parse_intermixed_args(list(arguments))))


def _own_config(request: Request) -> DictConfig:
    """The user's own config: where the store is, and what is trusted. Never the fetched one."""
    from pipeline import composing

    own = [override for override in request.overrides if override.lstrip("+~").startswith(_OWN)]
    return composing.composed([*request.own, *own])


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


def _say_plan(recorded: Recorded, request: Request) -> None:
    info = recorded.run.info
    _say(f"rerun of {info.run_id} ({info.run_name}), {info.status}")
    if not recorded.is_whole():
        _say("  differs: the record: its config is not the one that its tag config.hash was taken of")
    for override in request.changing:
        _say(f"  changed: {override}")
    for line in record.differences(recorded.environment, record.environment(Path())):
        _say(f"  differs: {line}")


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
        artifacts.check(found.artifact_location, tracking_uri)


def _checked(
    recorded: Recorded, own: DictConfig, experiment: str, gate: trust.Gate, request: Request
) -> dict[str, Any]:
    """The recorded config with what belongs to this place put in, once the gate has let it through."""
    values, groups = request.values(), request.groups()
    config = _placed(recorded, own, experiment, gate)
    # What an override replaces is neither read nor checked.
    for key, value in values.items():
        if key in groups or (key != "dataset.data_dir" and not isinstance(value, dict)):
            _drop(config, key.split("."))
    # As text, before anything else reads it: YAML makes an endless config of a small file.
    config = trust.check_config(config, gate, recorded_run_dir=recorded.run_dir, imports=False)
    config = migration.migrate(config, request.run_id, recorded.environment)
    for key, value in configuration.leaves(config).items():
        # The store's address is the user's own, and an experiment's name is masked in the store as well.
        if isinstance(value, str) and HIDDEN in value and not key.startswith("tracking."):
            raise ConfigError(key, "was a secret and is not in the record: give it again as an override", value)
    with imports.without_chatter():
        trust.check_config(config, gate)
    if (
        "optimizer.learning_rate" in values
        and not recorded.links
        and not any(key.startswith("sched") for key in values)
    ):
        rule = "must come with an override of the schedule: this record does not say what follows it"
        raise ConfigError("optimizer.learning_rate", rule, values["optimizer.learning_rate"])
    return relinked(config, recorded.links, values)


def _placed(recorded: Recorded, own: DictConfig, experiment: str, gate: trust.Gate) -> dict[str, Any]:
    config: dict[str, Any] = {
        key: dict(value) if isinstance(value, dict) else value for key, value in recorded.config.items()
    }
    config.pop("trust", None)
    config["tracking"] = config.get("tracking") or {}
    if not isinstance(config["tracking"], dict):
        raise ConfigError("tracking", "must be a mapping", str(config["tracking"]))
    name = f"rerun of {recorded.run.info.run_name}"
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


def _for_hydra(request: Request, run_dir: Path) -> list[str]:
    """The overrides, as they apply to a record: it has no groups, and lacks what is overridden."""
    values, groups, found = request.values(), request.groups(), []
    for override in request.overrides:
        key = override.lstrip("+~").split("=", 1)[0]
        if key in ("hydra.run.dir", "tracking", "dataset.data_dir"):  # each is in its place already
            continue
        if key in groups:
            override = f"+{override.lstrip('+')}"
        elif override.startswith(f"{key}=") and not key.startswith("hydra") and not isinstance(values.get(key), dict):
            override = f"++{override}"
        found.append(override)
    quoted = str(run_dir).replace("'", "\\'")
    return [*found, f"hydra.run.dir='{quoted}'"]


def _run(client: Any, recorded: Recorded, config: dict[str, Any], gate: trust.Gate, request: Request) -> int:
    from pipeline import composing, job

    old, outcomes = recorded.run.info.run_id, []
    other_data = [key for key in request.values() if f"{key}.".startswith("dataset.") and not _SAME_DATA.match(key)]
    command = " ".join(["pipeline rerun", request.run_id, *map(mask, request.overrides)])
    tags = {"rerun.of": old, "mlflow.source.name": command}

    def check_dataset(now: dict[str, Any]) -> None:
        try:
            if recorded.dataset:
                record.check_dataset(recorded.dataset, now, old)
        except ConfigError as error:
            if not other_data:
                raise
            _say(f"  differs: {error}")

    def task(composed: DictConfig, overrides: list[str], run_dir: Path) -> float:
        with trust.strict(gate):
            if request.dry:
                return _dry(composed, overrides, check_dataset)
            done = job.run(composed, overrides, run_dir, tags=tags, check_dataset=check_dataset)
        outcomes.append(done.run_id)
        return done.loss

    if not any(key.startswith("train/") for key in recorded.run.data.metrics):
        rule = "must have logged an update: there is nothing to compare a rerun with"
        if not request.dry:
            raise ConfigError("RUN_ID", rule, request.run_id)
        _say(f"  differs: RUN_ID {rule}")
    composing.run_recorded(config, _for_hydra(request, gate.run_dir), task, request.folders[1:])
    return 0 if request.dry else _compare(client, recorded, request, outcomes[0])


def _dry(config: DictConfig, overrides: Sequence[str], check_dataset: Any) -> float:
    """All that can be said without running: the config's errors, and whether the data are those of the record."""
    configuration.check(config, overrides)
    with imports.without_chatter():
        from pipeline import dataset

        try:
            check_dataset(record.dataset(dataset.load(config.dataset, prepare=False)))
        except ConfigError as error:
            _say(f"  differs: {error}")
    return 0.0


def _compare(client: Any, recorded: Recorded, request: Request, run_id: str) -> int:
    from pipeline import agreement

    old, new = recorded.run.info.run_id, client.get_run(run_id)
    earlier = client.get_run(old).data.tags.get("rerun.by")
    client.set_tag(old, "rerun.by", f"{earlier}, {run_id}" if earlier else run_id)
    validation = (recorded.dataset.get("examples") or {}).get("validation")
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "comparison.png"
        found = agreement.of_runs(client, recorded.run, new, validation, picture)
        client.log_artifact(run_id, str(picture), "rerun")
    client.set_tag(run_id, "rerun.verdict", found.verdict)
    _say(f"rerun {run_id} of {old}: {found}")
    deterministic = new.data.params.get("hardware.deterministic") == "true"
    if found.verdict != "bit-equal" and not request.changing and not deterministic:
        _say("equal to the bit on one machine is guaranteed with hardware.deterministic=true only")
    return 0 if found.verdict in ("bit-equal", "equal within rounding") else DIFFERENT


def _sweep(own: DictConfig, request: Request) -> int:
    """All jobs of a sweep, one after the other, each in a process of its own."""
    from pipeline import sweep

    parent = sweep.find(own.tracking.uri, request.run_id)
    children = sweep.Sweep(own.tracking.uri, parent.info.run_id, parent.info.experiment_id).children()
    if not children:
        raise ConfigError("RUN_ID", "must be a sweep with runs", request.run_id)
    options = [*request.own, *(f"--allow={prefix}" for prefix in request.allow), *(["--dry"] if request.dry else [])]
    given = [override for override in request.overrides if not override.startswith("hydra.run.dir=")]
    folder, statuses = _run_dir(request), []
    for number, (name, run) in enumerate(children.items()):
        _say(f"{name}:")
        quoted = str(folder / str(number)).replace("'", "\\'")
        command = [run.info.run_id, *options, *given, f"hydra.run.dir='{quoted}'"]
        statuses.append(subprocess.call([sys.executable, "-m", "pipeline", "rerun", *command]))
    same = sum(status == 0 for status in statuses)
    verdict = "can be run again" if request.dry else "agree"
    _say(f"rerun of sweep {parent.info.run_id}: {same} of {len(statuses)} runs {verdict}")
    return max(statuses, key=lambda status: (status not in (0, DIFFERENT), status))


def _say(line: str) -> None:
    """One line, also where what a store said would make another, or speak to the terminal."""
    print("".join(c if c.isprintable() else "?" for c in mask(line)), file=sys.stderr, flush=True)
