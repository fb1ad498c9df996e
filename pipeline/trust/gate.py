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

# Without a namespace, which TFDS would download code for, and without arguments such as data_dir.
_TFDS_NAME = re.compile(r"[A-Za-z]\w*(/\w[\w.\-]*)?(:[\d*]+(\.[\d*]+){2})?", re.ASCII)
# A home, a URL or a drive, a share.
_ELSEWHERE = re.compile(r"\s*(~|[A-Za-z][\w.+\-]*:[\\/]|(?i:file|data):|\\)|\s+/")
_MOST_VALUES, _DEEPEST = 100_000, 40  # YAML's anchors make a small file of a huge or an endless config


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

    @property
    def roots(self) -> list[Path]:
        return [self.run_dir] if self.data_dir is None else [self.run_dir, self.data_dir]


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
        walk = _Walk(_gate, Path.cwd())
        walk.read(plain, key)
        _identify(walk)


def check_config(
    config: Mapping[str, Any], gate: Gate, *, recorded_run_dir: str | Path | None = None, imports: bool = True
) -> dict[str, Any]:
    """Check a whole fetched config before anything is created.

    Args:
        config: as it was recorded, in plain dicts, lists and scalars.
        gate: what it may reach.
        recorded_run_dir: of the recorded run. A path in it becomes the same path in the new run's directory.
        imports: also whether the names are what they seem; that imports Keras and what the user allowed.

    Returns:
        A copy in which the paths of readers are absolute.

    Raises:
        ConfigError: something in it is not trusted. Nothing that is refused by its name was imported, nor anything
            else before every name was accepted.
    """
    walk = _Walk(gate, gate.run_dir, None if recorded_run_dir is None else str(recorded_run_dir))
    checked = walk.read(dict(config), "")  # first, since it finds what is too large to be said
    for key in ("hydra", "defaults"):
        if key in config:
            raise ConfigError(key, "must be of your own config, not of one from a tracking store", str(config[key]))
    tracking = config.get("tracking")
    if isinstance(tracking, Mapping) and tracking.get("uri") not in (None, gate.tracking_uri):
        raise ConfigError("tracking.uri", "must be your own, not that of a fetched config", tracking["uri"])
    if imports:
        _identify(walk)
    return dict(checked)


