"""`pipeline train` and `pipeline sweep`: train one run, or all jobs of a sweep."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from pipeline.cli import train_help
from pipeline.common import nvidia, secrets, yaml_size
from pipeline.common.errors import NOT_SHIPPED, ConfigError, Parser, first_line, say
from pipeline.common.signals import Terminated
from pipeline.config import compose, former_names, session, trust_entries
from pipeline.config.overrides import hydra_quoted, keys_set
from pipeline.config.plain import leaves, value_at
from pipeline.launch import hydra_job
from pipeline.sweep import again, sweep_file
from pipeline.sweep.files import sweep_files
from pipeline.tracking.foreign_store import MULTIRUN, ForeignStore, sync_command
from pipeline.trust import artifact_locations

if TYPE_CHECKING:  # importing it takes a second
    from pipeline.sweep.running_sweep import RunningSweep

# A function that takes the run ID of a sweep, and returns the arguments of the command
# that runs the missing jobs.
CommandAgain = Callable[[str], list[str]]
_HELP = {"--help", "-h"}
_MULTIRUN = {"--multirun", "-m"}
# Options with which Hydra does something else than to run a sweep.
_OTHER_MODES = {"--cfg", "-c", "--info", "-i", "--run", "-r"}


def train(arguments: Sequence[str]) -> int:
    """Compose a config and train it; with -m, train every job of a sweep.

    Return the exit status: for a sweep, 0 only if all jobs have finished.
    """
    if not _HELP.isdisjoint(arguments):
        others = [text for text in arguments if text not in _HELP | _MULTIRUN]
        say(*train_help.text(others).splitlines(), to=sys.stdout, always=True)
        return 0

    return train_composed(arguments, partial(_command_of_multirun, arguments))


def _command_of_multirun(arguments: Sequence[str], run_id: str) -> list[str]:
    """Return the command that runs the missing jobs of a sweep of `train -m`.

    Args:
        arguments: the arguments of `train`.
        run_id: the ID of the sweep.
    """
    options = compose.read_command_line(arguments).options
    name = options.config_name or MULTIRUN
    if name == "config":  # the default of --config-name
        name = MULTIRUN
    if options.config_path or name in sweep_files():
        # `pipeline sweep` would look for the config elsewhere.
        return ["train", *_repeatable(arguments), f"tracking.sweep={run_id}"]
    file = _config_arguments(name, options.config_dir)
    # A reopened sweep has recorded the overrides of the command that began it.
    is_recorded = "tracking.sweep" not in keys_set(options.overrides)
    overrides = _to_repeat(file, options.overrides, is_recorded=is_recorded)
    return [*_again_arguments(name, run_id, options.config_dir), *overrides]


def _again_arguments(name: str, run_id: str, config_dir: str | None) -> list[str]:
    """Return `sweep NAME --again RUN_ID`, with the config folder if it must be named.

    The user's own folder `conf` is found without being named.
    """
    command = ["sweep", name, "--again", run_id]
    if config_dir and config_dir != compose.own_folder():
        command += ["--config-dir", config_dir]
    return command


def _to_repeat(
    file: list[str], overrides: Sequence[str], *, is_recorded: bool
) -> list[str]:
    """Return the overrides that the command with --again repeats.

    Args:
        file: Hydra's arguments that select the config of the sweep.
        overrides: the overrides on the command line.
        is_recorded: whether these overrides are those that the sweep recorded. If not,
            all are repeated.
    """
    overrides = _repeatable(overrides)
    if not is_recorded:
        return overrides
    try:
        config = _config_of_place(file, again.unrecorded(overrides))
    except ConfigError:  # The config has changed since the sweep began.
        return overrides
    return again.to_repeat(overrides, config)


def sweep(arguments: Sequence[str]) -> int:
    """Run the multirun in `sweeps/NAME.yaml`, from this folder or from the package.

    With --again, NAME may also name a sweep of `pipeline train -m`: the name of such a
    sweep is `multirun`, or the value of --config-name.
    """
    files = sweep_files()
    options, rest = _sweep_parser(files).parse_known_args(list(arguments) or [""])
    for word in rest:
        if word.partition("=")[0] in _OTHER_MODES:
            rule = (
                "must be left out of a sweep, which has a config for each job: --dry "
                "lists the jobs, and `pipeline train OVERRIDES --cfg job` prints the "
                "config of one"
            )
            raise ConfigError(word, rule)
    # Convert the overrides to the form in which a sweep records them.
    rest = compose.as_text(rest)
    if options.again:
        options.again = sweep_file.id_of(options.again)
    path = files.get(options.name)
    config_dir = options.config_dir or compose.own_folder()
    if path is None and not (options.again and _is_config(options.name, config_dir)):
        raise _unknown_sweep(options.name, files, config_dir)

    if config_dir:
        compose.check_config_dir(config_dir)
    if path is not None:
        file = _sweep_file_arguments(options.name, path, config_dir)
    else:
        file = _config_arguments(options.name, config_dir)
    overrides = rest
    if options.again:
        overrides = _recorded_overrides(options, file, rest)

    if path is not None:
        say(*_lines_of_kept_keys(path, rest))

    def command_again(run_id: str) -> list[str]:
        command = _again_arguments(options.name, run_id, config_dir)
        command += _to_repeat(file, rest, is_recorded=not options.again)
        command += [f"--allow={entry}" for entry in options.allow]
        return command

    line = ["-m", *file, *overrides]
    return train_composed(line, command_again, dry=options.dry)


def _unknown_sweep(
    name: str, files: Iterable[str], config_dir: str | None
) -> ConfigError:
    """Return the error for a name that is not that of a sweep file."""
    rule = "must name a sweep"
    if name == MULTIRUN:
        rule += " (`pipeline train -m` runs a sweep without a file)"
    elif _is_config(name, config_dir):
        rule += f" (`pipeline train -m --config-name {name}` sweeps that config)"
    return ConfigError("NAME", rule, name, files)


def _sweep_parser(files: Any) -> Parser:
    parser = Parser(
        prog="pipeline sweep", description=sweep.__doc__, allow_abbrev=False
    )
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(files)}")
    parser.add_argument(
        "--again",
        metavar="SWEEP",
        help="run only the jobs of SWEEP that have not finished; SWEEP is the folder of "
        "a sweep, the start of its ID, the name of its run, or NAME, which stands for "
        "the newest sweep of that name",
    )
    parser.add_argument(
        "--dry",
        action="store_true",
        help="check and list the jobs, and run none of them",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="NAME",
        help="trust this dotted name, or this location of artifacts, in the sweep's record",
    )
    parser.add_argument(
        "--config-dir",
        "-cd",
        metavar="DIR",
        help="a folder with config groups of your own",
    )
    return parser


def _is_config(name: str, config_dir: str | None) -> bool:
    """Return whether a sweep of `train -m` may have this name."""
    if name == MULTIRUN:
        return True
    path = Path(f"{name.removesuffix('.yaml')}.yaml")
    # The name may have been copied from a store. It must not lead out of the folders.
    if path.is_absolute() or ".." in path.parts:
        return False
    folders = compose.config_folders()
    if config_dir:
        folders.append(config_dir)
    return any(Path(folder, path).is_file() for folder in folders)


def _config_arguments(name: str, config_dir: str | None) -> list[str]:
    """Return Hydra's arguments for the config of a sweep of `train -m`."""
    arguments = []
    if config_dir:
        arguments += ["--config-dir", config_dir]
    if name != MULTIRUN:
        arguments += ["--config-name", name]
    return arguments


