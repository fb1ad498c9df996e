"""The command line of `pipeline rerun`."""

from argparse import Namespace
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from pipeline.checkpoints.run_dirs import quoted
from pipeline.common.errors import Parser
from pipeline.config import compose, hydra_errors, key_kinds


class Request(Namespace):
    """The parsed command line; `parsed` declares what it holds."""

    @property
    def own(self) -> list[str]:  # the Hydra options that select the user's own config
        named = {"--config-dir": self.config_dir, "--config-name": self.config_name}
        return [
            text for option, value in named.items() if value for text in (option, value)
        ]

    @property
    def changing(self) -> list[str]:  # the run, not where it runs
        changing = []
        for override in self.overrides:
            key = override.lstrip("+~").partition("=")[0]
            if not key.startswith("hydra") and key_kinds.decides_what_runs(key):
                changing.append(override)
        return changing

    @property
    def folders(self) -> list[str]:  # with config groups, the package's first
        return [
            compose.directory(),
            *([str(Path(self.config_dir).absolute())] if self.config_dir else []),
        ]

    @cached_property
    def parsed(self) -> list[Override]:
        with hydra_errors.as_config_error(self.overrides, self.folders):
            return OverridesParser.create().parse_overrides(self.overrides)

    @cached_property
    def values(self) -> dict[str, Any]:
        return {override.key_or_group: override.value() for override in self.parsed}

    @cached_property
    def groups(self) -> set[str]:
        """Return the config groups of which an option is chosen, as by `optimizer=lion`."""
        return {
            key
            for key in hydra_errors.groups(self.folders)
            if isinstance(self.values.get(key), str)
        }

    def for_hydra(self, run_dir: Path) -> list[str]:
        """Return the overrides in a form for the record, which has no groups and lacks the overridden keys."""
        found = []
        for text, override in zip(self.overrides, self.parsed, strict=True):
            key = override.key_or_group
            if key in (
                "hydra.run.dir",
                "tracking",
                "dataset.data_dir",
            ):  # already applied
                continue
            if key in self.groups:
                text = f"+{text.lstrip('+')}"
            elif text.startswith(f"{key}=") and not (
                key.startswith("hydra") or isinstance(self.values[key], dict)
            ):
                text = f"++{text}"
            found.append(text)
        return [*found, f"hydra.run.dir={quoted(run_dir)}"]


def parsed(arguments: Sequence[str], description: str | None) -> Request:
    parser = Parser(prog="pipeline rerun", description=description, allow_abbrev=False)
    add = parser.add_argument
    add(
        "run_id",
        metavar="RUN_ID",
        help="ID of a run in the store of tracking.uri, or its start",
    )
    add("--dry", action="store_true", help="only show the plan and the differences")
    add(
        "--sweep", action="store_true", help="RUN_ID is a sweep: repeat all of its jobs"
    )
    add(
        "--allow",
        action="append",
        default=[],
        metavar="PREFIX",
        help="a dotted name or place to trust",
    )
    add(
        "--config-dir",
        "-cd",
        help="a folder with config groups of your own, which may set trust.allow",
    )
    add("--config-name", "-cn", help="name of your own config")
    add("overrides", nargs="*", help="overrides in Hydra's grammar")
    found = parser.parse_intermixed_args(compose.as_text(arguments), Request())
    found.config_dir = found.config_dir or compose.own_folder()
    return found
