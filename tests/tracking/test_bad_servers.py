"""Servers that redirect, or are hidden by something that answers `{}`: a line says so."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pipeline.common.errors import ConfigError
from pipeline.tracking.store import Store


@contextmanager
def server(status, headers, body=b"{}"):
    """Answer each request alike; yield the address and the requests."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers.get("Content-Length", 0))
            requests.append((self.path, self.rfile.read(length)))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, *_):
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # It looks for its end each hundredth of a second.
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}", requests
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(status):
    with server(200, {}) as (other, requests):
        path = "/mlflow/api/2.0/mlflow/experiments/search"
        with server(status, {"Location": other + path}) as (address, _):
            rule = f"it redirects to {other}/mlflow: set tracking.uri={other}/mlflow"
            with pytest.raises(ConfigError) as raised:
                Store(address)
        assert rule in str(raised.value)
        assert requests == []


def test_the_data_of_a_run_do_not_follow_a_redirect_that_comes_later(monkeypatch):
    monkeypatch.delenv("MLFLOW_ALLOW_HTTP_REDIRECTS", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with server(200, {}) as (address, _):
        store = Store(address)
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    assert store.is_served
    with (
        server(200, {}) as (other, requests),
        server(308, {"Location": f"{other}/api"}) as (address, _),
        pytest.raises(MlflowException),
    ):
        MlflowClient(address).set_tag("a" * 32, "key", "value")
    assert requests == []


def test_an_experiment_without_an_id_is_no_experiment():
    with server(200, {}) as (address, requests):
        store = Store(address)
        with pytest.raises(OSError, match="its answer has no ID of an experiment"):
            store.check("mine")
    assert any("experiments/get-by-name" in path for path, _ in requests)
