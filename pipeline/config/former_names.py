"""Dotted names in configs and records of earlier versions: `pipeline.model.mlp` → `pipeline.components.model.mlp`."""

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pipeline.config.plain import mapped

MODULES = {  # of `pipeline`; `pipeline.dataset` is a room, whose door has what it had
    "augmentation": "dataset.augmentation",
    "compose": "config.compose",
    "datasets": "dataset.builtin",
    "metrics": "components.metrics",
    "model": "components.model",
    "optimizer": "components.optimizer",
}
_FREE_TEXT = (
    "tracking",
    "start",
)  # a run may be called as it likes, also `pipeline.model.v2`
_FORMER = re.compile(rf"pipeline\.({'|'.join(MODULES)})((?:\.\w+)*)", re.ASCII)


def current(name: str) -> str:
    """Return a dotted name as it is now; any other text as it is."""
    found = _FORMER.fullmatch(name)
    return f"pipeline.{MODULES[found[1]]}{found[2]}" if found else name


def renamed(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a plain config in which each value that is a former name is the current one."""
    return {
        key: value if key in _FREE_TEXT else mapped(value, current)
        for key, value in config.items()
    }


def rename(config: DictConfig) -> None:
    """Replace former names among the values of a composed config, in place."""
    plain: Any = OmegaConf.to_container(config, resolve=False)
    config.merge_with(
        {key: value for key, value in renamed(plain).items() if value != plain[key]}
    )
