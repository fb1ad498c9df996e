"""A store that is not trusted may keep its artifacts with itself, and nowhere else."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
from mlflow.artifacts import download_artifacts
from mlflow.tracking import MlflowClient

from pipeline.common.errors import ConfigError
from pipeline.trust import artifact_locations
from tests.shared import migrated_store

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
    with pytest.raises(
        ConfigError,
        match=r"tracking\.uri must be a store that keeps artifacts in its own folders",
    ):
        artifact_locations.check(uri, tracking_uri)


@pytest.mark.parametrize(
    ("uri", "place", "lies"),
    [
        ("file:///mnt/nfs/1/artifacts", "/mnt/nfs", True),
        ("/mnt/nfs/my%20files/1", "file:///mnt/nfs", True),
        ("file:///mnt/nfs", "/mnt/nfs/", True),
        ("hdfs://host/a/b", "hdfs://host/a", True),
        ("http://other.example:81/a/1", "http://other.example:81", True),
        ("file:///mnt/nfs2/1", "/mnt/nfs", False),
        ("file:///mnt/nfs/../secret", "/mnt/nfs", False),
        ("file:///mnt/nfs/%2e%2e/secret", "/mnt/nfs", False),
        ("hdfs://host/ab", "hdfs://host/a", False),
        ("hdfs://host/a/../b", "hdfs://host/a", False),
        ("hdfs://host/a/%2e%2e/b", "hdfs://host/a", False),
        ("http://other.example@evil.example/a", "http://other.example", False),
        ("http://other.example.evil.example/a", "http://other.example", False),
    ],
)
def test_a_place_that_the_user_allows(uri, place, lies):
    outcome = nullcontext()
    if not lies:
        rule = r"naming it in trust\.allow or --allow"
        outcome = pytest.raises(ConfigError, match=rule)
    with outcome:
        artifact_locations.check(uri, SERVER, ["/another", place])


def test_a_model_may_be_tried_from_a_temporary_folder_of_the_process_alone(tmp_path):
    """MLflow loads a model from there before it logs it.

    When this was rejected, a rerun warned that the model cannot be served.
    """
    before = tempfile.gettempdir()
    (tmp_path / "model").write_text("a model")
    with artifact_locations.confined(SQLITE, []):
        own = Path(tempfile.mkdtemp())
        (own / "model").write_text("a model")
        assert (
            Path(download_artifacts(artifact_uri=str(own / "model"))).read_text()
            == "a model"
        )
        for other in (tmp_path / "model", Path(before)):
            with pytest.raises(ConfigError, match="keeps artifacts in its own folders"):
                download_artifacts(artifact_uri=str(other))
    assert tempfile.gettempdir() == before
    assert not own.exists()


def new_store(folder: Path) -> MlflowClient:
    shutil.copyfile(migrated_store(), folder / "mlflow.db")
    return MlflowClient(f"sqlite:///{folder}/mlflow.db")


def test_every_way_of_mlflow_is_confined_and_free_again(tmp_path):
    client = new_store(tmp_path)
    elsewhere = client.create_experiment("evil", (tmp_path / "elsewhere").as_uri())
    run_id = client.create_run(elsewhere).info.run_id
    model = client.create_logged_model(elsewhere)
    (tmp_path / "x").write_text("x")
    with artifact_locations.confined(client.tracking_uri, []):
        for way in (
            lambda: client.list_artifacts(run_id),
            lambda: client.download_artifacts(run_id, "x"),
            lambda: client.log_artifact(run_id, str(tmp_path / "x")),
            lambda: client.log_model_artifacts(model.model_id, str(tmp_path)),
        ):
            with pytest.raises(ConfigError, match="elsewhere"):
                way()
    with artifact_locations.confined(
        client.tracking_uri, [str(tmp_path / "elsewhere")]
    ):
        assert client.list_artifacts(run_id) == []
    client.log_artifact(run_id, str(tmp_path / "x"))
    assert (tmp_path / f"elsewhere/{run_id}/artifacts/x").exists()


@pytest.mark.parametrize("link", ["", "report", "report/report.html", "deep/er/file"])
def test_a_link_in_the_artifacts_leads_nowhere_else(tmp_path, link):
    """The run's folder, one in it or a file is a link to somebody else's.

    A link that stays within the folder is accepted. The files are those of `report`.
    """
    client = new_store(tmp_path)
    experiment = client.create_experiment("e", (tmp_path / "artifacts").as_uri())
    run_id = client.create_run(experiment).info.run_id
    new = tmp_path / "new"
    victim = tmp_path / "victim"
    root = tmp_path / "artifacts" / run_id / "artifacts"
    for folder in (new, victim, (root / link).parent):
        folder.mkdir(parents=True, exist_ok=True)
    (new / "report.html").write_text("a report")
    (victim / "report.html").write_text("precious")
    is_file = link.endswith(("html", "file"))
    target = victim / "report.html" if is_file else victim
    (root / link).symlink_to(target)
    with artifact_locations.confined(client.tracking_uri, []):
        for way in (
            lambda: client.log_artifacts(run_id, str(new), "report"),
            lambda: client.list_artifacts(run_id),
            lambda: client.download_artifacts(run_id, link or "report.html"),
            lambda: download_artifacts(artifact_uri=f"{root.as_uri()}/{link}"),
        ):
            with pytest.raises(
                ConfigError,
                match=r"a link that leads elsewhere|keeps artifacts in its own folders",
            ):
                way()
    assert (victim / "report.html").read_text() == "precious"
    assert [path.name for path in victim.iterdir()] == ["report.html"]
    (root / link).unlink()
    root.mkdir(exist_ok=True)
    (root / "newest").symlink_to(root / "kept")
    with artifact_locations.confined(client.tracking_uri, []):
        client.log_artifacts(run_id, str(new), "kept")
        assert (root / "newest" / "report.html").read_text() == "a report"
