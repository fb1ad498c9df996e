"""Composes a config from a command line with Hydra."""

import argparse
import logging
import os
import re
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from pipeline.common import yaml_size
from pipeline.common.errors import ConfigError, say
from pipeline.common.sqlite_uri import SQLITE
from pipeline.config import (
    former_names,
    hydra_errors,
    installed_configs,
    key_kinds,
    plain,
    schema,
    suggestions,
    text_keys,
)
from pipeline.config.hydra_internals import get_args_parser
from pipeline.config.overrides import hydra_quoted, with_class_index
from pipeline.config.session import Session, entered, session

# Matches a value such as `~/…` in an override. The shell does not expand this `~`, and
# Hydra's grammar does not allow it.
_HOME = re.compile("(sqlite:///)?~(/.*)", re.DOTALL)
# Matches the commas between the values of a sweep, but not those in `${…}`.
_BETWEEN_VALUES = re.compile(r",(?![^{]*\})")
# Matches a path that needs no quotes in Hydra's grammar.
_PLAIN_PATH = re.compile(r"[\w./@-]+", re.ASCII)
# Patterns for the configs whose size is checked in a folder of the search path. The
# folder may be large; Hydra reads only these files, unless a group is nested deeper.
_CONFIGS_OF_GROUPS = ("*.yaml", "*/*.yaml", "*/*/*.yaml")
# The options of Hydra that `composed` accepts: these do not run or print anything.
_READING = ("overrides", "config_name", "config_path", "config_dir", "run")


@dataclass(frozen=True)
class CommandLine:
    """A command line, parsed by Hydra.

    Attributes:
        options: the result of Hydra's own parser, including the overrides.
        flags: the arguments that are not overrides.
        folders: the config folders, beginning with this package's own.
    """

    options: argparse.Namespace
    flags: list[str]
    folders: list[str]


def directory(name: str = "conf") -> str:
    """Return the packaged folder `conf` or `sweeps`.

    The folder lies inside the package if a wheel is installed, and beside the package
    in a checkout.
    """
    package = Path(__file__).resolve().parents[1]
    if (package / name).is_dir():
        return str(package / name)
    return str(package.parent / name)


def config_folders() -> list[str]:
    """Return the folders of config groups of this and of other installed packages."""
    return [directory(), *installed_configs.folders()]


@dataclass(frozen=True)
class Composition:
    """A composed config, and what it was composed from.

    Attributes:
        config: the config.
        chosen: the chosen config of each group, by the name of the group; None if no
            config of the group is chosen.
        folders: the config folders, beginning with this package's own.
        hydra: the settings of Hydra itself, which `config` does not contain.
    """

    config: DictConfig
    chosen: dict[str, str | None]
    folders: list[str]
    hydra: DictConfig

    @contextmanager
    def as_job(self) -> Iterator[None]:
        """Let configs refer to Hydra's settings in the `with` block, as in a job.

        `${hydra:runtime.output_dir}` becomes the run directory that a job started now
        would have. It is only a placeholder: the directory is not created.

        Raises:
            ConfigError: the run directory cannot be determined.
        """
        complete = deepcopy(self.config)
        before = HydraConfig.instance().cfg
        try:
            with open_dict(complete), read_write(complete), hydra_errors.translated():
                complete.hydra = self.hydra
                output_dir = Path(complete.hydra.run.dir).absolute()
                complete.hydra.runtime.output_dir = str(output_dir)
            HydraConfig.instance().set_config(complete)
            yield
        finally:
            HydraConfig.instance().cfg = before


def composed(arguments: Sequence[str]) -> DictConfig:
    """Compose the config for `arguments` and return it.

    Raises:
        ConfigError: as for `composition`.
    """
    return composition(arguments).config


def composition(arguments: Sequence[str]) -> Composition:
    """Compose the config for `arguments`, and return it with its groups.

    Hydra's Compose API is used, so no job runs and no folder is created.

    Raises:
        ConfigError: the config is wrong, or an option of Hydra is given that does more
            than select configs.
    """
    schema.register()
    command_line = read_command_line(arguments)
    options = command_line.options
    for name, value in vars(options).items():
        if value and name not in _READING:
            rule = (
                "must be left out: this command reads a single config; use `pipeline "
                "train` to print configs or to sweep over them"
            )
            raise ConfigError(f"--{name.replace('_', '-')}", rule)

    # Add a handler to the root logger, as otherwise TensorFlow adds its own.
    logging.basicConfig(format="%(message)s")
    origins = (options.overrides, command_line.folders)
    with entered(Session(config_dir=options.config_dir)):
        # Hydra raises errors of any type for a wrong config.
        with (
            hydra_errors.translated(*origins, (Exception,)),
            hydra.initialize_config_dir(
                options.config_path or directory(), version_base="1.3"
            ),
        ):
            config = hydra.compose(
                options.config_name or "config",
                options.overrides,
                return_hydra_config=True,
            )
        chosen: Any = OmegaConf.to_container(config.hydra.runtime.choices)
        with open_dict(config):
            hydra_config = config.pop("hydra")
        with hydra_errors.translated(*origins):
            prepare(config)
    return Composition(config, chosen, command_line.folders, hydra_config)


