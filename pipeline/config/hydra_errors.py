"""Errors of Hydra and OmegaConf → `ConfigError`, in one line."""

import linecache
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
from omegaconf import DictConfig, ListConfig, OmegaConf, errors

from pipeline.common.errors import ConfigError, first_line
from pipeline.config import former_names
from pipeline.config.objective_nodes import NAMED

# What `compile` and `fit` take as lists.
_NAMED = {
    f"training.{name}": NAMED for name in ("metrics", "weighted_metrics", "callbacks")
}
_KINDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping",
}

# Hydra keeps these apart by their text alone: (pattern with the subject as its group, rule).
_TEXTS = (
    (
        r"Ambiguous value for argument '(?P<override>.+)'",
        "must be one value; --multirun sweeps over several",
    ),
    (
        r"Sweep parameters '(?P<override>.+)' requires",
        "must be one value; --multirun sweeps over several",
    ),
    (
        r"Could not append to config\. An item is already at '(?P<key>.+?)'",
        "must be named without + to be changed",
    ),
    (
        r"Could not delete from config\. '(?P<key>.+?)' does not exist",
        "must be in the config to be deleted",
    ),
    (
        r"Could not delete '(?P<key>.+?)(=.*)?'\.",
        "must be in the defaults list to be deleted",
    ),
    (
        r"Could not delete from config\. The value of '(?P<key>.+?)' is",
        "must be deleted with the value that it has",
    ),
    (
        r"(In '.+': )?Could not override '(?P<key>.+?)'\.",
        "must be a group of the defaults list",
    ),
    (r"You must specify '(?P<key>.+?)'", "must be given"),
    (r"(?P<key>hydra\.searchpath) must be", "must be a list of folders"),
    (
        r"force-add of config groups is not supported: '(?P<override>.+)'",
        "must be added with one + only",
    ),
)
_LINKS: dict[type[Exception], str] = {
    errors.InterpolationKeyError: "must refer to a key that exists",
    errors.InterpolationToMissingValueError: "must refer to a key that has a value",
    errors.UnsupportedInterpolationType: "must use a resolver that exists",
}
COMPOSITION = (
    HydraException,
    errors.OmegaConfBaseException,
    UnicodeDecodeError,
    yaml.YAMLError,
)


@contextmanager
def as_config_error(
    overrides: Sequence[str] = (),
    folders: Sequence[str] = (),
    kinds: tuple[type[Exception], ...] = COMPOSITION,
) -> Iterator[None]:
    """Raise a `ConfigError` in place of errors of `kinds`: it names the override, or the file in one of `folders`."""
    try:
        yield
    except ConfigError:
        raise
    except kinds as error:
        refusal = _refusal(error, overrides, folders)
        shown = (refusal.received or "").strip("'")
        removal = former_names.removal(refusal.key, shown)
        raise (refusal if removal is None else removal) from error


def groups(folders: Sequence[str]) -> dict[str, list[str]]:
    """Return the options of each config group in `folders`."""
    files = sorted(
        {
            (file.parent.name, file.stem)
            for folder in folders
            for file in Path(folder).glob("*/*.yaml")
        }
    )
    return {
        group: [name for other, name in files if other == group] for group, _ in files
    }


def _refusal(
    error: Exception, overrides: Sequence[str], folders: Sequence[str]
) -> ConfigError:
    if isinstance(error, OverrideParseException):
        key = re.split("[=@]", error.override.lstrip("+~"))[0]
        grammar = f"must be of Hydra's grammar ({first_line(error)})"
        _, _, value = error.override.partition("=")
        if re.fullmatch(r"\w[^'\"]*\[[^'\"]*\]", value):
            grammar += (
                f"; text with brackets has quotes of its own: '{key}=\"{value}\"'"
            )
        return ConfigError(
            key,
            grammar if "=" in error.override else "must be given as KEY=VALUE",
            error.override,
        )
    if isinstance(error, MissingConfigException):
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        if error.options is not None:
            return ConfigError(
                group, "must be an option of its group", name, error.options
            )
        return ConfigError(
            group or "--config-name",
            f"must be a config that exists{_origin(error)}",
            name,
        )
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        file, line = error.problem_mark.name, error.problem_mark.line + 1
        return ConfigError(
            f"{file}:{line}",
            f"must be YAML ({error.problem})",
            linecache.getline(file, line).strip(),
        )
    origin, link = _origin(error), error
    while link is not None:
        if isinstance(link, errors.OmegaConfBaseException) and link.full_key:
            return _of_key(link, origin, overrides, folders)
        link = link.__cause__ or link.__context__  # type: ignore[assignment]
    listed = _listed(origin, folders) if "ConfigTypeError" in str(error) else None
    return _from_text(error, overrides, folders) if listed is None else listed


def _listed(origin: str, folders: Sequence[str]) -> ConfigError | None:
    """Return the refusal of a list, where a mapping has to be, in the file that `origin` names; None without one."""
    for file in (Path(folder) / f"{origin[5:-1]}.yaml" for folder in folders):
        loaded = OmegaConf.load(file) if file.is_file() else OmegaConf.create()
        for key, rule in _NAMED.items():
            for place in (key, key.removeprefix("training.")):
                if isinstance(node := OmegaConf.select(loaded, place), ListConfig):
                    return ConfigError(
                        key, f"must be {rule}{origin}", OmegaConf.to_container(node)
                    )
    return None


