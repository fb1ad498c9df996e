"""Converts errors of Hydra and OmegaConf to a `ConfigError` with a one-line message."""

import linecache
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf, errors

from pipeline.common.errors import ConfigError, first_line
from pipeline.config import former_names, named_nodes, schema, suggestions
from pipeline.config.overrides import keys_set, values_at

# Rules for keys whose value is a mapping. Users may write a list, since Keras accepts
# lists of metrics and callbacks in `compile` and `fit`.
_NAMED = {key: named_nodes.rule(key) for key in named_nodes.KEYS}
# Keys that may be null or a group of keys.
_NULLABLE_GROUPS = {
    key.name.rpartition(".")[0]
    for key in schema.keys_in(schema.Config)
    if key.name.count(".") > 1
}
# Names, with a dot, of the keys whose value may be of any type. Each is also the prefix
# of the keys below that key.
_BELOW_ANY_TYPE = tuple(
    f"{key.name}." for key in schema.keys_in(schema.Config) if key.hint is Any
)
_LISTED_LOSS = (
    "a mapping, like the value that it is merged with; to replace that value, use a "
    "file of `objective`"
)
_CLASS_WEIGHT = "training.class_weight"
_ONE_WEIGHT = f"must be the weight of a class, by its index, as in {_CLASS_WEIGHT}.1=5"
_KINDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping",
    list: "a list",
}

# Errors of Hydra that can be recognized only by their text: a pattern, whose named
# group matches the override or the key, and the rule for the `ConfigError`.
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
        r"Could not delete from config\. '(?P<key>training\.class_weight\.\d+)' does",
        "must be set to 1, which has no effect, as Hydra cannot delete a number",
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
        r"(In '.+': )?Could not override '(?P<key>[^'@]+@experiment\.[^']+?)'\.",
        "must be a group of the defaults list; the first line of an experiment's file "
        "must be # @package _global_",
    ),
    (
        r"(In '.+': )?Could not override '(?P<key>.+?)'\.",
        "must be a group of the defaults list",
    ),
    (r"You must specify '(?P<key>.+?)'", "must be given"),
    (r"(?P<key>hydra\.searchpath) must be", "must be a list of folders"),
    (
        r"force-add of config groups is not supported: '(?P<override>.+)'",
        "must be added with a single +",
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
def translated(
    overrides: Sequence[str] = (),
    folders: Sequence[str] = (),
    kinds: tuple[type[Exception], ...] = COMPOSITION,
) -> Iterator[None]:
    """Raise a `ConfigError` in place of errors of Hydra and OmegaConf in the block.

    Args:
        overrides: overrides on the command line, so that the error can quote one.
        folders: config folders, so that the error can name a file.
        kinds: the types of errors to convert.
    """
    try:
        yield
    except ConfigError:
        raise
    except kinds as error:
        rejection = _config_error(error, overrides, folders)
        removal = former_names.removal(rejection.key)
        if removal is not None:
            raise removal from error
        raise rejection from error


def groups(folders: Sequence[str]) -> dict[str, list[str]]:
    """Return the options of each config group in `folders`."""
    files = set()
    for folder in folders:
        for file in Path(folder).glob("*/*.yaml"):
            files.add((file.parent.name, file.stem))
    options_by_group: dict[str, list[str]] = {}
    for group, option in sorted(files):
        options_by_group.setdefault(group, []).append(option)
    return options_by_group


def _config_error(
    error: Exception, overrides: Sequence[str], folders: Sequence[str]
) -> ConfigError:
    """Convert an error of Hydra or OmegaConf to a `ConfigError`."""
    if isinstance(error, OverrideParseException):
        return _grammar_error(error)
    if isinstance(error, MissingConfigException):
        return _missing_config_error(error, folders)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        line = mark.line + 1
        received = linecache.getline(mark.name, line).strip()
        return ConfigError(
            f"{mark.name}:{line}", f"must be YAML ({error.problem})", received
        )

    # Search the chain of causes: Hydra's errors are raised from those of OmegaConf,
    # which name the key.
    origin = _origin(error)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, errors.OmegaConfBaseException) and cause.full_key:
            return _key_error(cause, origin, overrides, folders)
        cause = cause.__cause__ or cause.__context__

    if "ConfigTypeError" in str(error):
        list_error = _list_error(origin, folders)
        if list_error is not None:
            return list_error
    return _text_error(error, overrides, folders)


