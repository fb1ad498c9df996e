"""`pipeline ui` prints where the newest run is, serves it, and leaves no process."""

from __future__ import annotations

import signal
import socket
import time
import urllib.request
from contextlib import suppress

import psutil
import pytest
from mlflow.tracking import MlflowClient

from pipeline.cli import ui
from pipeline.sweep import mlflow_view
from tests import shared, synthetic
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
        page = f"{root}/#/experiments/{newer}/runs"
        mode = "?workflowType=machine_learning"
        # MLflow's server has words of its own.
        lines = iter(process.stdout.readline, "")
        line = next(line for line in lines if line.startswith("newest run"))
        assert line == f"newest run: {page}/{newest.info.run_id}{mode}\n"
        line = next(line for line in lines if line.startswith("all runs"))
        assert line == f"all runs:   {page}{mode}\n"
        # The address is printed once it can be opened.
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        wait(lambda: answers(f"{root}/health"))
        served = psutil.Process(process.pid).children(recursive=True)
        assert len(served) > 1
        # To it alone, as a supervisor does, or the terminal that is closed.
        process.send_signal(number)
        assert process.wait(timeout=60) == status
        wait(lambda: not any(map(is_running, served)), 10)
    finally:
        process.kill()


def test_the_comparison_of_its_sweep_stands_first(tmp_path):
    """The newest run is a job of a sweep whose view is saved."""
    store = synthetic.store(tmp_path)
    made = synthetic.PlantedSweep(store, ["factor=1"])
    made.clock = int(time.time() * 1000) + 10_000  # it is the newest run
    job = made.job("factor=1", {"train/loss": [2, 1]})
    root = "http://127.0.0.1:1234"
    lines = ui._pages(store.uri, root)
    assert lines[0].startswith("newest run: ")

    fragment = mlflow_view.save_view(made.planned, {})
    lines = ui._pages(store.uri, root)
    assert lines[0] == f"sweep:      {root}/{fragment}"
    assert f"viewStateShareKey={made.run_id}" in lines[0]
    assert f"/runs/{job}?workflowType=machine_learning" in lines[1]


def test_a_server_on_the_default_port_is_named(capsys):
    """Its port is not free, but nothing has to be served there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        uri = f"http://127.0.0.1:{port}"
        assert ui.ui([f"--port={port}", f"tracking.uri={uri}"]) == 0
    answer = f"The store is a server with a UI of its own: {uri}\n"
    assert capsys.readouterr().out == answer
