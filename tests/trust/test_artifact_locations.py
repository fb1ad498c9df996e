"""Where a store that is not trusted may keep its artifacts: with itself, and nowhere else."""

from __future__ import annotations

import json
import sqlite3
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from mlflow.tracking import MlflowClient

from pipeline.errors import ConfigError
from pipeline.trust import artifact_locations
from tests.running import one_process
from tests.tracking.test_provenance import base

SERVER = "http://me:secret@127.0.0.1:5000"
SQLITE = "sqlite:////srv/mlruns/mlflow.db"
POSTGRES = "postgresql://me@h/db"


@pytest.mark.parametrize(
    ("tracking_uri", "uri"),
    [
        (SERVER, "mlflow-artifacts:/1/2/artifacts"),
        (SERVER, "mlflow-artifacts://127.0.0.1:5000/1/2/artifacts"),
        (SERVER, "http://127.0.0.1:5000/api/2.0/mlflow-artifacts/artifacts/1"),
        ("https://Host.example", "https://host.example:443/api/1"),
        ("http://[::1]:5000", "http://[::1]:5000/1"),
        (SQLITE, "file:///srv/mlruns/artifacts/1/artifacts"),
        (SQLITE, "/srv/mlruns/mlruns/1/2/artifacts"),
        (SQLITE, "mlruns/1/2/artifacts"),
        (POSTGRES, Path("mlruns/1/2/artifacts").absolute().as_uri()),
        (SERVER, "s3://bucket/1/2"),
        (SQLITE, "gs://bucket/1/2"),
        (POSTGRES, "wasbs://box@account.blob.core.windows.net/1"),
        (POSTGRES, "abfss://box@account.dfs.core.windows.net/1"),
    ],
)
def test_a_store_keeps_its_artifacts_with_itself_or_in_a_bucket(tracking_uri, uri):
    artifact_locations.check(uri, tracking_uri)


@pytest.mark.parametrize(
    ("tracking_uri", "uri"),
    [
        (SERVER, "http://evil.example/1"),
        (SERVER, "http://127.0.0.1/1"),
        (SERVER, "http://127.0.0.1:5001/1"),
        (SERVER, "https://127.0.0.1:5000/1"),
        (SERVER, "http://127.0.0.1:5000@evil.example/1"),
        (SERVER, "http://evil.example\\@127.0.0.1:5000/1"),
        (SERVER, "http://127.0.0.1:5000.evil.example/1"),
        (SERVER, "http://127.0.0.1:5000\n.evil.example/1"),
        (SERVER, "mlflow-artifacts://evil.example/1"),
        (SERVER, "mlflow-artifacts://evil.example:5000/1"),
        (SERVER, "file:///srv/mlruns/artifacts/1"),
        (SERVER, "/home/victim/.config"),
        ("https://host.example", "mlflow-artifacts://host.example:80/1"),
        (SQLITE, "http://evil.example/1"),
        (SQLITE, "mlflow-artifacts:/1"),
        (SQLITE, "file:///home/victim/.config"),
        (SQLITE, "file:///srv/mlruns"),
        (SQLITE, "file:///srv/mlruns/artifacts/../../../home/victim"),
        (SQLITE, "file:///srv/mlruns/artifacts/%2e%2e/%2e%2e/x"),
        (SQLITE, "file:///home/victim/.config#/../../../../srv/mlruns/artifacts/1"),
        (SQLITE, "file://elsewhere/srv/mlruns/artifacts/1"),
        (SQLITE, "../.config"),
        (SQLITE, "ftp://evil.example/x"),
        (SQLITE, "sftp://evil.example/x"),
        (SQLITE, "hdfs://evil.example/x"),
        (SQLITE, "b2://bucket@evil.example/x"),
        (SQLITE, "abfss://box@account.evil.example/x"),
        (SQLITE, "abfss://box@evil.example/x.dfs.core.windows.net/x"),
        (SQLITE, "runs:/1/x"),
        (SQLITE, ""),
    ],
)
def test_what_lies_elsewhere_is_refused(tracking_uri, uri):
    with pytest.raises(ConfigError, match=r"tracking\.uri must be a store that keeps artifacts with itself"):
        artifact_locations.check(uri, tracking_uri)


def test_every_way_of_mlflow_is_confined_and_free_again(tmp_path):
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    elsewhere = client.create_experiment("evil", (tmp_path / "elsewhere").as_uri())
    run_id = client.create_run(elsewhere).info.run_id
    model = client.create_logged_model(elsewhere)
    (tmp_path / "x").write_text("x")
    with artifact_locations.confined(client.tracking_uri):
        for way in (
            lambda: client.list_artifacts(run_id),
            lambda: client.download_artifacts(run_id, "x"),
            lambda: client.log_artifact(run_id, str(tmp_path / "x")),
            lambda: client.log_model_artifacts(model.model_id, str(tmp_path)),
        ):
            with pytest.raises(ConfigError, match="elsewhere"):
                way()
        artifact_locations.accept(f"runs:/{run_id}/x")
    client.log_artifact(run_id, str(tmp_path / "x"))
    assert (tmp_path / f"elsewhere/{run_id}/artifacts/x").exists()