def _sweep_file_arguments(name: str, file: Path, config_dir: str | None) -> list[str]:
    """Return Hydra's arguments for a sweep file.

    Hydra also searches the user's config folder and the package's sweeps.
    """
    arguments = ["--config-dir", str(file.parent), "--config-name", name]
    searched: list[Path] = []
    if config_dir:
        searched.append(Path(config_dir).absolute())
    package_sweeps = Path(compose.directory("sweeps"))
    if file.parent != package_sweeps:
        searched.append(package_sweeps)
    if searched:
        entries = ",".join(hydra_quoted(f"file://{path}") for path in searched)
        arguments.append(f"hydra.searchpath=[{entries}]")
    return arguments


def _lines_of_kept_keys(file: Path, overrides: Sequence[str]) -> list[str]:
    """Return a line for each group that the user selects and the sweep file also sets.

    For example, with `model=mlp`, the `model.width` of the file remains set, although
    that model may not have it.

    Raises:
        ConfigError: the file has too many values.
    """
    yaml_size.check_size(file)  # Aliases may expand to more than the memory holds.
    try:
        content = OmegaConf.load(file)
    except (OSError, ValueError, YAMLError):  # Hydra reports it when it composes.
        return []
    values = OmegaConf.to_container(content, resolve=False)
    keys = keys_set(overrides)
    # A file that sweeps a group has keys that all of its options have.
    swept = value_at(values, "hydra.sweeper.params")
    if not isinstance(swept, dict):
        swept = {}
    lines = []
    for text in overrides:
        group, _, option = text.partition("=")
        settings = value_at(values, group)
        if not option or not isinstance(settings, dict) or group in swept:
            continue
        kept = [key for key in leaves(settings, group) if key not in keys]
        if kept:
            deletions = shlex.join(f"~{key}" for key in kept)
            lines.append(
                f"with {text}, {file.name} still sets {', '.join(kept)}: "
                f"add {deletions} to remove what does not apply"
            )
    return lines


def train_composed(
    arguments: Sequence[str], command_again: CommandAgain, *, dry: bool = False
) -> int:
    """Train the run, or the jobs of the sweep, that Hydra composes.

    If jobs of a sweep did not finish, the command that runs them is printed.

    Args:
        arguments: Hydra's arguments.
        command_again: returns the command that runs the jobs that did not finish.
        dry: whether to only list the jobs of a sweep.

    Returns:
        The exit status.
    """
    arguments = list(arguments)
    if "tracking.sweep" in keys_set(arguments):
        # Restrict the places of artifacts: a reopened sweep reads from its store, which
        # is not trusted.
        arguments.append("tracking.confined=true")
    current = session.Session(dry=dry)
    try:
        hydra_job.run(partial(hydra_job.in_run_dir, run_one), arguments, current)
    except BaseException as error:
        status = "FAILED"
        interrupted_by = ""
        if not isinstance(error, Exception):
            status = "KILLED"
        if isinstance(error, KeyboardInterrupt):
            interrupted_by = "Ctrl-C"
        if isinstance(error, Terminated):
            interrupted_by = str(error)
        _close(current.sweep, command_again, status, interrupted_by)
        raise
    return _close(current.sweep, command_again)


