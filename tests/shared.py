"""What the workers of one test session share: a process that has imported TensorFlow, and a store that is migrated."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

from filelock import FileLock

from tests import warm

FOLDER = "PIPELINE_TEST_SESSION"  # environment variable: the session's folder


def begin() -> None:
    """Make the session's folder; its workers find it in their environment."""
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="pipeline-tests-")


def end() -> None:
    if warm_server.cache_info().currsize:
        warm_server().close()
    shutil.rmtree(os.environ.pop(FOLDER))


@cache
def warm_server() -> warm.Server:
    """Start the process that forks commands, which ends with this one."""
    return warm.Server(_folder())


def warm_address() -> str:
    """Return the address of the session's warm process; without workers the first who asks starts it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        warm_server()
    return warm.address_in(_folder())


def note(*lines: str) -> None:
    """Keep lines for `noted`, of whichever worker."""
    with (_folder() / "notes").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def noted() -> Counter[str]:
    """Return how often each line was kept in this session."""
    file = _folder() / "notes"
    return Counter(file.read_text().splitlines() if file.exists() else [])


def place_store(folder: Path) -> None:
    """Put a new store where a command in `folder` looks for it: to make one takes MLflow seconds of migrations."""
    database = folder / "mlruns" / "mlflow.db"
    if not database.exists():
        database.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(migrated_store(), database)


@cache
def migrated_store() -> Path:
    """Return a new store of MLflow's, an SQLite file to copy."""
    from pipeline.tracking.store import Store

    folder = _folder() / "store"
    with FileLock(_folder() / "store.lock"):
        if not folder.exists():
            being_made = folder.with_suffix(".new")
            Store(f"sqlite:///{being_made}/mlflow.db").client()
            being_made.rename(folder)
    return folder / "mlflow.db"


def _folder() -> Path:
    return Path(os.environ[FOLDER])
