"""The verbs that train: `pipeline train` and `pipeline sweep`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from pipeline import compose
from pipeline import config as configuration
from pipeline.errors import ConfigError
from pipeline.sweep import resume
from pipeline.sweep.files import sweep_files


def train(arguments: Sequence[str]) -> int:
    """Compose a config and train it; with -m train every job of a sweep.

    Returns:
        0 when the run, or every job, finished; else 1.
    """
    try:
        compose.run(partial(compose.in_run_dir, _run), arguments)
    except BaseException as error:
        if isinstance(error, ConfigError):
            compose.RunFolders.take_back()
        begun = _sweep_of_this_process()
        if begun is not None:
            begun.close("FAILED" if isinstance(error, Exception) else "KILLED")
        raise
    current = _sweep_of_this_process()
    return 0 if current is None else _conclude(current)


def sweep(arguments: Sequence[str]) -> int:
    """Train the multirun in `sweeps/NAME.yaml`, of this folder or of the package."""
    files = sweep_files()
    parser = argparse.ArgumentParser(prog="pipeline sweep", description=sweep.__doc__, allow_abbrev=False)
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(files)}")
    parser.add_argument("--again", metavar="SWEEP", help="run only the jobs of SWEEP that have not finished")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder with config groups of your own")
    if not arguments:
        raise ConfigError("NAME", "must name a sweep", "", files)
    options, rest = parser.parse_known_args(list(arguments))
    if options.name not in files:
        raise ConfigError("NAME", "must name a sweep", options.name, files)
    file = ["--config-dir", str(files[options.name].parent), "--config-name", options.name]
    if folders := _searched(files[options.name], options.config_dir):
        file.append(f"hydra.searchpath=[{','.join(folders)}]")
    if options.again:
        rest = _resumed(options, file, rest)
    return train(["-m", *file, *rest])


def _resumed(options: argparse.Namespace, file: list[str], rest: list[str]) -> list[str]:
    """Return `rest` with the recorded overrides of the sweep `options.again` before them."""
    from pipeline.sweep import parent_run

    # What is swept composes to no one config.
    where = [argument for argument in rest if argument.startswith(("tracking.", "trust.", "dataset.data_dir="))]
    own = compose.composed([*file, *where])
    parent = parent_run.find(own.tracking.uri, options.again)
    if parent.data.tags["sweep.name"] != options.name:
        raise ConfigError("NAME", f"must be the name of sweep {options.again}", options.name)
    # What is given now counts more: Hydra takes the last.
    return [*resume.replayed(parent.data.tags, rest, own), *rest, f"tracking.sweep={parent.info.run_id}"]


def _searched(file: Path, config_dir: str | None) -> list[str]:
    """Return where Hydra looks beside the folder of `file`: the user's groups and the package's sweeps."""
    ours = Path(configuration.directory("sweeps"))
    folders = [Path(config_dir).absolute()] if config_dir else []
    folders += [ours] if file.parent != ours else []
    return [f'"file://{folder}"' for folder in folders]


def _run(config: DictConfig, overrides: list[str], run_dir: Path) -> float:
    from pipeline import job

    return job.run(config, overrides, run_dir).loss


def _sweep_of_this_process() -> Any:
    module = sys.modules.get("pipeline.sweep.parent_run")  # which the launcher has imported, if there was a sweep
    return module.take() if module is not None else None


def _conclude(current: Any) -> int:
    """Close the sweep, complete its page and write its report; return the exit status."""
    from pipeline.report import command
    from pipeline.sweep import description

    status: int = current.close()
    children = description.complete(current)
    if any("train/loss" in run.data.metrics for run in children.values()):
        command.publish(current.uri, current.run_id)
    return status
