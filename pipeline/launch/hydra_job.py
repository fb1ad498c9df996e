"""Composes a config from a command line with Hydra, and runs a job on it."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.common.errors import (
    ConfigError,
    NotShippedError,
    RunError,
    StoreError,
    described,
    printable,
    say,
)
from pipeline.common.secrets import mask
from pipeline.config import compose, hydra_errors, key_kinds, schema
from pipeline.config.overrides import keys_set
from pipeline.config.session import Session, entered

# A function that takes the config, the overrides on the command line and the run
# directory, and returns the loss.
Task = Callable[[DictConfig, list[str], Path], float]

_SET_BY_A_SWEEP = key_kinds.keys_where(lambda facts: facts.set_by_a_sweep)


def run(
    task: Callable[[DictConfig], Any],
    arguments: Sequence[str],
    current: Session | None = None,
) -> None:
    """Run a task on the config that Hydra composes from the arguments.

    Args:
        task: called with the config; once, or once per job of a sweep.
        arguments: the command line, without the verb.
        current: the session that Hydra's plugins read and write; by default a new one.

    Raises:
        ConfigError: the command line or the config is wrong.
        RunError: a single run failed after it was created. Its traceback is in its run
            directory, unless the disk was full.
        NotShippedError: a single run has trained, but is not completely in the store.
        StoreError: the store did not accept a single run.
        SystemExit: Hydra has printed an error itself.
    """
    _check_working_folder()
    command_line = compose.read_command_line(arguments)
    options = command_line.options
    schema.register(hide_sweep_keys=_hides_sweep_keys(options))

    with hydra_errors.translated(options.overrides, command_line.folders, (Exception,)):
        parsed = OverridesParser.create().parse_overrides(options.overrides)
    overrides = options.overrides
    if options.multirun:
        overrides = _by_environment(parsed)

    # `_Job` keeps the error of a single run, so any other exception is due to the
    # input. In a multirun, the launcher also raises the errors of its jobs: convert
    # only those of the composition.
    errors_of_input: tuple[type[Exception], ...] = (Exception,)
    if options.multirun and not (options.cfg or options.info):
        errors_of_input = hydra_errors.COMPOSITION

    job = _Job(task)
    current = current or Session()
    main = hydra.main(
        version_base="1.3", config_path=compose.directory(), config_name="config"
    )
    try:
        with (
            _command_line_of_hydra([*overrides, *command_line.flags]),
            entered(current),
            hydra_errors.translated(overrides, command_line.folders, errors_of_input),
            current.checking_folder(),
        ):
            main(job)()
    except ConfigError:
        if job.error is None:
            raise
    except SystemExit as exit:
        if exit.code not in (0, None):
            raise SystemExit(2) from None  # Hydra has printed the reason.
    finally:
        current.remove_empty_folders()
    if job.error is not None:
        raise job.error


def in_run_dir(task: Task, config: DictConfig, sweep: str | None = None) -> float:
    """Call a task with the config, and with Hydra's overrides and run directory.

    Args:
        task: the task.
        config: the composed config.
        sweep: the sweep of the recorded run that a single run continues, or None if
            that run is not a job of a sweep.

    Raises:
        ConfigError: the config names another sweep for a single run, or sets
            `hydra.job.chdir`.
    """
    settings = HydraConfig.get()
    parent = config.tracking.sweep
    if parent not in (None, sweep) and settings.mode == RunMode.RUN:
        rule = "must be left out of a single run: it is for a multirun"
        raise ConfigError("tracking.sweep", rule, parent)
    if settings.job.chdir:
        rule = (
            "must be false: the store, the data and the code are looked up relative "
            "to the folder in which the command was run"
        )
        raise ConfigError("hydra.job.chdir", rule, True)
    if config.training.resume is not None:
        _say_if_run_dir_is_new(settings)
    # Do not resolve interpolations in the overrides: the config resolves them.
    overrides: Any = OmegaConf.to_container(settings.overrides.task, resolve=False)
    return task(config, overrides, Path(settings.runtime.output_dir))


def _say_if_run_dir_is_new(settings: Any) -> None:
    """Print that nothing can be resumed if the run directory has the time in its name.

    In a sweep, `--again` resumes the jobs, wherever they are.

    Args:
        settings: Hydra's own config.
    """
    written: Any = OmegaConf.to_container(settings.run, resolve=False)
    if settings.mode == RunMode.RUN and "${now:" in str(written["dir"]):
        say(
            "training.resume=auto begins a new run, because the run directory is new "
            "each time; to resume this run later, give it a fixed hydra.run.dir=FOLDER"
        )


class _Job:
    """The function that Hydra calls with each composed config.

    The error of a single run is stored in `error` instead of raised, as Hydra would
    print an additional line for it.
    """

    def __init__(self, task: Callable[[DictConfig], Any]) -> None:
        self.task = task
        self.error: Exception | None = None

    def __call__(self, config: DictConfig) -> Any:
        in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        try:
            compose.prepare(config)
            return self.task(config)
        except NotShippedError as error:
            if in_sweep:
                say(str(error))
                return error.loss  # The job has finished training.
            self.error = error
        except Exception as error:
            if in_sweep:
                raise _told_to_the_launcher(error) from None
            self.error = _with_traceback_kept(error)
        return None


def _check_working_folder() -> None:
    """Reject a working directory whose path Hydra would read as an interpolation."""
    folder = os.getcwd()
    if "${" in folder:
        rule = "must have no ${ in its path, which Hydra reads as a reference to a key"
        raise ConfigError("the working folder", rule, folder)


def _hides_sweep_keys(options: Any) -> bool:
    """Return whether to hide the keys that only a sweep sets.

    They are hidden if Hydra only prints the help or the config, unless the command line
    names one of them.
    """
    if not (options.help or options.cfg or options.info):
        return False
    return keys_set(options.overrides).isdisjoint(_SET_BY_A_SWEEP)


def _by_environment(overrides: Sequence[Override]) -> list[str]:
    """Return the overrides as strings, with secrets moved to environment variables.

    This keeps secrets out of the files into which Hydra writes the overrides of a
    sweep's jobs. A secret in a swept override is not moved.

    Raises:
        ConfigError: a secret is in a list, a mapping, or beside a reference to a key.
    """
    texts = []
    for number, override in enumerate(overrides):
        text = str(override.input_line)
        if mask(text) != text and not override.is_sweep_override():
            name = f"PIPELINE_SECRET_{number}"
            os.environ[name] = _secret_text(override)
            text = f"{text.split('=')[0]}=${{oc.env:{name}}}"
        texts.append(text)
    return texts


def _secret_text(override: Override) -> str:
    """Return the value of an override that holds a secret, with environment variables.

    OmegaConf does not resolve `${…}` within the value of an environment variable, so
    the value is resolved here.
    """
    value = override.value()
    rule = (
        "must, in a sweep, come entirely from the environment, as ${oc.env:NAME}, "
        "because it holds a secret"
    )
    if isinstance(value, list | dict):
        raise ConfigError(override.key_or_group, rule, override.input_line)
    try:
        return str(OmegaConf.create({"value": value})["value"])
    except OmegaConfBaseException:
        raise ConfigError(
            override.key_or_group, f"{rule} together with ${{…}}", override.input_line
        ) from None


@contextmanager
def _command_line_of_hydra(arguments: Sequence[str]) -> Iterator[None]:
    """Within the block, let Hydra read these arguments, and raise its errors."""
    arguments_before = sys.argv
    full_error_before = os.environ.get("HYDRA_FULL_ERROR", "0")
    sys.argv = ["pipeline", *arguments]  # Hydra needs adjacent overrides.
    # Without this variable, Hydra prints an error in many lines and exits with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = arguments_before
        os.environ["HYDRA_FULL_ERROR"] = full_error_before


def _told_to_the_launcher(error: Exception) -> Exception:
    """Print the traceback of a job, and return the error to raise to the launcher.

    A `ConfigError` is returned unchanged. Any other error becomes a `RuntimeError` that
    contains only text, so that the launcher can read it without importing TensorFlow.
    """
    say(*mask(traceback.format_exc()).splitlines())
    if isinstance(error, ConfigError):
        return error
    return RuntimeError(mask(described(error)))


def _with_traceback_kept(error: Exception) -> Exception:
    """Write the traceback of a failed run to a file in its run directory.

    Return a `RunError` whose one-line message names the file, or says why the file was
    not written. A `ConfigError`, a `StoreError`, or an error from before the run was
    created, is returned unchanged.
    """
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    if (
        isinstance(error, ConfigError | StoreError)
        or not (run_dir / "journal.jsonl").exists()
    ):
        return error
    file = run_dir / "traceback.log"
    lines = mask("".join(traceback.format_exception(error))).splitlines()
    text = "".join(f"{printable(line)}\n" for line in lines)
    try:
        file.write_text(text, encoding="utf-8")
        where = f"traceback in {file}"
    except OSError as full:
        where = f"its traceback was not written: {full.strerror}"
    failure = RunError(f"{described(error)} ({where})")
    failure.__cause__ = error
    return failure