def _of_key(
    error: errors.OmegaConfBaseException,
    origin: str,
    overrides: Sequence[str],
    folders: Sequence[str],
) -> ConfigError:
    """Return the refusal of an error in which OmegaConf names the key and its node."""
    key = str(error.full_key)
    if isinstance(error, errors.ConfigKeyError | errors.ConfigAttributeError):
        parent, _, name = key.rpartition(".")
        # The schema's own nodes take no other keys.
        if (
            isinstance(error.parent_node, DictConfig)
            and OmegaConf.get_type(error.parent_node) is dict
        ):
            origin += f"; a new one is added with +{key}=VALUE"
        siblings = [
            str(sibling)
            for sibling in error.parent_node
            if parent or sibling != "hydra"
        ]
        if key in former_names.KEYS:
            now = former_names.KEYS[key]
            return ConfigError(key, f"must be written as {now}, its name now{origin}")
        if not parent:
            siblings = sorted({*siblings, *groups(folders)})
        return ConfigError(
            key, f"must be a key of {parent or 'the config'}{origin}", name, siblings
        )
    if isinstance(error, errors.ValidationError):
        rule, choices = _type_of(error)
        return ConfigError(
            key, f"must be {_NAMED.get(key, rule)}{origin}", error.value, choices
        )
    if isinstance(error, errors.ConfigTypeError) and "Cannot merge" in str(
        error
    ):  # which value, it does not say
        for given, _, value in (
            override.lstrip("+").partition("=") for override in overrides
        ):
            if given == key in _NAMED:
                return ConfigError(key, f"must be {_NAMED[key]}", value)
        return ConfigError(
            key,
            f"must be {'a list' if error.object_type is list else 'a mapping'}{origin}",
        )
    if isinstance(
        error, errors.KeyValidationError
    ):  # YAML reads `off`, `on`, `yes` and `no` without quotes as no text
        return ConfigError(
            key.rpartition(".")[0] or key,
            f"must have text for its keys{origin}",
            error.key,
        )
    otherwise = (
        "must have a value"
        if isinstance(error, errors.InterpolationResolutionError)
        else "must be valid"
    )
    rule, value = _LINKS.get(type(error), f"{otherwise} ({_cause(error)})"), error.value
    if isinstance(
        error.parent_node, DictConfig
    ):  # as it was written, with its interpolation
        written: Any = OmegaConf.to_container(error.parent_node, resolve=False)
        value = reduce(
            lambda node, name: node[name], str(error.key).split("."), written
        )
    return ConfigError(key, f"{rule}{origin}", value)


def _type_of(error: errors.ValidationError) -> tuple[str, list[str] | None]:
    """Return what the schema wants at the key of `error`, and the choices of an enumeration."""
    hint = (
        get_type_hints(error.object_type).get(error.key)
        if hasattr(error.object_type, "__annotations__")
        else None
    )
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    null = ", or null" if NoneType in kinds else ""
    (kind, *_) = [kind for kind in kinds if kind is not NoneType]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of its choices{null}", list(kind.__members__)
    if name := _KINDS.get(get_origin(kind) or kind):
        return name + null, None
    return (
        "a mapping" if hasattr(kind, "__annotations__") else f"valid ({_cause(error)})"
    ), None


def _from_text(
    error: Exception, overrides: Sequence[str], folders: Sequence[str]
) -> ConfigError:
    text = str(error)
    for pattern, rule in _TEXTS:
        if match := re.match(pattern, text):
            found = match.groupdict()
            key, _, value = found.get("override", found.get("key", "")).partition("=")
            named = next(
                (
                    override
                    for override in overrides
                    if override.lstrip("+~").split("=")[0] == key
                ),
                key,
            )
            options = re.findall(r"^\t(.+)$", text, re.MULTILINE) or None
            return ConfigError(key, rule + _origin(error), value or named, options)
    if "group override must be" in text:
        known = groups(folders)
        for override in OverridesParser.create().parse_overrides(list(overrides)):
            key, given = override.key_or_group, override.value()
            if key in known and not isinstance(given, str | list | dict):
                return ConfigError(
                    key, "must be the name of an option of its group", given, known[key]
                )
    rule = f"must be what Hydra takes ({first_line(error)})"
    file = _file(error, folders)
    return (
        ConfigError("arguments", rule, " ".join(overrides))
        if file is None
        else ConfigError(file, rule)
    )


def _file(error: Exception, folders: Sequence[str]) -> str | None:
    """Return the config file that raises `error` when it is read; Hydra names none. None where no file does."""
    for file in (
        file
        for folder in folders
        for file in sorted(Path(folder).resolve().rglob("*.yaml"))
    ):
        try:
            OmegaConf.load(file)
        except Exception as own:
            if type(own) is type(error) and str(own) == str(error):
                return str(file)
    return None


def _origin(error: Exception) -> str:
    """Return ` (in FILE)` where Hydra says the file; empty for the command line and for `config.yaml`."""
    match = re.match(r"In '(.+?)'", str(error))
    return (
        ""
        if match is None or match[1] in ("config", "hydra/config")
        else f" (in {match[1]})"
    )


def _cause(error: errors.OmegaConfBaseException) -> str:
    return re.sub(
        r"^\w+ raised while resolving interpolation: ", "", first_line(error)
    ).strip("\"'")
