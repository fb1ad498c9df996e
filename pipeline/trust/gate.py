"""The gate before every instantiation: what a config that came out of a tracking store may build, read and write.

    fetched config ─► check_config: every name and path, as text ─► what the names really are ─► rerun
    instantiate.locate ─► check: the same once more for each node, just before it is imported

A user's own config and command line pass as they are. Of a fetched config everything is refused that is not named
here or allowed by the user, and nothing that it names is imported before its name was accepted.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from pipeline.errors import ConfigError, first_line
from pipeline.hydra_errors import refusing
from pipeline.trust import allowlist

_TFDS = "pipeline.dataset.from_tfds"
# Without a namespace, which TFDS would download code for, and without arguments such as data_dir.
_TFDS_NAME = re.compile(r"[A-Za-z]\w*(/\w[\w.\-]*)?(:[\d*]+(\.[\d*]+){2})?", re.ASCII)
# A home, a URL or a drive, a share.
_ELSEWHERE = re.compile(r"\s*(~|[A-Za-z][\w.+\-]*:[\\/]|(?i:file|data):|\\)|\s+/")
_MOST_VALUES, _DEEPEST = 100_000, 40


@dataclass(frozen=True)
class Gate:
    """What a fetched config may reach.

    Attributes:
        run_dir: of the new run; everything that is written stays beneath it.
        data_dir: the user's own, where files may be read as well.
        allowed: dotted prefixes of the user's own, never of the fetched config. `mypkg` allows `mypkg.models.build`
            where that is defined under `mypkg`, and not what `mypkg` only imports. The whole name of an object allows
            that object, wherever it is defined.
        tracking_uri: the user's own, the only one that a config may have.
        downloads: whether a dataset of TFDS may be fetched and prepared, which runs that dataset's own code on what
            it downloads; some of it unpickles and evaluates.
    """

    run_dir: Path
    data_dir: Path | None = None
    allowed: Sequence[str] = ()
    tracking_uri: str | None = None
    downloads: bool = False


_gate: Gate | None = None  # of this process: a context variable would leave the threads of a run unguarded


@contextmanager
def strict(gate: Gate) -> Iterator[None]:
    """Let this process, in all of its threads, instantiate only what `gate` accepts."""
    global _gate
    before, _gate = _gate, gate
    try:
        yield
    finally:
        _gate = before


def downloads() -> bool:
    """Return whether datasets may be downloaded and prepared now."""
    return _gate is None or _gate.downloads


def check(node: DictConfig, key: str) -> None:
    """Check `node` before anything of it is imported or built; do nothing outside of `strict`.

    Raises:
        ConfigError: `node`, or anything in it, is not trusted.
    """
    if _gate is not None:
        with refusing():
            plain = OmegaConf.to_container(node, resolve=True)
        check_config({key: plain}, _gate)


def check_config(config: Mapping[str, Any], gate: Gate, *, imports: bool = True) -> None:
    """Check a whole fetched config before anything is created.

    Args:
        config: as it was recorded, in plain dicts, lists and scalars.
        gate: what it may reach.
        imports: also whether the names are what they seem; that imports Keras and what the user allowed.

    Raises:
        ConfigError: something in it is not trusted. Nothing that is refused by its name was imported, nor anything
            else before every name was accepted.
    """
    check_size(config)
    reader = _Reader(gate)
    reader.read(dict(config), "")
    for key in ("hydra", "defaults"):
        if key in config:
            raise ConfigError(key, "must be of your own config, not of one from a tracking store", str(config[key]))
    tracking = config.get("tracking")
    if isinstance(tracking, Mapping) and tracking.get("uri") not in (None, gate.tracking_uri):
        raise ConfigError("tracking.uri", "must be your own, not that of a fetched config", tracking["uri"])
    if imports:
        for key, target in dict.fromkeys(reader.targets):
            _identify(key, target, gate.allowed)


def check_size(config: Mapping[str, Any]) -> None:
    """Refuse a config that YAML's anchors make huge or endless.

    Raises:
        ConfigError: it has too many values, or is too deep.
    """
    rest, values = [(key, value, 1) for key, value in config.items()], 0
    while rest:
        key, node, depth = rest.pop()
        values += 1
        if depth > _DEEPEST or values + len(rest) > _MOST_VALUES:
            raise ConfigError(str(key), f"must be of at most {_MOST_VALUES} values, {_DEEPEST} deep")
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        rest += [(key, entry, depth + 1) for entry in inner]


def drop_writers(config: dict[str, Any], allowed: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Leave out the callbacks of a fetched config that write files, but for those that the user allows.

    Returns:
        The config without them, and what each of them is by its dotted name.
    """
    training = config.get("training")
    if not isinstance(training, dict) or not isinstance(callbacks := training.get("callbacks"), dict):
        return config, {}
    targets = {name: node.get("_target_") for name, node in callbacks.items() if isinstance(node, dict)}
    writers = {
        name: target
        for name, target in targets.items()
        if isinstance(target, str) and target in allowlist.WRITERS and not allowlist.is_under(target, allowed)
    }
    kept = {name: node for name, node in callbacks.items() if name not in writers}
    dropped = {f"training.callbacks.{name}": target for name, target in writers.items()}
    return {**config, "training": {**training, "callbacks": kept}}, dropped


