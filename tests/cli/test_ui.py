"""`pipeline ui`: it prints where the newest run is, serves it, and leaves no process behind."""

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


# In the place of MLflow's server, which takes 10 s to start: it starts a process that would outlive it.
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
    more = {}
    if stub:
        (tmp_path / "stub" / "mlflow").mkdir(parents=True)
        (tmp_path / "stub" / "mlflow" / "__init__.py").touch()  # else it is outranked
        (tmp_path / "stub" / "mlflow" / "__main__.py").write_text(STUB)
        more["PYTHONPATH"] = str(
            tmp_path / "stub"
        )  # the command itself has imported MLflow
    shared.place_store(tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    experiments = [client.create_experiment(name) for name in ("pipeline", "another")]
    runs = [
        client.create_run(experiment, start_time=at)
        for at, experiment in enumerate(experiments, 1)
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = start("ui", "--port", str(port), cwd=tmp_path, **more)
    try:
        root = f"http://127.0.0.1:{port}"
        page = f"{root}/#/experiments/{experiments[1]}/runs"
        mode = "?workflowType=machine_learning"
        # MLflow's server has words of its own.
        lines = iter(process.stdout.readline, "")
        line = next(line for line in lines if line.startswith("newest run"))
        assert line == f"newest run: {page}/{runs[1].info.run_id}{mode}\n"
        line = next(line for line in lines if line.startswith("all runs"))
        assert line == f"all runs:   {page}{mode}\n"
        # The address is printed once it can be opened.
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        wait(lambda: answers(f"{root}/health"))
        served = psutil.Process(process.pid).children(recursive=True)
        assert len(served) > 1
        process.send_signal(
            number
        )  # to it alone, as a supervisor does, or the terminal that is closed
        assert process.wait(timeout=60) == status
        wait(
            lambda: (
                not any(
                    child.is_running() and child.status() != psutil.STATUS_ZOMBIE
                    for child in served
                )
            ),
            10,
        )
    finally:
        process.kill()


def test_the_comparison_of_its_sweep_stands_first(tmp_path):
    """The newest run is a job of a sweep whose view is saved."""
    store = synthetic.store(tmp_path)
    made = synthetic.Made(store, ["factor=1"])
    made.clock = int(time.time() * 1000) + 10_000  # it is the newest run
    job = made.job("factor=1", {"train/loss": [2, 1]})
    root = "http://127.0.0.1:1234"
    lines = ui._pages(store.uri, root)
    assert lines[0].startswith("newest run: ")

    fragment = mlflow_view.saved_view(made.planned)
    lines = ui._pages(store.uri, root)
    assert lines[0] == f"its sweep:  {root}/{fragment}"
    assert f"viewStateShareKey={made.run_id}" in lines[0]
    assert f"/runs/{job}?workflowType=machine_learning" in lines[1]
