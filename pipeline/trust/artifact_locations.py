"""Checks where a store keeps its artifacts.

A store that is not trusted must not decide which files are read or written, or where
data is sent. MLflow reads and writes wherever the store says that a run, an experiment
or a model keeps its artifacts, and sends the user's credentials for the tracking server
to any host that the store names. The verbs that read a store accept only:

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

# Artifact folders beside a SQLite database: that of this package, and those of MLflow's
# server.
_BESIDE = ("artifacts", "mlartifacts", "mlruns")
# Server addresses are matched as text, not parsed: parsers disagree on where the host
# ends if the address contains an @ or a backslash.
_SERVER = re.compile(
    r"(mlflow-artifacts|https?)://((?:[\w.\-]+|\[[\da-f:.]+\])(?::\d+)?)(/.*)?",
    re.IGNORECASE | re.ASCII,
)
# Azure's URIs are accepted only with Azure's hosts, since MLflow sends the host a
# token.
_BUCKET = re.compile(
    r"(s3|gs)://.+|(wasbs|abfss)://[\w$\-]+@\w+\.(blob|dfs)\.core\.windows\.net(/.*)?",
    re.ASCII,
)
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}

# Places where artifacts may lie in addition to the store, for all threads of this
# process. If None, artifacts may lie anywhere.
confined_to: list[str] | None = None


@contextmanager
def confined(tracking_uri: str, places: Sequence[str]) -> Iterator[None]:
    """Within the block, let MLflow open only artifact locations that `check` accepts.

    A location is checked when MLflow opens it, not earlier, since a server may return
    another location for the next request. Temporary files are also accepted, since
    MLflow reads them when it loads a model to test it. They are in a new folder with a
    name that no store can guess.

    Args:
        tracking_uri: the URI of the store.
        places: further places where the user allows artifacts.
    """
    from mlflow.store.artifact.artifact_repository_registry import (
        get_registered_artifact_repositories,
    )

    global confined_to
    # Scheme → function that opens a location. In MLflow 3.17.2 this is not a copy, but
    # the mapping in which MLflow itself looks up each scheme.
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
        # Skip `runs` and `models`: MLflow translates them to another address, which is
        # then checked.
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
    # Reject characters with which an address could name another host.
    if not store.isprintable() or re.search(r"[?#\\@]", store):
        return False
    path = store
    if store.startswith(sqlite_uri.SQLITE):
        path = sqlite_uri.path_in(store)
    return store in places or any(_lies_in(path, place) for place in places)


def check(uri: str, tracking_uri: str, places: Sequence[str] = ()) -> None:
    """Check that artifacts are with the store, in a bucket, or in an allowed place.

    Args:
        uri: the location of the artifacts, according to the store.
        tracking_uri: the URI of the store.
        places: further places where the user allows artifacts.

    Raises:
        ConfigError: the artifacts are elsewhere, or their location has a backslash or
            an unprintable character.
    """
    known = [*places, *_folders_of_store(tracking_uri)]
    lies_there = (
        _BUCKET.fullmatch(uri) is not None
        or _is_on(uri, tracking_uri)
        or any(_lies_in(uri, place) for place in known)
    )
    if not lies_there or not uri.isprintable() or "\\" in uri:
        rule = (
            "must be a store that keeps artifacts in its own folders or server, or in "
            f"a bucket; these artifacts lie in {uri}, which you can allow by naming "
            "it in trust.allow or --allow"
        )
        raise ConfigError("tracking.uri", rule, tracking_uri)


def is_inside(path: Path, folders: Iterable[Path]) -> bool:
    """Return whether `path` lies in one of `folders`, with symlinks followed.

    The result is False for a path that cannot be resolved, because of a loop of
    symlinks, a name that is too long, or a null byte.
    """
    try:
        return any(
            path.resolve().is_relative_to(folder.resolve()) for folder in folders
        )
    except (OSError, RuntimeError, ValueError):
        return False


def _folders_of_store(tracking_uri: str) -> list[str]:
    """Return the URIs of the local folders in which a store keeps artifacts.

    For a tracking server, the list is empty.
    """
    if urlsplit(tracking_uri).scheme in _DEFAULT_PORTS:
        return []  # a server
    folders = [Path("mlruns")]
    if tracking_uri.startswith(sqlite_uri.SQLITE):
        database = Path(sqlite_uri.path_in(tracking_uri))
        folders += [database.parent / name for name in _BESIDE]
    return [folder.absolute().as_uri() for folder in folders]


def _check_links(folder: Path) -> None:
    """Reject symlinks in a folder of artifacts that lead out of the folder.

    MLflow would follow them to read and write files.
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
    if match is None:  # a URI without a host means the tracking server
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
    """Return the local path that a URI names, or None if it is not a local path."""
    if uri.startswith("file:///"):
        if re.search("[?#;]", uri):  # MLflow drops a query and a fragment
            return None
        return Path(unquote(uri.removeprefix("file://")))
    if ":" in uri:
        return None
    return Path(uri)
