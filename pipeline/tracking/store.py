"""Opening an MLflow store: one that cannot be used is refused, and a SQLite store is created atomically."""

import contextlib
import os
import socket
import sqlite3
import tempfile
from pathlib import Path
from urllib.parse import quote, urlsplit

from filelock import FileLock
from mlflow.entities import Run, ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from pipeline.common.errors import ConfigError, first_line
from pipeline.common.secrets import mask, remember

SQLITE = "sqlite:///"
PORTS = {
    "http": 80,
    "https": 443,
    "postgresql": 5432,
    "mysql": 3306,
    "mssql": 1433,
}  # if a URI names none
TAGS = {
    "mlflow.experimentKind": "custom_model_development"
}  # of an experiment, whose page would else open for GenAI


class Store:
    """A store that answers, else a `ConfigError` says why not; a SQLite one is created when its first run starts."""

    def __init__(self, uri: str):
        remember(uri)
        self.uri, self._tables = uri, b""  # the latter are of a new SQLite store
        self.database = (
            Path(uri.removeprefix(SQLITE).split("?")[0]).absolute()
            if uri.startswith(SQLITE)
            else None
        )
        try:
            self._check()
        except Exception as error:
            raise ConfigError(
                "tracking.uri",
                f"must be a store that answers ({first_line(error)})",
                uri,
            ) from error

    def is_new(self) -> bool:
        """Return whether the store is a SQLite file that does not exist yet."""
        return self.database is not None and not self.database.exists()

    def file_id(self) -> tuple[int, int] | None:
        """Return the device and inode of a SQLite store's file; None if there is no such file."""
        found = None if self.database is None or self.is_new() else self.database.stat()
        return None if found is None else (found.st_dev, found.st_ino)

    def prepare(self) -> None:
        """Make the tables of a new SQLite store, which takes seconds, in a file that `client` puts in place."""
        if self.is_new():
            with tempfile.TemporaryDirectory() as folder:
                new = Path(folder) / "new.db"
                MlflowClient(f"{SQLITE}{new}").search_experiments(max_results=1)
                self._tables = new.read_bytes()

    def client(self) -> MlflowClient:
        """Return MLflow's client of the store, which is created first if it is new."""
        if self.database is not None and self.is_new():
            self.database.parent.mkdir(parents=True, exist_ok=True)
            # By a rename: MLflow makes its tables in sixty steps, and may be killed meanwhile.
            with FileLock(f"{self.database}.lock"):
                if self.is_new():  # another run may have been faster
                    if not self._tables:
                        self.prepare()
                    new = Path(f"{self.database}.new")
                    new.write_bytes(self._tables)
                    new.rename(self.database)
        return MlflowClient(self.uri)

    def check(self, experiment: str) -> str | None:
        """Return the ID of an experiment; None if it does not exist, and a `ConfigError` if it is deleted."""
        found = (
            None
            if self.is_new()
            else MlflowClient(self.uri).get_experiment_by_name(mask(experiment))
        )
        if found is None:
            return None
        if found.lifecycle_stage != "active":
            raise ConfigError(
                "tracking.experiment",
                "is deleted; restore it or choose another name",
                experiment,
            )
        return found.experiment_id

    def experiment(self, name: str) -> str:
        """Return the ID of `name`, masked; a new one has its artifacts beside a SQLite store, or at the server."""
        client, known = self.client(), self.check(name)
        if known is None:
            location = (
                None
                if self.database is None
                else (self.database.parent / "artifacts").as_uri()
            )
            try:
                return client.create_experiment(mask(name), location, TAGS)
            except MlflowException:  # another run created it in between
                if (known := self.check(name)) is None:
                    raise
        return known

    def find_run(self, experiment_id: str, journal: str) -> Run | None:
        """Return the run that was created for a journal, by the journal's name; None if there is none."""
        where = f"tags.journal = '{journal}'"
        runs = self.client().search_runs(
            [experiment_id], where, ViewType.ALL, order_by=["start_time ASC"]
        )
        return next(iter(runs), None)

    def status(self, run_id: str) -> str:
        """Return the status of a run as others find it: in a file, by a new connection."""
        new = (
            ""
            if self.database is None
            else f"{'&' if '?' in self.uri else '?'}cached_statements=128"
        )  # the default
        return str(
            MlflowClient(self.uri + new).get_run(run_id).info.status
        )  # it keeps the connections of each URI

    def _check(self) -> None:
        scheme = self.uri.partition(":")[0].lower().split("+")[0]
        if self.database is not None:
            folder = next(folder for folder in self.database.parents if folder.exists())
            try:
                tempfile.TemporaryFile(
                    dir=folder
                ).close()  # /proc, for one, says that root may write
            except OSError as error:
                raise OSError(
                    f"{folder} is not a folder that can be written"
                ) from error
            if self.is_new():
                return
            _check_database(self.database)
        elif scheme in PORTS:  # MLflow would try for minutes
            _check_server(self.uri, PORTS[scheme])
        else:
            raise ValueError(
                "the scheme is not one of sqlite, http, https, postgresql, mysql, mssql"
            )
        MlflowClient(self.uri).search_experiments(max_results=1)


def _check_database(database: Path) -> None:
    """Refuse a file that cannot be written, or that is the database of another program."""
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(str(database))}?mode=rw", uri=True)
        ) as connection:
            tables = {
                name
                for (name,) in connection.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table'"
                )
            }
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
    except sqlite3.DatabaseError as error:
        if "locked" in str(error):  # in use by another run: the store works
            return
        raise OSError(f"{database}: {error}") from error
    if tables and "alembic_version" not in tables:  # MLflow would add its tables to it
        raise ValueError(f"{database} is a database of something other than MLflow")
    if not os.access(
        database, os.W_OK
    ):  # SQLite would open it read-only, without an error
        raise OSError(f"{database} cannot be written")


def _check_server(uri: str, port: int) -> None:
    try:
        parts = urlsplit(uri)
        port = parts.port or port
    except ValueError:
        raise ValueError(
            "where its host starts cannot be told: percent-encode what its password holds"
        ) from None
    if parts.hostname is None and not parts.scheme.startswith(
        "http"
    ):  # a database reached by a Unix socket
        return
    try:
        socket.create_connection((parts.hostname or "", port), timeout=5).close()
    except OSError as error:
        raise OSError(f"{parts.hostname}:{port}: {error.strerror or error}") from error
