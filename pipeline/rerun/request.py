"""The command line of `pipeline rerun`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from pipeline.common.errors import ConfigError, Parser
from pipeline.config import compose, former_names, hydra_errors, key_kinds
from pipeline.config.overrides import hydra_quoted

# These overrides are applied before Hydra composes the recorded config.
_APPLIED_BEFORE = ("hydra.run.dir", "tracking", "dataset.data_dir")
# Matches overrides that also apply to the user's own config.
_OF_OWN_CONFIG = re.compile(rf"[+~]*({'|'.join(key_kinds.groups_apart())})[.=]")


@dataclass(frozen=True)
class Request:
    """The parsed command line of `pipeline rerun`.

    Attributes:
        run_id: the run's ID, or the beginning of the ID.
        dry: whether to only show the plan and the differences.
        sweep: whether `run_id` is a sweep, all of whose jobs are rerun.
        allow: dotted names and places that the user trusts.
        config_dir: a folder with the user's own config groups.
        config_name: the name of the user's own config.
        overrides: the overrides, in Hydra's grammar.
        other: the ID, or the beginning of the ID, of another run, which is compared
            with the run in place of a rerun. None to rerun the run.
    """

    run_id: str
    dry: bool
    sweep: bool
    allow: list[str]
    config_dir: str | None
    config_name: str | None
    overrides: list[str]
    other: str | None = None

    @property
    def own_config_options(self) -> list[str]:
        """The options of Hydra that select the user's own config."""
        options = []
        if self.config_dir:
            options += ["--config-dir", self.config_dir]
        if self.config_name:
            options += ["--config-name", self.config_name]
        return options

    @property
    def changes(self) -> list[str]:
        """The overrides that change what the run computes, not where it runs."""
        changes = []
        for override in self.overrides:
            key = override.lstrip("+~").partition("=")[0]
            if not key.startswith("hydra") and key_kinds.decides_what_runs(key):
                changes.append(override)
        return changes

    @property
    def own_folders(self) -> list[str]:
        """The user's own folders with config groups."""
        if not self.config_dir:
            return []
        return [str(Path(self.config_dir).absolute())]

    def own_config(self) -> DictConfig:
        """Return the user's own config, with the entries of `--allow`.

        The store and the trusted names come from it, never from a record.
        """
        overrides = [text for text in self.overrides if _OF_OWN_CONFIG.match(text)]
        config = compose.composed([*self.own_config_options, *overrides])
        allowed = [former_names.current(entry) for entry in self.allow]
        config.trust.allow = [*config.trust.allow, *allowed]
        return config

    @cached_property
    def parsed_overrides(self) -> list[Override]:
        """The overrides as parsed by Hydra.

        Raises:
            ConfigError: an override does not follow Hydra's grammar.
        """
        with hydra_errors.translated(self.overrides, self._folders):
            return OverridesParser.create().parse_overrides(self.overrides)

    @cached_property
    def values(self) -> dict[str, Any]:
        """The values of the overrides by key or config group."""
        values = {}
        for override in self.parsed_overrides:
            values[override.key_or_group] = override.value()
        return values

    @cached_property
    def groups(self) -> set[str]:
        """The config groups whose option is overridden, as in `optimizer=lion`."""
        groups = hydra_errors.groups(self._folders)
        return {group for group in groups if isinstance(self.values.get(group), str)}

    @property
    def deleted(self) -> set[str]:
        """The keys and groups that an override deletes."""
        deleted = [
            override for override in self.parsed_overrides if override.is_delete()
        ]
        return {override.key_or_group for override in deleted}

    @cached_property
    def run_dir(self) -> Path:
        """The run directory of the rerun.

        For a sweep, each job gets its own folder in this directory.

        Raises:
            ConfigError: `hydra.run.dir` is overridden, and does not name a plain
                folder.
        """
        default = f"outputs/{datetime.now():%Y-%m-%d/%H-%M-%S-%f}"
        folder = self.values.get("hydra.run.dir", default)
        if not isinstance(folder, str) or "${" in folder:
            rule = "must be the plain path of a folder"
            raise ConfigError("hydra.run.dir", rule, folder)
        return Path(folder).absolute()

    def overrides_of_record(self) -> list[str]:
        """Return the overrides in a form that Hydra can apply to the recorded config.

        Selected groups get the prefix `+`, since the record has no defaults list.
        Replaced values get the prefix `++`, since they were removed from the record.
        """
        overrides = []
        for text, override in zip(self.overrides, self.parsed_overrides, strict=True):
            key = override.key_or_group
            if key in _APPLIED_BEFORE:
                continue
            is_value = not isinstance(self.values[key], dict)
            if key in self.groups:
                text = f"+{text.lstrip('+')}"
            elif (
                is_value and text.startswith(f"{key}=") and not key.startswith("hydra")
            ):
                text = f"++{text}"
            overrides.append(text)
        return [*overrides, f"hydra.run.dir={hydra_quoted(self.run_dir)}"]

    @property
    def _folders(self) -> list[str]:
        """The folders with config groups: of installed packages, then of the user."""
        return [*compose.config_folders(), *self.own_folders]


def add_config_options(parser: Parser) -> None:
    """Add the options that select the user's own config."""
    parser.add_argument(
        "--config-dir",
        "-cd",
        metavar="DIR",
        help="a folder with config groups of your own, which may set trust.allow",
    )
    parser.add_argument(
        "--config-name", "-cn", metavar="NAME", help="name of your own config"
    )


def parse_command_line(arguments: Sequence[str], description: str | None) -> Request:
    """Parse the arguments of `pipeline rerun`.

    Args:
        arguments: the command line, without the verb.
        description: the text of `--help`.

    Raises:
        ConfigError: the arguments are wrong.
    """
    parser = Parser(prog="pipeline rerun", description=description, allow_abbrev=False)
    parser.add_argument(
        "run_id",
        metavar="RUN_ID",
        help="ID of a run in the store of tracking.uri, or the start of the ID",
    )
    parser.add_argument(
        "--dry", action="store_true", help="only show the plan and the differences"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="RUN_ID is a sweep: repeat all of its jobs"
    )
    parser.add_argument(
        "--with",
        dest="other",
        metavar="OTHER",
        help="train nothing: compare the run with OTHER, the ID of another run",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="PREFIX",
        help="trust what begins with this dotted name, or artifacts at this location",
    )
    add_config_options(parser)
    # Without a default, argparse would report the overrides as required, too, if RUN_ID
    # is missing.
    parser.add_argument(
        "overrides", nargs="*", default=[], help="overrides in Hydra's grammar"
    )
    options = parser.parse_intermixed_args(compose.as_text(arguments))
    if not options.config_dir:
        options.config_dir = compose.own_folder()
    request = Request(**vars(options))
    if request.other is not None:
        _check_comparison(request)
    return request


def _check_comparison(request: Request) -> None:
    """Reject arguments that only training uses, if two runs are to be compared."""
    if request.dry or request.sweep:
        rule = "must come without --dry and --sweep: it compares two runs"
        raise ConfigError("--with", rule)
    if request.changes:
        rule = "must come without overrides that change a run: it trains nothing"
        raise ConfigError("--with", rule, request.changes)
