"""Opens MLflow stores: rejects unusable stores, and creates new SQLite stores.

A new SQLite store appears complete or not at all, even if the process dies meanwhile.
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
from mlflow.tracking import MlflowClient

from pipeline.common import durable, sqlite_uri
from pipeline.common.errors import ConfigError, first_line
from pipeline.common.secrets import mask, remember
from pipeline.common.signals import STOP_TAG
from pipeline.common.sqlite_uri import SQLITE

# The default port of a server, by the scheme of its URI.
PORTS = {
    "http": 80,
    "https": 443,
    "postgresql": 5432,
    "mysql": 3306,
    "mssql": 1433,
}
CONNECT_SECONDS = 5
# Bytes that a disk needs for a new SQLite store: about twice those of its file.
NEW_STORE_BYTES = 2**21
# Tags of a new experiment. Without them, MLflow's UI shows its page for GenAI.
TAGS = {"mlflow.experimentKind": "custom_model_development"}


class Store:
    """A store that answers. The first call of `client` creates a missing SQLite store.

    For an HTTP server, MLflow's requests no longer follow redirects in this process,
    unless the environment variable MLFLOW_ALLOW_HTTP_REDIRECTS is set already.

    Attributes:
        uri: the URI of the store.
        database: the file of a SQLite store, or None for any other store.

    Raises:
        ConfigError: the store does not answer or cannot be used; the message gives the
            reason.
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
        """Whether the store is an HTTP server, possibly behind a proxy."""
        return self.uri.lower().startswith(("http:", "https:"))

    def is_new(self) -> bool:
        """Return whether the store is a SQLite file that does not exist yet."""
        return self.database is not None and not self.database.exists()

    def file_id(self) -> tuple[int, int] | None:
        """Return the device and inode of the SQLite file, or None if none exists."""
        if self.database is None or self.is_new():
            return None
        status = self.database.stat()
        return status.st_dev, status.st_ino

    def prepare(self) -> None:
        """Create the content of a new SQLite store, and keep it in memory.

        This takes seconds. `client` writes the content to the store's file. For an
        existing store, this does nothing.
        """
        if self.is_new():
            # Import this only here: it takes half a second, and servers do not need it.
            from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

            with tempfile.TemporaryDirectory() as folder:
                new = Path(folder) / "new.db"
                # Pass the artifact folder as a URI, which percent-encodes quotes and
                # colons: MLflow inserts it into SQL, where a quote would end the string
                # and a colon could begin a parameter.
                SqlAlchemyStore(f"{SQLITE}{new}", self._artifacts())
                self._new_database = new.read_bytes()

    def client(self) -> MlflowClient:
        """Return an MLflow client for the store.

        A new SQLite store is created first.
        """
        if self.database is not None and self.is_new():
            self.database.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.database}.lock"):
                if self.is_new():  # another run may have created it meanwhile
                    self._create(self.database)
        return MlflowClient(self.uri)

    def _create(self, database: Path) -> None:
        # Write the file under another name and rename it, so that no incomplete store
        # remains if the process is killed.
        if not self._new_database:
            self.prepare()
        new = Path(f"{database}.new")
        try:
            new.write_bytes(self._new_database)
            durable.sync(new)
            new.rename(database)
        except OSError:  # the disk may be full
            new.unlink(missing_ok=True)
            raise

    def check(self, experiment: str) -> str | None:
        """Return the ID of an experiment, or None if it does not exist.

        Raises:
            ConfigError: the experiment is deleted.
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
        """Return the ID of an experiment; create it if it does not exist.

        Secrets in the name are masked. The artifacts of a new experiment are stored
        beside the file of a SQLite store, or else in the default location of the store.

        Raises:
            ConfigError: the experiment is deleted.
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
        """Return the artifact folder beside a SQLite store, or None for other stores.

        The folder is returned as a URI.
        """
        if self.database is None:
            return None
        return (self.database.parent / "artifacts").as_uri()

    def find_run(self, journal: str, run_id: str = "") -> Run | None:
        """Return the run whose tag `journal` has a given value, or None.

        All experiments are searched, including deleted ones. A new SQLite store is
        created first; see `client`.

        Args:
            journal: the value of the tag.
            run_id: the ID of the run, or "" if it is not known.
        """
        client = self.client()
        if run_id:
            with contextlib.suppress(MlflowException):  # the ID may be of another store
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
        """Return the status of a run as other processes see it.

        For a SQLite store, the status is read through a new connection. Since MLflow
        caches connections by URI, a parameter with its default value is added to the
        URI.
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
            folder = _check_folder(self.database)
            if self.is_new():
                _check_space(folder)
                return
            _check_database(self.database)
        elif scheme in PORTS:
            # Check the connection first: MLflow would try to connect for minutes.
            _check_server(self.uri, PORTS[scheme])
            if self.is_served:
                # Do not send a run's data to a host that the server redirects to.
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
    """Return the experiments of a store, over all pages of MLflow's search.

    Deleted experiments are included if `view_type` includes them.
    """
    experiments: list[Experiment] = []
    token = None
    while True:
        page = client.search_experiments(view_type, page_token=token)
        experiments += page
        token = page.token
        if not token:
            return experiments


def has_stop_tag(client: MlflowClient, run_id: str) -> bool:
    """Return whether somebody has asked a run to end, by its tag `STOP_TAG`."""
    return STOP_TAG in client.get_run(run_id).data.tags


def remove_stop_tag(client: MlflowClient, run_id: str) -> None:
    """Remove the tag `STOP_TAG` of a run, if the run has it."""
    if has_stop_tag(client, run_id):
        client.delete_tag(run_id, STOP_TAG)


def check_id(new_id: str, kind: str) -> None:
    """Raise an OSError if an ID in a server's answer is empty.

    A proxy in front of the server may answer `{}` with a status of success.

    Args:
        new_id: the ID in the answer.
        kind: the kind of the object with the ID, for the error.
    """
    if not new_id:
        raise OSError(f"its answer has no ID of {kind}")


def _check_redirects(uri: str) -> None:
    """Raise a ValueError that names the new address if the server redirects."""
    endpoint = "/api/2.0/mlflow/experiments/search"
    # Ignore a failed request: MLflow's next request reports the problem.
    with contextlib.suppress(requests.RequestException):
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


def _check_folder(database: Path) -> Path:
    """Return the folder of a database, or its nearest parent that exists.

    Raises:
        OSError: the folder is not writable.
    """
    folder = next(parent for parent in database.parents if parent.exists())
    try:
        # Try to write: permissions are not reliable. For example, root has write
        # permission in /proc but cannot create files there.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(f"{folder} is not a folder that can be written") from error
    return folder


def _check_space(folder: Path) -> None:
    """Reject a folder on a disk that has no space for a new store.

    Otherwise the store's first write would fail later, after the run's folder is made.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(NEW_STORE_BYTES))
            file.flush()
    except OSError as error:
        reason = f"{folder} has no space for a new store: {error.strerror}"
        raise OSError(reason) from error


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
    # Do not let MLflow add its tables to the database of another program.
    if tables and "alembic_version" not in tables:
        raise ValueError(f"{database} is a database of something other than MLflow")
    if not os.access(database, os.W_OK):
        # Check the permission, since SQLite opens such a file read-only, without an
        # error.
        raise OSError(f"{database} cannot be written")


def _check_server(uri: str, port: int) -> None:
    """Reject a server that accepts no connection.

    Args:
        uri: the URI of the store.
        port: the port to use if the URI has none.
    """
    try:
        parts = urlsplit(uri)
        port = parts.port or port
    except ValueError:
        raise ValueError(
            "it is unclear where the host in the URI starts: percent-encode the password"
        ) from None
    if parts.hostname is None and not parts.scheme.startswith("http"):
        return  # a database behind a Unix socket has no host to connect to
    try:
        address = (parts.hostname or "", port)
        socket.create_connection(address, timeout=CONNECT_SECONDS).close()
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"{parts.hostname}:{port}: {reason}") from error
