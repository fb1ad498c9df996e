"""Contenders in processes of their own, and the file of results.

This module imports no TensorFlow, which would take memory.
"""

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
PEERS = ROOT / ".venv-peers" / "bin" / "python"  # made by `make peers`
PEER_PACKAGES = ("torch", "accelerate", "lightning", "transformers")
# GNU's OpenMP spins before it sleeps. Beside other work, PyTorch had a sixth of its speed
# by that, and the Trainer down to a twentieth.
SLEEPING: Mapping[str, str] = MappingProxyType({"OMP_WAIT_POLICY": "passive"})
_NONE: Mapping[str, str] = MappingProxyType({})
_ERROR_CHARACTERS = 2000  # of the end of a process' standard error


class Process:
    """Runs some updates at each call, in a process that `child.Child` serves.

    Args:
        command: starts the process.
        updates: of one call.
        variables: further environment variables.

    Attributes:
        facts: what the child has sent about itself.
    """

    def __init__(
        self,
        command: Sequence[str],
        updates: int,
        variables: Mapping[str, str] = _NONE,
    ):
        self._updates = updates
        self._command = " ".join(command)
        # It is open as long as the process runs.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment() | {**variables},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self.facts = json.loads(self._answer())

    def __call__(self) -> int:
        """Run a turn, and return the tokens of its updates; 0 if none are counted."""
        # If the process has ended, `_answer` raises and says why.
        with suppress(BrokenPipeError):
            print(self._updates, file=self._process.stdin, flush=True)
        return int(self._answer())

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            errors = self._errors.read()[-_ERROR_CHARACTERS:]
            raise RuntimeError(f"{self._command} ended with {status}: {errors}")
        return line


def run(
    command: Sequence[str],
    cwd: Path = ROOT,
    status: int = 0,
    variables: Mapping[str, str] = _NONE,
) -> str:
    """Run a command with further environment variables and return its output.

    Raises:
        RuntimeError: its exit status is not `status`; the message contains the end of
            its standard error.
    """
    completed = subprocess.run(
        command,
        cwd=cwd,
        env=environment() | {**variables},
        capture_output=True,
        text=True,
    )
    if completed.returncode != status:
        errors = completed.stderr[-_ERROR_CHARACTERS:]
        raise RuntimeError(
            f"{' '.join(command)} ended with {completed.returncode}: {errors}"
        )
    return completed.stdout


def seconds(command: Sequence[str], cwd: Path = ROOT, status: int = 0) -> float:
    """Return the seconds that `run` takes."""
    begun = time.perf_counter()
    run(command, cwd, status)
    return time.perf_counter() - begun


def in_turns(names: Iterable[Any], rounds: int) -> Iterator[tuple[int, Any]]:
    """Yield each name with the number of the round; odd rounds are in reverse."""
    forward = list(names)
    backward = forward[::-1]
    for number in range(rounds):
        order = forward if number % 2 == 0 else backward
        for name in order:
            yield number, name


def environment() -> dict[str, str]:
    """Return the environment of a process that imports this checkout, quietly."""
    paths = [str(ROOT)]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    return {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def versions_in(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of packages that an interpreter has."""
    names = tuple(packages)
    code = f"from importlib import metadata; print(*map(metadata.version, {names}))"
    versions = run([python, "-c", code]).split()
    return dict(zip(packages, versions, strict=True))


def peer_versions() -> dict[str, str]:
    """Return the versions of the peers; empty if their environment does not exist."""
    if not PEERS.exists():
        return {}
    return versions_in(str(PEERS), PEER_PACKAGES)


def check_peers() -> None:
    """Print how to set up the environment of the peers if it does not exist."""
    if not PEERS.exists():
        print(
            "PyTorch and the libraries on it are left out: `make peers` sets them up",
            file=sys.stderr,
        )


def write(
    path: Path,
    begun: float,
    options: object,
    peers: Mapping[str, str] = _NONE,
    **results: Any,
) -> None:
    """Write results to a JSON file, with the conditions of the measurement.

    Args:
        path: of the file.
        begun: when the measurement began, in seconds since 1970.
        options: of the command line.
        peers: further versions.
        results: further keys of the file.
    """
    ours = ("tensorflow", "keras", "mlflow")
    content = {
        "processors": os.cpu_count(),
        "platform": platform.platform(),
        "processor": processor(),
        "versions": {name: metadata.version(name) for name in ours} | {**peers},
        "begun": begun,
        "seconds": time.time() - begun,
        "options": vars(options),
        **results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=str) + "\n")


def processor() -> str:
    """Return the name of the processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
        return ""
    return platform.processor()
