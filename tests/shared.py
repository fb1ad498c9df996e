"""What all workers of a test session share: a warm process and a migrated store."""

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
    """End the warm process, if it was started, and remove the session's folder."""
    if warm_server.cache_info().currsize:
        warm_server().close()
    shutil.rmtree(os.environ.pop(FOLDER))


@cache
def warm_server() -> warm.Server:
    """Start the process that forks commands, which ends with this one."""
    return warm.Server(_folder())


def warm_address() -> str:
    """Return the address of the session's warm process.

    Without workers, the first call starts that process.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        warm_server()
    return warm.address_in(_folder())


def note(*lines: str) -> None:
    """Keep lines for `noted`, from whichever worker."""
    with (_folder() / "notes").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def noted() -> Counter[str]:
    """Return how often each line was kept in this session."""
    file = _folder() / "notes"
    if not file.exists():
        return Counter()
    return Counter(file.read_text().splitlines())


def place_store(folder: Path) -> None:
    """Put an empty store where a command in `folder` looks for it, unless there is one.

    A command that finds none spends seconds on MLflow's migrations.
    """
    database = folder / "mlruns" / "mlflow.db"
    if not database.exists():
        database.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(migrated_store(), database)


@cache
def migrated_store() -> Path:
    """Return an empty MLflow store, an SQLite file to copy; made once a session."""
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
