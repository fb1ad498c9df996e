"""Adapts the recorded config of a run to this call and this machine.

The record decides what runs. The user's own config decides where it runs: the store,
the ports and the GPUs.
"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pipeline.checkpoints import fork
from pipeline.common import imports, secrets
from pipeline.common.errors import ConfigError, printable, say
from pipeline.config import key_kinds, schema, trust_entries
from pipeline.config.model_uris import MODEL
from pipeline.config.plain import leaves
from pipeline.rerun.recorded_run import RecordedRun, relinked
from pipeline.rerun.request import Request
from pipeline.trust.artifact_locations import is_inside
from pipeline.trust.gate import Gate, check_config, drop_writers, texts

# Memory limits belong to the keys of the machine, but a rerun keeps the recorded
# limits.
_LIMITS = ("hardware.memory", "hardware.gpu_memory")
_RATE = "optimizer.learning_rate"


def gate_of(request: Request, own_config: DictConfig) -> Gate:
    """Return the permissions of the recorded config, as the user defines them."""
    own_data_dir = OmegaConf.select(own_config, "dataset.data_dir")
    data_dir = request.values.get("dataset.data_dir", own_data_dir)
    data_folder = None
    if data_dir is not None:
        data_folder = Path(str(data_dir)).absolute()
    # Trust all values in a config group whose option the user selects.
    groups: dict[str, str | None] = dict.fromkeys(request.groups)
    return Gate(
        run_dir=request.run_dir,
        data_dir=data_folder,
        allowed=trust_entries.allowed_names(own_config.trust.allow),
        tracking_uri=own_config.tracking.uri,
        downloads=request.values.get("dataset.download") is True,
        start=any(key.split(".")[0] == "start" for key in request.values),
        given=texts(request.values) | groups,
    )


def adapt(
    recorded: RecordedRun,
    request: Request,
    own_config: DictConfig,
    gate: Gate,
    experiment: str,
) -> dict[str, Any]:
    """Adapt and check the recorded config; return the config to compose with overrides.

    Args:
        recorded: the record of the run.
        request: the parsed command line.
        own_config: the user's own config.
        gate: the permissions of the recorded config.
        experiment: the experiment of the new run.

    Raises:
        ConfigError: the schema of the record is unknown, the record is not trusted, or
            an override is missing, such as that of a secret.
    """
    config = placed(recorded, own_config, gate, experiment)
    recorded.check_schema()
    remove_replaced(config, request)
    config = _without_writers(config, gate)
    _check_secrets(config, request)
    with imports.without_chatter():
        check_config(config, gate)
    _check_rate(recorded, request)
    return relinked(config, recorded.links, request.values)


def placed(
    recorded: RecordedRun, own_config: DictConfig, gate: Gate, experiment: str
) -> dict[str, Any]:
    """Return the recorded config with this call's store, machine keys and folders.

    The arguments are those of `adapt`.
    """
    config = recorded.moved(gate.run_dir)
    config.pop("trust", None)
    config["schema"] = schema.SCHEMA
    config["tracking"] = {
        **(config.get("tracking") or {}),
        **key_kinds.outside_a_sweep(),
        "uri": own_config.tracking.uri,
        "experiment": experiment,
        "register": None,  # the version `latest` must stay that of the recorded run
        "run_name": printable(f"rerun of {recorded.run.info.run_name}"),
        "code": own_config.tracking.code,  # paths on this machine
    }

    of_machine = {}
    for key in key_kinds.keys_of(schema.Kind.MACHINE):
        group, _, name = key.partition(".")
        if group == "hardware" and key not in _LIMITS:
            of_machine[name] = own_config.hardware[name]
    config["hardware"] = (config.get("hardware") or {}) | of_machine

    start = config.get("start") or {}
    if start.get("run") is not None and not MODEL.fullmatch(str(start["run"])):
        # Replace the recorded value, a prefix of an ID that may have become ambiguous.
        tags = recorded.run.data.tags
        start["run"] = f"{tags.get(fork.RUN_TAG)}@{tags.get(fork.UPDATE_TAG)}"
    dataset = config.get("dataset") or {}
    if "data_dir" in dataset:
        dataset["data_dir"] = data_dir(recorded, gate)
    if "token_cache" in dataset:
        # Write nothing to a path from a record. Without a cache, the tokens are the
        # same.
        dataset["token_cache"] = None
    return config


def data_dir(recorded: RecordedRun, gate: Gate) -> str | None:
    """Return the folder from which the rerun reads its data.

    It is the folder that the user names, or else the recorded folder if it exists below
    the working directory, or else None, which selects the dataset's default.
    """
    if gate.data_dir is not None:
        return str(gate.data_dir)
    if recorded.data_dir is None:
        return None
    folder = Path(recorded.data_dir)
    if is_inside(folder, [Path.cwd()]) and folder.exists():
        return recorded.data_dir
    return None


def remove_replaced(config: dict[str, Any], request: Request) -> None:
    """Remove the values that overrides replace, so that they are not checked.

    A value that an override deletes is kept, since Hydra requires it to exist. A value
    is also kept if the override is a mapping, which Hydra merges into it.
    """
    for key in request.values.keys() - request.deleted:
        is_merged = isinstance(request.values[key], dict)
        # Keep the data directory, which `placed` has already replaced.
        is_replaced = key != "dataset.data_dir" and not is_merged
        if is_replaced or key in request.groups:
            _remove(config, key)


def _remove(config: dict[str, Any], key: str) -> None:
    """Remove a dotted key from a plain config, if it is there."""
    *parents, last = key.split(".")
    node: Any = config
    for parent in parents:
        if not isinstance(node, dict):
            return
        node = node.get(parent)
    if isinstance(node, dict):
        node.pop(last, None)


def _without_writers(config: dict[str, Any], gate: Gate) -> dict[str, Any]:
    """Return the config without callbacks that write files, unless they are allowed."""
    kept, writers = drop_writers(config, gate.allowed)
    for key, target in writers.items():
        say(f"  left out: {key}: {target} writes files; --allow {target} permits this")
    return kept


def _check_secrets(config: dict[str, Any], request: Request) -> None:
    """Reject a config with a masked secret that no override replaces or deletes."""
    # Skip `tracking`: the store is the user's own, and the name of the experiment is
    # masked in the store, too.
    unchecked = ["tracking."]
    for key in request.deleted:
        unchecked.append(f"{key}.")
    for key, value in leaves(config).items():
        is_hidden = isinstance(value, str) and secrets.HIDDEN in value
        if is_hidden and not f"{key}.".startswith(tuple(unchecked)):
            rule = "was a secret and is not in the record: give it again as an override"
            raise ConfigError(key, rule, value)


def _check_rate(recorded: RecordedRun, request: Request) -> None:
    """Reject an override of the learning rate if the record has no links.

    Such a record, made by an older version, does not say which values follow the
    learning rate. So the schedule has to be overridden, too.
    """
    if _RATE not in request.values or recorded.links:
        return
    if any(key.startswith("sched") for key in request.values):
        return
    rule = (
        "must come with an override of the schedule: this record does not say which "
        "values depend on the rate"
    )
    raise ConfigError(_RATE, rule, request.values[_RATE])
