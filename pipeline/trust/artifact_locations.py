"""Where a store may keep its artifacts: a store that is not trusted must not choose what is read, sent or written.

MLflow reads and writes wherever the store says that a run, an experiment or a model has its artifacts, and sends the
user's credentials for the tracking server to any host that it names. So, for a rerun, only these are accepted:

    mlflow-artifacts:, http(s):  of the very scheme, host and port of the tracking URI
    file:, a path                in a folder of artifacts beside the SQLite database, or in MLflow's own `./mlruns`
    s3:, gs:, wasbs:, abfss:     any bucket: their clients sign for their own service, whatever the store says
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pipeline.errors import ConfigError

_BESIDE = ("artifacts", "mlartifacts", "mlruns")  # ours, and those that MLflow's server makes
# Read as text: parsers disagree on where the host of an address with an @ or a backslash ends.
_SERVER = re.compile(r"(mlflow-artifacts|https?)://(?P<host>[\w.\-]+|\[[\da-f:.]+\])(?P<port>:\d+)?(/.*)?", re.I | re.A)
_OF_THE_SERVER = re.compile(r"mlflow-artifacts:(/(?!/).*)?")
# Of Azure's URIs MLflow asks the host that they name, with a token.
_BUCKET = re.compile(r"(s3|gs)://.+|(wasbs|abfss)://[\w$\-]+@\w+\.(blob|dfs)\.core\.windows\.net(/.*)?", re.A)
_DEFAULT_PORTS = {"http": 80, "https": 443}

_tracking_uri: str | None = None  # of this process, in all of its threads: of the store that artifacts must be of


@contextmanager
def confined(tracking_uri: str) -> Iterator[None]:
    """Until it is left, this process reads and writes artifacts only where `check` lets it."""
    from mlflow.store.artifact.artifact_repository_registry import _artifact_repository_registry as registry

    global _tracking_uri
    before, opened = _tracking_uri, registry.get_artifact_repository
    _tracking_uri = tracking_uri

    # Everything of MLflow passes here: runs, and the models that it keeps apart from them.
    def checked(artifact_uri: str, *arguments: Any, **named: Any) -> Any:
        accept(artifact_uri)
        return opened(artifact_uri, *arguments, **named)

    registry.get_artifact_repository = checked  # type: ignore[method-assign]
    try:
        yield
    finally:
        _tracking_uri, registry.get_artifact_repository = before, opened  # type: ignore[method-assign]


def accept(uri: str) -> None:
    """`check` within `confined`; elsewhere the store is the user's own, and nothing is checked."""
    # Either leads to another address, which passes here too.
    if _tracking_uri is not None and not uri.startswith(("runs:/", "models:/")):
        check(uri, _tracking_uri)


def are_confined() -> bool:
    """Whether this process is within `confined`."""
    return _tracking_uri is not None


def check(uri: str, tracking_uri: str) -> None:
    """Refuses artifacts that lie where the store has none.

    Raises:
        ConfigError: `uri` leads elsewhere.
    """
    if not (uri.isprintable() and "\\" not in uri and _lies_in_the_store(uri, tracking_uri)):
        rule = f"must be a store that keeps artifacts with itself, or in a bucket, to rerun from: these lie in {uri}"
        raise ConfigError("tracking.uri", rule, tracking_uri)


def _lies_in_the_store(uri: str, tracking_uri: str) -> bool:
    ours = urlsplit(tracking_uri)
    if ours.scheme in _DEFAULT_PORTS:
        if _OF_THE_SERVER.fullmatch(uri):
            return True
        found = _SERVER.fullmatch(uri)
        if found is not None:
            scheme = found[1].lower() if found[1].lower() in _DEFAULT_PORTS else ours.scheme
            port = int(found["port"][1:]) if found["port"] else _DEFAULT_PORTS[scheme]
            host = found["host"].strip("[]").lower()
            return (scheme, host, port) == (ours.scheme, ours.hostname, ours.port or _DEFAULT_PORTS[ours.scheme])
    elif uri.startswith("file:///"):  # of which MLflow leaves out a query and a fragment
        return not re.search("[?#;]", uri) and _is_beside(Path(unquote(uri.removeprefix("file://"))), tracking_uri)
    elif ":" not in uri:
        return _is_beside(Path(uri), tracking_uri)
    return _BUCKET.fullmatch(uri) is not None


def _is_beside(path: Path, tracking_uri: str) -> bool:
    folders = [Path("mlruns")]
    if tracking_uri.startswith("sqlite:///"):
        database = Path(tracking_uri.removeprefix("sqlite:///").split("?")[0]).absolute()
        folders += [database.parent / name for name in _BESIDE]
    return any(path.resolve().is_relative_to(folder.resolve()) for folder in folders)
