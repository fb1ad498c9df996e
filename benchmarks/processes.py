"""Contenders in processes of their own. Imports no TensorFlow, so that what is measured first has the machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
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
        with suppress(BrokenPipeError):  # it has ended, and the answer that does not come says why
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
            raise RuntimeError(f"{self._command} ended with {status}: {self._errors.read()[-2000:]}")
        return line


def run(command: Sequence[str], cwd: Path = ROOT) -> str:
    """Run a command to its end and return what it printed.

    Raises:
        RuntimeError: it failed; with the end of what it wrote to standard error.
    """
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def environment() -> dict[str, str]:
    """Return that of a process which finds this checkout and says little."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "MLFLOW_DISABLE_TELEMETRY": "true"}
    return os.environ | quiet | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def peer_versions() -> dict[str, str]:
    """Return the versions of what the other environment holds; nothing where it is not there."""
    names = ("torch", "accelerate", "lightning")
    asked = f"from importlib import metadata; print(*map(metadata.version, {names}))"
    return dict(zip(names, run([str(PEERS), "-c", asked]).split(), strict=True)) if PEERS.exists() else {}


def processor() -> str:
    """Return the processor's name as Linux gives it."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return platform.processor()


def peers_are_there() -> bool:
    """Return whether the other environment is there; say how to make it where it is not."""
    if not PEERS.exists():
        print("PyTorch, Accelerate and Lightning are left out: `make peers` sets them up", file=sys.stderr)
    return PEERS.exists()
