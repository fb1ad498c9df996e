"""`pipeline sweep NAME --again SWEEP`: reuses the recorded overrides of a sweep.

The overrides come from a tracking store and are not trusted. The user has to repeat
each override that could name code, a folder or a host on the command line.
"""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep, Transformer
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from pipeline.common.errors import ConfigError, first_line
from pipeline.common.secrets import HIDDEN, mask
from pipeline.config import former_names, key_kinds, plain, trust_entries
from pipeline.tracking.foreign_store import listed
from pipeline.trust.gate import Gate, check_config

RECORD = "sweep.overrides"  # tag of the parent run: the recorded overrides, as JSON
# Keys that are not recorded with a sweep: they set where one call of the command reads
# and writes, or which ports it opens.
_LOCATIONS = (
    "tracking",
    *key_kinds.keys_where(lambda facts: facts.of_one_call),
    *(
        "hydra.sweep.dir",
        "hydra.sweep.subdir",
        "hydra.run.dir",
        "hydra.mode",
        "hydra.searchpath",
    ),
)
_LOCAL = ("local", "submitit_local")
_CHOICES = {
    "hydra/launcher": (*_LOCAL, "submitit_slurm", "basic"),
    "hydra/sweeper": ("basic", "search"),
}
_SWEEPER_KEYS = "trials|at_once|seed"
_LAUNCHER_KEYS = (
    "account|array_parallelism|constraint|cpus_per_gpu|cpus_per_task|exclude"
    "|gpus_per_node|gpus_per_task|gres|mem_gb|mem_per_cpu|mem_per_gpu|nodes|partition"
    "|qos|timeout_min"
)
_HYDRA_KEYS = re.compile(
    rf"hydra\.(sweeper\.({_SWEEPER_KEYS})|launcher\.({_LAUNCHER_KEYS}))"
)
# For each launcher, a pattern of the parameters that it lacks. They are dropped, since
# the recorded sweep may have used another launcher.
_FOREIGN_PARAMETERS = {
    **dict.fromkeys(_LOCAL, r"hydra\.launcher\.(?!timeout_min=)"),
    "basic": r"hydra\.launcher\.",
}
_PLAIN = re.compile(r"[\w.,:\-]+", re.ASCII)  # safe in a line of a batch script
_SWEEPER_PARAMS = "hydra.sweeper.params."
_NEVER = ("hydra", "trust", "defaults")
# Matches the keys that select a dataset of TFDS, also of a further validation set.
_DOWNLOADING = re.compile(r"dataset\.(validations\.\w+\.)?(name|builder|download)")
_MAX_VALUES = 10_000  # maximum number of values of one swept override

_OWN_CONFIG = "must come from your own config, not from a tracking store"


def recordable(overrides: Iterable[str]) -> list[str]:
    """Return the overrides that define a sweep, with secrets masked.

    Overrides of the keys in `_LOCATIONS` are left out.
    """
    return [mask(text) for text in overrides if _key(text) not in _LOCATIONS]


def updated_record(tags: Mapping[str, str], overrides: Iterable[str]) -> list[str]:
    """Return the overrides to record when a sweep is reopened.

    A later override of a key takes the place of an earlier one, as in the names of the
    jobs. Trust entries are not added, since a record is not trusted.

    Args:
        tags: the tags of the sweep's parent run.
        overrides: the overrides with which the sweep is reopened.
    """
    added = [text for text in overrides if not _key(text).startswith("trust.")]
    text_by_key = {}
    for text in recordable([*listed(tags, RECORD), *added]):
        text_by_key[text.split("=")[0]] = text
    return list(text_by_key.values())


def unrecorded(overrides: Iterable[str]) -> list[str]:
    """Return the overrides that are not recorded with a sweep."""
    return [text for text in overrides if not recordable([text])]


def to_repeat(overrides: Sequence[str], config: DictConfig) -> list[str]:
    """Return the overrides of a sweep that its command with `--again` must repeat.

    These are the ones that are not recorded, or all of them if the record is not
    trusted.

    Args:
        overrides: the overrides with which the sweep began.
        config: the user's config, with the overrides that are not recorded.
    """
    recorded = recordable(overrides)
    others = unrecorded(overrides)
    try:
        tags = {RECORD: json.dumps(recorded)}
        trusted_overrides(tags, others, config)
    except ConfigError:
        return list(overrides)
    return others