def _close(
    sweep: RunningSweep | None,
    command_again: CommandAgain,
    broken: str | None = None,
    interrupted_by: str = "",
) -> int:
    """Close a sweep, if there was one, publish its report, and return the exit status.

    No report is published for a sweep that ended early with the status `broken`.
    """
    if sweep is None:
        return 0
    parent = sweep.parent
    failure_reasons = sweep.endings.failure_reasons()
    try:
        status: int = sweep.close(broken, interrupted_by)
    except Exception as error:  # The store is unreachable.
        close = sync_command(sweep.folder, parent.uri)
        reason = first_line(error)
        store = secrets.mask(parent.uri)
        say(f"the sweep could not be closed in the store {store} ({reason}): {close}")
        if failure_reasons:
            say(_missing_line(parent.run_id, command_again))
        return NOT_SHIPPED
    if status:
        if sweep.endings.any_rejected:
            say(
                "a config that was rejected is rejected again until you correct its "
                "file; to correct an override, begin a new sweep"
            )
        # The same command would not run these jobs either.
        say(*sweep.lines_on_unplanned())
        if broken or failure_reasons or not sweep.unplanned:
            say(_missing_line(parent.run_id, command_again))
    if broken is None:
        _publish_report(sweep)
    return status


def _missing_line(run_id: str, command_again: CommandAgain) -> str:
    """Return the line with the command that runs what is missing of a sweep."""
    command = [secrets.mask(word) for word in command_again(run_id)]
    return f"run what is missing with: {shlex.join(['pipeline', *command])}"


def _publish_report(sweep: RunningSweep) -> None:
    from pipeline.report import writer
    from pipeline.sweep import mlflow_view

    parent = sweep.parent
    runs = mlflow_view.complete(parent).values()
    if any("train/loss" in run.data.metrics for run in runs):
        writer.publish(parent.uri, parent.run_id, sweep.places)


def _repeatable(arguments: Sequence[str]) -> list[str]:
    """Return the arguments to repeat in the command that runs the rest of a sweep.

    The overrides for the sweep's folder, which already contains jobs, and for
    `tracking.sweep` are left out.
    """
    of_first_call = ("hydra.sweep.dir=", "tracking.sweep=")
    return [text for text in arguments if not text.startswith(of_first_call)]


def _recorded_overrides(
    options: argparse.Namespace, file: list[str], rest: list[str]
) -> list[str]:
    """Return the recorded overrides of the sweep `options.again`, then `rest`.

    Raises:
        ConfigError: no sweep or several sweeps match, the sweep has another name, or
            its record is not trusted.
    """
    config = _config_of_place(file, rest)
    allowed = [former_names.current(entry) for entry in options.allow]
    config.trust.allow = [*config.trust.allow, *allowed]

    store = ForeignStore.open(config.tracking.uri, config.trust.allow)
    parent = store.sweep(options.again)
    if parent.data.tags["sweep.name"] != options.name:
        rule = f"must be the name of sweep {options.again}"
        name = parent.data.tags["sweep.name"]
        raise ConfigError("NAME", rule, options.name, [name])

    trusted = again.trusted_overrides(parent.data.tags, rest, config)
    overrides = again.in_recorded_order(parent.data.tags, trusted, rest)
    if options.allow:
        overrides.append(f"trust.allow={list(config.trust.allow)}")
    overrides.append(f"tracking.sweep={parent.info.run_id}")
    return overrides


def _config_of_place(file: Sequence[str], overrides: Sequence[str]) -> DictConfig:
    """Return the config with only those overrides that set the store, trust or data.

    Other overrides are left out: swept values would give several configs.
    """
    keys_of_place = ("tracking.", "tracking=", "trust.", "dataset.data_dir=")
    place = [text for text in overrides if text.startswith(keys_of_place)]
    return compose.composed([*file, *place])


def run_one(
    config: DictConfig, overrides: list[str], run_dir: Path, **how: Any
) -> float:
    """Train or resume the run of a composed config, and return its last loss.

    Args:
        config: the config.
        overrides: the overrides on the command line.
        run_dir: the run directory.
        how: further arguments of `pipeline.run.run`: `resume` and `key`.
    """
    if config.hardware.device.name == "gpu" and not nvidia.visible():
        # Fail now, as the import of TensorFlow below takes seconds.
        raise nvidia.no_gpu_error()
    from pipeline.run import run

    places = trust_entries.allowed_places(config.trust.allow)
    locations: Any = nullcontext()
    if config.tracking.confined:
        locations = artifact_locations.confined(config.tracking.uri, places)
    with locations:
        _, loss = run.run(config, overrides, run_dir, **how)
    return loss
