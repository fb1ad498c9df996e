"""Checks a config from a tracking store before anything in it is instantiated.

The gate decides what a config fetched from a store may build, read and write:

    fetched config ─► check_config: every name and path, as text
                   ─► the objects that the names refer to ─► rerun
    instantiate.locate ─► check: the same checks for each node, before it is imported

The user's own config and command line are not checked. A name in a fetched config is
rejected if it is neither listed in `trusted_names` nor allowed by the user. No object
is imported before its name is accepted.
"""

import os
import re
import shlex
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf

from pipeline.common import file_patterns
from pipeline.common.errors import ConfigError
from pipeline.config.hydra_errors import translated
from pipeline.config.model_uris import MODEL
from pipeline.config.validation_sets import SPLIT
from pipeline.trust import artifact_locations, trusted_names

_TFDS = "pipeline.dataset.from_tfds"
# Targets that read a dataset of TFDS; the second one only if it has a `name`.
_TFDS_READERS = (_TFDS, "pipeline.dataset.text_files")
# Matches a dataset name without a namespace, for which TFDS would download code, and
# without arguments, such as data_dir.
_TFDS_NAME = re.compile(r"[A-Za-z]\w*(/\w[\w.\-]*)?(:[\d*]+(\.[\d*]+){2})?", re.ASCII)
# Matches a path in a home folder, a URL, a drive, a network share, or an absolute path
# after blanks.
_ELSEWHERE = re.compile(r"\s*(~|[A-Za-z][\w.+\-]*:[\\/]|(?i:file|data):|\\)|\s+/")
# Matches the ID of a run or the start of an ID, optionally followed by an update.
_RUN = re.compile(r"[0-9a-f]{4,32}(@\d{1,10})?", re.ASCII)
_MOST_VALUES = 100_000
_DEEPEST = 40


@dataclass(frozen=True)
class Gate:
    """The user's limits on what a fetched config may build, read and write.

    Attributes:
        run_dir: the directory of the new run. Files are written only here, unless the
            code that writes them is `allowed`.
        data_dir: another folder from which files may be read.
        allowed: dotted prefixes. `mypkg` allows `mypkg.models.build` if that is defined
            under `mypkg`, and nothing that `mypkg` only imports. The full name of an
            object allows that object, wherever it is defined.
        tracking_uri: the only store that a config may name.
        downloads: whether TFDS may download and prepare a dataset. Code of TFDS then
            processes the downloaded files, and some of it unpickles or evaluates them.
        start: whether the user, not the config, named the run to start from.
        given: the strings that the user gave, by dotted key. The value None stands for
            a config group that the user chose, in which every string is accepted.
    """

    run_dir: Path
    data_dir: Path | None = None
    allowed: Sequence[str] = ()
    tracking_uri: str | None = None
    downloads: bool = False
    start: bool = False
    given: Mapping[str, str | None] = field(default_factory=dict)

    def confine(self, path: str, key: str) -> None:
        """Reject a path outside the allowed folders, with symlinks followed.

        The allowed folders are `run_dir`, `data_dir` and, for keys of `dataset`, the
        working directory. A path that the user gave may lie anywhere.

        Raises:
            ConfigError: `path`, the value at `key`, is outside these folders.
        """
        if not self._is_the_users(path, key) and not self._is_inside(path, key):
            self._raise_outside(path, key)

    def confine_pattern(self, pattern: str, key: str) -> None:
        """Reject a pattern of files that matches a file outside the allowed folders.

        See `confine`, and `pipeline.common.file_patterns` for patterns.
        """
        self.confine(pattern, key)
        if self._is_the_users(pattern, key):
            return
        for file in file_patterns.matching(pattern):
            if not self._is_inside(str(file), key):  # through a symlink
                self._raise_outside(pattern, key)

    def _folders(self, key: str) -> list[Path]:
        """Return the folders from which a path at `key` may be read."""
        folders = [self.run_dir]
        if self.data_dir is not None:
            folders.append(self.data_dir)
        if key.startswith("dataset."):
            folders.append(Path.cwd())
        return folders

    def _is_inside(self, path: str, key: str) -> bool:
        is_local = path != "" and not _leads_away(path)
        return is_local and artifact_locations.is_inside(Path(path), self._folders(key))

    def _raise_outside(self, path: str, key: str) -> NoReturn:
        folders = " or ".join(str(folder) for folder in self._folders(key))
        again = shlex.quote(f"{key}={path[:300]}")
        rule = f"must lie in {folders}; if the path is your own, give it again: {again}"
        raise ConfigError(key, rule, path)

    def _is_the_users(self, text: str, key: str) -> bool:
        """Return whether the user gave the string at `key`, or chose its group."""
        if self.given.get(key) == text:
            return True
        parts = key.split(".")
        for end in range(1, len(parts)):
            group = ".".join(parts[:end])
            if group in self.given and self.given[group] is None:
                return True
        return False