def trusted_overrides(
    tags: Mapping[str, str], command_line: Sequence[str], config: DictConfig
) -> list[str]:
    """Return the recorded overrides to apply again, after checking that they are safe.

    Overrides that the command line repeats, and parameters that the chosen launcher
    lacks, are left out.

    Args:
        tags: the tags of the sweep's parent run.
        command_line: the user's overrides. A recorded override that is repeated here is
            trusted.
        config: the user's config.

    Raises:
        ConfigError: a recorded override is malformed, holds a masked secret, names a
            removed key, or could name code, a folder or a host or start a download.
    """
    recorded = _recorded_overrides(tags, command_line)
    try:
        values = _checked_values(recorded)
        data_dir = OmegaConf.select(config, "dataset.data_dir")
        if data_dir:
            data_dir = Path(data_dir).absolute()
        names = trust_entries.allowed_names(config.trust.allow)
        imports = "_target_" in str(values)
        gate = Gate(Path.cwd(), data_dir, names)
        check_config(former_names.renamed(values), gate, imports=imports)
    except ConfigError as error:
        cause = str(error).rstrip(".")
        rule = (
            "must be given again on the command line, since the store is not trusted "
            f"({cause})"
        )
        raise ConfigError("a recorded override", rule) from error
    return _without_foreign_parameters(recorded, command_line)


def in_recorded_order(
    tags: Mapping[str, str], trusted: Sequence[str], command_line: Sequence[str]
) -> list[str]:
    """Return the overrides of a sweep with `--again`, ordered as in its record.

    The name of a job lists its values in the order of the overrides, and has to be the
    same as before. So an override that the command line repeats stands where the record
    has it. The other overrides of the command line come last, and so take precedence.

    Args:
        tags: the tags of the sweep's parent run.
        trusted: the overrides that `trusted_overrides` returns.
        command_line: the user's overrides.
    """
    own_text = {mask(text): text for text in command_line}
    ordered = []
    for text in listed(tags, RECORD):
        if text in trusted:
            ordered.append(text)
        elif mask(text) in own_text:
            ordered.append(own_text.pop(mask(text)))
    return [*ordered, *own_text.values()]


def _recorded_overrides(
    tags: Mapping[str, str], command_line: Sequence[str]
) -> list[str]:
    """Return the recorded overrides that the command line does not repeat."""
    repeated = {mask(text) for text in command_line}
    # Drop `tracking=…` from older records: the current command line selects the store.
    recorded = []
    for text in listed(tags, RECORD):
        if mask(text) not in repeated and _key(text) != "tracking":
            recorded.append(text)
    return former_names.without_removed(recorded)


def _without_foreign_parameters(
    recorded: Sequence[str], command_line: Sequence[str]
) -> list[str]:
    """Return `recorded` without parameters that the chosen launcher lacks."""
    launcher = ""
    for text in (*recorded, *command_line):
        if _key(text) == "hydra/launcher":
            launcher = text.partition("=")[2]

    foreign = _FOREIGN_PARAMETERS.get(launcher)
    if foreign is None:
        return list(recorded)
    return [text for text in recorded if not re.match(foreign, text.lstrip("+"))]


@dataclass(frozen=True)
class _RecordedOverride:
    """An override of a sweep's record.

    Attributes:
        text: the override as it was recorded.
        parsed: the override as Hydra parses it.
        alternatives: all values that it may set; see `_alternatives`.
    """

    text: str
    parsed: Override
    alternatives: list[Any]

    @property
    def key(self) -> str:
        return self.parsed.key_or_group

    @property
    def value_text(self) -> str:
        return self.text.partition("=")[2]


def _checked_values(overrides: Sequence[str]) -> dict[str, Any]:
    """Check overrides, and return the values that they set, nested as in a config.

    The value of a swept key is the list of its alternatives. An override of
    `hydra.sweeper.params.KEY` sets KEY. Overrides of other keys of Hydra, and overrides
    that delete a key, are checked but set nothing.

    Raises:
        ConfigError: an override is malformed, holds a masked secret, or sets a key that
            must not come from a store.
    """
    values: dict[str, Any] = {}
    for text in overrides:
        override = _parse(text)
        if _is_sweeper_param(override.key):
            override = _parse(_without_sweeper_prefix(override))

        if override.key in _CHOICES or _HYDRA_KEYS.fullmatch(override.key):
            _check_hydra_value(override.key, override.value_text)
            continue

        path = override.key.replace("/", ".")
        _check_config_value(override, path)
        if override.parsed.is_delete():
            continue
        value: Any = override.alternatives
        if not override.parsed.is_sweep_override():
            value = override.alternatives[0]
        _place(values, path.split("."), value)
    return values


