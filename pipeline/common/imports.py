"""Starts processes, and suppresses notices while TensorFlow is imported.

A new process imports this package from the same place as this process.
"""

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

# Matches the notices that TensorFlow's libraries print before they read a log level.
_NOTICE = re.compile(
    r"[IWE]\d{4} |\d{4}-\d\d-\d\d .*: [IWE] |"
    r"WARNING: All log messages before absl"
)
_PATIENCE = 30.0  # seconds to wait for the output of a program


@contextmanager
def without_chatter() -> Iterator[None]:
    """Within the block, suppress the notices that TensorFlow's libraries print.

    Other lines on standard error are printed when the block ends; see `say`. If
    TensorFlow is first imported in the block, its objects are excluded from garbage
    collection, as each collection would take 0.2 s longer.
    """
    is_first_import = "tensorflow" not in sys.modules
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.stderr.flush()
    stderr = os.dup(2)
    was_enabled = faulthandler.is_enabled()
    faulthandler.enable(stderr)  # Print the trace of a crash at once.
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            with without_collections():
                yield
                if is_first_import:
                    gc.freeze()  # before the next garbage collection
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            if was_enabled:
                faulthandler.enable(2)
            else:
                faulthandler.disable()
            os.close(stderr)
            captured.seek(0)
            for line in captured.read().decode(errors="replace").splitlines():
                if not _NOTICE.match(line):
                    say(line)


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection in the block.

    Garbage collection would take a quarter of the time of large imports.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def output_of(*command: str) -> str | None:
    """Run a program, and return its standard output without surrounding blanks.

    Return None if the program is missing, fails, or takes more than 30 s.
    """
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return process.stdout.strip()


def path_of_processes() -> str:
    """Return a PYTHONPATH for a new process.

    With it, the process imports this package from the same place as this process.
    """
    folders = [str(Path(__file__).resolve().parents[2])]
    inherited = os.environ.get("PYTHONPATH")
    if inherited:
        folders.append(inherited)
    return os.pathsep.join(folders)


def started(
    module: str, variables: dict[str, str] | None = None, **options: Any
) -> Any:
    """Start `python -m module`, and return the process; its standard input is a pipe.

    The process imports nothing from the working directory.

    Args:
        module: the module's dotted name.
        variables: environment variables, in addition to those of this process.
        options: further arguments of `subprocess.Popen`.
    """
    environment = {**os.environ, "PYTHONPATH": path_of_processes()}
    if variables:
        environment.update(variables)
    # Start a new session, so that Ctrl-C reaches only this process, which then ends the
    # new one.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        env=environment,
        text=True,
        start_new_session=True,
        **options,
    )


@contextmanager
def variables_set(**variables: str) -> Iterator[None]:
    """Set environment variables within the block, and restore them afterwards."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)
