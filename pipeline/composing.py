"""Command line → composed config → job, through Hydra; and what Hydra refuses, said in one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from pipeline import config as configuration
from pipeline.errors import ConfigError


def train(arguments: Sequence[str]) -> int:
    """`pipeline train`: Hydra composes, then `job.run` runs."""
    _hydra(_train, arguments)
    return 0


def ui(arguments: Sequence[str]) -> int:
    """`pipeline ui`: MLflow's UI on the composed config's store."""
    opened: list[str] = []
    _hydra(lambda config: opened.append(config.tracking.uri), [*arguments, "hydra.run.dir=."])
    (uri,) = opened
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
    run_dir = Path(settings.runtime.output_dir)
    try:
        job.run(config, list(settings.overrides.task), run_dir)
    finally:
        _remove_empty(run_dir)


def _remove_empty(folder: Path) -> None:
    """Takes back the folder that Hydra made for a run that was refused, and the empty ones above it."""
    here = Path.cwd()
    while folder != here and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
        if here not in folder.parents:
            return


def _hydra(task: Callable[[DictConfig], None], arguments: Sequence[str]) -> None:
    configuration.register()
    raised: list[Exception] = []

    def job(config: DictConfig) -> None:
        try:
            task(config)
        except Exception as error:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                raise  # the launcher must know which job failed
            raised.append(error)  # else Hydra prints a line of its own about it

    before, environment = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["pipeline", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints what it refuses in many lines and exits with 1
    try:
        hydra.main(version_base="1.3", config_path=configuration.directory(), config_name="config")(job)()
    except SystemExit as exit:
        if exit.code not in (0, None):
            raise ConfigError("arguments", "must be of Hydra's grammar: see pipeline train --hydra-help") from None
    finally:
        sys.argv = before
        if environment is None:
            del os.environ["HYDRA_FULL_ERROR"]
    if raised:
        raise raised[0]


def refusal(error: Exception) -> str | None:
    """What Hydra or OmegaConf refused, in one line; None where the error is not of the user's input."""
    if isinstance(error, UnicodeDecodeError):
        return f"the config must be UTF-8: {error}"
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return None
    parts = [str(error)]
    if error.__cause__ is not None:
        parts.append(str(error.__cause__))
    text = " ".join(" ".join(parts).split())
    return re.sub(r"\s*(full_key|object_type|reference_type)[:=]\S*", "", text)
