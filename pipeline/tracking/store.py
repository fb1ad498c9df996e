"""Opens MLflow stores: rejects one that cannot be used, and creates a new SQLite store.

A SQLite store appears as a whole or not at all, even if a process dies meanwhile.
"""

import contextlib
import os
import socket
import sqlite3
import tempfile
from pathlib import Path
from urllib.parse import quote, urljoin, urlsplit

import requests
from filelock import FileLock
from mlflow.entities import Experiment, Run, ViewType
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.tracking import MlflowClient

from pipeline.common import durable, sqlite_uri
from pipeline.common.errors import ConfigError, first_line
from pipeline.common.secrets import mask, remember
from pipeline.common.sqlite_uri import SQLITE

# The port of a server whose URI names none, by the scheme.
PORTS = {
    "http": 80,
    "https": 443,
    "postgresql": 5432,
    "mysql": 3306,
    "mssql": 1433,
}
CONNECT_SECONDS = 5
# Tags of a new experiment, without which its page opens for GenAI.
TAGS = {"mlflow.experimentKind": "custom_model_development"}


class Store:
    """A store that answers; a SQLite store is created when its first run starts.

    Attributes:
        uri: its address.
        database: the file of a SQLite store; None for any other.

    Raises:
        ConfigError: it does not answer, or it cannot be used; the message says why.
    """

    def __init__(self, uri: str):
        remember(uri)
        self.uri = uri
        self.database: Path | None = None
        if uri.startswith(SQLITE):
            self.database = Path(sqlite_uri.path_in(uri)).absolute()
        self._new_database = b""  # the content of a new SQLite store
        try:
            self._check()
        except Exception as error:
            rule = f"must be a store that answers ({first_line(error)})"
            raise ConfigError("tracking.uri", rule, uri) from error

    @property
    def is_served(self) -> bool:
        """Whether a server answers, or something before it that stands in for it."""
        return self.uri.lower().startswith(("http:", "https:"))

    def is_new(self) -> bool:
        """Return whether the store is a SQLite file that does not exist yet."""
        return self.database is not None and not self.database.exists()

    def file_id(self) -> tuple[int, int] | None:
        """Return the device and the inode of a SQLite file; None without a file."""
        if self.database is None or self.is_new():
            return None
        status = self.database.stat()
        return status.st_dev, status.st_ino

    def prepare(self) -> None:
        """Make the tables of a new SQLite store, which takes seconds.

        `client` puts the file in place.
        """
        if self.is_new():
            with tempfile.TemporaryDirectory() as folder:
                new = Path(folder) / "new.db"
                # MLflow writes the folder of its default experiment into SQL as it is.
                # In a URI, a colon is no parameter, and a quote no end of the text.
                SqlAlchemyStore(f"{SQLITE}{new}", self._artifacts())
                self._new_database = new.read_bytes()

    def client(self) -> MlflowClient:
        """Return MLflow's client of the store; a new store is created first."""
        if self.database is not None and self.is_new():
            self.database.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.database}.lock"):
                if self.is_new():  # another run may have been faster
                    self._create(self.database)
        return MlflowClient(self.uri)

    def _create(self, database: Path) -> None:
        # By a rename: MLflow makes its tables in sixty steps, and may be killed.
        if not self._new_database:
            self.prepare()
        new = Path(f"{database}.new")
        new.write_bytes(self._new_database)
        durable.sync(new)
        new.rename(database)

    def check(self, experiment: str) -> str | None:
        """Return the ID of an experiment; None if it does not exist.

        Raises:
            ConfigError: it is deleted.
        """
        if self.is_new():
            return None
        found = MlflowClient(self.uri).get_experiment_by_name(mask(experiment))
        if found is None:
            return None
        check_id(found.experiment_id, "an experiment")
        if found.lifecycle_stage != "active":
            rule = "is deleted; restore it or choose another name"
            raise ConfigError("tracking.experiment", rule, experiment)
        return found.experiment_id

    def experiment(self, name: str) -> str:
        """Return the ID of an experiment, which is created if it does not exist.

        Its name is masked. A new one has its artifacts beside a SQLite store, or at
        the server.
        """
        client = self.client()
        known = self.check(name)
        if known is not None:
            return known
        location = self._artifacts()
        try:
            new = str(client.create_experiment(mask(name), location, TAGS))
        except MlflowException:
            known = self.check(name)
            if known is None:
                raise
            return known  # another run created it in between
        check_id(new, "an experiment")
        return new

    def _artifacts(self) -> str | None:
        """Return where a SQLite store has its artifacts: beside it."""
        if self.database is None:
            return None
        return (self.database.parent / "artifacts").as_uri()

    def find_run(self, journal: str, run_id: str = "") -> Run | None:
        """Return the run whose tag `journal` has this value; None if there is none.

        Its experiment may have been renamed, and is of no account.

        Args:
            journal: the value of the tag.
            run_id: its ID, if it is known.
        """
        client = self.client()
        if run_id:
            with contextlib.suppress(MlflowException):  # the store may be another one
                run = client.get_run(run_id)
                if run.data.tags.get("journal") == journal:
                    return run
        experiments = all_experiments(client, ViewType.ALL)
        runs = client.search_runs(
            [experiment.experiment_id for experiment in experiments],
            f"tags.journal = '{journal}'",
            ViewType.ALL,
            order_by=["start_time ASC"],
        )
        return next(iter(runs), None)

    def status(self, run_id: str) -> str:
        """Return the status of a run as other processes find it.

        For a SQLite store it is read from the file by a new connection. MLflow keeps
        the connections of each URI, so the URI has one parameter more, with its
        default as the value.
        """
        uri = self.uri
        if self.database is not None:
            separator = "&" if "?" in uri else "?"
            uri += f"{separator}cached_statements=128"
        return str(MlflowClient(uri).get_run(run_id).info.status)

    def _check(self) -> None:
        """Raise an error if the store cannot be read and written."""
        scheme = self.uri.partition(":")[0].lower().split("+")[0]
        if self.database is not None:
            rule = sqlite_uri.misread(self.uri)
            if rule:
                raise ValueError(f"it {rule}")
            _check_folder(self.database)
            if self.is_new():
                return
            _check_database(self.database)
        elif scheme in PORTS:
            # MLflow would try to connect for minutes.
            _check_server(self.uri, PORTS[scheme])
            if self.is_served:
                # A run's data do not follow a redirect to another host.
                os.environ.setdefault("MLFLOW_ALLOW_HTTP_REDIRECTS", "false")
                _check_redirects(self.uri)
        else:
            raise ValueError(
                "the scheme is not one of sqlite, http, https, postgresql, mysql, mssql"
            )
        MlflowClient(self.uri).search_experiments(max_results=1)


