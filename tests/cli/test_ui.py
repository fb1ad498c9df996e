"""`pipeline ui` prints where the newest run is, serves it, and leaves no process."""

from __future__ import annotations

import signal
import socket
import urllib.request
from contextlib import suppress

import psutil
import pytest
from mlflow.tracking import MlflowClient

from tests import shared
from tests.running import start, wait


def answers(address: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(address, timeout=5) as answer:
        return answer.status == 200
    return False


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


# In place of MLflow's server, which takes 10 s to start. It starts a process that would
# outlive it.
STUB = """
import http.server, subprocess, sys

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

subprocess.Popen(["sleep", "1000"])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Answer).serve_forever()
"""


@pytest.mark.parametrize(
    ("number", "status", "stub"),
    [
        (signal.SIGTERM, 143, True),
        pytest.param(signal.SIGTERM, 143, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, True, marks=pytest.mark.soak),
    ],
)
def test_it_shows_the_newest_run_and_ends_with_all_its_processes(
    tmp_path, number, status, stub
):
    variables = {}
    if stub:
        package = tmp_path / "stub" / "mlflow"
        package.mkdir(parents=True)
        # Without it, the real package would be found first.
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(STUB)
        # The command itself has imported MLflow already.
        variables["PYTHONPATH"] = str(tmp_path / "stub")
    shared.place_store(tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    older = client.create_experiment("pipeline")
    newer = client.create_experiment("another")
    client.create_run(older, start_time=1)
    newest = client.create_run(newer, start_time=2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    process = start("ui", "--port", str(port), cwd=tmp_path, **variables)
    try:
        root = f"http://127.0.0.1:{port}"
        runs = f"{root}/#/experiments/{newer}/runs"
        newest_line = f"newest run: {runs}/{newest.info.run_id}\n"
        assert process.stdout.readline() == newest_line
        assert process.stdout.readline() == f"all runs:   {runs}\n"
        wait(lambda: answers(f"{root}/health"))
        served = psutil.Process(process.pid).children(recursive=True)
        assert len(served) > 1
        # To it alone, as a supervisor does, or the terminal that is closed.
        process.send_signal(number)
        assert process.wait(timeout=60) == status
        wait(lambda: not any(map(is_running, served)), 10)
    finally:
        process.kill()
