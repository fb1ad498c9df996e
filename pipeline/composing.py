"""Command line → composed config → job, through Hydra."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline import config as configuration
from pipeline.errors import ConfigError
from pipeline.refusal import COMPOSITION, refusing


def train(arguments: Sequence[str]) -> int:
    """`pipeline train`: Hydra composes, then `job.run` runs."""
    _hydra(_train, arguments)
    return 0


def ui(arguments: Sequence[str]) -> int:
    """`pipeline ui`: MLflow's UI on the composed config's store."""
    opened: list[str] = []
    _hydra(lambda config: opened.append(config.tracking.uri), [*arguments, "hydra.run.dir=."])
    for uri in opened:  # none where Hydra was asked to show something, and did
        return _serve(uri)
    return 0


def _serve(uri: str) -> int:
    if uri.startswith(("http://", "https://")):
        print(f"The store is a server with a UI of its own: {configuration.mask(uri)}")
        return 0
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--backend-store-uri", uri]
    try:
        return subprocess.call([*command, "--port", os.environ.get("PIPELINE_UI_PORT", "5000")])
    except KeyboardInterrupt:
        return 0


def _train(config: DictConfig) -> None:
    from pipeline import job

    settings = HydraConfig.get()
    try:
        # Unresolved: an override may hold an interpolation, which is the config's to resolve.
        overrides: Any = OmegaConf.to_container(settings.overrides.task, resolve=False)
        job.run(config, overrides, Path(settings.runtime.output_dir))
    finally:
        Folders.take_back()


class Folders(Callback):
    """Notes which folders Hydra makes for a run, so that one that is refused takes back just those."""

    _made: ClassVar[list[Path]] = []

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        with suppress(OmegaConfBaseException):  # Hydra reads it next, and then it is refused
            folder = Path(config.hydra.run.dir).absolute()
            Folders._made = [made for made in (folder, *folder.parents) if not made.exists()]

    @classmethod
    def take_back(cls) -> None:
        """Removes what was made and is empty, from the run directory upwards."""
        for folder in cls._made:
            if not folder.is_dir() or any(folder.iterdir()):
                return
            folder.rmdir()


def _hydra(task: Callable[[DictConfig], None], arguments: Sequence[str]) -> None:
    """Runs `task` on the config that Hydra composes from `arguments`.

    Raises:
        ConfigError: the arguments or the config that they ask for are wrong.
    """
    configuration.register()
    raised: list[Exception] = []

    def job(config: DictConfig) -> None:
        try:
            task(config)
        except Exception as error:
            raised.append(error)
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                raise  # the launcher must know which job failed; else Hydra prints a line of its own about it

    options = _parsed(arguments)
    flags = [argument for argument in arguments if argument not in options.overrides]
    folders = [configuration.directory(), *([options.config_dir] if options.config_dir else [])]
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
    except SystemExit as exit:
        if exit.code not in (0, None):
            raise SystemExit(2) from None  # Hydra has said why
    finally:
        sys.argv = before
        if environment is None:
            del os.environ["HYDRA_FULL_ERROR"]
    if raised:
        raise raised[0]


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line as Hydra's own parser reads it, which answers a wrong one with its whole usage."""
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