class Hostile(BaseHTTPRequestHandler):
    """A tracking server whose only run has its artifacts on the host that `evil` names; it notes who asks."""

    evil: str
    asked: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("Authorization")))
        info = {"run_id": "e" * 32, "status": "FINISHED", "lifecycle_stage": "active", "artifact_uri": self.evil}
        self._say({"run": {"info": {**info, "experiment_id": "1"}, "data": {}}, "files": []})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._say({"experiments": []})

    def _say(self, answer: dict) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """What `pipeline rerun` said to stores that lead elsewhere, and what was asked of the other host."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "mlruns").mkdir()
    client = MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db")
    experiment = client.create_experiment("theirs", (folder / "mlruns/artifacts").as_uri())
    (folder / "config.yaml").write_text(yaml.safe_dump(base() | {"tracking": {"experiment": "theirs"}}))
    runs = [client.create_run(experiment).info.run_id for _ in range(2)]
    for run_id in runs:
        client.log_artifact(run_id, str(folder / "config.yaml"))
        for step in (1, 2):
            client.log_metric(run_id, "train/loss", 1.0, step=step)
        client.set_terminated(run_id)
    elsewhere = folder / "victim"
    with sqlite3.connect(folder / "mlruns/mlflow.db") as store:
        store.execute("UPDATE runs SET artifact_uri = ? WHERE run_uuid = ?", (elsewhere.as_uri(), runs[0]))
        store.execute("UPDATE experiments SET artifact_location = ? WHERE name = 'theirs'", (elsewhere.as_uri(),))
        for of in ("INSERT", "UPDATE"):  # its tags are read-only
            store.execute(
                f"CREATE TRIGGER no_{of} BEFORE {of} ON tags WHEN NEW.run_uuid = '{runs[1]}' AND NEW.key = 'rerun.by' "
                "BEGIN SELECT RAISE(ABORT, 'read-only'); END"
            )
    servers = [
        ThreadingHTTPServer(("127.0.0.1", 0), type("Noting", (Hostile,), {"asked": [], "evil": ""})) for _ in range(2)
    ]
    theirs, evil = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    servers[0].RequestHandlerClass.evil = f"{evil}/api/2.0/mlflow-artifacts/artifacts/1"
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    quiet = "tracking.system_metrics=false"
    try:
        lines = {
            "host": f"rerun {'e' * 32} --dry tracking.uri={theirs}",
            "folder": f"rerun {runs[0]} --dry",
            "experiment": f"rerun {runs[1]} {quiet}",
            "own experiment": f"rerun {runs[1]} {quiet} tracking.experiment=theirs",
        }
        answers = one_process(lines, folder, MLFLOW_TRACKING_TOKEN="the-token")
    finally:
        for server in servers:
            server.shutdown()
    return folder, answers, [server.RequestHandlerClass.asked for server in servers], client


def test_no_other_host_is_asked_nor_told_a_secret(hostile):
    _, answers, (theirs, evil), _ = hostile
    assert answers["host"]["status"] == 2
    assert "must be a store that keeps artifacts with itself" in answers["host"]["err"].splitlines()[-1]
    assert ("/api/2.0/mlflow/runs/get?run_uuid=" + "e" * 32, "Bearer the-token") in [
        (path.split("&")[0], authorization) for path, authorization in theirs
    ]
    assert evil == []


def test_no_other_folder_is_read(hostile):
    answer = hostile[1]["folder"]
    assert answer["status"] == 2
    assert "/victim." in answer["err"].splitlines()[-1]
    assert answer["changed"] == []


def test_a_run_that_cannot_be_linked_to_its_rerun_undoes_nothing(hostile):
    _, answers, _, client = hostile
    lines = answers["experiment"]["err"].splitlines()
    verdict = next(number for number, line in enumerate(lines) if ": different from update 1 on" in line)
    assert any("has no link to its rerun: " in line for line in lines[verdict + 1 :])
    assert "Traceback" not in answers["experiment"]["err"]
    (new,) = client.search_runs([client.get_experiment_by_name("pipeline").experiment_id])
    assert new.data.tags["rerun.verdict"] == "different"


def test_an_experiment_whose_artifacts_lie_elsewhere_is_not_written_to(hostile):
    folder, answers, _, client = hostile
    answer = answers["experiment"]
    assert answer["status"] == 3, answer["err"]
    assert "changed: tracking.experiment=pipeline, since tracking.uri must be a store that keeps" in answer["err"]
    (new,) = client.search_runs([client.get_experiment_by_name("pipeline").experiment_id])
    assert new.info.status == "FINISHED"
    assert "model.not_logged" not in new.data.tags  # MLflow keeps models apart from runs, and they pass, too
    assert client.list_artifacts(new.info.run_id, "rerun")
    assert answers["own experiment"]["status"] == 2
    assert "must be a store that keeps artifacts with itself" in answers["own experiment"]["err"]
    assert len(client.search_runs([client.get_experiment_by_name("theirs").experiment_id])) == 2
    assert not (folder / "victim").exists()
