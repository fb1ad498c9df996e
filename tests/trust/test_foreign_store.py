"""Hostile stores, read by every verb that reads one.

Nothing is sent to another host, written elsewhere, or printed raw.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from mlflow.tracking import MlflowClient

from pipeline.common.errors import ConfigError
from pipeline.tracking.foreign_store import ForeignStore
from tests import synthetic
from tests.running import TINY, one_process, pipeline
from tests.synthetic import PlantedSweep
from tests.tracking.test_provenance import base

ESCAPE = "\x1b]0;owned\x07\x1b[31m"
ELSEWHERE = "tracking.uri must be a store that keeps artifacts in its own folders"
QUIET = "tracking.system_metrics=false"
CSV = (
    "+training.callbacks.rows={_target_: keras.callbacks.CSVLogger, filename: rows.csv}"
)


def test_a_relative_store_is_that_of_the_working_directory(tmp_path, monkeypatch):
    """MLflow keeps a store open under its URI, for all folders of one process."""
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        sweep = PlantedSweep(synthetic.store(folder), ["seed=0"], ["seed"], name=name)
        sweep.end()
        monkeypatch.chdir(folder)
        found = ForeignStore.open("sqlite:///mlruns/mlflow.db").sweep(name)
        assert found.info.run_id == sweep.run_id


def test_a_run_is_found_by_the_start_of_its_id(tmp_path):
    store = synthetic.store(tmp_path)
    client = store.client()
    ids = ["aaaa1" + 27 * "0", "aaaa2" + 27 * "0"]
    for run_id in ids:
        made = client.create_run("0", run_name="it").info.run_id
        with sqlite3.connect(tmp_path / "mlruns/mlflow.db") as database:
            uri = (tmp_path / "mlruns/artifacts" / run_id).as_uri()
            database.execute(
                "UPDATE runs SET run_uuid = ?, artifact_uri = ? WHERE run_uuid = ?",
                (run_id, uri, made),
            )
    found = ForeignStore.open(store.uri)
    for run_id in ids:
        assert [found.run(start).info.run_id for start in (run_id, run_id[:5])] == [
            run_id,
            run_id,
        ]
    with pytest.raises(
        ConfigError, match=r"RUN_ID must name one run, not 2.*Choices: aaaa"
    ) as ambiguous:
        found.run("aaaa")
    assert all(f"{run_id} (it)" in str(ambiguous.value) for run_id in ids)
    for start, said in (
        ("aaa", "at least its first 4 digits"),
        ("aaab", "one run of the store"),
        ("aaa%", "must be the ID"),
    ):
        with pytest.raises(ConfigError, match=said):
            found.run(start)


def test_an_unknown_run_is_rejected_with_the_store_and_its_folder(
    tmp_path, monkeypatch
):
    synthetic.store(tmp_path)
    monkeypatch.chdir(tmp_path)
    found = ForeignStore.open("sqlite:///mlruns/mlflow.db")
    where = f"the store sqlite:///{tmp_path}/mlruns/mlflow.db"
    for start in ("abcd", "0123456789abcdef" * 2):
        with pytest.raises(ConfigError) as unknown:
            found.run(start)
        line = str(unknown.value)
        rule = f"must name one run of {where}; to use another store, set tracking.uri"
        assert line.startswith(f"RUN_ID {rule}.")
        assert f"Received: '{start}'" in line
    with pytest.raises(ConfigError) as no_store:
        ForeignStore.open("sqlite:///none.db")
    assert f"sqlite:///{tmp_path}/none.db does not." in str(no_store.value)


class Hostile(BaseHTTPRequestHandler):
    """A tracking server whose runs have their artifacts on the host that `evil` names.

    It notes each request. The run ddd… names that host only at a second request.
    """

    evil: str
    asked: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self._note()
        self._say({"run": _run("e" * 32, self.evil), "files": []})

    def do_CONNECT(self) -> None:  # of a client that takes this for its proxy
        self._note()
        self.send_error(403)

    def do_POST(self) -> None:
        self._note()
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        runs = [_run("e" * 32, self.evil), _run("d" * 32, "mlflow-artifacts:/1/d")]
        if "tags.sweep =" in text:
            runs = []
        experiment = {
            "experiment_id": "1",
            "name": "pipeline",
            "artifact_location": self.evil,
        }
        self._say(
            {"experiments": [{**experiment, "lifecycle_stage": "active"}], "runs": runs}
        )

    def _note(self) -> None:
        self.asked.append((self.path, self.headers.get("Authorization")))

    def _say(self, answer: dict) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _run(run_id: str, artifact_uri: str) -> dict:
    info = {
        "run_id": run_id,
        "status": "FINISHED",
        "lifecycle_stage": "active",
        "artifact_uri": artifact_uri,
    }
    tags = {
        "sweep.name": "seeds",
        "sweep.jobs": '["seed=0"]',
        "mlflow.runName": f"{ESCAPE}sweep",
    }
    pairs = [{"key": key, "value": value} for key, value in tags.items()]
    return {
        "info": {
            **info,
            "experiment_id": "1",
            "start_time": 1,
            "run_name": f"{ESCAPE}sweep",
        },
        "data": {"tags": pairs},
    }


def recorded_runs(client: MlflowClient, folder, count: int) -> list[str]:
    """Runs that can be run again, in the experiment `theirs`."""
    experiment = client.create_experiment(
        "theirs", (folder / "mlruns/artifacts").as_uri()
    )
    (folder / "config.yaml").write_text(
        yaml.safe_dump(base() | {"tracking": {"experiment": "theirs"}})
    )
    runs = [client.create_run(experiment).info.run_id for _ in range(count)]
    for run_id in runs:
        client.log_artifact(run_id, str(folder / "config.yaml"))
        for step in (1, 2):
            client.log_metric(run_id, "train/loss", 1.0, step=step)
        client.set_terminated(run_id)
    return runs


def made_sweep(store, *overrides: str) -> PlantedSweep:
    """Make a sweep of the file `seeds` with a job that failed.

    There is an escape sequence wherever a store may have one.
    """
    made = PlantedSweep(store, ["seed=0", f"{ESCAPE}seed=1"], ["seed"], "seeds")
    made.job(
        "seed=0", {"train/loss": [2, 1]}, tags={"failure": ESCAPE}, status="FAILED"
    )
    made.job(f"{ESCAPE}seed=1", {"train/loss": [2, 1]})
    made.tag(
        made.run_id,
        **{
            "sweep.overrides": json.dumps(["training.epochs=1", *overrides]),
            "failure": ESCAPE,
        },
    )
    made.client.update_run(made.run_id, name=f"{ESCAPE}sweep")
    made.end("FAILED")
    return made


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Return the verbs' answers for stores that lead elsewhere.

    With them, the requests to the other host.
    """
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "mlruns").mkdir()
    store = synthetic.store(folder)
    client = store.client()
    elsewhere = folder / "victim"
    runs = recorded_runs(client, folder, 2)
    names = [
        "good",
        "folder",
        "tfds",
        "csv",
        "name",
        "download",
        "no job",
        "jobs",
        "varied",
        "overrides",
        "moved",
    ]
    sweeps = {name: made_sweep(store).run_id for name in names}
    overrides = {
        "tfds": ["dataset=tfds", "dataset.name='huggingface:glue'"],
        "csv": [CSV],
        "overrides": [{"a": 1}],
    }
    overrides |= {
        "name": ["training.callbacks.rows.filename=other.csv"],
        "download": ["dataset.download=true"],
    }
    for name, texts in overrides.items():
        client.set_tag(sweeps[name], "sweep.overrides", json.dumps(texts))
    client.set_tag(sweeps["jobs"], "sweep.jobs", '["seed=0"')
    client.set_tag(sweeps["varied"], "sweep.varied", '{"a": 1}')
    made = client.get_experiment_by_name("made").experiment_id
    client.create_run(made, tags={"sweep": sweeps["no job"]})
    with sqlite3.connect(folder / "mlruns/mlflow.db") as database:
        for run_id in (runs[0], sweeps["folder"]):
            database.execute(
                "UPDATE runs SET artifact_uri = ? WHERE run_uuid = ?",
                (f"{elsewhere.as_uri()}{ESCAPE}", run_id),
            )
        database.execute(
            "UPDATE runs SET artifact_uri = ? WHERE run_uuid = ?",
            (elsewhere.as_uri(), sweeps["folder"]),
        )
        database.execute(
            "UPDATE experiments SET artifact_location = ? WHERE name = 'theirs'",
            (elsewhere.as_uri(),),
        )
        database.execute(
            "UPDATE runs SET experiment_id = "
            "(SELECT experiment_id FROM experiments WHERE name = 'theirs') "
            "WHERE run_uuid = ?",
            (sweeps["moved"],),
        )
        for change in ("INSERT", "UPDATE"):  # its tags are read-only
            database.execute(
                f"CREATE TRIGGER no_{change} BEFORE {change} ON tags "
                f"WHEN NEW.run_uuid = '{runs[1]}' AND NEW.key = 'rerun.by' "
                "BEGIN SELECT RAISE(ABORT, 'read-only'); END"
            )
    servers = [
        ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Noting", (Hostile,), {"asked": [], "evil": ""})
        )
        for _ in range(2)
    ]
    theirs, evil = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    servers[0].RequestHandlerClass.evil = f"{evil}/api/2.0/mlflow-artifacts/artifacts/1"
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    again = (
        "sweep seeds hydra/launcher=basic tracking.log_model=false model=mlp --again"
    )
    try:
        lines = {
            "rerun of another host": f"rerun {'e' * 32} --dry tracking.uri={theirs}",
            "report of another host": f"report {'e' * 6} tracking.uri={theirs}",
            "report of a host with two faces": f"report {'d' * 6} tracking.uri={theirs}",
            "rest of another host": f"{again} {'e' * 6} tracking.uri={theirs}",
            "rest of a host with two faces": f"{again} {'d' * 6} tracking.uri={theirs}",
            "a job's sweep of another host": "train -m seed=0,1 "
            f"tracking.sweep={'e' * 32} tracking.uri={theirs}",
            "rerun of another folder": f"rerun {runs[0]} --dry",
            "report of another folder": f"report {sweeps['folder']}",
            "rest of another folder": f"{again} {sweeps['folder']}",
            "rest in an experiment of another folder": f"{again} {sweeps['moved']}",
            "rest, another experiment": f"{again} {sweeps['good']} tracking.experiment=theirs",
            **{
                f"rest, {name}": f"{again} {sweeps[name]}"
                for name in ("tfds", "csv", "name", "download")
            },
            **{
                f"report, {name}": f"report {sweeps[name]}"
                for name in ("no job", "jobs", "varied")
            },
            "rest, overrides": f"{again} {sweeps['overrides']}",
            "report": f"report {sweeps['good']}",
            "report, start of an ID that no run has": "report 0000",
            "experiment": f"rerun {runs[1]} {QUIET}",
            "own experiment": f"rerun {runs[1]} {QUIET} tracking.experiment=theirs",
            "confined": "train model=mlp training.updates=1 tracking.confined=true "
            f"tracking.experiment=theirs {QUIET}",
            "report of a folder that is allowed": f"report {sweeps['folder']} --allow {elsewhere}",
        }
        there = {
            "MLFLOW_TRACKING_TOKEN": "the-token",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        }
        answers = one_process(
            lines, folder, **there, HTTPS_PROXY=evil
        )  # which any download would ask
    finally:
        for server in servers:
            server.shutdown()
    return (
        folder,
        answers,
        [server.RequestHandlerClass.asked for server in servers],
        client,
        sweeps,
    )


