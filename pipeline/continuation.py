"""Going on with a run: which changes of its config it bears, and which make it another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from pipeline import config as configuration
from pipeline.errors import ConfigError, first_line
from pipeline.masking import mask, masked
from pipeline.sizes import EFFECTIVE, HORIZONS, Batching
from pipeline.tracking.journal_file import Past, absolute

_TRAINING = ("loss", "loss_weights", "class_weight", "metrics", "weighted_metrics")
# What makes a run what it is; the effective batch, which several keys give, is checked by its size.
_SAME = (
    *("dataset", "model", "optimizer", "schedule", "scaling", "seed", "schema", "hardware.precision"),
    *(f"training.{name}" for name in _TRAINING),
)
_FREE = (
    *("dataset.data_dir", "dataset.download", "tracking", "trust", "training.resume", "training.checkpoint_every"),
    *("hardware.parallel_jobs", "hardware.gpus_per_job"),
)
_SIZES = ("accumulation.effective_batch_size", "accumulation.factor", "accumulation.micro_batch_size")


def recorded_config(run_dir: Path, key: str) -> dict[str, Any]:
    """Return the resolved config that the run in `run_dir` began with.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is no mapping")
    except (OSError, ValueError, yaml.YAMLError) as error:
        rule = f"must have a config.yaml that can be read ({first_line(error)})"
        raise ConfigError(key, rule, str(run_dir)) from error
    return config


def changes(recorded: dict[str, Any], config: DictConfig, cut: Batching, past: Past) -> list[str]:
    """Return a line for each change that a run bears.

    Args:
        recorded: what the run began with.
        config: what it is to go on with, checked.
        cut: how its effective batch is cut.
        past: of the run.

    Raises:
        ConfigError: a change makes it another run, or the store is another one.
    """
    uri, first = config.tracking.uri, past.start["segment"]["cut"]["effective_batch_size"]
    if past.run and mask(absolute(uri)) != past.start["store"]:
        raise ConfigError("tracking.uri", f"must be the store of the run, {past.start['store']}", uri)
    if cut.effective_batch_size != first:
        raise ConfigError(EFFECTIVE, f"must be that of the run, {first}", cut.effective_batch_size)
    then, now = configuration.leaves(recorded), configuration.leaves(masked(configuration.plain(config)))
    found = []
    for key in [*then, *(key for key in now if key not in then)]:
        old, new = then.get(key), now.get(key)
        if old == new or _in(key, _FREE):
            continue
        if _in(key, _SAME):
            raise ConfigError(key, f"must be that of the run, {old!r}", new)
        found.append(f"{key} {new} (was {old})")
    return found


def is_longer(recorded: dict[str, Any], config: DictConfig) -> bool:
    """Return whether the horizon is another one than the run began with."""
    return any(recorded["training"].get(name) != config.training[name] for name in HORIZONS)


def _in(key: str, names: tuple[str, ...]) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in names)
