"""Errors of Hydra and OmegaConf → `ConfigError`, in one line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import reduce
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
    ValidationError,
)

from pipeline.errors import ConfigError, first_line

_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "a mapping"}

# Hydra keeps these apart by their text alone: (pattern, rule). The group `key` or `override` is the subject.
_TEXTS = (
    (r"Ambiguous value for argument '(?P<override>.+)'", "must be one value; --multirun sweeps over several"),
    (r"Sweep parameters '(?P<override>.+)' requires", "must be one value; --multirun sweeps over several"),
    (r"Could not append to config\. An item is already at '(?P<key>.+?)'", "must be named without + to be changed"),
    (r"Could not delete from config\. '(?P<key>.+?)' does not exist", "must be in the config to be deleted"),
    (r"Could not delete '(?P<key>.+?)(=.*)?'\.", "must be in the defaults list to be deleted"),
    (r"Could not delete from config\. The value of '(?P<key>.+?)' is", "must be deleted with the value that it has"),
    (r"(In '.+': )?Could not override '(?P<key>.+?)'\.", "must be a group of the defaults list"),
    (r"You must specify '(?P<key>.+?)'", "must be given"),
    (r"(?P<key>hydra\.searchpath) must be", "must be a list of folders"),
    (r"force-add of config groups is not supported: '(?P<override>.+)'", "must be added with one + only"),
)


COMPOSITION = (HydraException, OmegaConfBaseException, UnicodeDecodeError, yaml.YAMLError)


@contextmanager
def refusing(
    overrides: Sequence[str] = (), folders: Sequence[str] = (), kinds: tuple[type[Exception], ...] = COMPOSITION
) -> Iterator[None]:
    """Turn what composing or reading a config raises into a `ConfigError`.

    Args:
        overrides: the command line's, to find the one that is meant.
        folders: folders with config groups.
        kinds: errors that only the user's input can cause.
    """
    try:
        yield
    except ConfigError:
        raise
    except kinds as error:
        raise _refusal(error, overrides, folders) from error


def groups(folders: Sequence[str]) -> dict[str, list[str]]:
    """Return the options of each config group in `folders`."""
    found: dict[str, set[str]] = {}
    for file in (file for folder in folders for file in Path(folder).glob("*/*.yaml")):
        found.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(options) for group, options in sorted(found.items())}


def _refusal(error: Exception, overrides: Sequence[str], folders: Sequence[str]) -> ConfigError:
    if isinstance(error, OverrideParseException):
        key = re.split("[=@]", error.override.lstrip("+~"))[0]
        rule = "must be given as KEY=VALUE" if "=" not in error.override else f"must be of Hydra's grammar ({error})"
        return ConfigError(key, rule.replace(f"\nSee {_url(error)} for details", ""), error.override)
    if isinstance(error, MissingConfigException):
        return _missing(error)
    if isinstance(error, UnicodeDecodeError | yaml.YAMLError):
        return _unreadable(error, folders)
    for link in _chain(error):
        if isinstance(link, OmegaConfBaseException) and link.full_key:
            return _of_key(link, _origin(error), folders)
    return _from_text(error, overrides, folders)


def _of_key(error: OmegaConfBaseException, origin: str, folders: Sequence[str]) -> ConfigError:
    """Return the refusal of an error in which OmegaConf names the key and its node."""
    key = str(error.full_key)
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        parent, _, name = key.rpartition(".")
        # The schema's own nodes take no other keys.
        if isinstance(error.parent_node, DictConfig) and OmegaConf.get_type(error.parent_node) is dict:
            origin += f"; a new one is added with +{key}=VALUE"
        siblings = [str(sibling) for sibling in error.parent_node if parent or sibling != "hydra"]
        if not parent:
            siblings = sorted({*siblings, *groups(folders)})
        return ConfigError(key, f"must be a key of {parent or 'the config'}{origin}", name, siblings)
    if isinstance(error, ValidationError):
        rule, choices = _type_of(error)
        return ConfigError(key, f"must be {rule}{origin}", error.value, choices)
    if isinstance(error, ConfigTypeError) and "Cannot merge" in str(
        error
    ):  # a list for a mapping, or a mapping for a list; which value, it does not say
        return ConfigError(key, f"must be {'a list' if error.object_type is list else 'a mapping'}{origin}")
    rules = {
        InterpolationKeyError: "must refer to a key that exists",
        InterpolationToMissingValueError: "must refer to a key that has a value",
        UnsupportedInterpolationType: "must use a resolver that exists",
        InterpolationResolutionError: f"must have a value ({_cause(error)})",
    }
    rule = next((rule for kind, rule in rules.items() if isinstance(error, kind)), f"must be valid ({_cause(error)})")
    return ConfigError(key, f"{rule}{origin}", _unresolved(error))


def _type_of(error: ValidationError) -> tuple[str, list[str] | None]:
    """Return what the schema wants at the key of `error`, and the choices of an enumeration."""
    hint = get_type_hints(error.object_type).get(error.key) if hasattr(error.object_type, "__annotations__") else None
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    null = ", or null" if NoneType in kinds else ""
    (kind, *_) = [kind for kind in kinds if kind is not NoneType]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of its choices{null}", list(kind.__members__)
    kind = get_origin(kind) or kind
    if kind in _KINDS:
        return _KINDS[kind] + null, None
    return ("a mapping" if hasattr(kind, "__annotations__") else f"valid ({_cause(error)})"), None


def _missing(error: MissingConfigException) -> ConfigError:
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if error.options is None:
        if not group:
            return ConfigError("--config-name", "must be a config that exists", name)
        return ConfigError(group, f"must be a config that exists{_origin(error)}", name)
    return ConfigError(group, "must be an option of its group", name, error.options)


def _unreadable(error: UnicodeDecodeError | yaml.YAMLError, folders: Sequence[str]) -> ConfigError:
    file = _file(error, folders)
    mark = getattr(error, "problem_mark", None)
    if file is None:
        return ConfigError("config", f"must be YAML in UTF-8 ({first_line(error)})")
    lines = Path(file).read_bytes().split(b"\n")
    if isinstance(error, UnicodeDecodeError):
        number = next(index for index, line in enumerate(lines) if not _decodes(line))
        return ConfigError(f"{file}:{number + 1}", "must be UTF-8", lines[number])
    if mark is None:
        return ConfigError(file, f"must be YAML ({first_line(error)})")
    line = lines[mark.line].decode() if mark.line < len(lines) else ""
    return ConfigError(f"{file}:{mark.line + 1}", f"must be YAML ({getattr(error, 'problem', '')})", line)


def _from_text(error: Exception, overrides: Sequence[str], folders: Sequence[str]) -> ConfigError:
    text = str(error)
    for pattern, rule in _TEXTS:
        match = re.match(pattern, text)
        if match is None:
            continue
        found = match.groupdict()
        key, _, value = found.get("override", found.get("key", "")).partition("=")
        named = next((override for override in overrides if re.split("=", override.lstrip("+~"))[0] == key), key)
        options = re.findall(r"^\t(.+)$", text, re.MULTILINE) or None
        return ConfigError(key, rule + _origin(error), value or named, options)
    known = groups(folders)
    for override in overrides:
        parsed = OverridesParser.create().parse_override(override)
        if "group override must be" in text and not isinstance(parsed.value(), str | list | dict):
            key = parsed.key_or_group
            if key in known:
                return ConfigError(key, "must be the name of an option of its group", parsed.value(), known[key])
            if not key:
                return ConfigError("arguments", "must be given as KEY=VALUE", override)
    folder = re.match("Additional config directory '(.+)' not found", text)
    if folder:
        return ConfigError("--config-dir", "must be a folder that exists", folder[1])
    if isinstance(error, OSError) and error.filename is not None:
        rule = f"must be a folder that can be made ({error.strerror})"
        return ConfigError("hydra.run.dir", rule, os.fspath(error.filename))
    rule = f"must be what Hydra takes ({first_line(error)})"
    file = _file(error, folders)
    return ConfigError("arguments", rule, " ".join(overrides)) if file is None else ConfigError(file, rule)


def _file(error: Exception, folders: Sequence[str]) -> str | None:
    """Return the config file that raises `error` when it is read; Hydra names none. None where no file does."""
    for file in (file for folder in folders for file in sorted(Path(folder).resolve().rglob("*.yaml"))):
        try:
            OmegaConf.load(file)
        except Exception as own:
            if type(own) is type(error) and str(own) == str(error):
                return str(file)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _origin(error: Exception) -> str:
    """Return ` (in FILE)` where Hydra says the file; empty for the command line and for `config.yaml`."""
    match = re.match(r"In '(.+?)'", str(error))
    return "" if match is None or match[1] in ("config", "hydra/config") else f" (in {match[1]})"


def _cause(error: OmegaConfBaseException) -> str:
    text = re.sub(r"^\w+ raised while resolving interpolation: ", "", first_line(error))
    return text.strip("\"'")


def _unresolved(error: OmegaConfBaseException) -> object:
    """Return the value as it was written, with its interpolation."""
    if not isinstance(error.parent_node, DictConfig):
        return error.value
    written: Any = OmegaConf.to_container(error.parent_node, resolve=False)
    return reduce(lambda node, name: node[name], str(error.key).split("."), written)


def _url(error: OverrideParseException) -> str:
    return next(iter(re.findall(r"https?://\S+", error.message)), "")


def _decodes(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
