"""Command line → composed config → job, through Hydra."""

import argparse
import logging
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from pipeline.common.errors import (
    ConfigError,
    NotShippedError,
    RunError,
    described,
    printable,
    say,
)
from pipeline.common.secrets import mask
from pipeline.config import former_names, hydra_errors, key_kinds, schema
from pipeline.config.hydra_internals import get_args_parser

Task = Callable[[DictConfig, list[str], Path], float]
_SET_BY_A_SWEEP = key_kinds.keys_where(lambda facts: facts.set_by_a_sweep)
_HOME = re.compile(
    "^([^=]+=(sqlite:///)?)~(?=/)"
)  # a shell leaves KEY=~/… as it is, and Hydra has no ~ in a value
# An override of what is text, also where Hydra would read a number in it; what Hydra knows as more than words is its.
_TEXT = re.compile(r"\A(\+{0,2}start\.run=)([^'\"$\\()\[\]{}]+)\Z")


def directory(name: str = "conf") -> str:
    """Return the packaged folder `conf` or `sweeps`: inside an installed wheel, beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return str(package / name if (package / name).is_dir() else package.parent / name)


def composed(arguments: Sequence[str]) -> DictConfig:
    """Return the config that `arguments` compose to, by Hydra's Compose API, which runs, prints and makes nothing."""
    schema.register()
    options, _, folders = _read(arguments)
    for name, value in vars(options).items():
        if value and name not in (
            "overrides",
            "config_name",
            "config_path",
            "config_dir",
            "run",
        ):
            rule = "must be left out: this reads one config; `pipeline train` prints configs and sweeps over them"
            raise ConfigError(f"--{name.replace('_', '-')}", rule)
    logging.basicConfig(
        format="%(message)s"
    )  # to a root logger without a handler TensorFlow's adds one of its own
    token = _session.set(Session(config_dir=options.config_dir))
    try:
        with (
            hydra_errors.as_config_error(options.overrides, folders, (Exception,)),
            hydra.initialize_config_dir(
                options.config_path or directory(), version_base="1.3"
            ),
        ):
            config = hydra.compose(options.config_name or "config", options.overrides)
            _expand_home(config)
            former_names.rename(config)
            return config
    finally:
        _session.reset(token)


def run_recorded(
    config: Mapping[str, Any],
    overrides: Sequence[str],
    task: Task,
    folders: Sequence[str] = (),
) -> None:
    """Compose a recorded config, plain, resolved and checked, with `overrides` and a user's `folders`; call `task`."""
    with tempfile.TemporaryDirectory() as folder:
        run(
            partial(in_run_dir, task),
            [*recorded_file(config, Path(folder), "record", folders), *overrides],
        )


def recorded_file(
    config: Mapping[str, Any], folder: Path, name: str, folders: Sequence[str] = ()
) -> list[str]:
    """Write a recorded config to `folder`, to be composed with a user's `folders`; return the arguments that do so."""
    ours = OmegaConf.load(Path(directory()) / "config.yaml")
    of_hydra = [
        entry
        for entry in ours.defaults
        if not isinstance(entry, str) and "override" in str(entry)
    ]
    hydras = {**ours.hydra, "searchpath": [f"file://{folder}" for folder in folders]}
    record = OmegaConf.create(
        {"defaults": ["schema", "_self_", *of_hydra], **config, "hydra": hydras}
    )
    (folder / f"{name}.yaml").write_text(OmegaConf.to_yaml(record), encoding="utf-8")
    return ["--config-dir", str(folder), "--config-name", name]


def in_run_dir(task: Task, config: DictConfig) -> float:
    """Call `task` with the config, the command line's overrides and the run directory that Hydra made."""
    settings, parent = HydraConfig.get(), config.tracking.sweep
    if parent is not None and settings.mode == RunMode.RUN:
        raise ConfigError(
            "tracking.sweep",
            "must be left out of a single run: it is of a multirun",
            parent,
        )
    # Unresolved: an override may hold an interpolation, which is the config's to resolve.
    overrides: Any = OmegaConf.to_container(settings.overrides.task, resolve=False)
    return task(config, overrides, Path(settings.runtime.output_dir))


