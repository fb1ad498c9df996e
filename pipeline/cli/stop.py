"""`pipeline stop RUN`: end a running run, or all jobs of a sweep, with checkpoints."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig

from pipeline.checkpoints import run_dirs
from pipeline.common.errors import ConfigError, Parser, count, say
from pipeline.common.signals import STOP_TAG
from pipeline.config import compose, trust_entries
from pipeline.sweep import liveness, sweep_file
from pipeline.sweep.files import sweep_files
from pipeline.tracking.foreign_store import (
    MULTIRUN,
    ForeignStore,
    OwnStore,
    SweepRecord,
)
from pipeline.tracking.journal_file import JOURNAL_NAME, Past, is_locked

RUN = "RUN"
_INTERVAL = 0.2  # seconds between two checks whether a run has ended


def stop(arguments: Sequence[str]) -> int:
    """End RUN between two updates, with a checkpoint from which it can be resumed.

    With training.checkpoint_every=null, there is no checkpoint. A process on this
    machine gets SIGTERM. Otherwise, the run gets the tag `stop` in its store.
    """
    parser = Parser(prog="pipeline stop", description=stop.__doc__, allow_abbrev=False)
    parser.add_argument(
        "run",
        metavar=RUN,
        help="a run directory, the folder of a sweep, or the start of the ID of a run or "
        "a sweep",
    )
    parser.add_argument(
        "--config-dir",
        "-cd",
        metavar="DIR",
        help="a folder with config groups of your own",
    )
    options, overrides = parser.parse_known_args(list(arguments))
    config_dir = ["--config-dir", options.config_dir] if options.config_dir else []
    config = compose.composed([*config_dir, *overrides])
    trust_entries.check_allowed(config.trust.allow)

    sweep_folder = _find_sweep(options.run)
    if sweep_folder is not None:
        _stop_sweep(sweep_folder, config)
        return 0
    _check_no_name_of_sweeps(options.run)
    run_dir = _find_run(options.run)
    if run_dir is None:
        _stop_in_store(options.run, config)
    else:
        _stop_run(run_dir, config, overrides)
    return 0


def _find_sweep(start: str) -> Path | None:
    """Return the folder `start`, or that of the sweep whose ID begins with `start`.

    If the sweep has several folders, because of `--again`, return the locked one.
    Return None unless exactly one sweep matches.
    """
    if (Path(start) / sweep_file.NAME).exists():
        return Path(start)
    if len(start) < run_dirs.SHORTEST_ID:
        return None
    ids = set()
    folder = None
    for path in sweep_file.folders_below(Path()):
        content = sweep_file.read(path) or {}
        run_id = str(content.get("run_id"))
        if run_id.startswith(start):
            ids.add(run_id)
            if folder is None or is_locked(path / sweep_file.NAME):
                folder = path
    return folder if len(ids) == 1 else None


def _check_no_name_of_sweeps(name: str) -> None:
    """Reject the name of sweeps, since several sweeps may have the same name.

    Raises:
        ConfigError: the argument is such a name. The choices are the running sweeps.
    """
    if Path(name).exists():
        return
    is_name = name in (MULTIRUN, *sweep_files())
    running = []
    for folder in sweep_file.folders_below(Path()):
        content = sweep_file.read(folder) or {}
        if content.get("name") == name:
            is_name = True
            if is_locked(folder / sweep_file.NAME):
                running.append(str(folder))
    if is_name:
        rule = "must be the folder or the ID of a running sweep, not its name"
        raise ConfigError(RUN, rule, name, running or None)


def _find_run(start: str) -> Path | None:
    """Return the run directory of `start`; None if no run below this folder matches."""
    is_id = len(start) >= run_dirs.SHORTEST_ID and set(start) <= set("0123456789abcdef")
    if is_id and not Path(start).exists():
        ids = run_dirs.by_id(RUN)
        if not any(run_id.startswith(start) for run_id in ids):
            return None
    return run_dirs.find(start, RUN)


def _stop_sweep(folder: Path, config: DictConfig) -> None:
    """End the process that runs the sweep in a folder, by a signal or by the tag."""
    file = folder / sweep_file.NAME
    content = sweep_file.read(folder) or {}
    run_id = str(content.get("run_id"))
    process = _process_with_open(file, content.get("pid"))
    if process is None:
        _stop_in_store(run_id, config)
    else:
        _terminate(process, file, f"sweep {run_id}")
        say(f"sweep {run_id} has ended")


def _stop_run(run_dir: Path, config: DictConfig, overrides: Sequence[str]) -> None:
    """End the run in a run directory by a signal, or else by its tag.

    Raises:
        ConfigError: the run is not running, or its store is not trusted.
    """
    journal = run_dir / JOURNAL_NAME
    past = Past.read(run_dir, RUN, running=True)
    if not is_locked(journal):
        raise _not_running(str(run_dir), past.status)
    process = _process_with_open(journal, past.pid)
    if process is not None:
        _terminate(process, journal, f"the run in {run_dir}")
        status = Past.read(run_dir, RUN, running=True).status
        say(f"the run in {run_dir} has ended as {status or 'KILLED'}")
        return

    if not past.run_id:
        rule = "must run on this machine, since no store has the run yet"
        raise ConfigError(RUN, rule, str(run_dir))
    own = OwnStore(
        config.tracking.uri,
        tuple(trust_entries.allowed_places(config.trust.allow)),
        on_command_line=any(text.startswith("tracking.uri=") for text in overrides),
    )
    uri = own.followed(past.store, f"the journal in {run_dir}")
    store = ForeignStore.open(uri, config.trust.allow)
    _request(store.client(), [store.run(past.run_id, RUN)], str(run_dir))


def _stop_in_store(start: str, config: DictConfig) -> None:
    """Ask the run or sweep whose ID in the configured store begins with `start` to end.

    Raises:
        ConfigError: there is no such run, or it is not running.
    """
    store = ForeignStore.open(config.tracking.uri, config.trust.allow)
    run = store.run(start, RUN)
    runs = [run]
    # If no process runs the sweep any more, its jobs may still run, on a cluster.
    if "sweep.name" in run.data.tags and not liveness.has_process(run):
        record = SweepRecord(store.uri, run.info.run_id, run.info.experiment_id)
        runs = list(record.children().values())
        if all(job.info.status != "RUNNING" for job in runs):
            status = run.info.status
            if liveness.was_killed(run):
                status = "KILLED"
            raise _not_running(start, status)
    _request(store.client(), runs, start)


def _request(client: Any, runs: Sequence[Any], received: str) -> None:
    """Set the tag on those runs that are running.

    Args:
        client: an MLflow client for the store.
        runs: a run, or the jobs of a sweep.
        received: the argument that names the run or the sweep.

    Raises:
        ConfigError: none of the runs is running.
    """
    running = [run for run in runs if run.info.status == "RUNNING"]
    if not running:
        statuses = sorted({run.info.status for run in runs})
        raise _not_running(received, ", ".join(statuses))
    for run in running:
        client.set_tag(run.info.run_id, STOP_TAG, "true")
    say(
        f"asked {count(len(running), 'run')} to end by setting the tag {STOP_TAG}; a "
        "process that is still running sees the tag within seconds"
    )


def _not_running(received: str, status: str | None) -> ConfigError:
    return ConfigError(RUN, f"must be running; it is {status or 'KILLED'}", received)


def _process_with_open(file: Path, pid: Any) -> psutil.Process | None:
    """Return the process with this ID if it has a file open, else None.

    The ID is recorded beside the file. It may belong to another machine, or by now to
    another process: neither has the file open.
    """
    if not isinstance(pid, int):
        return None
    try:
        process = psutil.Process(pid)
        for opened in process.open_files():
            if os.path.samefile(opened.path, file):
                return process
    except (psutil.Error, OSError, ValueError):
        pass
    return None


def _terminate(process: psutil.Process, file: Path, name: str) -> None:
    """Send SIGTERM to a process, and wait until it has unlocked a file."""
    try:
        process.terminate()
    except psutil.NoSuchProcess:  # it has just ended
        return
    say(
        f"sent SIGTERM to process {process.pid}: waiting for {name} to end; Ctrl-C "
        "only ends the waiting"
    )
    while is_locked(file):
        time.sleep(_INTERVAL)
