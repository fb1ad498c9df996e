"""An MLflow server, and a bad network before it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.tracking.proxy import Proxy


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory) -> Iterator[str]:
    """The address of an MLflow server of this module's own."""
    from tests.browser import server

    folder = tmp_path_factory.mktemp("server")
    with (
        contextlib.chdir(folder),
        server(f"sqlite:///{folder}/mlflow.db") as address,
    ):  # its artifacts are put here
        yield address


@pytest.fixture
def proxy(mlflow_server) -> Iterator[Proxy]:
    """What stands before the server, to be harmed."""
    proxy = Proxy(mlflow_server)
    yield proxy
    proxy.close()


@pytest.fixture
def impatient_requests(monkeypatch) -> None:
    """Let MLflow give up a request after two tries of 4 s."""
    for name, value in {
        "MAX_RETRIES": "1",
        "BACKOFF_FACTOR": "0",
        "TIMEOUT": "4",
    }.items():
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", value)


@pytest.fixture
def forked_shippers(monkeypatch) -> None:
    """Fork the shippers of journals in this process, as those of warm commands are."""
    import subprocess

    from tests import shared, warm

    monkeypatch.setattr(subprocess, "Popen", subprocess.Popen)  # is put back
    warm.fork_children(shared.warm_address())
