"""Command line → composed config → job, through Hydra."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from pipeline import config as configuration
from pipeline.errors import ConfigError, RunError, first_line, printable, say
from pipeline.hydra_errors import COMPOSITION, refusing
from pipeline.hydra_internals import get_args_parser
from pipeline.masking import mask

Task = Callable[[DictConfig, list[str], Path], float]

_registrations: dict[str, Callable[[], None]] = {}  # by plugin: Hydra may execute a plugin's module twice


def on_plugins_found(plugin: str, register: Callable[[], None]) -> None:
    """Call `register` once Hydra has found all plugins, whose names it may then take over."""
    _registrations[plugin] = register


def composed(arguments: Sequence[str]) -> DictConfig:
    """Return the config that `arguments` compose to; run nothing."""
    seen: list[DictConfig] = []
    run(seen.append, [*arguments, "hydra.mode=RUN", "hydra.run.dir=."])
    return seen[0]


def run_recorded(config: Mapping[str, Any], overrides: Sequence[str], task: Task, folders: Sequence[str] = ()) -> None:
    """Compose a recorded config with `overrides` and call `task` on it.

    Args:
        config: resolved, as plain dicts; it has been checked.
        overrides: of the command line, in Hydra's grammar.
        task: takes the config, the overrides and the run directory.
        folders: with the user's own config groups.
    """
    ours = OmegaConf.load(Path(configuration.directory()) / "config.yaml")
    of_hydra = [entry for entry in ours.defaults if not isinstance(entry, str) and "override" in str(entry)]
    hydras = {**ours.hydra, "searchpath": [f"file://{folder}" for folder in folders]}
    record = OmegaConf.create({"defaults": ["schema", "_self_", *of_hydra], **config, "hydra": hydras})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "record.yaml").write_text(OmegaConf.to_yaml(record), encoding="utf-8")
        run(partial(in_run_dir, task), ["--config-dir", folder, "--config-name", "record", *overrides])


def in_run_dir(task: Task, config: DictConfig) -> float:
    """Call `task` with the config, the command line's overrides and the run directory that Hydra made.

    A run directory that is still empty afterwards is removed.
    """
    settings = HydraConfig.get()
    try:
        parent = config.tracking.sweep
        if parent is not None and settings.mode == RunMode.RUN:
            raise ConfigError("tracking.sweep", "must be left out of a single run: it is of a multirun", parent)
        # Unresolved: an override may hold an interpolation, which is the config's to resolve.
        overrides: Any = OmegaConf.to_container(settings.overrides.task, resolve=False)
        return task(config, overrides, Path(settings.runtime.output_dir))
    finally:
        RunFolders.take_back()


class RunFolders(Callback):
    """Expand `~` in the run directory, and note which folders Hydra makes, so that a refused run removes just those."""

    _made: ClassVar[list[Path]] = []

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        self._note(config, "hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self._note(config, "hydra.sweep.dir")

    @staticmethod
    def _note(config: DictConfig, key: str) -> None:
        with suppress(OmegaConfBaseException):  # Hydra reads it next, and then it is refused
            written = OmegaConf.select(config, key)
            folder = Path(written).expanduser().absolute()
            if str(written).startswith("~"):
                with read_write(config):
                    OmegaConf.update(config, key, str(folder))
                    config.hydra.overrides.hydra.append(f"{key}='{folder}'")  # the jobs of a sweep compose it again
            configuration.expand_home(config)  # here for a launcher, which opens the store
            RunFolders._made = [made for made in (folder, *folder.parents) if not made.exists()]

    @classmethod
    def wanted(cls, folder: object) -> bool:
        """Return whether `folder` is one that was missing when Hydra began."""
        return isinstance(folder, str) and Path(folder).absolute() in cls._made

    @classmethod
    def take_back(cls) -> None:
        """Remove what was made and is empty, from the run directory upwards."""
        if cls._made and cls._made[0].is_dir():
            (cls._made[0] / "multirun.yaml").unlink(missing_ok=True)  # Hydra's, of a sweep that was refused
        for folder in cls._made:
            if not folder.is_dir() or any(folder.iterdir()):
                return
            folder.rmdir()


def run(task: Callable[[DictConfig], Any], arguments: Sequence[str]) -> None:
    """Run `task` on the config that Hydra composes from `arguments`.

    Raises:
        ConfigError: the arguments or the config that they ask for are wrong.
        RunError: one run failed after it was created; its traceback is in its run directory.
    """
    Plugins.instance()  # first: published plugins register the names that ours take over
    configuration.register()
    for register in _registrations.values():
        register()
    raised: list[Exception] = []

    def job(config: DictConfig) -> Any:
        try:
            configuration.expand_home(config)
            return task(config)
        except Exception as error:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                # The launcher must know which job failed, in words that need no import of TensorFlow there.
                say(*mask(traceback.format_exc()).splitlines())
                raise RuntimeError(mask(_in_one_line(error))) from None
            raised.append(_with_traceback_kept(error))  # raised again below: else Hydra prints a line of its own
            return None

    # A shell leaves KEY=~/… as it is, and Hydra's grammar has no ~ in a value.
    arguments = [re.sub("^([^=]+=(sqlite:///)?)~(?=/)", rf"\1{Path.home()}", argument) for argument in arguments]
    options = _parsed(arguments)
    _check_digits(options.overrides)
    if options.multirun:
        options.overrides, arguments = _by_environment(options.overrides, arguments)
    flags = [argument for argument in arguments if argument not in options.overrides]
    folders = [configuration.directory(), *([options.config_dir] if options.config_dir else [])]
    if options.config_dir and not options.shell_completion:
        say_unused(Path(options.config_dir))
    # One run's errors are kept in `raised`, so all others are of the input; a launcher raises those of its jobs too.
    kinds = COMPOSITION if options.multirun else (Exception,)
    before, environment = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["pipeline", *options.overrides, *flags]  # Hydra wants the overrides side by side
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints what it refuses in many lines and exits with 1
    try:
        with refusing(options.overrides, folders, kinds):
            hydra.main(version_base="1.3", config_path=configuration.directory(), config_name="config")(job)()
    except ConfigError:
        if not raised:
            raise
    except OSError as error:  # of a multirun; also what a launcher raises
        if not RunFolders.wanted(error.filename):
            raise
        rule = f"must be a folder that can be made ({error.strerror})"
        raise ConfigError("hydra.sweep.dir", rule, error.filename) from error
    except SystemExit as exit:
        if exit.code not in (0, None):
            raise SystemExit(2) from None  # Hydra has said why
    finally:
        sys.argv = before
        if environment is None:
            del os.environ["HYDRA_FULL_ERROR"]
    if raised:
        raise raised[0]


def _with_traceback_kept(error: Exception) -> Exception:
    """Write the traceback of a failed run into its run directory; return what to say of it in one line."""
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    if isinstance(error, ConfigError) or not (run_dir / "journal.jsonl").exists():
        return error
    file = run_dir / "traceback.log"
    lines = mask("".join(traceback.format_exception(error))).splitlines()
    file.write_text("\n".join([*map(printable, lines), ""]), encoding="utf-8")
    failure = RunError(f"{type(error).__name__}: {first_line(error)} (traceback in {file})")
    failure.__cause__ = error
    return failure


def say_unused(config_dir: Path) -> None:
    """Name the user's config files that have a built-in's name: Hydra takes the built-in, without a word."""
    files = sorted(file.relative_to(config_dir) for file in config_dir.glob("*/**/*.yaml"))
    for file in files:
        ours = Path(configuration.directory()) / file
        if ours.exists() and not ours.samefile(config_dir / file):
            name = f"{file.parent}={file.stem}"
            say(f"pipeline: {name} is the built-in config; {config_dir / file} is not used, rename it")


def _by_environment(overrides: Sequence[str], arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return both without secrets; a secret that is swept over stays.

    The environment carries the secrets to the jobs of a sweep: Hydra writes their overrides into files.
    """
    places: dict[str, str] = {}
    for text in (text for text in overrides if mask(text) != text):
        with suppress(HydraException):  # what cannot be parsed Hydra refuses
            override = OverridesParser.create().parse_override(text)
            if not override.is_sweep_override():
                name = f"PIPELINE_SECRET_{len(places)}"
                os.environ[name] = str(override.value())
                places[text] = f"{text.split('=')[0]}=${{oc.env:{name}}}"
    return [places.get(text, text) for text in overrides], [places.get(text, text) for text in arguments]


def _check_digits(overrides: Sequence[str]) -> None:
    """Refuse a number that is longer than Python reads; Hydra refuses everything else."""
    for text in overrides:
        try:
            with suppress(HydraException):
                OverridesParser.create().parse_override(text)
        except ValueError as error:
            key, _, value = text.partition("=")
            raise ConfigError(key, f"must be a number that Python reads ({first_line(error)})", value) from error


def _in_one_line(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line as Hydra's own parser reads it; refuse a wrong one in one line."""
    parser = get_args_parser()
    flags = [action.option_strings[0] for action in parser._actions if action.option_strings]

    def refuse(message: str) -> NoReturn:
        raise ConfigError("arguments", f"must be what Hydra takes ({message})", " ".join(arguments))

    parser.exit_on_error = False
    parser.error = refuse  # type: ignore[method-assign]
    try:
        options, unknown = parser.parse_known_intermixed_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError(str(error.argument_name), f"must be what Hydra takes ({error.message})") from None
    if unknown:
        raise ConfigError("arguments", "must be overrides and Hydra's options", unknown[0], flags)
    return options