ELSEWHERE_CASES = [
    "rerun of another host",
    "rerun of another folder",
    "report of another host",
    "report of another folder",
    "rest of another host",
    "rest of another folder",
    "report of a host with two faces",
    "rest of a host with two faces",
    "a job's sweep of another host",
    "rest in an experiment of another folder",
]


@pytest.mark.slow
@pytest.mark.parametrize("case", ELSEWHERE_CASES)
def test_artifacts_that_lie_elsewhere_are_refused(hostile, case):
    answer = hostile[1][case]
    assert answer["status"] == 2, answer["err"]
    assert ELSEWHERE in answer["err"].splitlines()[-1]
    assert [
        path for path in answer["changed"] if not path.startswith("mlruns/mlflow.db")
    ] == []


@pytest.mark.slow
def test_no_other_host_is_asked_nor_told_a_secret(hostile):
    theirs, evil = hostile[2]
    assert ("/api/2.0/mlflow/runs/get", "Bearer the-token") in [
        (path.split("?")[0], told) for path, told in theirs
    ]
    assert evil == []


@pytest.mark.slow
def test_only_what_the_user_allows_is_written_elsewhere(hostile):
    folder, answers, *_ = hostile
    allowed = answers["report of a folder that is allowed"]
    assert allowed["status"] == 0, allowed["err"]
    assert "victim/report/report.html" in allowed["changed"]
    for case, answer in answers.items():
        if case != "report of a folder that is allowed":
            assert [
                path for path in answer["changed"] if path.startswith("victim")
            ] == [], case
    assert not list(folder.glob("*.csv"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("rest, tfds", "dataset.name may start a download"),
        ("rest, download", "dataset.download may start a download"),
        ("rest, csv", "must not write files unless you allow it"),
        (
            "rest, name",
            "training.callbacks.rows.filename may name a file that is written",
        ),
        (
            "rest, another experiment",
            "tracking.experiment must be the experiment of the sweep, or be left out. "
            "Received: 'theirs'. Choices: made",
        ),
        ("rest, overrides", "SWEEP must have a tag sweep.overrides that can be read"),
        ("report, jobs", "SWEEP must have a tag sweep.jobs that can be read"),
        ("report, varied", "SWEEP must have a tag sweep.varied that can be read"),
        (
            "report, no job",
            "SWEEP must have runs with a tag sweep.job and IDs in MLflow's format",
        ),
        (
            "report, start of an ID that no run has",
            "SWEEP or RUN must name one sweep or run of the store",
        ),
    ],
)
def test_a_record_that_is_wrong_is_refused_in_one_line(hostile, case, named):
    answer = hostile[1][case]
    assert answer["status"] == 2, answer["err"]
    assert len(answer["err"].splitlines()) == 1
    assert named in answer["err"]
    assert answer["changed"] == []


