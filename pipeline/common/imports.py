"""How processes start, and what they import: this package, wherever it is, and TensorFlow without its notices."""

import faulthandler
import gc
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.common.errors import say


@contextmanager
def without_chatter() -> Iterator[None]:
    """Suppress the notices that TensorFlow's libraries print before they read any level.

    Nor is garbage ever looked for among what was imported first: each search takes 0.2 s.
    """
    first = "tensorflow" not in sys.modules
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.stderr.flush()
    kept, traced = os.dup(2), faulthandler.is_enabled()
    faulthandler.enable(kept)  # what a crash says is not held back
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            with without_collections():
                yield
                if first:
                    gc.freeze()  # before anything looks for garbage again
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            faulthandler.enable(2) if traced else faulthandler.disable()
            os.close(kept)
            held.seek(0)
            for line in held.read().decode(errors="replace").splitlines():
                if not re.match(
                    r"[IWE]\d{4} |\d{4}-\d\d-\d\d .*: [IWE] |WARNING: All log messages before absl",
                    line,
                ):
                    say(line)


@contextmanager
def without_collections() -> Iterator[None]:
    """Look for no garbage meanwhile, which takes a quarter of the time that large imports take."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def said(*command: str) -> str | None:
    """Return what a program prints; None if it is missing, fails or takes more than 30 s."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None


def path_of_processes() -> str:
    """Return the PYTHONPATH with which a new process imports this package from the same place."""
    return os.pathsep.join(
        filter(
            None,
            [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")],
        )
    )


def started(
    module: str, variables: dict[str, str] | None = None, **options: Any
) -> Any:
    """Return the process of `python -m module`, with a pipe to it; it imports nothing from the working directory."""
    ours = {**os.environ, "PYTHONPATH": path_of_processes(), **(variables or {})}
    command, stdin = [sys.executable, "-P", "-m", module], subprocess.PIPE
    # In a session of its own, Ctrl-C reaches this process alone, which then ends it.
    return subprocess.Popen(
        command, stdin=stdin, env=ours, text=True, start_new_session=True, **options
    )


@contextmanager
def variables_set(**ours: str) -> Iterator[None]:
    """Set environment variables within the block."""
    before = {name: os.environ[name] for name in ours if name in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]
        os.environ.update(before)