@dataclass
class Session:
    """One call of Hydra: what its plugins are told by who called it, and what they leave for them."""

    config_dir: str | None = (
        None  # the user's, where Hydra's plugins have to find it; else Hydra knows it
    )
    key: str = ""  # the config key of the run directory, and
    asked: Path = Path()  # the folder that it names
    made: Sequence[
        Path
    ] = ()  # the folders that Hydra makes for it, the innermost first
    sweep: Any = None  # the parent run of a multirun, once there is one

    @contextmanager
    def checking_folder(self) -> Iterator[None]:
        """Raise a `ConfigError` for a run directory that cannot be made."""
        try:
            yield
        except OSError as error:
            if Path(str(error.filename)).absolute() not in (
                self.asked,
                *self.asked.parents,
            ):
                raise
            rule = f"must be a folder that can be made ({error.strerror})"
            raise ConfigError(self.key, rule, str(error.filename)) from error

    def remove_empty_folders(self) -> None:
        """Remove the folders that Hydra made and that are empty, from the run directory upwards."""
        with suppress(
            OSError
        ):  # one is not there, or is another process', which has removed it or uses it now
            for folder in self.made:
                if {file.name for file in folder.iterdir()} - {"multirun.yaml"}:
                    return
                (folder / "multirun.yaml").unlink(
                    missing_ok=True
                )  # Hydra's, of a sweep that was refused
                folder.rmdir()


# Hydra makes its callbacks and launchers by itself and returns nothing of theirs: nothing else gives them a session.
_session: ContextVar[Session] = ContextVar("session")


def session() -> Session:
    """Return the session of the call of Hydra that this code runs in; an empty one outside of any."""
    return _session.get(Session())


class RunFolders(Callback):
    """Expand `~` in the run directory, and note in the session which folders Hydra is about to make."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        key = "hydra.run.dir" if config.hydra.mode == RunMode.RUN else "hydra.sweep.dir"
        with suppress(
            OmegaConfBaseException
        ):  # Hydra reads it next, and then it is refused
            written = OmegaConf.select(config, key)
            folder = Path(written).expanduser().absolute()
            if str(written).startswith("~"):
                with read_write(config):
                    OmegaConf.update(config, key, str(folder))
                    config.hydra.overrides.hydra.append(
                        f"{key}='{folder}'"
                    )  # the jobs of a sweep compose it again
            _expand_home(config)  # here for a launcher, which opens the store
            here = session()
            here.key, here.asked = key, folder
            here.made = [
                made for made in (folder, *folder.parents) if not made.exists()
            ]

    on_multirun_start = on_run_start


def _expand_home(config: DictConfig) -> None:
    """Replace `~` at the start of the store's file and of the data's folder by the home directory, in place."""
    for key, prefix in (("tracking.uri", "sqlite:///"), ("dataset.data_dir", "")):
        with suppress(OmegaConfBaseException):  # what has no value is refused later
            value = OmegaConf.select(config, key)
            if isinstance(value, str) and value.startswith(f"{prefix}~"):
                OmegaConf.update(
                    config, key, prefix + os.path.expanduser(value.removeprefix(prefix))
                )


def run(
    task: Callable[[DictConfig], Any],
    arguments: Sequence[str],
    here: Session | None = None,
) -> None:
    """Run `task` on the config that Hydra composes from `arguments`; its plugins write into the session `here`.

    Raise a RunError if one run failed after it was created; its traceback is in its run directory.
    """
    raised: list[Exception] = []

    def job(config: DictConfig) -> Any:
        multirun = HydraConfig.get().mode == RunMode.MULTIRUN
        try:
            _expand_home(config)
            former_names.rename(config)
            return task(config)
        except NotShippedError as error:
            if multirun:
                say(str(error))
                return error.loss  # the job has done what it was for
            raised.append(error)
        except Exception as error:
            if multirun:
                # The launcher must know which job failed, in words that need no import of TensorFlow there.
                say(*mask(traceback.format_exc()).splitlines())
                raise RuntimeError(
                    mask(
                        str(error)
                        if isinstance(error, ConfigError)
                        else described(error)
                    )
                ) from None
            raised.append(
                _with_traceback_kept(error)
            )  # raised again below: else Hydra prints a line of its own
        return None

    options, flags, folders = _read(arguments)
    # What only a sweep sets is not shown, unless the command line names it.
    named = {text.lstrip("+~").partition("=")[0] for text in options.overrides}
    shows = options.help or options.cfg or options.info
    schema.register(shown=bool(shows) and named.isdisjoint(_SET_BY_A_SWEEP))
    with hydra_errors.as_config_error(options.overrides, folders, (Exception,)):
        parsed = OverridesParser.create().parse_overrides(options.overrides)
    overrides = _by_environment(parsed) if options.multirun else options.overrides
    # One run's errors are kept in `raised`, so all others are of the input; a launcher raises those of its jobs too.
    kinds = (
        hydra_errors.COMPOSITION
        if options.multirun and not (options.cfg or options.info)
        else (Exception,)
    )
    here = here or Session()
    token, before, full_error = (
        _session.set(here),
        sys.argv,
        os.environ.get("HYDRA_FULL_ERROR", "0"),
    )
    sys.argv = [
        "pipeline",
        *overrides,
        *flags,
    ]  # Hydra wants the overrides side by side
    os.environ["HYDRA_FULL_ERROR"] = (
        "1"  # else Hydra prints what it refuses in many lines and exits with 1
    )
    try:
        with (
            hydra_errors.as_config_error(overrides, folders, kinds),
            here.checking_folder(),
        ):
            hydra.main(
                version_base="1.3", config_path=directory(), config_name="config"
            )(job)()
    except ConfigError:
        if not raised:
            raise
    except SystemExit as exit:
        if exit.code not in (0, None):
            raise SystemExit(2) from None  # Hydra has said why
    finally:
        sys.argv, os.environ["HYDRA_FULL_ERROR"] = before, full_error
        _session.reset(token)
        here.remove_empty_folders()
    if raised:
        raise raised[0]


def _with_traceback_kept(error: Exception) -> Exception:
    """Write the traceback of a failed run into its run directory, if there is room; return what to say in one line."""
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    if isinstance(error, ConfigError) or not (run_dir / "journal.jsonl").exists():
        return error
    file, lines = (
        run_dir / "traceback.log",
        mask("".join(traceback.format_exception(error))).splitlines(),
    )
    try:
        file.write_text("\n".join([*map(printable, lines), ""]), encoding="utf-8")
        kept = f"traceback in {file}"
    except OSError as full:
        kept = f"its traceback was not written: {full.strerror}"
    failure = RunError(f"{described(error)} ({kept})")
    failure.__cause__ = error
    return failure


def as_text(overrides: Sequence[str]) -> list[str]:
    """Return the overrides as Hydra reads them: `~/` expanded, the start of a run such as 12e4 quoted, current keys."""

    def quoted(found: re.Match[str]) -> str:
        values = map(str.strip, found[2].split(","))
        return found[1] + ",".join(
            value if value.lower() in ("null", "") else f"'{value}'" for value in values
        )

    return [
        former_names.current_override(
            _TEXT.sub(quoted, _HOME.sub(rf"\1{Path.home()}", text))
        )
        for text in overrides
    ]


def own_folder() -> str | None:
    """Return the folder `conf` of the working directory if it holds config groups other than the package's own."""
    folder = Path("conf").absolute()
    return (
        str(folder)
        if any(folder.glob("*/*.yaml")) and not folder.samefile(directory())
        else None
    )