@pytest.mark.slow
def test_what_a_store_says_does_not_speak_to_the_terminal(hostile):
    _, answers, *_ = hostile
    assert "??]0;owned" not in answers["report"]["out"]
    assert answers["report"]["status"] == 0, answers["report"]["err"]
    assert "owned" in "".join(
        answer["out"] + answer["err"] for answer in answers.values()
    )
    for case, answer in answers.items():
        assert not {"\x1b", "\x07"} & set(answer["out"] + answer["err"]), case


@pytest.mark.slow
def test_a_run_that_cannot_be_linked_to_its_rerun_undoes_nothing(hostile):
    _, answers, _, client, _ = hostile
    lines = answers["experiment"]["err"].splitlines()
    verdict = next(
        number
        for number, line in enumerate(lines)
        if ": different from update 1 on" in line
    )
    assert any("has no link to its rerun: " in line for line in lines[verdict + 1 :])
    assert "Traceback" not in answers["experiment"]["err"]
    (new,) = client.search_runs(
        [client.get_experiment_by_name("pipeline").experiment_id]
    )
    assert new.data.tags["rerun.verdict"] == "different"


@pytest.mark.slow
def test_an_experiment_whose_artifacts_lie_elsewhere_is_not_written_to(hostile):
    _, answers, _, client, _ = hostile
    answer = answers["experiment"]
    assert answer["status"] == 3, answer["err"]
    assert (
        "changed: tracking.experiment=pipeline, since tracking.uri must be a store that keeps"
        in answer["err"]
    )
    (new,) = client.search_runs(
        [client.get_experiment_by_name("pipeline").experiment_id]
    )
    assert new.info.status == "FINISHED"
    assert (
        "model.not_logged" not in new.data.tags
    )  # MLflow keeps models apart from runs, and they pass, too
    assert client.list_artifacts(new.info.run_id, "rerun")
    assert answers["own experiment"]["status"] == 2
    assert ELSEWHERE in answers["own experiment"]["err"]


@pytest.mark.slow
def test_a_run_that_is_confined_leaves_nothing_elsewhere(hostile):
    """As the jobs of a sweep that is taken up again are."""
    answer = hostile[1]["confined"]
    assert answer["status"] == 1
    assert ELSEWHERE in answer["err"]


@pytest.mark.slow
def test_a_confined_run_that_is_resumed_leaves_nothing_elsewhere(tmp_path):
    """Its store may have moved the place of its artifacts meanwhile."""
    confined = ("tracking.confined=true", "hydra.run.dir=run")
    pipeline("train", *TINY, *confined, cwd=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    with sqlite3.connect(tmp_path / "mlruns/mlflow.db") as database:
        database.execute("UPDATE runs SET artifact_uri = ?", (elsewhere.as_uri(),))
    resumed = pipeline("resume", "run", "training.epochs=2", cwd=tmp_path, status=4)
    assert ELSEWHERE in resumed.stderr
    assert not elsewhere.exists()
