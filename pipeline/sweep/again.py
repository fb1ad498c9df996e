"""`pipeline sweep NAME --again SWEEP`: which recorded overrides of a sweep are used to run its missing jobs.

They come from a tracking store, so the user has to pass one again that could name code, a folder or a host.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep, Transformer
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from pipeline.common.errors import ConfigError, first_line
from pipeline.common.secrets import HIDDEN, mask
from pipeline.config import allow_list, former_names, key_kinds, plain
from pipeline.tracking.foreign_store import listed
from pipeline.trust.gate import Gate, check_config

# Where one call of the command reads and writes, and what it opens; not part of the sweep.
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
_HYDRA_KEYS = re.compile(
    r"hydra\.(sweeper\.(trials|at_once|seed)|launcher\.(account|array_parallelism|constraint|cpus_per_gpu|cpus_per_task"
    r"|exclude|gpus_per_node|gpus_per_task|gres|mem_gb|mem_per_cpu|mem_per_gpu|nodes|partition|qos|timeout_min))"
)
# Parameters of other launchers: the sweep may have run on another one before.
_FOREIGN_PARAMETERS = {
    **dict.fromkeys(_LOCAL, r"hydra\.launcher\.(?!timeout_min=)"),
    "basic": r"hydra\.launcher\.",
}
_PLAIN = re.compile(r"[\w.,:\-]+", re.ASCII)  # safe in a line of a batch script
_SWEPT = "hydra.sweeper.params."
_NEVER = ("hydra", "trust", "defaults")
_DOWNLOADING = (
    "dataset.name",
    "dataset.builder",
    "dataset.download",
)  # these may start a download
_MAX_VALUES = 10_000  # that one override may be swept over


def recordable(overrides: Iterable[str]) -> list[str]:
    """Return the command line's `overrides` that define the sweep, with secrets masked."""
    return [mask(text) for text in overrides if _key(text) not in _LOCATIONS]


def trusted_overrides(
    tags: Mapping[str, str], given: Sequence[str], own: DictConfig
) -> list[str]:
    """Return the overrides in the parent's `tags` that are not `given`, once all passed the gate; `own` is trusted."""
    ours = {mask(text) for text in given}
    # Older records hold `tracking=server`; this call says where the store is.
    recorded = [
        text
        for text in listed(tags, "sweep.overrides")
        if mask(text) not in ours and _key(text) != "tracking"
    ]
    values: dict[str, Any] = {}
    try:
        for key, value in itertools.chain.from_iterable(map(_values, recorded)):
            _put(values, key.split("."), value)
        data_dir = OmegaConf.select(own, "dataset.data_dir")
        gate = Gate(
            Path.cwd(),
            data_dir and Path(data_dir).absolute(),
            allow_list.allowed_names(own.trust.allow),
        )
        check_config(
            former_names.renamed(values), gate, imports="_target_" in str(values)
        )
    except ConfigError as error:
        rule = (
            "come from the store, and this one must be given again on the command line"
        )
        raise ConfigError(
            "the sweep's overrides", f"{rule} ({str(error).rstrip('.')})"
        ) from error
    launchers = [
        text.partition("=")[2]
        for text in (*recorded, *given)
        if _key(text) == "hydra/launcher"
    ]
    unknown = _FOREIGN_PARAMETERS.get(launchers[-1]) if launchers else None
    return [
        text
        for text in recorded
        if unknown is None or not re.match(unknown, text.lstrip("+"))
    ]


def _values(text: str) -> Iterator[tuple[str, Any]]:
    """Yield each key that `text` sets with its value, or a list if it is swept; Hydra's are checked here instead."""
    try:
        override = OverridesParser.create().parse_override(text)
        alternatives = _alternatives(override)
    except (HydraException, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            "override", f"must be one of Hydra's ({first_line(error)})", str(text)
        ) from None
    key, value = override.key_or_group, text.partition("=")[2]
    if HIDDEN in text:
        raise ConfigError(key, "was a secret and is not in the record", text)
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            raise ConfigError(
                key, "must be a choice of this package", value, _CHOICES[key]
            )
    elif _HYDRA_KEYS.fullmatch(key):
        if not _PLAIN.fullmatch(value):
            raise ConfigError(key, "must be a plain word or number", value)
    elif key.startswith(_SWEPT) and not key.startswith(2 * _SWEPT):
        # Hydra unquotes a quoted value.
        inner = value if override.is_sweep_override() else override.value()
        yield from _values(f"{key.removeprefix(_SWEPT)}={inner}")
    elif override.package is not None or re.split(r"[./]", key)[0] in (*_NEVER, ""):
        raise ConfigError(
            key, "must be of your own config, not of one from a tracking store", text
        )
    else:
        for alternative in alternatives:
            _check_leaves(plain.leaves(alternative, key.replace("/", ".")), text)
        if not override.is_delete():
            yield (
                key.replace("/", "."),
                alternatives if override.is_sweep_override() else alternatives[0],
            )


def _check_leaves(leaves: Mapping[str, Any], text: str) -> None:
    """Refuse values that pass the gate, but may reach a file or a host together with the user's own config."""
    for key, value in leaves.items():
        if key in _LOCATIONS:
            raise ConfigError(
                key,
                "must be of your own config, not of one from a tracking store",
                text,
            )
        if key == "hardware":  # a group of the user's own may open ports too
            raise ConfigError(key, "may open ports of this machine", text)
        if key in _DOWNLOADING or "from_tfds" in str(value):
            raise ConfigError(key, "may start a download", text)
        known = (
            f"{key.rpartition('.')[0]}._target_" in leaves
        )  # the gate checks its arguments
        entries = value if isinstance(value, list) else [value]
        if (
            key.startswith("training.callbacks")
            and not known
            and any(isinstance(entry, str) for entry in entries)
        ):
            raise ConfigError(key, "may name a file that is written", text)


def _alternatives(override: Override) -> list[Any]:
    if not override.is_sweep_override():
        return [override.value()]
    if override.is_interval_sweep():
        return [None]  # a number between two others
    value = override.value()
    # Hydra's own iterator lists a whole range before it shuffles it.
    swept = (
        value.range()
        if isinstance(value, RangeSweep)
        else override.sweep_iterator(transformer=Transformer.encode)
    )
    texts = list(itertools.islice(swept, _MAX_VALUES + 1))
    if len(texts) > _MAX_VALUES:
        raise ConfigError(
            override.key_or_group, f"must be swept over at most {_MAX_VALUES} values"
        )
    parse = OverridesParser.create().parse_override
    return [parse(f"x={text}").value() for text in texts]


def _put(values: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for part in parents:
        if not isinstance(
            values.setdefault(part, {}), dict
        ):  # the choice of a config group that also has a key set
            values[part] = {"choice": values[part]}
        values = values[part]
    if isinstance(values.get(last), dict):
        values, last = values[last], "choice"
    values[last] = value


def _key(text: str) -> str:
    return text.lstrip("+~").split("=")[0]