def _grammar_error(error: OverrideParseException) -> ConfigError:
    """Return the error for an override that does not follow Hydra's grammar."""
    override = error.override
    key = re.split("[=@]", override.lstrip("+~"))[0]
    if "=" not in override:
        return ConfigError(key, "must be given as KEY=VALUE", override)
    rule = f"must follow Hydra's grammar ({first_line(error)})"
    value = override.partition("=")[2]
    if re.fullmatch(r"\w[^'\"]*\[[^'\"]*\]", value):
        rule += f"; quote text that has brackets: '{key}=\"{value}\"'"
    return ConfigError(key, rule, override)


def _missing_config_error(
    error: MissingConfigException, folders: Sequence[str]
) -> ConfigError:
    """Return the error for a config, or an option of a group, that does not exist."""
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if error.options is not None:
        rule = "must name one of the options of this group"
        removal = former_names.removal(group, name)
        if removal is not None:
            return removal
        return ConfigError(group, rule, name, error.options)
    rule = "must be a config that exists"
    if group or _origin(error):
        if _origin(error):
            rule += f" (named in {_origin(error)})"
        return ConfigError(group or "--config-name", rule, name)
    rule += " in ./conf or in the folder of --config-dir"
    file = f"{name.removesuffix('.yaml')}.yaml"
    if Path(file).is_file():
        rule += f" (./{file} is not searched)"
    names: set[str] = set()
    for folder in folders:
        names.update(path.stem for path in Path(folder).glob("*.yaml"))
    return ConfigError("--config-name", rule, name, sorted(names) or None)


def _list_error(origin: str, folders: Sequence[str]) -> ConfigError | None:
    """Return the error for a list where a mapping is required.

    The list is in the config that `origin` names. Return None if its file is not found
    or has no such list.
    """
    for folder in folders:
        file = Path(folder) / f"{origin}.yaml"
        if not file.is_file():
            continue
        loaded = OmegaConf.load(file)
        for key, rule in {**_NAMED, "training.loss": _LISTED_LOSS}.items():
            for place in (key, key.removeprefix("training.")):
                node = OmegaConf.select(loaded, place)
                if isinstance(node, ListConfig):
                    received = OmegaConf.to_container(node)
                    rule = f"must be {rule}{_in_file(origin)}"
                    return ConfigError(key, rule, received)
    return None


def _key_error(
    error: errors.OmegaConfBaseException,
    origin: str,
    overrides: Sequence[str],
    folders: Sequence[str],
) -> ConfigError:
    """Convert an error of OmegaConf that names the key."""
    key = str(error.full_key)
    if isinstance(error, errors.ConfigKeyError | errors.ConfigAttributeError):
        return _unknown_key_error(error, key, origin, overrides, folders)
    if isinstance(error, errors.ValidationError):
        rule, choices = _type_of(error)
        rule = f"must be {_NAMED.get(key, rule)}{_in_file(origin)}"
        removal = former_names.removal(key, error.value)
        if removal is not None:
            return removal
        return ConfigError(key, rule, error.value, choices)
    if isinstance(error, errors.ConfigTypeError) and "Cannot merge" in str(error):
        return _merge_error(error, key, origin, overrides)
    if "does not support deletion" in str(error):
        rule = "must be given"
        if key in _NAMED:
            rule += f"; {named_nodes.removal(key)}"
        return ConfigError(key, rule)
    if isinstance(error, errors.KeyValidationError):
        # The key may be `off`, `on`, `yes` or `no`, which are Booleans in YAML unless
        # they are quoted.
        parent = key.rpartition(".")[0] or key
        rule = f"must have text as its keys{_in_file(origin)}"
        return ConfigError(parent, rule, error.key)

    rule = f"must be valid ({_cause(error)})"
    if isinstance(error, errors.InterpolationResolutionError):
        rule = f"must have a value ({_cause(error)})"
    rule = _LINKS.get(type(error), rule)
    return ConfigError(key, rule + _in_file(origin), _written_value(error))


