"""Where a store may keep its artifacts: a store that is not trusted must not choose what is read, sent or written.

MLflow reads and writes wherever the store says that a run, an experiment or a model keeps its artifacts, and sends the
user's credentials for the tracking server to any host that the store names. The verbs that read a store accept only:

    mlflow-artifacts:, http(s):  with the scheme, host and port of the tracking URI
    file:, a path                in a folder of artifacts beside the SQLite database, or in MLflow's own `./mlruns`
    s3:, gs:, wasbs:, abfss:     any bucket: their clients authenticate to their own service only
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

from pipeline.common.errors import ConfigError

_BESIDE = (
    "artifacts",
    "mlartifacts",
    "mlruns",
)  # ours, and those that MLflow's server makes
# Matched as text: parsers disagree on where the host of an address with an @ or a backslash ends.
_SERVER = re.compile(
    r"(mlflow-artifacts|https?)://((?:[\w.\-]+|\[[\da-f:.]+\])(?::\d+)?)(/.*)?",
    re.I | re.A,
)
# MLflow sends a token to the host that a URI of Azure names.
_BUCKET = re.compile(
    r"(s3|gs)://.+|(wasbs|abfss)://[\w$\-]+@\w+\.(blob|dfs)\.core\.windows\.net(/.*)?",
    re.A,
)
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}

confined_to: list[str] | None = (
    None  # places that the user allows all threads of this process; None: anywhere
)


@contextmanager
def confined(tracking_uri: str, places: Sequence[str]) -> Iterator[None]:
    """Let this process read and write artifacts only where `check` accepts it.

    The check is made when MLflow opens a place, not before: a server may answer differently when asked again. MLflow
    may also read temporary files, as it loads a model to try it: in a folder of their own, whose name no store guesses.
    """
    from mlflow.store.artifact.artifact_repository_registry import (
        get_registered_artifact_repositories,
    )

    global confined_to
    # Scheme → what opens a place: not a copy in MLflow 3.17.2, so every call of MLflow looks it up here.
    repositories: dict[str, Any] = get_registered_artifact_repositories()
    before, before_tempdir, opened = confined_to, tempfile.tempdir, dict(repositories)

    def checked(
        open_place: Any, artifact_uri: str, *arguments: Any, **named: Any
    ) -> Any:
        check(artifact_uri, tracking_uri, [*places, temporary])
        if (folder := _path(artifact_uri)) is not None:
            _check_links(folder)
        return open_place(artifact_uri, *arguments, **named)

    for scheme, open_place in opened.items():
        if scheme not in (
            "runs",
            "models",
        ):  # these lead to another address, which is looked up as well
            repositories[scheme] = partial(checked, open_place)
    with tempfile.TemporaryDirectory() as temporary:
        confined_to, tempfile.tempdir = list(places), temporary
        try:
            yield
        finally:
            confined_to, tempfile.tempdir = before, before_tempdir
            repositories.update(opened)


def lies_in(store: str, places: Sequence[str]) -> bool:
    """Return whether a store at an address that is not trusted lies in one of `places`."""
    plain = store.isprintable() and not re.search(
        r"[?#\\@]", store
    )  # a query may name another host
    return plain and any(
        _lies_in(store.removeprefix("sqlite:///"), place) or store == place
        for place in places
    )


def check(uri: str, tracking_uri: str, places: Sequence[str] = ()) -> None:
    """Refuse artifacts that lie neither with the store nor in one of `places`."""
    known = list(places)
    if (
        urlsplit(tracking_uri).scheme not in _DEFAULT_PORTS
    ):  # a database, whose artifacts lie in local folders
        beside = Path(tracking_uri.removeprefix("sqlite:///").split("?")[0]).parent
        names = _BESIDE if tracking_uri.startswith("sqlite:///") else ()
        known += [
            folder.absolute().as_uri()
            for folder in (Path("mlruns"), *(beside / name for name in names))
        ]
    lies_there = (
        _BUCKET.fullmatch(uri)
        or _is_on(uri, tracking_uri)
        or any(_lies_in(uri, place) for place in known)
    )
    if not lies_there or not uri.isprintable() or "\\" in uri:
        rule = f"must be a store that keeps artifacts with itself or in a bucket: these lie in {uri}"
        raise ConfigError(
            "tracking.uri",
            f"{rule}; trust.allow or --allow may name that place",
            tracking_uri,
        )


def is_inside(path: Path, folders: Iterable[Path]) -> bool:
    """Return whether `path` lies in one of `folders`, with symlinks followed; False if it is no path."""
    try:
        return any(
            path.resolve().is_relative_to(folder.resolve()) for folder in folders
        )
    except (
        OSError,
        RuntimeError,
        ValueError,
    ):  # a loop of symlinks, a name that is too long, a null byte
        return False


def _check_links(folder: Path) -> None:
    """Refuse artifacts that a link leads out of their `folder`: MLflow would read and write there."""
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            if path.is_symlink() and not is_inside(path, [folder]):
                rule = f"must be a store whose artifacts are its own: {path} is a link that leads elsewhere"
                raise ConfigError("tracking.uri", rule)


def _is_on(uri: str, tracking_uri: str) -> bool:
    server, found = urlsplit(tracking_uri), _SERVER.fullmatch(uri)
    if server.scheme not in _DEFAULT_PORTS:
        return False
    if found is None:
        return re.fullmatch("mlflow-artifacts:(/(?!/).*)?", uri) is not None
    addresses = (server.netloc.rpartition("@")[2], found[2])
    ours, theirs = (
        address.lower().removesuffix(_DEFAULT_PORTS[server.scheme])
        for address in addresses
    )
    return theirs == ours and found[1].lower() in ("mlflow-artifacts", server.scheme)


def _lies_in(uri: str, place: str) -> bool:
    path, folder = _path(uri), _path(place)
    if path is not None and folder is not None:
        return is_inside(path, [folder])
    upwards = ".." in re.split("[/?#;]", unquote(uri))
    return (
        folder is None and not upwards and f"{uri}/".startswith(f"{place.rstrip('/')}/")
    )


def _path(uri: str) -> Path | None:
    if uri.startswith("file:///"):  # MLflow drops a query and a fragment
        return (
            None
            if re.search("[?#;]", uri)
            else Path(unquote(uri.removeprefix("file://")))
        )
    return Path(uri) if ":" not in uri else None