# The gate of this process; None if nothing is checked. It is not a context variable,
# since a run's new threads would not inherit its value.
in_force: Gate | None = None


@contextmanager
def strict(gate: Gate) -> Iterator[None]:
    """Within the block, let this process build only objects that `gate` accepts.

    This applies to all threads.
    """
    global in_force
    outer = in_force
    in_force = gate
    try:
        yield
    finally:
        in_force = outer


def check(node: DictConfig, key: str) -> None:
    """Reject a node that is not trusted, before anything in it is imported.

    Outside a `strict` block, every node is trusted.
    """
    if in_force is not None:
        with translated():
            container = OmegaConf.to_container(node, resolve=True)
            check_config({key: container}, in_force)


def check_config(
    config: Mapping[str, Any], gate: Gate, *, imports: bool = True
) -> None:
    """Reject a fetched config that contains anything untrusted.

    Args:
        config: the config, plain.
        gate: the user's limits.
        imports: whether to import the objects that the config names, to check their
            types and where they are defined. Otherwise only the names are checked.

    Raises:
        ConfigError: the message names the key and the rule.
    """
    check_size(config)
    checked = dict(config)
    if gate.start:  # the user named the run to start from
        checked.pop("start", None)

    packages = trusted_names.packages_to_allow(_target_names(checked), gate.allowed)
    targets: dict[tuple[str, str], None] = {}  # an ordered set of pairs
    for node in _nodes(checked):
        if isinstance(node.value, dict):
            _check_mapping(node.value, node.key)
            if "_target_" in node.value:
                _check_target(node.value, node.key, gate, packages)
                target_key = _join(node.key, "_target_")
                targets[target_key, node.value["_target_"]] = None
        elif not isinstance(node.value, list) and not _is_tfds_name(node):
            _check_scalar(node.value, node.key, gate)

    _check_top_level(config, gate)
    if imports:
        for key, target in targets:
            trusted_names.check_object(target, key, gate.allowed)


def check_size(config: Mapping[str, Any]) -> None:
    """Reject a config with too many values, or one that is nested too deeply.

    Anchors in YAML can make a config huge, or make it contain itself.
    """
    for count, node in enumerate(_nodes(dict(config))):
        if count > _MOST_VALUES or len(node.parents) > _DEEPEST:
            rule = (
                f"must have at most {_MOST_VALUES} values, nested at most "
                f"{_DEEPEST} deep"
            )
            raise ConfigError(node.key.partition(".")[0], rule)