@cache
def check_config_dir(folder: str) -> None:
    """Refuse a folder of the user's configs that is not there; say once that it is used, and what is not."""
    if not Path(folder).is_dir():
        raise ConfigError("--config-dir", "must be a folder that exists", folder)
    if folder == own_folder():
        say(f"pipeline: with the configs in {folder}")
    for file in sorted(Path(folder).glob("*/**/*.yaml")):
        name = file.relative_to(folder)
        ours = Path(directory()) / name
        if ours.exists() and ours.read_bytes() != file.read_bytes():
            say(
                f"pipeline: {name.parent}={name.stem} is the built-in config; {file} is not used, rename it"
            )


def _by_environment(overrides: Sequence[Override]) -> list[str]:
    """Leave all secrets but swept ones to the environment: Hydra writes the overrides of a sweep's jobs into files."""
    texts = [str(override.input_line) for override in overrides]
    for number, (text, override) in enumerate(zip(texts, overrides, strict=True)):
        if mask(text) != text and not override.is_sweep_override():
            os.environ[name := f"PIPELINE_SECRET_{number}"] = str(override.value())
            texts[number] = f"{text.split('=')[0]}=${{oc.env:{name}}}"
    return texts


def _read(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Return the command line as Hydra reads it, with a user's folder; its options; and the folders of configs."""
    arguments = as_text(arguments)
    options = _parsed(arguments)
    flags = [argument for argument in arguments if argument not in options.overrides]
    if options.config_dir is None and (own := own_folder()) is not None:
        options.config_dir, flags = own, [*flags, "--config-dir", own]
    if options.config_dir and not options.shell_completion:
        check_config_dir(options.config_dir)
    return options, flags, [directory(), *filter(None, [options.config_dir])]


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line as Hydra's own parser reads it; refuse a wrong one in one line."""

    def refuse(message: str) -> NoReturn:
        raise ConfigError(
            "arguments", f"must be what Hydra takes ({message})", " ".join(arguments)
        )

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_intermixed_args(list(arguments))