def _written_value(error: errors.OmegaConfBaseException) -> Any:
    """Return the value that raised `error` as it was written, with its interpolation.

    If that value is not found, return the value in the error.
    """
    if not isinstance(error.parent_node, DictConfig | ListConfig):
        return error.value
    written: Any = OmegaConf.to_container(error.parent_node, resolve=False)
    # The key is a name, a number or a Boolean in the parent, or a dotted path from it.
    for path in ([error.key], str(error.key).split(".")):
        value = written
        try:
            for name in path:
                value = value[name]
        except (KeyError, IndexError, TypeError):
            continue
        return value
    return error.value


def _unknown_key_error(
    error: errors.OmegaConfBaseException,
    key: str,
    origin: str,
    overrides: Sequence[str],
    folders: Sequence[str],
) -> ConfigError:
    """Return the error for a key that the config does not have."""
    if key in former_names.KEYS:
        now = former_names.KEYS[key]
        rule = f"must be written as {now}, its current name{_in_file(origin)}"
        return ConfigError(key, rule)

    if key in groups(folders) and origin:
        # Without a package, the keys of a file belong to its group, which the config
        # does not have.
        rule = (
            f"must not be a key of the config{_in_file(origin)}: begin the file with "
            "the line `# @package KEY`, where KEY is the key below which its values "
            "belong, such as `# @package training.callbacks`"
        )
        return ConfigError(key, rule)

    parent, _, name = key.rpartition(".")
    node = error.parent_node
    siblings = [str(sibling) for sibling in node]
    if parent == _CLASS_WEIGHT:
        return ConfigError(key, _ONE_WEIGHT + _in_file(origin), name, siblings)
    rule = f"must be a key of {parent or 'the config'}{_in_file(origin)}"
    # Suggest `+` only for an untyped node: the nodes of the schema accept no new keys.
    if isinstance(node, DictConfig) and OmegaConf.get_type(node) is dict:
        rule += f"; a new one is added with +{key}=VALUE"
    if not parent:
        ours = {sibling for sibling in siblings if sibling != "hydra"}
        siblings = sorted({*ours, *groups(folders)})
        meant = _key_of_another_tool(name, overrides)
        if meant is not None:
            rule += "; docs/coming_from.md has the keys for those of other tools"
            rejection = ConfigError(key, rule, name, siblings)
            rejection.close = meant  # outranks a similar key
            return rejection
    similar = suggestions.key_elsewhere(name) or ""
    return ConfigError(key, rule, name, siblings, meant=similar)


def _key_of_another_tool(name: str, overrides: Sequence[str]) -> str | None:
    """Return the key for an override that is meant for another tool, or None.

    Args:
        name: the first part of the override's key, the only part that Hydra names:
            `trainer` of `trainer.max_epochs=3`.
        overrides: the overrides on the command line.
    """
    for override in overrides:
        for key in sorted(keys_set([override])):
            if key.partition(".")[0] == name:
                return suggestions.key_of_another_tool(key)
    return None


def _merge_error(
    error: errors.OmegaConfBaseException,
    key: str,
    origin: str,
    overrides: Sequence[str],
) -> ConfigError:
    """Return the error for a value that should be a mapping or a list."""
    wanted: type = dict
    other = "list"
    if error.object_type is list:
        wanted = list
        other = "mapping"
    rule = f"must be {_NAMED.get(key, _KINDS[wanted])}"
    if key not in _NAMED and f"{key}.".startswith(_BELOW_ANY_TYPE):
        rule += (
            f", like the value that it is merged with; to set a {other}, put "
            f"{key}=null before it"
        )

    # OmegaConf's error does not contain the value, so look for it in the overrides.
    for value in values_at(overrides, key):
        if not isinstance(value, wanted):
            return ConfigError(key, rule, value)
        if isinstance(value, dict) and value and not origin:
            # The wrong value is one of those in the mapping, and the error has no key.
            rule = (
                "must have mappings and lists in the same places as the value that it "
                "is merged with"
            )
            return ConfigError(key, rule, value)
    return ConfigError(key, rule + _in_file(origin))


