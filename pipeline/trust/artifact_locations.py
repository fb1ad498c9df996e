"""Where a store may keep its artifacts.

A store that is not trusted must not choose what is read, sent or written. MLflow reads
and writes wherever the store says that a run, an experiment or a model keeps its
artifacts, and sends the user's credentials for the tracking server to any host that the
store names. The verbs that read a store accept only:

    mlflow-artifacts:, http(s):  with the scheme, host and port of the tracking URI
    file:, a path                in a folder of artifacts beside the SQLite database, or
                                 in MLflow's own `./mlruns`
    s3:, gs:, wasbs:, abfss:     any bucket: their clients authenticate to their own
                                 service only
    any folder or URI            in a place that `trust.allow` or `--allow` names
"""

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pipeline.common import sqlite_uri
from pipeline.common.errors import ConfigError

# Folders beside a SQLite database: ours, and those that MLflow's server makes.
_BESIDE = ("artifacts", "mlartifacts", "mlruns")
# Matched as text: parsers disagree on where the host of an address with an @ or a
# backslash ends.
_SERVER = re.compile(
    r"(mlflow-artifacts|https?)://((?:[\w.\-]+|\[[\da-f:.]+\])(?::\d+)?)(/.*)?",
    re.IGNORECASE | re.ASCII,
)
# Azure's URIs are accepted only with its own hosts: MLflow sends a token to the host.
_BUCKET = re.compile(
    r"(s3|gs)://.+|(wasbs|abfss)://[\w$\-]+@\w+\.(blob|dfs)\.core\.windows\.net(/.*)?",
    re.ASCII,
)
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}

# Places to which all threads of this process are confined, in addition to the store. If
# None, artifacts may lie anywhere.
confined_to: list[str] | None = None


@contextmanager
def confined(tracking_uri: str, places: Sequence[str]) -> Iterator[None]:
    """Let this process read and write artifacts only where `check` accepts it.

    The check is made when MLflow opens a place, not before: a server may answer
    differently when it is asked again. MLflow may also read temporary files, as it
    loads a model to try it. They are in a folder of their own, whose name no store can
    guess.

    Args:
        tracking_uri: the URI of the store.
        places: further places where the user allows artifacts.
    """
    from mlflow.store.artifact.artifact_repository_registry import (
        get_registered_artifact_repositories,
    )

    global confined_to
    # Scheme → what opens a place. In MLflow 3.17.2 this is not a copy: every call of
    # MLflow looks a scheme up here.
    repositories: dict[str, Any] = get_registered_artifact_repositories()
    unconfined = dict(repositories)
    outer_places = confined_to
    outer_tempdir = tempfile.tempdir

    def open_checked(
        open_place: Any, artifact_uri: str, *arguments: Any, **options: Any
    ) -> Any:
        check(artifact_uri, tracking_uri, [*places, temporary])
        folder = _path(artifact_uri)
        if folder is not None:
            _check_links(folder)
        return open_place(artifact_uri, *arguments, **options)

    for scheme, open_place in unconfined.items():
        # `runs` and `models` lead to another address, which is looked up as well.
        if scheme not in ("runs", "models"):
            repositories[scheme] = partial(open_checked, open_place)
    with tempfile.TemporaryDirectory() as temporary:
        confined_to = list(places)
        tempfile.tempdir = temporary
        try:
            yield
        finally:
            confined_to = outer_places
            tempfile.tempdir = outer_tempdir
            repositories.update(unconfined)


def lies_in(store: str, places: Sequence[str]) -> bool:
    """Return whether a store lies in one of `places`; its address is not trusted."""
    # A query may name another host.
    if not store.isprintable() or re.search(r"[?#\\@]", store):
        return False
    path = store
    if store.startswith(sqlite_uri.SQLITE):
        path = sqlite_uri.path_in(store)
    return store in places or any(_lies_in(path, place) for place in places)


def check(uri: str, tracking_uri: str, places: Sequence[str] = ()) -> None:
    """Check where artifacts lie.

    Args:
        uri: where they lie, according to the store.
        tracking_uri: the URI of the store.
        places: further places where the user allows artifacts.

    Raises:
        ConfigError: they lie neither with the store nor in one of the places.
    """
    known = [*places, *_folders_of_store(tracking_uri)]
    lies_there = (
        _BUCKET.fullmatch(uri) is not None
        or _is_on(uri, tracking_uri)
        or any(_lies_in(uri, place) for place in known)
    )
    if not lies_there or not uri.isprintable() or "\\" in uri:
        rule = (
            "must be a store that keeps artifacts with itself or in a bucket: "
            f"these lie in {uri}; trust.allow or --allow may name that place"
        )
        raise ConfigError("tracking.uri", rule, tracking_uri)


def is_inside(path: Path, folders: Iterable[Path]) -> bool:
    """Return whether `path` lies in one of `folders`, with symlinks followed.

    The result is False for anything that is not a path: a loop of symlinks, a name that
    is too long, a null byte.
    """
    try:
        return any(
            path.resolve().is_relative_to(folder.resolve()) for folder in folders
        )
    except (OSError, RuntimeError, ValueError):
        return False


def _folders_of_store(tracking_uri: str) -> list[str]:
    """Return the local folders in which a database keeps artifacts."""
    if urlsplit(tracking_uri).scheme in _DEFAULT_PORTS:
        return []  # a server
    folders = [Path("mlruns")]
    if tracking_uri.startswith(sqlite_uri.SQLITE):
        database = Path(sqlite_uri.path_in(tracking_uri))
        folders += [database.parent / name for name in _BESIDE]
    return [folder.absolute().as_uri() for folder in folders]


def _check_links(folder: Path) -> None:
    """Reject links among the artifacts that lead out of their folder.

    MLflow would read and write where they lead.
    """
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() and not is_inside(path, [folder]):
                rule = (
                    "must be a store whose artifacts are its own: "
                    f"{path} is a link that leads elsewhere"
                )
                raise ConfigError("tracking.uri", rule)


def _is_on(uri: str, tracking_uri: str) -> bool:
    """Return whether artifacts lie on the tracking server."""
    server = urlsplit(tracking_uri)
    if server.scheme not in _DEFAULT_PORTS:
        return False
    match = _SERVER.fullmatch(uri)
    if match is None:  # the tracking server, without its name
        return re.fullmatch("mlflow-artifacts:(/(?!/).*)?", uri) is not None

    scheme, address, _ = match.groups()
    port = _DEFAULT_PORTS[server.scheme]
    ours = server.netloc.rpartition("@")[2].lower().removesuffix(port)
    theirs = address.lower().removesuffix(port)
    return theirs == ours and scheme.lower() in ("mlflow-artifacts", server.scheme)


def _lies_in(uri: str, place: str) -> bool:
    path = _path(uri)
    folder = _path(place)
    if path is not None and folder is not None:
        return is_inside(path, [folder])
    if folder is not None or ".." in re.split("[/?#;]", unquote(uri)):
        return False
    return f"{uri}/".startswith(f"{place.rstrip('/')}/")


def _path(uri: str) -> Path | None:
    """Return the local path that a URI names; None if it names none."""
    if uri.startswith("file:///"):
        if re.search("[?#;]", uri):  # MLflow drops a query and a fragment
            return None
        return Path(unquote(uri.removeprefix("file://")))
    if ":" in uri:
        return None
    return Path(uri)
