"""The line about a failed request names the request and the cause, and nothing else."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from pipeline.common.errors import first_line
from pipeline.tracking.journal import Journal
from tests.shared import place_store

RUN_ID = "a" * 32


@pytest.fixture(autouse=True)
def no_retries(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")


@pytest.fixture
def answering():
    """Return a function that starts a server with one answer, and returns its URI.

    An answer is a status and a body; None hangs, and "" closes the connection.
    """
    servers = []
    ended = threading.Event()

    def start(answer):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                if answer is None:
                    ended.wait(10)
                if not answer:
                    return
                status, body = answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    ended.set()
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (None, "runs/get: Read timed out. (read timeout=1)"),
        ("", "runs/get: Remote end closed connection without response"),
        ((503, b"busy"), "runs/get: too many 503 error responses"),
        ((401, b"<!DOCTYPE html>\n<p>no"), "runs/get: the server answered 401"),
        ((401, b"Log in."), "runs/get: the server answered 401, Log in"),
    ],
    ids=str,
)
def test_the_line_about_a_server_names_the_request_and_the_cause(
    answering, answer, line
):
    with pytest.raises(MlflowException) as caught:
        MlflowClient(answering(answer)).get_run(RUN_ID)
    assert first_line(caught.value) == line


def test_the_line_about_a_server_that_is_gone(monkeypatch):
    with pytest.raises(MlflowException) as caught:
        MlflowClient("http://127.0.0.1:9").get_run(RUN_ID)
    line = first_line(caught.value)
    assert line.startswith("runs/get: Failed to establish a new connection: ")
    assert line.endswith("Connection refused")


def test_the_line_about_a_database_names_the_cause(tmp_path):
    place_store(tmp_path)
    file = tmp_path / "mlruns" / "mlflow.db"
    client = MlflowClient(f"sqlite:///{file}")
    run_id = client.create_run("0").info.run_id
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("DROP TABLE tags")
        connection.commit()
    with pytest.raises(MlflowException) as caught:
        client.set_tag(run_id, "a", "b")
    assert first_line(caught.value) == "no such table: tags"


def test_a_run_that_goes_offline_says_where_it_is_and_how_it_is_uploaded(
    tmp_path, capsys
):
    journal = Journal(
        "http://me:word@127.0.0.1:9",
        "e",
        when_unreachable="offline",
        run_dir=tmp_path,
    )
    journal.ready()
    journal.abandon()
    (line,) = capsys.readouterr().err.splitlines()
    store = "http://***@127.0.0.1:9"
    assert line == (
        f"the store {store} does not answer (127.0.0.1:9: Connection refused): "
        f"the run trains offline and is kept in {tmp_path}; upload it later with: "
        f"pipeline sync {tmp_path} 'tracking.uri={store}'"
    )