def prepare(config: DictConfig) -> None:
    """Expand `~` in a composed config, and replace former names, in place.

    Raises:
        ConfigError: a key that holds text has a value of another type, or a key or
            value was removed in an earlier version.
    """
    text_keys.check(config)
    _expand_home(config)
    former_names.rename(config)


def read_command_line(arguments: Sequence[str]) -> CommandLine:
    """Parse a command line with Hydra's parser.

    Without `--config-dir`, the user's own folder `conf` is added, if there is one.

    Raises:
        ConfigError: the command line or the config folder is invalid.
    """
    arguments = as_text(arguments)
    options = _parsed(arguments)
    flags = [argument for argument in arguments if argument not in options.overrides]
    if options.config_dir is None:
        own = own_folder()
        if own is not None:
            options.config_dir = own
            flags += ["--config-dir", own]

    folders = config_folders()
    if options.config_dir:
        folders.append(options.config_dir)
        if not options.shell_completion:
            check_config_dir(options.config_dir)
    if not options.shell_completion:
        _say_unused_config(Path(options.config_dir or "conf").absolute())
    if not options.shell_completion:
        for folder in _searched_folders(options):
            _check_sizes(folder, _CONFIGS_OF_GROUPS)
    return CommandLine(options, flags, folders)


def as_text(overrides: Sequence[str]) -> list[str]:
    """Return the overrides in the form that is passed to Hydra.

    A leading `~/` in a value is expanded, a value such as 12e4 is quoted if its key
    holds text, former names of keys are replaced, and the weight of one class becomes a
    mapping.
    """
    texts = []
    for text in overrides:
        text = former_names.with_current_key(_with_home(text))
        text = with_class_index(text)
        texts.append(text_keys.kept(text))
    return texts


def own_folder() -> str | None:
    """Return the user's own folder `conf` in the working directory.

    The folder is the user's own if it has config groups, or a config for
    `--config-name`, and is not the package's. Otherwise, return None.
    """
    folder = Path("conf").absolute()
    has_groups = any(folder.glob("*/*.yaml"))
    has_configs = any(file.name != "config.yaml" for file in folder.glob("*.yaml"))
    if (has_groups or has_configs) and not folder.samefile(directory()):
        return str(folder)
    return None


@cache
def check_config_dir(folder: str) -> None:
    """Reject a config folder that does not exist or has a file that is too large.

    Once per process, print that the user's own folder is used, and which of its files
    are not used because a config of an installed package has the same name.
    """
    if not Path(folder).is_dir():
        raise ConfigError("--config-dir", "must be a folder that exists", folder)
    _check_sizes(folder)
    if folder == own_folder():
        say(f"pipeline: using the configs in {folder}")
    for file in sorted(Path(folder).glob("*/**/*.yaml")):
        name = file.relative_to(folder)
        choice = f"{name.parent}={name.stem}"
        for installed in config_folders():
            theirs = Path(installed, name)
            if theirs.exists() and theirs.read_bytes() != file.read_bytes():
                owner = f"the config in {theirs.parent}"
                if installed == directory():
                    owner = "the built-in config"
                say(f"pipeline: {choice} is {owner}; {file} is not used: rename it")
                break


@cache
def _say_unused_config(folder: Path) -> None:
    """Print that `config.yaml` in the user's folder is not used, if it exists.

    Hydra would find the package's file of that name first.
    """
    file = folder / "config.yaml"
    if file.exists() and not folder.samefile(directory()):
        say(f"pipeline: {file} is not used: rename it, and select it by --config-name")


