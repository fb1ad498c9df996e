"""How processes start, and what they import: this package, wherever it is, and TensorFlow without its notices."""

import faulthandler
import gc
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from pipeline.common.errors import say

# Keras' import matplotlib, scikit-learn and scipy.stats, a third of the time that `import tensorflow` takes; MLflow's
# imports FastAPI.
ON_USE = (
    "keras.visualization",
    "keras.wrappers",
    "keras.src.visualization",
    "mlflow.gateway",
)


class _OnUse(MetaPathFinder):
    """Finds the modules of `ON_USE`, each to be executed when a name in it is first looked up."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        spec = PathFinder.find_spec(name, path) if name in ON_USE else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader)
        return spec


class _Later(Loader):
    """Executes a module late. Python's own `LazyLoader` does so too early: `inspect` asks every module for its file."""

    def __init__(self, loader: Loader):
        self._loader, self._lock, self._begun = loader, RLock(), False

    def exec_module(self, module: ModuleType) -> None:
        def look_up(name: str) -> Any:
            unknown = AttributeError(
                f"module {module.__name__!r} has no attribute {name!r}"
            )
            if name.startswith("__") and name != "__all__":
                raise unknown
            with self._lock:  # other threads wait for the one that executes it
                if not self._begun:
                    self._begun = True
                    try:
                        self._loader.exec_module(module)
                    except BaseException:
                        self._begun = False
                        raise
            if name not in vars(module):
                raise unknown
            return vars(module)[name]

        def names() -> list[str]:
            with suppress(AttributeError):
                look_up("__all__")  # executes it
            return sorted(vars(module))

        vars(module).update(__getattr__=look_up, __dir__=names)


@contextmanager
def executed_on_use() -> Iterator[None]:
    """Leave the modules of `ON_USE` that are imported meanwhile to be executed when they are used."""
    finder = _OnUse()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextmanager
def without_chatter() -> Iterator[None]:
    """Suppress the notices that TensorFlow's libraries print before they read any level; execute `ON_USE` later.

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
            with executed_on_use(), without_collections():
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
