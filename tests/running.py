"""Runs the real command in real processes, and reads what it left in a real store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from tests import shared
from tests.warm import Python

ROOT = Path(__file__).resolve().parent.parent

# One epoch of a small model, with nothing logged that takes seconds.
TINY = (
    "model=mlp",
    "training.epochs=1",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
)


def environment(**more: str) -> dict[str, str]:
    """Return a command's environment, in which it finds this package and its own store.

    Args:
        more: further variables.
    """
    variables = dict(os.environ)
    # MLflow exports it into this process as soon as a test opens a store.
    variables.pop("MLFLOW_TRACKING_URI", None)

    paths = [str(ROOT)]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    return variables | more


def python(
    *arguments: str,
    cwd: Path,
    warm: bool = True,
    stdin: int = subprocess.DEVNULL,
    **more: str,
) -> subprocess.Popen[str] | Python:
    """Start `python ARGUMENTS` as a process group, with a pipe for each of its streams.

    Args:
        arguments: of the interpreter, such as "-m", "pipeline".
        cwd: the folder that it is started in.
        warm: fork it from a process that has imported TensorFlow, see warm.py.
        stdin: `subprocess.PIPE`, or nothing to read.
        more: environment variables.
    """
    variables = environment(**more)
    if warm:
        address = shared.warm_address()
        return Python(address, arguments, cwd=cwd, env=variables, stdin=stdin)
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=variables,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background job ignores Ctrl-C, and so would all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def start(
    *arguments: str, cwd: Path, warm: bool = True, **more: str
) -> subprocess.Popen[str] | Python:
    """Start `pipeline ARGUMENTS`, see `python`, and do not wait for it."""
    return python("-m", "pipeline", *arguments, cwd=cwd, warm=warm, **more)


def pipeline(
    *arguments: str,
    cwd: Path,
    status: int | None = 0,
    timeout: int = 570,
    warm: bool = True,
    new_store: bool = False,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Run `pipeline ARGUMENTS` to its end.

    Args:
        arguments: the verb and what follows it.
        cwd: the folder that it is started in.
        status: the exit status that it must have; None for any.
        timeout: seconds after which it is killed and the test fails.
        warm: see `python`.
        new_store: let it create the store of `cwd`. Otherwise an empty one is placed
            there, which saves the seconds of MLflow's migrations.
        more: environment variables.
    """
    trains = arguments[0] in ("train", "sweep") and "--cfg" not in arguments
    if trains and status != 2 and not new_store:
        shared.place_store(cwd)

    process = start(*arguments, cwd=cwd, warm=warm, **more)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert status in (None, process.returncode), f"{arguments}\n{out}\n{err}"
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def train_in(
    folder: Path, name: str, *overrides: str, status: int = 0, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run `pipeline train OVERRIDES` in `folder`; see `pipeline`.

    `name` is the name of the experiment, whose only run it is, and of its directory.
    """
    place = (f"tracking.experiment={name}", f"hydra.run.dir={name}")
    return pipeline("train", *overrides, *place, cwd=folder, status=status, **more)


def one_process(
    lines: dict[str, str], cwd: Path, *, warm: bool = True, **more: str
) -> dict[str, dict]:
    """Run many command lines in one process, and return the result of each by its name.

    Args:
        lines: command lines without `pipeline`, by names of the test's choice.
        cwd: the folder that they are run in.
        warm: see `python`.
        more: environment variables.

    Returns:
        for each line what `tests.one_process.run` returns: its status, what it wrote to
        the two streams, and what it changed in `cwd`.
    """
    process = python(
        *("-m", "tests.one_process"), cwd=cwd, warm=warm, stdin=subprocess.PIPE, **more
    )
    out, err = process.communicate(json.dumps(list(lines.values())))
    assert process.returncode == 0, err
    return dict(zip(lines, json.loads(out), strict=True))


def wait(condition: Callable[[], object], seconds: float = 240) -> None:
    """Wait until `condition` holds; fail after `seconds`."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


class Store:
    """Reads the default store of a folder that the command was run in."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.client = MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db")

    def runs(self, experiment: str = "pipeline") -> list[Run]:
        """Return the runs of an experiment, the oldest first."""
        entity = self.client.get_experiment_by_name(experiment)
        if entity is None:
            return []
        oldest_first = ["start_time ASC"]
        runs = self.client.search_runs([entity.experiment_id], order_by=oldest_first)
        return list(runs)

    def trained(self, experiment: str = "pipeline") -> list[Run]:
        """Return the runs that trained something: all except the parents of sweeps."""
        runs = self.runs(experiment)
        return [run for run in runs if "sweep.name" not in run.data.tags]

    def run(self, experiment: str = "pipeline") -> Run:
        """Return the only run of an experiment."""
        (run,) = self.runs(experiment)
        return run

    def history(self, run: Run, key: str) -> dict[int, float]:
        """Return the values of a metric by step; no step may occur twice."""
        points = self.client.get_metric_history(run.info.run_id, key)
        by_step = {point.step: point.value for point in points}
        assert len(by_step) == len(points), f"{key} has two values on one step"
        return dict(sorted(by_step.items()))

    def histories(self, run: Run, *prefixes: str) -> dict[str, dict[int, float]]:
        """Return the history of each metric whose name begins with one of the prefixes.

        Without prefixes these are the metrics of training and validation.
        """
        if not prefixes:
            prefixes = ("train/", "val/")
        keys = [key for key in run.data.metrics if key.startswith(prefixes)]
        return {key: self.history(run, key) for key in sorted(keys)}

    def by_param(self, runs: list[Run], *keys: str) -> dict[tuple[str, ...], Run]:
        """Return the runs by their values of `keys`; no two may have the same ones."""
        groups = defaultdict(list)
        for run in runs:
            values = tuple(run.data.params[key] for key in keys)
            groups[values].append(run)
        assert all(len(group) == 1 for group in groups.values())
        return {values: group[0] for values, group in groups.items()}
