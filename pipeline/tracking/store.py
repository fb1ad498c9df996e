"""Opening an MLflow store: what cannot work is refused, a SQLite store is created whole or not at all."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sqlite3
import tempfile
from pathlib import Path
from urllib.parse import quote, urlsplit

# Before MLflow is imported: quiet migrations, and answers within seconds where a server is gone.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# It prints a server's address, password and all, and on the shipper's line to the trainer.
os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
logging.getLogger("alembic").setLevel(logging.WARNING)

from filelock import FileLock  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402
from mlflow.tracking import MlflowClient  # noqa: E402

from pipeline.masking import mask, remember  # noqa: E402

SQLITE = "sqlite:///"
TAGS = {"mlflow.experimentKind": "custom_model_development"}  # of an experiment, whose UI else opens for GenAI


class StoreError(Exception):
    """The store cannot be used; the message says why in one line."""


class ExperimentError(Exception):
    """The experiment cannot be logged to; the message says why in one line."""


class Store:
    """A tracking store that answers, and is created only when a run starts.

    Args:
        uri: an MLflow tracking URI.

    Attributes:
        database: the file of a SQLite store.

    Raises:
        StoreError: it cannot be reached, read or written.
    """

    def __init__(self, uri: str):
        remember(uri)
        self.uri = uri
        self.database: Path | None = None
        if uri.startswith(SQLITE):
            self._open_sqlite(Path(uri.removeprefix(SQLITE).split("?")[0]).absolute())
        elif uri.lower().startswith(("http://", "https://")):
            self._open_server()
        elif uri.partition(":")[0].lower().split("+")[0] in ("postgresql", "mysql", "mssql"):
            self._search()
        else:
            raise StoreError("the scheme is not one of sqlite, http, https, postgresql, mysql, mssql")

    def client(self) -> MlflowClient:
        """Return MLflow's client of the store, which is created first where there is none."""
        if self._is_new():
            self._create()
        return MlflowClient(self.uri)

    def check(self, experiment: str) -> str | None:
        """Return the ID of an experiment that can be logged to; None where there is none, and none is created.

        Raises:
            ExperimentError: the experiment is deleted.
        """
        if self._is_new():
            return None
        found = MlflowClient(self.uri).get_experiment_by_name(mask(experiment))
        if found is None:
            return None
        if found.lifecycle_stage != "active":
            raise ExperimentError("is deleted; restore it or choose another name")
        return found.experiment_id

    def experiment(self, name: str) -> str:
        """Return the ID of the experiment `name`, which is masked; create it where there is none, with its artifacts
        beside a SQLite store."""
        client = self.client()
        known = self.check(name)
        if known is not None:
            return known
        location = None if self.database is None else (self.database.parent / "artifacts").as_uri()
        try:
            created: str = client.create_experiment(mask(name), location, TAGS)
        except MlflowException:  # another run created it in between
            known = self.check(name)
            if known is None:
                raise
            return known
        return created

    def _open_sqlite(self, database: Path) -> None:
        self.database = database
        if database.exists():
            _check_database(database)
            self._search()
            return
        parent = next(folder for folder in database.parents if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise StoreError(f"{parent} is not a folder that can be written")
        try:
            tempfile.TemporaryFile(dir=parent).close()  # /proc, for one, says that root may write
        except OSError as error:
            raise StoreError(f"{parent} is not a folder that can be written ({error.strerror})") from error

    def _is_new(self) -> bool:
        return self.database is not None and not self.database.exists()

    def _create(self) -> None:
        """Put a new database in place whole: MLflow makes its tables in sixty steps, and may be killed meanwhile."""
        assert self.database is not None
        self.database.parent.mkdir(parents=True, exist_ok=True)
        with (
            FileLock(f"{self.database}.lock"),
            tempfile.TemporaryDirectory(prefix=".mlflow-", dir=self.database.parent) as folder,
        ):
            if self._is_new():  # another run may have been faster
                new = Path(folder) / self.database.name
                MlflowClient(f"{SQLITE}{new}").search_experiments(max_results=1)
                new.rename(self.database)

    def _open_server(self) -> None:
        try:
            parts = urlsplit(self.uri)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise StoreError("where its host starts cannot be told: percent-encode what its password holds") from None
        try:
            socket.create_connection((parts.hostname or "", port), timeout=5).close()
        except OSError as error:
            raise StoreError(f"{parts.hostname}:{port}: {error.strerror or error}") from error
        self._search()

    def _search(self) -> None:
        try:
            MlflowClient(self.uri).search_experiments(max_results=1)
        except Exception as error:
            raise StoreError(str(error).splitlines()[0]) from error


def _check_database(database: Path) -> None:
    """Refuse a file that cannot be written, or that is the database of something else."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(database))}?mode=rw", uri=True)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
    except sqlite3.DatabaseError as error:
        if "locked" in str(error):  # a store in use by another run is a store that works
            return
        raise StoreError(f"{database}: {error}") from error
    if tables and "alembic_version" not in tables:  # MLflow would add its tables to it
        raise StoreError(f"{database} is a database of something other than MLflow")
    if not os.access(database, os.W_OK) or not os.access(database.parent, os.W_OK):
        raise StoreError(f"{database} cannot be written")
