"""What is missing of a sweep, run again: by whom it may be, and with which of the overrides that its record holds.

A record comes out of a tracking store, so of its overrides only those are taken that can name no code, no folder and
no host; what else it holds has to be given again by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Transformer
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from pipeline.errors import ConfigError, first_line
from pipeline.masking import HIDDEN, mask
from pipeline.trust.gate import Gate, check_config

DEFAULT_STORE = "sqlite:///mlruns/mlflow.db"
MULTIRUN = "multirun"  # the name of a sweep that has no file
# Where one call of the command works, and nothing of the sweep.
_PLACES = ("tracking.uri", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.run.dir", "hydra.mode", "hydra.searchpath")
_CHOICES = {
    "hydra/launcher": ("local", "submitit_local", "submitit_slurm", "basic"),
    "hydra/sweeper": ("basic", "search"),
}
_OF_HYDRA = re.compile(
    r"hydra\.(sweeper\.(trials|at_once|seed)|launcher\.(account|array_parallelism|constraint|cpus_per_gpu|cpus_per_task"
    r"|exclude|gpus_per_node|gpus_per_task|gres|mem_gb|mem_per_cpu|mem_per_gpu|nodes|partition|qos|timeout_min))"
)
_PLAIN = re.compile(r"[\w.,:\-]+", re.ASCII)  # a line of a batch script is made of it
_SWEPT = "hydra.sweeper.params."
_NEVER = ("hydra", "trust", "defaults")


def command(name: str, run_id: str, uri: str) -> str:
    """What runs the rest of the sweep `run_id` in the store `uri`."""
    store = "" if uri == DEFAULT_STORE else f" tracking.uri={mask(uri)}"
    if name == MULTIRUN:
        return f"pipeline train -m … tracking.sweep={run_id}{store}"
    return f"pipeline sweep {name} --again {run_id}{store}"


def recordable(overrides: Iterable[str]) -> list[str]:
    """Those of a command line's `overrides` that make the sweep what it is, without secrets."""
    return [mask(text) for text in overrides if _key(text) not in _PLACES]


def replayed(tags: Mapping[str, str], given: Sequence[str], own: DictConfig) -> list[str]:
    """The recorded overrides of a sweep, each of them harmless, or given again.

    Args:
        tags: of the sweep's parent run.
        given: the command line's overrides.
        own: the user's own config.

    Raises:
        ConfigError: one of them could name code, a file or a host, or was a secret, and is not among `given`.
    """
    again = {mask(text) for text in given}
    recorded = [text for text in json.loads(tags.get("sweep.overrides", "[]")) if text not in again]
    values: dict[str, Any] = {}
    try:
        for text in recorded:
            for key, value in _values(text):
                _put(values, key.split("."), value)
        data_dir = OmegaConf.select(own, "dataset.data_dir")
        gate = Gate(Path.cwd(), data_dir and Path(data_dir).absolute(), list(own.trust.allow))
        check_config(values, gate, imports="_target_" in str(values))
    except ConfigError as error:
        rule = "come from the store, and this one must be given again on the command line"
        raise ConfigError("the sweep's overrides", f"{rule} ({str(error).rstrip('.')})") from error
    return recorded


def _values(text: str) -> Iterator[tuple[str, Any]]:
    """Each key that `text` sets, with a list of the values that it is swept over; nothing for what is harmless."""
    try:
        override = OverridesParser.create().parse_override(text)
    except (HydraException, TypeError) as error:
        raise ConfigError("override", f"must be one of Hydra's ({first_line(error)})", str(text)) from None
    key, value = override.key_or_group, text.partition("=")[2]
    if HIDDEN in text:
        raise ConfigError(key, "was a secret and is not in the record", text)
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            raise ConfigError(key, "must be a choice of this package", value, _CHOICES[key])
    elif _OF_HYDRA.fullmatch(key):
        if not _PLAIN.fullmatch(value):
            raise ConfigError(key, "must be a plain word or number", value)
    elif key.startswith(_SWEPT):
        # Hydra takes a quoted value as the text in it.
        inner = value if override.is_sweep_override() else override.value()
        yield from _values(f"{key.removeprefix(_SWEPT)}={inner}")
    elif override.package is not None or re.split(r"[./]", key)[0] in (*_NEVER, ""):
        raise ConfigError(key, "must be of your own config, not of one from a tracking store", text)
    elif not override.is_delete():
        yield key.replace("/", "."), _alternatives(override)


def _alternatives(override: Override) -> Any:
    if not override.is_sweep_override():
        return override.value()
    if override.is_interval_sweep():
        return None  # between two numbers
    parse = OverridesParser.create().parse_override
    return [parse(f"x={text}").value() for text in override.sweep_iterator(transformer=Transformer.encode)]


def _put(values: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for part in parents:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):  # a group's choice, of which a key follows
            inner = values[part] = {"choice": inner}
        values = inner
    if isinstance(values.get(last), dict):
        values[last]["choice"] = value
    else:
        values[last] = value


def _key(text: str) -> str:
    return text.lstrip("+~").split("=")[0]