def drop_writers(config: dict[str, Any], allowed: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Leave out the callbacks of a fetched config that write files, but for those that the user allows.

    Returns:
        The config without them, and what each of them is by its dotted name.
    """
    training = config.get("training")
    callbacks = training.get("callbacks") if isinstance(training, dict) else None
    if not isinstance(training, dict) or not isinstance(callbacks, dict):
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


def is_small(config: Any) -> bool:
    """Return whether the config is finite and below the size limit."""
    rest, values = [config], 0
    while rest and values + len(rest) <= _MOST_VALUES:
        node, values = rest.pop(), values + 1
        rest += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return not rest


def confine(path: str | Path, roots: Sequence[Path], key: str = "path", *, base: Path | None = None) -> str:
    """Return `path`, absolute and with its symlinks followed.

    Args:
        path: without `..`; of this machine, so no URL.
        roots: the folders that it must lie in.
        key: for the error.
        base: of a relative path; the current directory where it is left out.

    Raises:
        ConfigError: it leads elsewhere.
    """
    text = os.fspath(path)
    rule = f"must lie in {' or '.join(map(str, roots))}"
    if not text or _ELSEWHERE.match(text) or _upwards(text):
        raise ConfigError(key, rule, text)
    try:
        whole = ((base or Path.cwd()) / text).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name that is too long, a null byte
        raise ConfigError(key, f"{rule} ({first_line(error)})", text) from error
    for root in (root.resolve() for root in roots):
        if whole.is_relative_to(root):
            return str(whole)
    raise ConfigError(key, rule, text)


class _Walk:
    """Read a plain config through once, as text; import nothing.

    Attributes:
        targets: (key, name) of what it would build, all accepted by name.
    """

    def __init__(self, gate: Gate, base: Path, recorded: str | None = None):
        self.gate, self.base = gate, base
        self.recorded = recorded.rstrip("/") if recorded and os.path.isabs(recorded) else None
        self.targets: list[tuple[str, str]] = []
        self._values = 0

    def read(self, value: Any, key: str, depth: int = 0) -> Any:
        """Return a copy of `value`, in which the paths that are read from are absolute."""
        self._values += 1
        if depth > _DEEPEST or self._values > _MOST_VALUES:
            rule = f"must be of at most {_MOST_VALUES} values, {_DEEPEST} deep"
            raise ConfigError(key.split(".")[0], rule)
        if isinstance(value, dict):
            return self._mapping(value, key, depth)
        if isinstance(value, list):
            return [self.read(entry, _join(key, index), depth + 1) for index, entry in enumerate(value)]
        if type(value) is str:
            return self._text(value, key)
        if value is None or type(value) in (bool, int, float):
            return value
        raise ConfigError(key, "must be a mapping, a list, text, a number, true, false or null", type(value).__name__)

    def _mapping(self, node: dict[Any, Any], key: str, depth: int) -> dict[Any, Any]:
        for name in node:
            if type(name) not in (str, int, bool, float) or "${" in str(name) or not str(name).isprintable():
                raise ConfigError(key or "the config", "must have plain names for its keys", repr(name))
        for name in ("class_name", "registered_name"):  # with either Keras would build an object from the mapping
            if name in node:
                raise ConfigError(_join(key, name), "must not be a serialized object: name it by _target_", node[name])
        paths = self._target(node, key) if "_target_" in node else {}
        others = {name: entry for name, entry in node.items() if name not in paths}
        return {name: self.read(entry, _join(key, name), depth + 1) for name, entry in others.items()} | paths

    def _text(self, text: str, key: str) -> str:
        """Return `text`, checked as a path: whoever is given it could read it, or write there."""
        text = self._plain(text, key)
        if key.startswith("tracking."):  # the names of an experiment and of a run are no paths, and may look like one
            return text
        if _ELSEWHERE.match(text) or text.startswith("/") or _upwards(text):
            confine(text, self.gate.roots, key, base=self.base)
        elif re.search(r"[\\/]", text) and os.path.lexists(text):
            confine(text, self.gate.roots, key)
        return text

    def _plain(self, text: str, key: str) -> str:
        """Return `text`; a path in the recorded run's directory becomes the same path in the new run's."""
        if "${" in text:
            raise ConfigError(key, "must be resolved: a record holds no interpolation", text)
        # What is not seen may be passed over by whoever reads the text as a path or as an address.
        if any(unicodedata.category(sign) in ("Cc", "Cf") and sign not in "\t\n" for sign in text):
            raise ConfigError(key, "must be of signs that can be seen", text)
        if self.recorded is not None and (text == self.recorded or text.startswith(f"{self.recorded}/")):
            text = f"{self.gate.run_dir.absolute()}{text[len(self.recorded) :]}"
        return text

    def _target(self, node: dict[Any, Any], key: str) -> dict[str, Any]:
        """Check the target's name; return its arguments that are a path, made absolute."""
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
        return self._paths(target, node, key)

    def _paths(self, target: str, node: dict[Any, Any], key: str) -> dict[str, Any]:
        application = target.startswith("keras.applications.")
        if not (application or target in allowlist.READERS):
            return {}
        for name in ("_args_", "_partial_"):  # either would bring the path in unseen
            if node.get(name):
                raise ConfigError(_join(key, name), f"of {target} must be left out: give its arguments by name")
        if application and node.get("weights") not in (None, "imagenet"):
            raise ConfigError(_join(key, "weights"), f"of {target} must be null or 'imagenet'", node["weights"])
        if target == "pipeline.dataset.from_tfds" and not _TFDS_NAME.fullmatch(str(node.get("name"))):
            rule = f"of {target} must be a dataset of TFDS itself: name, name/config or name:version"
            raise ConfigError(_join(key, "name"), rule, str(node.get("name")))
        named = {"name": node["name"]} if target == "pipeline.dataset.from_tfds" else {}  # which is no path
        name = allowlist.READERS.get(target, "")
        path, where = node.get(name), _join(key, name)
        if isinstance(path, dict):  # what it builds could be any text
            raise ConfigError(where, f"of {target} must be given as it is", path)
        if type(path) is not str:  # a vocabulary may be a list; null is the reader's default
            return named
        return {**named, name: confine(self._plain(path, where), self.gate.roots, where, base=self.base)}


def _identify(walk: _Walk) -> None:
    """Import the accepted names and refuse those that are not what they seem."""
    for key, target in dict.fromkeys(walk.targets):
        if target in allowlist.BUILDERS:
            continue
        try:
            found = get_object(target)
        except Exception as error:
            rule = f"must name something that exists ({first_line(error.__cause__ or error)})"
            raise ConfigError(key, rule, target) from error
        if allowlist.is_under(target, walk.gate.allowed):
            module = getattr(found, "__module__", None) or type(found).__module__
            if target not in walk.gate.allowed and not allowlist.is_under(module, walk.gate.allowed):
                rule = f"must be defined under a prefix that you allow ({', '.join(walk.gate.allowed)})"
                raise ConfigError(key, f"{rule}, not only be reachable through one", target)
        elif not allowlist.is_of_keras(target, found):
            raise ConfigError(key, f"must be what {target.rpartition('.')[0]} is for", target)


def _upwards(path: str) -> bool:
    return ".." in re.split(r"[\\/]", path)


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