def all_experiments(
    client: MlflowClient, view_type: int = ViewType.ACTIVE_ONLY
) -> list[Experiment]:
    """Return all experiments of a store: MLflow returns at most 1,000 at a time."""
    experiments: list[Experiment] = []
    token = None
    while True:
        page = client.search_experiments(view_type, page_token=token)
        experiments += page
        token = page.token
        if not token:
            return experiments


def check_id(new_id: str, kind: str) -> None:
    """Raise an OSError if a server has answered without the ID of `kind`.

    What stands before a server may answer `{}`, with the status of a success.
    """
    if not new_id:
        raise OSError(f"its answer has no ID of {kind}")


def _check_redirects(uri: str) -> None:
    """Raise an OSError with the final address if the server redirects."""
    endpoint = "/api/2.0/mlflow/experiments/search"
    with contextlib.suppress(requests.RequestException):  # MLflow says what is wrong
        response = requests.post(
            uri.rstrip("/") + endpoint,
            json={"max_results": 1},
            timeout=CONNECT_SECONDS,
            allow_redirects=False,
        )
        target = response.headers.get("Location")
        if response.is_redirect and target:
            address = urljoin(uri, target).split("?")[0].removesuffix(endpoint)
            raise ValueError(f"it redirects to {address}: set tracking.uri={address}")


def _check_folder(database: Path) -> None:
    """Reject a database whose folder, or the one to create it in, is read-only."""
    folder = next(parent for parent in database.parents if parent.exists())
    try:
        # Permissions do not tell: by those of /proc, root may write there.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(f"{folder} is not a folder that can be written") from error


def _check_database(database: Path) -> None:
    """Reject a file that cannot be written, or another program's database."""
    address = f"file:{quote(str(database))}?mode=rw"
    query = "SELECT name FROM sqlite_master WHERE type = 'table'"
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
            tables = {name for (name,) in connection.execute(query)}
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
    except sqlite3.DatabaseError as error:
        if "locked" in str(error):  # another run is writing: the store works
            return
        raise OSError(f"{database}: {error}") from error
    if tables and "alembic_version" not in tables:  # MLflow would add its tables
        raise ValueError(f"{database} is a database of something other than MLflow")
    if not os.access(database, os.W_OK):
        # SQLite would open it read-only, without an error.
        raise OSError(f"{database} cannot be written")


def _check_server(uri: str, port: int) -> None:
    """Reject a server that accepts no connection; `port` is that of the scheme."""
    try:
        parts = urlsplit(uri)
        port = parts.port or port
    except ValueError:
        raise ValueError(
            "where its host starts cannot be told: "
            "percent-encode what its password holds"
        ) from None
    if parts.hostname is None and not parts.scheme.startswith("http"):
        return  # a database that is reached by a Unix socket
    try:
        address = (parts.hostname or "", port)
        socket.create_connection(address, timeout=CONNECT_SECONDS).close()
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"{parts.hostname}:{port}: {reason}") from error