def _parse(text: str) -> _RecordedOverride:
    """Parse an override.

    Raises:
        ConfigError: the override is malformed, or holds a masked secret.
    """
    try:
        parsed = OverridesParser.create().parse_override(text)
        alternatives = _alternatives(parsed)
    except (HydraException, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            "override", f"must follow Hydra's grammar ({first_line(error)})", str(text)
        ) from None
    if HIDDEN in text:
        rule = "was a secret and is not in the record"
        raise ConfigError(parsed.key_or_group, rule, text)
    return _RecordedOverride(text, parsed, alternatives)


def _is_sweeper_param(key: str) -> bool:
    """Return whether a key has the prefix `hydra.sweeper.params.` exactly once."""
    return key.startswith(_SWEEPER_PARAMS) and not key.startswith(2 * _SWEEPER_PARAMS)


def _without_sweeper_prefix(override: _RecordedOverride) -> str:
    """Return `KEY=VALUE` for an override of `hydra.sweeper.params.KEY`."""
    value: Any = override.value_text
    if not override.parsed.is_sweep_override():
        value = override.parsed.value()  # Hydra unquotes a quoted value
    return f"{override.key.removeprefix(_SWEEPER_PARAMS)}={value}"


def _check_hydra_value(key: str, value: str) -> None:
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            rule = "must be an option of this package"
            raise ConfigError(key, rule, value, _CHOICES[key])
    elif not _PLAIN.fullmatch(value):
        raise ConfigError(key, "must be a plain word or number", value)


def _check_config_value(override: _RecordedOverride, path: str) -> None:
    """Reject an override of a config key that must not come from a store.

    Args:
        override: the override.
        path: its key in the form `section.key`.
    """
    section = re.split(r"[./]", override.key)[0]
    if override.parsed.package is not None or section in (*_NEVER, ""):
        raise ConfigError(override.key, _OWN_CONFIG, override.text)
    for alternative in override.alternatives:
        _check_leaves(plain.leaves(alternative, path), override.text)


def _check_leaves(leaves: Mapping[str, Any], text: str) -> None:
    """Reject values that could make a job access a file or a host.

    The gate accepts these values by themselves. In combination with the user's own
    config, they could open ports, start a download or write a file.
    """
    for key, value in leaves.items():
        if key in _LOCATIONS:
            raise ConfigError(key, _OWN_CONFIG, text)
        if key == "hardware":  # the user's own `hardware` groups may open ports
            raise ConfigError(key, "may open ports of this machine", text)
        if _DOWNLOADING.fullmatch(key) or "from_tfds" in str(value):
            raise ConfigError(key, "may start a download", text)
        # Skip the arguments of a `_target_`: the gate checks them.
        is_argument = f"{key.rpartition('.')[0]}._target_" in leaves
        if key.startswith("training.callbacks") and not is_argument:
            if _has_text(value):
                raise ConfigError(key, "may name a file that is written", text)


def _has_text(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(entry, str) for entry in value)
    return isinstance(value, str)


def _alternatives(override: Override) -> list[Any]:
    """Return all values that an override may set; `[None]` for an interval."""
    if not override.is_sweep_override():
        return [override.value()]
    if override.is_interval_sweep():
        return [None]  # any number in the interval, which needs no check

    value = override.value()
    swept: Iterable[Any]
    if isinstance(value, RangeSweep):
        # Do not use Hydra's iterator: to shuffle a range, it first lists all values.
        swept = value.range()
    else:
        swept = override.sweep_iterator(transformer=Transformer.encode)
    texts = list(itertools.islice(swept, _MAX_VALUES + 1))
    if len(texts) > _MAX_VALUES:
        rule = f"must be swept over at most {_MAX_VALUES} values"
        raise ConfigError(override.key_or_group, rule)

    parser = OverridesParser.create()
    return [parser.parse_override(f"x={text}").value() for text in texts]


def _place(values: dict[str, Any], path: list[str], value: Any) -> None:
    """Set the value at a path of keys in nested dicts.

    If a config group is selected and one of its keys is also set, the selected option
    is stored under the key `choice` of the group's dict.
    """
    *parents, last = path
    for part in parents:
        if not isinstance(values.setdefault(part, {}), dict):
            values[part] = {"choice": values[part]}
        values = values[part]
    if isinstance(values.get(last), dict):
        values[last]["choice"] = value
    else:
        values[last] = value


def _key(text: str) -> str:
    return text.lstrip("+~").split("=")[0]
