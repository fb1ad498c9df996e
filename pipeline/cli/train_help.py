"""The text of `pipeline train --help`."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config import compose, hydra_errors, key_guide
from pipeline.config.plain import plain, value_at

_WIDTH = 88
_ALL_KEYS = """\
All keys:
  pipeline train --cfg job        print every key with its value, and train nothing
  docs/config_reference.md        every key with its type, default and meaning
  pipeline train --hydra-help     Hydra's own options"""


def text(arguments: Sequence[str]) -> str:
    """Return the help for the config that the arguments compose.

    The values of the keys are those of the config, so they show the effect of
    overrides.

    Args:
        arguments: the command line, without the verb and the options `--help` and `-m`.

    Raises:
        ConfigError: the config is wrong.
    """
    composition = compose.composition(arguments)
    values = _values(composition.config)
    first_keys = []
    for key in key_guide.FIRST_KEYS.keys:
        if not _has(values, key):
            continue
        # A group, such as `model`, is shown with its choice instead of its keys.
        value = composition.chosen.get(key) or _written(value_at(values, key))
        first_keys.append(f"  {key}={value}")
        description = key_guide.described(key, Path(compose.directory()))
        first_keys += _wrapped(_with_kind(description), 6)

    groups = []
    for group, choices in sorted(hydra_errors.groups(composition.folders).items()):
        if len(choices) > 1:
            groups += _wrapped(f"{group}: {', '.join(choices)}", 2)
    sections = [
        "usage: pipeline train [-h] [-m] [--cfg job] [--config-dir DIR] "
        "[--config-name NAME]\n                      [overrides]",
        "Train one run, or with -m every job of a Hydra multirun.",
        "\n".join(["Keys to begin with, and their values:", *first_keys]),
        "\n".join(["Config groups: GROUP=CHOICE replaces a whole group.", *groups]),
        _ALL_KEYS,
    ]
    return "\n\n".join(sections)


def _values(config: DictConfig) -> dict[str, Any]:
    """Return the config as plain values.

    If a reference cannot be resolved, all references are left as they are.
    """
    try:
        return plain(config)
    except OmegaConfBaseException:
        unresolved: Any = OmegaConf.to_container(config, enum_to_str=True)
        return unresolved


def _has(values: dict[str, Any], key: str) -> bool:
    """Return whether a config has a key: not every optimizer has a learning rate."""
    group, _, name = key.rpartition(".")
    parent: Any = values
    if group:
        parent = value_at(values, group)
    return isinstance(parent, dict) and name in parent


def _written(value: Any) -> str:
    """Return a value as it is written in an override."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")


def _with_kind(description: key_guide.Description) -> str:
    """Return a description with the type in front, unless the value shows the type."""
    if description.kind in (None, "node"):
        return description.text
    return f"({description.kind}) {description.text}"


def _wrapped(paragraph: str, indent: int) -> list[str]:
    """Return the lines of an indented paragraph."""
    spaces = " " * indent
    return textwrap.wrap(
        paragraph,
        _WIDTH,
        initial_indent=spaces,
        subsequent_indent=f"{spaces}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