def confine(path: str, roots: Sequence[Path], key: str) -> None:
    """Refuse a path that leads out of the folders `roots`, also through a symlink, or is no path of this machine.

    Raises:
        ConfigError: it does; `key` is where it stands.
    """
    try:
        whole = Path(path).resolve()
        inside = path != "" and not _leads_away(path) and any(whole.is_relative_to(root.resolve()) for root in roots)
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name that is too long, a null byte
        inside = False
    if not inside:
        raise ConfigError(key, f"must lie in {' or '.join(map(str, roots))}", path)


class _Reader:
    """Reads a plain config through once, as text; imports nothing.

    Attributes:
        targets: (key, name) of what it would build, all accepted by name.
    """

    def __init__(self, gate: Gate):
        self.gate = gate
        self.roots = [gate.run_dir] if gate.data_dir is None else [gate.run_dir, gate.data_dir]
        self.targets: list[tuple[str, str]] = []

    def read(self, value: Any, key: str) -> None:
        if isinstance(value, dict):
            self._read_mapping(value, key)
        elif isinstance(value, list):
            for index, entry in enumerate(value):
                self.read(entry, _join(key, index))
        elif type(value) is str:
            self._read_text(value, key)
        elif value is not None and type(value) not in (bool, int, float):
            rule = "must be a mapping, a list, text, a number, true, false or null"
            raise ConfigError(key, rule, type(value).__name__)

    def _read_mapping(self, node: dict[Any, Any], key: str) -> None:
        for name in node:
            if type(name) not in (str, int, bool, float) or "${" in str(name) or not str(name).isprintable():
                raise ConfigError(key or "the config", "must have plain names for its keys", repr(name))
        for name in ("class_name", "registered_name"):  # with either Keras would build an object from the mapping
            if name in node:
                raise ConfigError(_join(key, name), "must not be a serialized object: name it by _target_", node[name])
        if "_target_" in node:
            self._check_target(node, key)
        for name, entry in node.items():
            if not (name == "name" and node.get("_target_") == _TFDS):  # which is no path, and was checked
                self.read(entry, _join(key, name))

    def _read_text(self, text: str, key: str) -> None:
        """Check `text` as a path as well: whoever is given it could read it, or write there."""
        if "${" in text:
            raise ConfigError(key, "must be resolved: a record holds no interpolation", text)
        # What is not seen may be passed over by whoever reads the text as a path or as an address.
        if any(unicodedata.category(sign) in ("Cc", "Cf") and sign not in "\t\n" for sign in text):
            raise ConfigError(key, "must be of signs that can be seen", text)
        if key.startswith("tracking."):  # the names of an experiment and of a run are no paths, and may look like one
            return
        if text.startswith("/") or _leads_away(text) or (re.search(r"[\\/]", text) and os.path.lexists(text)):
            confine(text, self.roots, key)

    def _check_target(self, node: dict[Any, Any], key: str) -> None:
        target, where = node["_target_"], _join(key, "_target_")
        if type(target) is not str:
            raise ConfigError(where, "must be the dotted name of what builds it", str(target))
        allowlist.check_name(target, where, self.gate.allowed)
        self.targets.append((where, target))
        for flag in ("_partial_", "_recursive_"):
            if type(node.get(flag, True)) is not bool:
                raise ConfigError(_join(key, flag), f"of {target} must be true or false", node[flag])
        if type(node.get("_args_", [])) is not list:
            raise ConfigError(_join(key, "_args_"), f"of {target} must be a list", node["_args_"])
        application = target.startswith("keras.applications.")
        if not (application or target in allowlist.READERS):
            return
        for name in ("_args_", "_partial_"):  # either would bring the path in unseen
            if node.get(name):
                raise ConfigError(_join(key, name), f"of {target} must be left out: give its arguments by name")
        if application and node.get("weights") not in (None, "imagenet"):
            raise ConfigError(_join(key, "weights"), f"of {target} must be null or 'imagenet'", node["weights"])
        if target == _TFDS and not _TFDS_NAME.fullmatch(str(node.get("name"))):
            rule = f"of {target} must be a dataset of TFDS itself: name, name/config or name:version"
            raise ConfigError(_join(key, "name"), rule, str(node.get("name")))
        name = allowlist.READERS.get(target, "")
        path, where = node.get(name), _join(key, name)
        if isinstance(path, dict):  # what it builds could be any text
            raise ConfigError(where, f"of {target} must be given as it is", path)
        if type(path) is str:  # a vocabulary may be a list; null is the reader's default
            confine(path, self.roots, where)


def _identify(key: str, target: str, allowed: Sequence[str]) -> None:
    """Import an accepted name and refuse it where it is not what it seems."""
    if target in allowlist.BUILDERS:
        return
    try:
        found = get_object(target)
    except Exception as error:
        rule = f"must name something that exists ({first_line(error.__cause__ or error)})"
        raise ConfigError(key, rule, target) from error
    if not allowlist.is_under(target, allowed):
        if not allowlist.is_of_keras(target, found):
            raise ConfigError(key, f"must be what {target.rpartition('.')[0]} is for", target)
    elif target not in allowed:
        module = getattr(found, "__module__", None) or type(found).__module__
        if not allowlist.is_under(module, allowed):
            rule = f"must be defined under a prefix that you allow ({', '.join(allowed)})"
            raise ConfigError(key, f"{rule}, not only be reachable through one", target)


def _leads_away(path: str) -> bool:
    return bool(_ELSEWHERE.match(path)) or ".." in re.split(r"[\\/]", path)


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