def _type_of(error: errors.ValidationError) -> tuple[str, list[str] | None]:
    """Return the expected type in words, and the choices if the type is an enum."""
    hint = None
    if hasattr(error.object_type, "__annotations__"):
        hint = get_type_hints(error.object_type).get(error.key)
    kinds: tuple[Any, ...] = (hint,)
    if get_origin(hint) in (Union, UnionType):
        kinds = get_args(hint)
    or_null = ", or null" if NoneType in kinds else ""
    kind = next(kind for kind in kinds if kind is not NoneType)

    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of its choices{or_null}", list(kind.__members__)
    name = _KINDS.get(get_origin(kind) or kind)
    if name is not None:
        return name + or_null, None
    if is_dataclass(kind):
        names = [each.name for each in fields(kind)]
        null_or = "null, or " if or_null else ""
        return f"{null_or}a mapping with the keys {' and '.join(names)}", None
    return f"valid ({_cause(error)})", None


def _text_error(
    error: Exception, overrides: Sequence[str], folders: Sequence[str]
) -> ConfigError:
    """Convert an error that can be recognized only by its text."""
    text = str(error)
    for pattern, rule in _TEXTS:
        match = re.match(pattern, text)
        if match is not None:
            return _pattern_error(match, rule, error, overrides)
    if "group override must be" in text or isinstance(error, TypeError):
        group_error = _group_error(overrides, folders)
        if group_error is not None:
            return group_error
    if "Unexpected type for root" in text:
        below_null = _below_null_error(overrides)
        if below_null is not None:
            return below_null

    rule = f"cannot be read by Hydra ({first_line(error)})"
    file = _file(error, folders)
    if file is None:
        return ConfigError("arguments", rule, " ".join(overrides))
    return ConfigError(file, rule)


def _pattern_error(
    match: re.Match[str], rule: str, error: Exception, overrides: Sequence[str]
) -> ConfigError:
    """Return the error for a text that matches a pattern of `_TEXTS`."""
    subjects = match.groupdict()
    subject = subjects.get("override", subjects.get("key", ""))
    key, _, received = subject.partition("=")
    if not received:
        received = key
        for override in overrides:
            if override.lstrip("+~").partition("=")[0] == key:
                received = override
                break
    options = re.findall(r"^\t(.+)$", str(error), re.MULTILINE)
    rule += _in_file(_origin(error))
    return ConfigError(key, rule, received, options or None)


def _below_null_error(overrides: Sequence[str]) -> ConfigError | None:
    """Return the error if an override sets a key in a group that is null, else None."""
    for override in overrides:
        for key in keys_set([override]):
            group = key.rpartition(".")[0]
            if group in _NULLABLE_GROUPS:
                rule = f"must not be null if {override.lstrip('+')} sets a key in it"
                return ConfigError(group, rule)
    return None


def _group_error(
    overrides: Sequence[str], folders: Sequence[str]
) -> ConfigError | None:
    """Return the error for a config group whose value is not a name.

    Return None if no override sets a group to such a value.
    """
    known = groups(folders)
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        if key not in known or override.is_delete():
            continue
        value = override.value()
        names = [value]
        if isinstance(value, list):
            names = value
        if not all(isinstance(name, str | dict) for name in names):
            rule = "must name one of the options of this group"
            return ConfigError(key, rule, value, known[key])
    return None


def _file(error: Exception, folders: Sequence[str]) -> str | None:
    """Return the config file that raises `error` when it is read, or None.

    Hydra's error does not name the file, so the files in `folders` are read again until
    one of them raises the same error.
    """
    for folder in folders:
        for file in sorted(Path(folder).resolve().rglob("*.yaml")):
            try:
                OmegaConf.load(file)
            except Exception as raised:
                if type(raised) is type(error) and str(raised) == str(error):
                    return str(file)
    return None


def _origin(error: Exception) -> str:
    """Return the config that Hydra names as the origin of `error`.

    The result is empty if Hydra names no origin, or the main config.
    """
    match = re.match(r"In '(.+?)'", str(error))
    if match is None or match[1] in ("config", "hydra/config"):
        return ""
    return match[1]


def _in_file(origin: str) -> str:
    """Return the origin of an error in the form for its rule, if there is one."""
    if not origin:
        return ""
    return f" (in {origin})"


def _cause(error: errors.OmegaConfBaseException) -> str:
    """Return the first line of an error, without OmegaConf's prefix or outer quotes."""
    around = r"^\w+ raised while resolving interpolation: "
    return re.sub(around, "", first_line(error)).strip("\"'")
