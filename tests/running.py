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
TINY = (
    "model=mlp",
    "training.epochs=1",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
)


def environment(**more: str) -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    here = {
        key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"
    }  # MLflow exports it
    return {
        **here,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        **more,
    }


def python(
    *arguments: str,
    cwd: Path,
    warm: bool = True,
    stdin: int = subprocess.DEVNULL,
    **more: str,
) -> subprocess.Popen[str] | Python:
    """`python …` as a process group of its own, with its output kept apart.

    Args:
        warm: fork it from a process that has imported TensorFlow, see warm.py.
        stdin: nothing, or `subprocess.PIPE`.
        more: environment variables.
    """
    env = environment(**more)
    if warm:
        return Python(shared.warm_address(), arguments, cwd=cwd, env=env, stdin=stdin)
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=env,
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
    """`pipeline …`, see `python`."""
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
    """`pipeline …` to its end; its exit status must be `status`, where that is given.

    Args:
        warm: see `python`.
        new_store: let it make the store of `cwd`, in place of finding an empty one there.
    """
    if (
        arguments[0] in ("train", "sweep")
        and "--cfg" not in arguments
        and status != 2
        and not new_store
    ):
        shared.place_store(cwd)
    process = start(*arguments, cwd=cwd, warm=warm, **more)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert status in (None, process.returncode), f"{arguments}\n{out}\n{err}"
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def one_process(
    lines: dict[str, str], cwd: Path, *, warm: bool = True, **more: str
) -> dict[str, dict]:
    """What each command line does: its status, what it wrote to either stream, and what it changed in `cwd`.

    Args:
        warm: see `python`.
        more: environment variables.
    """
    process = python(
        "-m", "tests.refused", cwd=cwd, warm=warm, stdin=subprocess.PIPE, **more
    )
    out, err = process.communicate(json.dumps(list(lines.values())))
    assert process.returncode == 0, err
    return dict(zip(lines, json.loads(out), strict=True))


def wait(condition: Callable[[], object], seconds: float = 240) -> None:
    """Until `condition` holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


class Store:
    """The default store of a folder that the command was run in."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.client = MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db")

    def runs(self, experiment: str = "pipeline") -> list[Run]:
        """Oldest first."""
        found = self.client.get_experiment_by_name(experiment)
        return (
            list(
                self.client.search_runs(
                    [found.experiment_id], order_by=["start_time ASC"]
                )
            )
            if found
            else []
        )

    def trained(self, experiment: str = "pipeline") -> list[Run]:
        """Those that trained something: all but the parents of sweeps."""
        return [
            run for run in self.runs(experiment) if "sweep.name" not in run.data.tags
        ]

    def run(self, experiment: str = "pipeline") -> Run:
        (run,) = self.runs(experiment)
        return run

    def history(self, run: Run, key: str) -> dict[int, float]:
        """Value by step; no step is there twice."""
        points = self.client.get_metric_history(run.info.run_id, key)
        by_step = {point.step: point.value for point in points}
        assert len(by_step) == len(points), f"{key} has two values on one step"
        return dict(sorted(by_step.items()))

    def histories(self, run: Run, *prefixes: str) -> dict[str, dict[int, float]]:
        keys = [
            key
            for key in run.data.metrics
            if key.startswith(prefixes or ("train/", "val/"))
        ]
        return {key: self.history(run, key) for key in sorted(keys)}

    def by_param(self, runs: list[Run], *keys: str) -> dict[tuple[str, ...], Run]:
        found = defaultdict(list)
        for run in runs:
            found[tuple(run.data.params[key] for key in keys)].append(run)
        assert all(len(group) == 1 for group in found.values())
        return {values: group[0] for values, group in found.items()}
