"""The gate before every instantiation: what a config that came out of a tracking store may build, read and write.

    fetched config ─► check_config: every name and path, as text ─► what the names really are ─► rerun
    instantiate.locate ─► check: the same again for each node, just before it is imported

A user's own config and command line are not checked. Of a fetched config everything is refused that is neither listed
here nor allowed by the user, and nothing is imported before its name was accepted.
"""

import os
import re
import shlex
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pipeline.common.errors import ConfigError
from pipeline.config.hydra_errors import as_config_error
from pipeline.trust import allowlist, artifact_locations

_TFDS = "pipeline.dataset.from_tfds"
# Without a namespace, which TFDS would download code for, and without arguments such as data_dir.
_TFDS_NAME = re.compile(r"[A-Za-z]\w*(/\w[\w.\-]*)?(:[\d*]+(\.[\d*]+){2})?", re.ASCII)
# A home, a URL or a drive, a share.
_ELSEWHERE = re.compile(r"\s*(~|[A-Za-z][\w.+\-]*:[\\/]|(?i:file|data):|\\)|\s+/")
_RUN = re.compile(r"[0-9a-f]{4,32}(@\d{1,10})?", re.ASCII)
_MOST_VALUES, _DEEPEST = 100_000, 40


@dataclass(frozen=True)
class Gate:
    """What a fetched config may reach, all of it given by the user and none of it by the config.

    `allowed`: dotted prefixes. `mypkg` allows `mypkg.models.build` if that is defined under `mypkg`, and nothing that
    `mypkg` only imports. The full name of an object allows that object, wherever it is defined.
    """

    run_dir: Path  # of the new run; files are written only here, unless `allowed` names what writes them
    data_dir: Path | None = None  # another folder that files may be read from
    allowed: Sequence[str] = ()
    tracking_uri: str | None = None  # the only one that a config may have
    # Whether TFDS may fetch and prepare a dataset: its own code runs on what it downloads; some unpickles or evaluates.
    downloads: bool = False
    start: bool = False  # whether the user named the run whose checkpoint to begin with
    # The user's own texts, by dotted key; null for a config group that they chose: all in it is theirs.
    given: Mapping[str, str | None] = field(default_factory=dict)

    def confine(self, path: str, key: str) -> None:
        """Refuse a path that leads elsewhere, also by a link, unless `given`; data may lie in the working directory."""
        parts = key.split(".")
        groups = [".".join(parts[:end]) for end in range(1, len(parts))]
        if self.given.get(key) == path or any(
            self.given.get(group, "") is None for group in groups
        ):
            return
        roots = [
            self.run_dir,
            *filter(None, [self.data_dir]),
            *([Path.cwd()] if key.startswith("dataset.") else []),
        ]
        if (
            path == ""
            or _leads_away(path)
            or not artifact_locations.is_inside(Path(path), roots)
        ):
            again = shlex.quote(f"{key}={path[:300]}")
            rule = f"must lie in {' or '.join(map(str, roots))}; if the path is your own, give it again: {again}"
            raise ConfigError(key, rule, path)


in_force: Gate | None = (
    None  # of this process: a context variable would leave the threads of a run unguarded
)


@contextmanager
def strict(gate: Gate) -> Iterator[None]:
    """Let all threads of this process instantiate only what `gate` accepts."""
    global in_force
    before, in_force = in_force, gate
    try:
        yield
    finally:
        in_force = before


def check(node: DictConfig, key: str) -> None:
    """Refuse a `node` that is not trusted before anything of it is imported; do nothing outside of `strict`."""
    if in_force is not None:
        with as_config_error():
            check_config({key: OmegaConf.to_container(node, resolve=True)}, in_force)


def check_config(
    config: Mapping[str, Any], gate: Gate, *, imports: bool = True
) -> None:
    """Refuse a fetched config in which something is not trusted; without `imports`, judge objects by name alone."""
    check_size(config)
    targets = []
    for key, value, parents in _nodes(
        {k: value for k, value in config.items() if not (gate.start and k == "start")}
    ):
        if isinstance(value, dict):
            _check_mapping(value, key)
            if "_target_" in value:
                _check_target(value, key, gate)
                targets.append((_join(key, "_target_"), value["_target_"]))
        elif not (isinstance(value, list) or _is_tfds_name(value, key, parents[-1])):
            _check_scalar(value, key, gate)
    for key in ("hydra", "defaults"):
        if key in config:
            raise ConfigError(
                key,
                "must be of your own config, not of one from a tracking store",
                str(config[key]),
            )
    tracking = config.get("tracking")
    if isinstance(tracking, Mapping) and tracking.get("uri") not in (
        None,
        gate.tracking_uri,
    ):
        raise ConfigError(
            "tracking.uri",
            "must be your own, not that of a fetched config",
            tracking["uri"],
        )
    for key, target in dict.fromkeys(targets) if imports else ():
        allowlist.check_object(target, key, gate.allowed)


def check_size(config: Mapping[str, Any]) -> None:
    """Refuse a config that YAML's anchors make huge or endless."""
    for count, (key, _, parents) in enumerate(_nodes(dict(config))):
        if count > _MOST_VALUES or len(parents) > _DEEPEST:
            raise ConfigError(
                key.partition(".")[0],
                f"must be of at most {_MOST_VALUES} values, {_DEEPEST} deep",
            )


