"""`pipeline train` and `pipeline sweep`: train one run, or all jobs of a sweep."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from pipeline.common import nvidia, secrets
from pipeline.common.errors import NOT_SHIPPED, ConfigError, Parser, first_line, say
from pipeline.config import allow_list, compose, former_names, session
from pipeline.launch import hydra_job
from pipeline.sweep.again import trusted_overrides
from pipeline.sweep.files import sweep_files
from pipeline.tracking.foreign_store import ForeignStore, sync_command
from pipeline.trust import artifact_locations

if TYPE_CHECKING:  # importing it takes a second
    from pipeline.sweep.parent_run import ParentRun


def train(arguments: Sequence[str]) -> int:
    """Compose a config and train it, with -m every job of a sweep; return 0 when all finished, else 1."""
    return train_composed(
        arguments,
        lambda run_id: ["train", *_repeatable(arguments), f"tracking.sweep={run_id}"],
    )


def sweep(arguments: Sequence[str]) -> int:
    """Run the multirun in `sweeps/NAME.yaml`, from this folder or from the package."""
    files = sweep_files()
    parser = Parser(
        prog="pipeline sweep", description=sweep.__doc__, allow_abbrev=False
    )
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(files)}")
    parser.add_argument(
        "--again",
        metavar="SWEEP",
        help="run only the jobs of SWEEP that have not finished",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="NAME",
        help="what the sweep's record may name",
    )
    parser.add_argument(
        "--config-dir",
        "-cd",
        metavar="DIR",
        help="a folder with config groups of your own",
    )
    options, rest = parser.parse_known_args(list(arguments) or [""])
    if options.name not in files:
        raise ConfigError("NAME", "must name a sweep", options.name, files)
    folder, ours = files[options.name].parent, Path(compose.directory("sweeps"))
    file = ["--config-dir", str(folder), "--config-name", options.name]
    own: list[str] = []
    searched = [ours] if folder != ours else []
    if conf := options.config_dir or compose.own_folder():
        compose.check_config_dir(conf)
        own, searched = ["--config-dir", conf], [Path(conf).absolute(), *searched]
    if searched:
        file.append(
            "hydra.searchpath=["
            + ",".join(f'"file://{path}"' for path in searched)
            + "]"
        )
    overrides = _recorded(options, file, rest) if options.again else rest
    given = [*own, *_repeatable(rest), *(f"--allow={entry}" for entry in options.allow)]
    return train_composed(
        ["-m", *file, *overrides],
        lambda run_id: ["sweep", options.name, "--again", run_id, *given],
    )


def train_composed(arguments: Sequence[str], again: Callable[[str], list[str]]) -> int:
    """Train. If jobs of a sweep did not finish, print the command that runs them: `again` of the sweep's run ID."""
    # A reopened sweep reads from its store, which is not trusted.
    confined = ["tracking.confined=true"] * any(
        text.lstrip("+").startswith("tracking.sweep=") for text in arguments
    )
    current = session.Session()
    try:
        hydra_job.run(
            partial(hydra_job.in_run_dir, run_one), [*arguments, *confined], current
        )
    except BaseException as error:
        _close(
            current.sweep, again, "FAILED" if isinstance(error, Exception) else "KILLED"
        )
        raise
    return _close(current.sweep, again)


def _close(
    current: ParentRun | None,
    again: Callable[[str], list[str]],
    broken: str | None = None,
) -> int:
    """Close a sweep, if there was one, and publish its report unless it ended early with status `broken`."""
    if current is None:
        return 0
    missing = f"run what is missing with: {shlex.join(['pipeline', *map(secrets.mask, again(current.run_id))])}"
    try:
        status: int = current.close(broken)
    except Exception as error:  # the store is unreachable
        close = sync_command(current.folder, current.uri)
        unclosed = (
            f"the sweep could not be closed in the store ({first_line(error)}): {close}"
        )
        say(unclosed, *([missing] if current.lost else []))
        return NOT_SHIPPED
    if status:
        say(missing)
    if broken is None:
        from pipeline.report import writer
        from pipeline.sweep import mlflow_view

        if any(
            "train/loss" in run.data.metrics
            for run in mlflow_view.complete(current).values()
        ):
            writer.publish(current.uri, current.run_id, current.places)
    return status


def _repeatable(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that also apply to the rest of a sweep; its folder does not, since it has jobs by then."""
    return [
        text
        for text in arguments
        if not text.startswith(("hydra.sweep.dir=", "tracking.sweep="))
    ]


def _recorded(
    options: argparse.Namespace, file: list[str], rest: list[str]
) -> list[str]:
    """Return `rest` with the recorded overrides of the sweep `options.again` before them."""
    # Without what is swept, which composes to several configs.
    where = [
        text
        for text in rest
        if text.startswith(("tracking.", "tracking=", "trust.", "dataset.data_dir="))
    ]
    own = compose.composed([*file, *where])
    own.trust.allow = [*own.trust.allow, *map(former_names.current, options.allow)]
    parent = ForeignStore.open(own.tracking.uri, own.trust.allow).sweep(options.again)
    if parent.data.tags["sweep.name"] != options.name:
        raise ConfigError(
            "NAME", f"must be the name of sweep {options.again}", options.name
        )
    allowed = [f"trust.allow={list(own.trust.allow)}"] if options.allow else []
    # The arguments come last, so that they override the record.
    return [
        *trusted_overrides(parent.data.tags, rest, own),
        *rest,
        *allowed,
        f"tracking.sweep={parent.info.run_id}",
    ]


def run_one(
    config: DictConfig, overrides: list[str], run_dir: Path, resume: bool = False
) -> float:
    """Train the run of a composed config, or resume it; return its last loss."""
    if config.hardware.device.name == "gpu" and not nvidia.visible():
        nvidia.why_no_gpu(
            required=True
        )  # fails at once, while TensorFlow would take seconds
    from pipeline.run import run

    places = allow_list.allowed_places(config.trust.allow)
    confined = config.tracking.confined and not resume
    with (
        artifact_locations.confined(config.tracking.uri, places)
        if confined
        else nullcontext()
    ):
        return run.run(config, overrides, run_dir, resume=resume)[1]
