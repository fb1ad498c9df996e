"""The keys whose value maps names to nodes, such as `training.callbacks`."""

import shlex
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from pipeline.common.errors import ConfigError
from pipeline.config.overrides import keys_set, values_at

KEYS = (
    "training.metrics",
    "training.weighted_metrics",
    "training.callbacks",
    "training.shown",
)


def rule(key: str) -> str:
    """Return the rule for the value of one of `KEYS`, to follow `must be`."""
    return f"a mapping of name → _target_; {removal(key)}"


def removal(key: str) -> str:
    """Return in words how an entry of one of `KEYS` is removed."""
    return f"'~{key}.NAME' removes an entry"


def check_emptied(config: DictConfig, overrides: Sequence[str]) -> None:
    """Reject an override such as `training.callbacks={}` that removes no entry.

    Hydra merges `{}` with the value of the config. Entries that other overrides set do
    not count.

    Args:
        config: the composed config.
        overrides: the overrides on the command line.
    """
    mappings = [override for override in overrides if "{" in override]
    for key in KEYS:
        if {} not in values_at(mappings, key):
            continue
        parts = [f"{name}." for name in keys_set(overrides)]
        remaining = []
        for name in OmegaConf.select(config, key):
            entry = f"{key}.{name}"
            if not any(part.startswith(f"{entry}.") for part in parts):
                remaining.append(f"~{entry}")
        if remaining:
            reason = (
                "must have its entries removed one by one, because {} is merged with "
                f"them: {shlex.join(remaining)}"
            )
            raise ConfigError(key, reason, {})