def drop_writers(
    config: dict[str, Any], allowed: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a fetched config without the callbacks that write files and are not `allowed`, and those: key → target."""
    match config:
        case {"training": {"callbacks": dict(callbacks)} as training}:
            writers = [
                target
                for target in allowlist.WRITERS
                if not allowlist.is_under(target, allowed)
            ]
            targets = {
                name: node.get("_target_")
                for name, node in callbacks.items()
                if isinstance(node, dict)
            }
            dropped = {
                f"training.callbacks.{name}": target
                for name, target in targets.items()
                if target in writers
            }
            kept = {
                name: node
                for name, node in callbacks.items()
                if targets.get(name) not in writers
            }
            return {**config, "training": {**training, "callbacks": kept}}, dropped
    return config, {}


def texts(values: Mapping[str, Any]) -> dict[str, str | None]:
    """Return every text in a plain config by its dotted key, for `Gate.given`."""
    return {
        key: value for key, value, _ in _nodes(dict(values)) if isinstance(value, str)
    }


def _nodes(
    value: Any, key: str = "", parents: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yield (key, value, mappings and lists around it) for a plain config and everything in it, outermost first."""
    yield key, value, parents
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, entry in entries:
        yield from _nodes(entry, _join(key, name), (*parents, value))


def _check_mapping(node: dict[Any, Any], key: str) -> None:
    for name in node:
        if (
            type(name) not in (str, int, bool, float)
            or "${" in str(name)
            or not str(name).isprintable()
        ):
            raise ConfigError(
                key or "the config", "must have plain names for its keys", repr(name)
            )
        if name in (
            "class_name",
            "registered_name",
        ):  # with either Keras would build an object from the mapping
            raise ConfigError(
                _join(key, name),
                "must not be a serialized object: name it by _target_",
                node[name],
            )


def _is_tfds_name(value: Any, key: str, parent: Any) -> bool:
    """Return whether `value` is the name of a dataset of TFDS, which is no path and was checked with its target."""
    named = (
        key.endswith(".name")
        and isinstance(parent, dict)
        and parent.get("_target_") == _TFDS
    )
    return named and value == parent.get("name")


def _check_scalar(value: Any, key: str, gate: Gate) -> None:
    """Refuse what is no scalar, a run to begin with that is not given by its ID, and text that leads elsewhere."""
    if value is None or type(value) is bool:
        return
    if type(value) not in (str, int, float):
        raise ConfigError(
            key,
            "must be a mapping, a list, text, a number, true, false or null",
            type(value).__name__,
        )
    if (
        key.partition(".")[0] == "start"
    ):  # the run is looked for below the working directory
        if not _RUN.fullmatch(str(value)):
            rule = "must be the ID of a run where it comes from a store: give start.run again"
            raise ConfigError("start.run", rule, str(value))
    elif type(value) is str:
        if "${" in value:
            raise ConfigError(
                key, "must be resolved: a record holds no interpolation", value
            )
        # A reader of paths or addresses may skip characters that are not visible.
        if any(
            unicodedata.category(sign) in ("Cc", "Cf") and sign not in "\t\n"
            for sign in value
        ):
            raise ConfigError(key, "must be of signs that can be seen", value)
        # As a path as well: code that receives it could read it, or write there.
        is_path = (
            value.startswith("/")
            or _leads_away(value)
            or (re.search(r"[\\/]", value) and os.path.lexists(value))
        )
        if is_path and not key.startswith(
            "tracking."
        ):  # the names of an experiment and of a run may look like one
            gate.confine(value, key)


def _check_target(node: dict[Any, Any], key: str, gate: Gate) -> None:
    """Refuse a target by its name, and the arguments of one that reads files."""
    target = node["_target_"]
    if type(target) is not str:
        raise ConfigError(
            _join(key, "_target_"),
            "must be the dotted name of what builds it",
            str(target),
        )
    allowlist.check_name(target, _join(key, "_target_"), gate.allowed)
    kinds = {
        "_partial_": (bool, "true or false"),
        "_recursive_": (bool, "true or false"),
        "_args_": (list, "a list"),
    }
    for name, (kind, rule) in kinds.items():
        if name in node and type(node[name]) is not kind:
            raise ConfigError(
                _join(key, name), f"of {target} must be {rule}", node[name]
            )
    of_keras = target.startswith(allowlist.APPLICATIONS)
    if target not in allowlist.READERS and not of_keras:  # it reads no files
        return
    for name in ("_args_", "_partial_"):
        if node.get(name):  # it would hide a path from these checks
            raise ConfigError(
                _join(key, name),
                f"of {target} must be left out: give its arguments by name",
            )
    if of_keras and node.get("weights") not in (None, "imagenet"):
        raise ConfigError(
            _join(key, "weights"),
            f"of {target} must be null or 'imagenet'",
            node["weights"],
        )
    if target == _TFDS and not _TFDS_NAME.fullmatch(str(node.get("name"))):
        rule = f"of {target} must be a dataset of TFDS itself: name, name/config or name:version"
        raise ConfigError(_join(key, "name"), rule, str(node.get("name")))
    name = allowlist.READERS.get(target, "")
    path = node.get(name)
    if isinstance(path, dict):  # what it builds could be any text
        raise ConfigError(_join(key, name), f"of {target} must be given as it is", path)
    if type(path) is str:  # a vocabulary may be a list; null is the reader's default
        gate.confine(path, _join(key, name))


def _leads_away(path: str) -> bool:
    return bool(_ELSEWHERE.match(path)) or ".." in re.split(r"[\\/]", path)


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
