"""Contenders in processes of their own, and the file of results. Imports no TensorFlow, which would take memory."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).parent.parent
_NONE: Mapping[str, str] = MappingProxyType({})
PEERS = ROOT / ".venv-peers" / "bin" / "python"  # made by `make peers`


class Process:
    """Runs `updates` updates at each call in a process of its own, which `child.Child` serves.

    Attributes:
        said: what the child said of itself.
        updates: of a turn.
    """

    def __init__(self, command: Sequence[str], updates: int):
        self.updates = updates
        self._command = " ".join(command)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, it lives as long as the process
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self.said = json.loads(self._answer())

    def __call__(self) -> None:
        with suppress(
            BrokenPipeError
        ):  # it has ended, and the answer that does not come says why
            print(self.updates, file=self._process.stdin, flush=True)
        self._answer()

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(
                f"{self._command} ended with {status}: {self._errors.read()[-2000:]}"
            )
        return line


def run(
    command: Sequence[str],
    cwd: Path = ROOT,
    status: int = 0,
    variables: Mapping[str, str] = _NONE,
) -> str:
    """Run a command with further environment variables and return its output.

    Raises:
        RuntimeError: its exit status is not `status`; the message has the end of its standard error.
    """
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment() | {**variables},
        capture_output=True,
        text=True,
    )
    if done.returncode != status:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}"
        )
    return done.stdout


def seconds(command: Sequence[str], cwd: Path = ROOT, status: int = 0) -> float:
    """Return the seconds that `run` takes."""
    begun = time.perf_counter()
    run(command, cwd, status)
    return time.perf_counter() - begun


def in_turns(names: Iterable[Any], rounds: int) -> Iterator[tuple[int, Any]]:
    """Yield the number of the round with each name; every other round has them in reverse."""
    order = list(names)
    for number in range(rounds):
        for name in order if number % 2 == 0 else reversed(order):
            yield number, name


def environment() -> dict[str, str]:
    """Return the environment of a process that imports this checkout and prints little."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "MLFLOW_DISABLE_TELEMETRY": "true"}
    return (
        os.environ
        | quiet
        | {
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
            )
        }
    )


def peer_versions() -> dict[str, str]:
    """Return the versions of the other environment's libraries; empty if it does not exist."""
    names = ("torch", "accelerate", "lightning")
    asked = f"from importlib import metadata; print(*map(metadata.version, {names}))"
    return (
        dict(zip(names, run([str(PEERS), "-c", asked]).split(), strict=True))
        if PEERS.exists()
        else {}
    )


def write(
    path: Path,
    begun: float,
    options: object,
    peers: Mapping[str, str] = _NONE,
    **found: Any,
) -> None:
    """Write what was found to a JSON file, with the conditions of the measurement; `peers` are further versions."""
    result = {
        "processors": os.cpu_count(),
        "platform": platform.platform(),
        "processor": processor(),
        "versions": {
            name: metadata.version(name) for name in ("tensorflow", "keras", "mlflow")
        }
        | {**peers},
        "begun": begun,
        "seconds": time.time() - begun,
        "options": vars(options),
        **found,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")


def processor() -> str:
    """Return the processor's name in Linux."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            (
                line.split(":")[1].strip()
                for line in lines
                if line.startswith("model name")
            ),
            "",
        )
    return platform.processor()


def check_peers() -> None:
    """Print how to set up the environment of the other libraries if it does not exist."""
    if not PEERS.exists():
        print(
            "PyTorch, Accelerate and Lightning are left out: `make peers` sets them up",
            file=sys.stderr,
        )