def drop_writers(
    config: dict[str, Any], allowed: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Remove the callbacks that write files from a fetched config.

    Args:
        config: the config, plain; it is not modified.
        allowed: prefixes that the user trusts; callbacks under them are kept.

    Returns:
        The config without these callbacks, and the removed targets by dotted key.
    """
    training = config.get("training")
    if not isinstance(training, dict):
        return config, {}
    callbacks = training.get("callbacks")
    if not isinstance(callbacks, dict):
        return config, {}

    kept = {}
    dropped = {}
    for name, node in callbacks.items():
        target: Any = None
        if isinstance(node, dict):
            target = node.get("_target_")
        if _is_writer(target) and not trusted_names.is_under(target, allowed):
            dropped[f"training.callbacks.{name}"] = target
        else:
            kept[name] = node
    return {**config, "training": {**training, "callbacks": kept}}, dropped


def texts(values: Mapping[str, Any]) -> dict[str, str | None]:
    """Return all strings in a plain config by dotted key, for `Gate.given`."""
    found: dict[str, str | None] = {}
    for node in _nodes(dict(values)):
        if isinstance(node.value, str):
            found[node.key] = node.value
    return found


@dataclass(frozen=True)
class _Node:
    """A value in a plain config, its dotted key, and the containers around it."""

    key: str
    value: Any
    parents: tuple[Any, ...]


def _nodes(value: Any, key: str = "", parents: tuple[Any, ...] = ()) -> Iterator[_Node]:
    """Yield a plain config and everything in it, outermost first."""
    yield _Node(key, value, parents)
    entries: Any = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    for name, entry in entries:
        yield from _nodes(entry, _join(key, name), (*parents, value))


def _check_top_level(config: Mapping[str, Any], gate: Gate) -> None:
    """Reject values that only the user may set: Hydra's keys, and another store."""
    for key in ("hydra", "defaults"):
        if key in config:
            rule = "must come from your own config, not from a tracking store"
            raise ConfigError(key, rule, str(config[key]))
    tracking = config.get("tracking")
    if isinstance(tracking, Mapping):
        uri = tracking.get("uri")
        if uri not in (None, gate.tracking_uri):
            rule = "must be your own, not that of a fetched config"
            raise ConfigError("tracking.uri", rule, uri)


def _check_mapping(node: dict[Any, Any], key: str) -> None:
    """Reject keys that are not plain names, and serialized objects of Keras."""
    for name in node:
        is_scalar = type(name) in (str, int, bool, float)
        if not is_scalar or "${" in str(name) or not str(name).isprintable():
            rule = "must have plain names as its keys"
            raise ConfigError(key or "the config", rule, repr(name))
        if name in ("class_name", "registered_name"):
            rule = "must not be a serialized object: name it by _target_"
            raise ConfigError(_join(key, name), rule, node[name])


def _is_tfds_name(node: _Node) -> bool:
    """Return whether a value is the name of a dataset in TFDS.

    Such a name may look like a path. It is checked elsewhere, with the node's
    `_target_`.
    """
    parent = node.parents[-1]
    if not isinstance(parent, dict) or parent.get("_target_") not in _TFDS_READERS:
        return False
    return node.key.endswith(".name") and node.value == parent.get("name")


def _check_scalar(value: Any, key: str, gate: Gate) -> None:
    """Reject a value that is not a scalar, and text that `_check_text` rejects.

    Under `start`, reject all text but the ID of a run and the URI of a model.
    """
    if value is None or type(value) is bool:
        return
    if type(value) not in (str, int, float):
        rule = "must be a mapping, a list, text, a number, true, false or null"
        raise ConfigError(key, rule, type(value).__name__)
    if key.partition(".")[0] == "start":
        # Accept only an ID or a registered model, of which only the weights are read:
        # other text would be taken as a path of a run directory.
        text = str(value)
        if not (_RUN.fullmatch(text) or MODEL.fullmatch(text)):
            rule = (
                "must be the ID of a run if it comes from a store: give start.run again"
            )
            raise ConfigError("start.run", rule, str(value))
    elif type(value) is str:
        _check_text(value, key, gate)


def _check_text(text: str, key: str, gate: Gate) -> None:
    """Reject interpolations, invisible characters, and paths that are not allowed."""
    if "${" in text:
        rule = "must have no interpolation: the values in a record are resolved"
        raise ConfigError(key, rule, text)
    # Code that reads paths or addresses may skip invisible characters.
    for character in text:
        if character not in "\t\n" and unicodedata.category(character) in ("Cc", "Cf"):
            raise ConfigError(key, "must consist of visible characters", text)
    # Skip the names of an experiment and a run, which may look like paths. Any other
    # text that is a path may reach code that reads or writes there.
    if _is_path(text) and not key.startswith("tracking."):
        gate.confine(text, key)


def _is_path(text: str) -> bool:
    if text.startswith("/") or _leads_away(text):
        return True
    return re.search(r"[\\/]", text) is not None and os.path.lexists(text)


def _target_names(config: dict[Any, Any]) -> Iterator[str]:
    """Yield the values of all keys `_target_` that are text."""
    for node in _nodes(config):
        if isinstance(node.value, dict) and type(node.value.get("_target_")) is str:
            yield node.value["_target_"]


def _check_target(
    node: dict[Any, Any], key: str, gate: Gate, packages: Sequence[str]
) -> None:
    """Check a target's name and Hydra keys and, if it reads files, its arguments.

    `packages` is what the whole config needs; see `trusted_names.packages_to_allow`.
    """
    target = node["_target_"]
    target_key = _join(key, "_target_")
    if type(target) is not str:
        rule = "must be the dotted name of the code that builds the object"
        raise ConfigError(target_key, rule, str(target))
    trusted_names.check_name(target, target_key, gate.allowed, packages)
    _check_hydra_keys(node, key, target)

    is_application = target.startswith(trusted_names.APPLICATIONS)
    if target in trusted_names.READERS or is_application:
        _check_reader(node, key, target, gate)


def _check_hydra_keys(node: dict[Any, Any], key: str, target: str) -> None:
    kinds = {"_partial_": bool, "_recursive_": bool, "_args_": list}
    for name, kind in kinds.items():
        if name in node and type(node[name]) is not kind:
            words = "a list" if kind is list else "true or false"
            rule = f"of {target} must be {words}"
            raise ConfigError(_join(key, name), rule, node[name])


def _check_reader(node: dict[Any, Any], key: str, target: str, gate: Gate) -> None:
    """Check the arguments of a target that reads files."""
    for name in ("_args_", "_partial_"):
        if node.get(name):  # could hide a path from these checks
            rule = f"of {target} must be left out: give its arguments by name"
            raise ConfigError(_join(key, name), rule)

    is_application = target.startswith(trusted_names.APPLICATIONS)
    if is_application and node.get("weights") not in (None, "imagenet"):
        rule = f"of {target} must be null or 'imagenet'"
        raise ConfigError(_join(key, "weights"), rule, node["weights"])
    reads_tfds = target == _TFDS or node.get("name") is not None
    is_tfds_name = _TFDS_NAME.fullmatch(str(node.get("name"))) is not None
    if target in _TFDS_READERS and reads_tfds and not is_tfds_name:
        rule = (
            f"of {target} must be a dataset of TFDS itself: "
            "name, name/config or name:version"
        )
        raise ConfigError(_join(key, "name"), rule, str(node.get("name")))

    for name in trusted_names.READERS.get(target, ()):
        path = node.get(name)
        if isinstance(path, dict):  # the built object could be any text
            rule = f"of {target} must be given literally"
            raise ConfigError(_join(key, name), rule, path)
        # A vocabulary may be a list; null is the reader's default.
        if type(path) is str:
            gate.confine(path, _join(key, name))
    _check_patterns(node, key, trusted_names.PATTERN_READERS.get(target, ()), gate)


def _check_patterns(
    node: dict[Any, Any], key: str, arguments: Sequence[str], gate: Gate
) -> None:
    """Check the arguments of a target that are patterns of files."""
    for name in arguments:
        for value in _nodes(node.get(name), _join(key, name)):
            if type(value.value) is str:
                gate.confine_pattern(value.value, value.key)
    if "validation_split" in arguments:
        splits = _further_validation_splits(node, key)
        for split_key, split in splits.items():
            gate.confine_pattern(split, split_key)


def _further_validation_splits(node: dict[Any, Any], key: str) -> dict[str, str]:
    """Return the splits of the same dataset in `dataset.validations`, by their keys.

    The dataset is built once more for each of these splits, as its `validation_split`.
    """
    sets = node.get("validations")
    if not isinstance(sets, dict):
        return {}
    splits = {}
    for name, entry in sets.items():
        set_key = _join(_join(key, "validations"), name)
        if isinstance(entry, dict) and "_target_" not in entry:
            entry = entry.get(SPLIT)
            set_key = _join(set_key, SPLIT)
        if type(entry) is str:
            splits[set_key] = entry
    return splits


def _is_writer(target: object) -> bool:
    return isinstance(target, str) and target in trusted_names.WRITERS


def _leads_away(path: str) -> bool:
    return bool(_ELSEWHERE.match(path)) or ".." in re.split(r"[\\/]", path)


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
