"""Composes configs for tests that are not about composing."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from pipeline.config.compose import composed
from pipeline.config.resolve import RunSpec, resolve


def config_of(*overrides: str) -> DictConfig:
    """Return the config of these overrides, on one that is composed once a process.

    To compose it takes most of the time, so only what chooses or removes is composed.
    """
    groups = []
    values = []
    for override in overrides:
        key = override.partition("=")[0]
        if "." not in key or key.startswith("~"):
            groups.append(override)
        else:
            values.append(override)

    config = deepcopy(_with_groups(*groups))
    for override in OverridesParser.create().parse_overrides(values):
        OmegaConf.update(
            config,
            override.key_or_group,
            override.value(),
            merge=False,
            force_add=True,
        )
    return config


@cache
def _with_groups(*groups: str) -> DictConfig:
    return composed(groups)


def spec_of(overrides: Sequence[str]) -> RunSpec:
    """Return what the config of these overrides is resolved to.

    The environment names no workers.
    """
    return resolve(config_of(*overrides), list(overrides), {})