class RunFolders(Callback):
    """Expands `~` in folders, and records the folders that Hydra will create."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        key = "hydra.sweep.dir"
        if config.hydra.mode == RunMode.RUN:
            key = "hydra.run.dir"

        # Ignore a wrong value: Hydra reads the config next and rejects it.
        with suppress(OmegaConfBaseException):
            written = OmegaConf.select(config, key)
            folder = Path(written).expanduser().absolute()
            if str(written).startswith("~"):
                with read_write(config):
                    OmegaConf.update(config, key, str(folder))
                    # The jobs of a sweep compose their configs from these overrides.
                    override = f"{key}={hydra_quoted(folder)}"
                    config.hydra.overrides.hydra.append(override)
            # Also expand `~` in the store's URI now, as a launcher opens the store
            # before a job calls `prepare`.
            _expand_home(config)
            current = session()
            if current.dry:
                # Hydra writes a file into the folder of a sweep.
                folder = Path(tempfile.gettempdir(), f"pipeline-{uuid.uuid4().hex}")
                with read_write(config):
                    config.hydra.sweep.dir = str(folder)
            current.key = key
            current.run_dir = folder
            current.new_folders = [
                path for path in (folder, *folder.parents) if not path.exists()
            ]

    on_multirun_start = on_run_start


def _check_sizes(folder: str, patterns: Sequence[str] = ("**/*.yaml",)) -> None:
    """Reject a folder with a config that has too many values.

    Args:
        folder: the folder.
        patterns: glob patterns of the configs.
    """
    for pattern in patterns:
        for file in sorted(Path(folder).glob(pattern)):
            yaml_size.check_size(file)


def _searched_folders(options: argparse.Namespace) -> list[str]:
    """Return the folders that the command line adds to Hydra's search path.

    These are the folder of `--config-path` and those of `hydra.searchpath`, which Hydra
    takes from the command line and from the primary config. A value that Hydra rejects
    is skipped.
    """
    values: list[Any] = []
    for text in options.overrides:
        if text.startswith("hydra.searchpath="):
            with suppress(HydraException):
                values.append(OverridesParser.create().parse_override(text).value())
    name = (options.config_name or "config").removesuffix(".yaml")
    for folder in (options.config_path, options.config_dir):
        if not folder:
            continue
        # Do not use `with_suffix`, as a name may contain a dot.
        file = Path(folder, f"{name}.yaml")
        with suppress(OSError, yaml.YAMLError, OmegaConfBaseException, ValueError):
            values.append(OmegaConf.select(OmegaConf.load(file), "hydra.searchpath"))

    folders = []
    if options.config_path:
        folders.append(options.config_path)
    for value in values:
        if isinstance(value, list | ListConfig):
            folders += [str(entry).removeprefix("file://") for entry in value]
    return folders


def _with_home(override: str) -> str:
    """Return an override in which a leading `~/` in each value is expanded."""
    key, equals, text = override.partition("=")
    values = []
    for value in _BETWEEN_VALUES.split(text):
        match = _HOME.fullmatch(value.strip())
        if match is not None:
            home = str(Path.home())
            value = f"{match[1] or ''}{home}{match[2]}"
            if not _PLAIN_PATH.fullmatch(home):
                value = hydra_quoted(value)
        values.append(value)
    return f"{key}{equals}{','.join(values)}"


def _expand_home(config: DictConfig) -> None:
    """Expand a leading `~` in the values of all keys that hold paths, in place."""
    for key in key_kinds.keys_where(lambda facts: facts.path):
        # Skip a key without a value: it is rejected later.
        with suppress(OmegaConfBaseException):
            value = OmegaConf.select(config, key)
            if isinstance(value, ListConfig):
                # Do not resolve links, so that the entries keep theirs.
                value = OmegaConf.to_container(value)
            expanded = plain.mapped(value, _expanded)
            if expanded != value:
                OmegaConf.update(config, key, expanded)


def _expanded(path: str) -> str:
    """Return a path, or the URI of a SQLite store, with a leading `~` expanded."""
    if path.startswith(f"{SQLITE}~"):
        return SQLITE + os.path.expanduser(path.removeprefix(SQLITE))
    return os.path.expanduser(path)


def _as_override(message: str) -> str | None:
    """Return the override that the user meant by an option such as `--epochs=5`.

    Return None if the message names no such option, or no key has this name.

    Args:
        message: the error message of Hydra's parser.
    """
    match = re.search(r"unrecognized arguments: --([\w.-]+)(=\S+)?", message)
    if match is None:
        return None
    name = match[1].replace("-", "_")
    key = suggestions.key_elsewhere(name.rpartition(".")[2])
    if key is None:
        return None
    return f"{key}{match[2] or '=VALUE'}"


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line with Hydra's own parser.

    Raises:
        ConfigError: the parser rejects the command line.
    """

    def reject(message: str) -> NoReturn:
        raise ConfigError(
            "arguments",
            f"cannot be read by Hydra ({message})",
            " ".join(arguments),
            meant=_as_override(message) or "",
        )

    parser = get_args_parser()
    parser.error = reject  # type: ignore[method-assign]
    return parser.parse_intermixed_args(list(arguments))
