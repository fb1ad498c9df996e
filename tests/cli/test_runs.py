"""`pipeline runs` lists the runs of a folder and of a store, in every state."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack, chdir, contextmanager, redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from pipeline.cli.runs import ListedRun
from pipeline.cli.runs import runs as runs_command
from pipeline.cli.runs_order import Entry, sorted_runs
from pipeline.common.errors import ConfigError
from pipeline.report import metric_direction
from pipeline.run.ending_lines import results_and_times
from pipeline.tracking import journal_file
from pipeline.tracking.journal_file import JOURNAL_NAME
from pipeline.tracking.journal_summary import JournalSummary
from tests.running import one_process, pipeline
from tests.shared import place_store

EXPERIMENT = "pipeline"
KEEP_BEST = {
    "training.keep_best.metric": "val/accuracy",
    "training.keep_best.mode": "max",
}
LOCK = """
import fcntl, sys, time
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX, 1, 0)
print("locked", flush=True)
time.sleep(60)
"""


def planted(
    folder,
    name,
    began,
    run_id="",
    status=None,
    updates=4,
    params=None,
    resumed=False,
    **start_values,
):
    """Write the journal of a run to FOLDER/name, as a trainer would leave it."""
    run_dir = folder / name
    run_dir.mkdir()
    start = {
        "format": 1,
        "store": f"sqlite:///{folder}/mlruns/mlflow.db",
        "experiment": EXPERIMENT,
        "name": name,
        "params": params or {"training.keep_best.metric": "null"},
        "tags": {"journal": name},
        **start_values,
    }
    lines = [{"time": began, "start": start}]
    if run_id:
        lines.append({"time": began, "run": {"run_id": run_id, "experiment_id": "1"}})
    for step in range(1, updates + 1):
        metrics = {"train/loss": 1 / step, "train/learning_rate": 0.1}
        lines.append({"time": began, "step": step, "metrics": metrics})
        metrics = {"train/mine": 7.0}
        lines.append({"time": began, "step": step, "metrics": metrics, "logged": True})
        if step % 2 == 0:
            # The best evaluation is the first one.
            metrics = {"val/loss": 0.5 + step, "val/accuracy": 0.9 - 0.1 * step}
            lines.append({"time": began, "step": step, "metrics": metrics})
    if status is not None:
        lines.append({"time": began, "end": status})
    if resumed:
        lines.append({"time": began, "resume": {}})
    writer = journal_file.create(run_dir / JOURNAL_NAME)
    for line in lines:
        writer.write(line)
    writer.close()
    return run_dir


def with_checkpoint(run_dir):
    """Put the name of a checkpoint into a run directory, and return the directory."""
    (run_dir / "checkpoints" / "4").mkdir(parents=True)
    (run_dir / "checkpoints" / "4" / "meta.json").touch()
    return run_dir


def listed(folder, *arguments):
    """Return what `pipeline runs --json` says about each run, by its name."""
    with chdir(folder), redirect_stdout(io.StringIO()) as out:
        assert runs_command(["--json", *arguments]) == 0
    return {run["name"]: run for run in json.loads(out.getvalue())}


def stored(client, name, began, status, steps=0, **params):
    """Create a run in the store, and return its ID."""
    experiment = client.get_experiment_by_name(EXPERIMENT)
    experiment_id = experiment.experiment_id if experiment else None
    if experiment_id is None:
        experiment_id = client.create_experiment(EXPERIMENT)
    run = client.create_run(experiment_id, start_time=began, run_name=name)
    points = [
        Metric("train/loss", 1 / step, began, step) for step in range(1, steps + 1)
    ]
    entries = [Param(key, value) for key, value in params.items()]
    client.log_batch(run.info.run_id, points, entries)
    if status != "RUNNING":
        client.set_terminated(run.info.run_id, status)
    return run.info.run_id


@contextmanager
def locked(run_dir):
    """Lock the journal of a run, as the process that trains it does."""
    command = [sys.executable, "-c", LOCK, str(run_dir / JOURNAL_NAME)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "locked\n"
        yield
    finally:
        process.kill()
        process.communicate()


class EndingRun(BaseHTTPRequestHandler):
    """A store that does not answer, and whose first request ends a running run."""

    def do_GET(self):
        self.server.lock.close()
        self.send_error(404)

    do_POST = do_GET

    def log_message(self, *arguments):
        pass


def test_a_run_that_ends_during_the_listing_is_not_interrupted(tmp_path):
    lock = ExitStack()
    lock.enter_context(locked(with_checkpoint(planted(tmp_path, "ending", 1_000))))
    server = ThreadingHTTPServer(("127.0.0.1", 0), EndingRun)
    server.lock = lock
    threading.Thread(target=server.serve_forever).start()
    store = f"tracking.uri=http://127.0.0.1:{server.server_port}"
    try:
        assert listed(tmp_path, store)["ending"]["status"] == "running"
        # A control: from now on, nobody trains it.
        assert listed(tmp_path, store)["ending"]["status"] == "interrupted"
    finally:
        lock.close()
        server.shutdown()
        server.server_close()


@pytest.fixture
def folder(tmp_path):
    """A folder with a run in each state, and a store with further runs."""
    place_store(tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    planted(tmp_path, "offline", 1_000, status="FINISHED")
    run_id = stored(client, "finished", 2_000, "FINISHED", 4)
    planted(tmp_path, "finished", 2_000, run_id, "FINISHED", params=KEEP_BEST)
    run_id = stored(client, "failed", 3_000, "FAILED", 4)
    planted(tmp_path, "failed", 3_000, run_id, "FAILED")
    run_id = stored(client, "killed", 4_000, "KILLED", 4)
    planted(tmp_path, "killed", 4_000, run_id, "KILLED")  # it has no checkpoint
    # Its machine died: nobody closed it, and the last row did not arrive.
    run_id = stored(client, "interrupted", 5_000, "RUNNING", 3)
    with_checkpoint(planted(tmp_path, "interrupted", 5_000, run_id))
    run_id = stored(client, "running", 6_000, "RUNNING", 2)
    planted(tmp_path, "running", 6_000, run_id)
    stored(client, "elsewhere", 7_000, "FINISHED", 2)
    return tmp_path


def test_each_state_is_shown_once_with_what_to_do(folder):
    with locked(folder / "running"):
        answers = one_process(
            {
                "table": "runs",
                "json": "runs --json",
                "newest": "runs --limit 2 --json",
                "away": "runs tracking.uri=http://127.0.0.1:9",
            },
            folder,
            warm=False,
        )
    assert {answer["status"] for answer in answers.values()} == {0}
    runs = json.loads(answers["json"]["out"])
    by_name = {run["name"]: run for run in runs}
    assert [run["name"] for run in runs] == [
        *("elsewhere", "running", "interrupted", "killed", "failed", "finished"),
        "offline",
    ]
    assert by_name["elsewhere"]["status"] == "finished"
    for name in ("running", "interrupted", "killed", "failed", "finished"):
        assert by_name[name]["status"] == name
    missing = {run["name"]: run["not_shipped"] for run in runs}
    assert missing == {
        "elsewhere": None,
        "running": None,
        "interrupted": 1,
        "killed": 0,
        "failed": 0,
        "finished": 0,
        "offline": 4,
    }
    values = (by_name["killed"]["best"], by_name["killed"]["last"])
    assert values == (2.5, 4.5)  # of the validation loss
    finished = by_name["finished"]
    assert finished["metric"] == "val/accuracy"
    assert finished["best"] == pytest.approx(0.7)
    assert finished["last"] == pytest.approx(0.5)
    assert by_name["elsewhere"]["metric"] == "train/loss"
    assert by_name["elsewhere"]["last"] == 0.5

    newest = json.loads(answers["newest"]["out"])
    assert [run["name"] for run in newest] == ["elsewhere", "running"]
    table = answers["table"]["out"]
    lines = table.splitlines()
    assert max(map(len, lines)) <= 100
    place = lines.index("    pipeline resume interrupted")
    assert lines[place - 1].startswith("interrupted ")
    assert lines[place - 1].endswith(" val/loss 4.5 best 2.5")
    sync = "not in the store: pipeline sync"
    assert lines[place + 1] == f"    1 update {sync} interrupted"
    assert lines[-1] == f"    4 updates {sync} offline"
    assert "    pipeline resume killed training.resume=auto" in lines
    assert len(lines) == len(runs) + 4

    away = answers["away"]
    unknown = "the runs of the store are left out, and it is unknown what it lacks: "
    assert f"{unknown}tracking.uri must" in away["err"]
    assert len(away["err"].splitlines()) == 1
    assert "elsewhere" not in away["out"]
    assert "interrupted" in away["out"]
    for answer in answers.values():
        assert "tensorflow" not in answer["loaded"]


@pytest.mark.slow
def test_two_hundred_runs_are_listed(tmp_path):
    place_store(tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    params = {f"key.{number}": "value" for number in range(150)}
    for number in range(200):
        run_id = stored(client, f"run {number}", number + 1, "FINISHED", 1, **params)
        planted(tmp_path, f"run {number}", number + 1, run_id, "FINISHED", 1000)
    listed = pipeline("runs", "--limit", "200", cwd=tmp_path, warm=False)
    assert len(listed.stdout.splitlines()) == 200


def test_a_resumed_run_is_not_complete_by_the_status_of_an_earlier_segment(tmp_path):
    place_store(tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    for name, resumed in (("once", False), ("resumed", True)):
        run_id = stored(client, name, 1_000, "KILLED", 3)
        status = None if resumed else "KILLED"
        planted(tmp_path, name, 1_000, run_id, status, resumed=resumed)
    listed = pipeline("runs", "--json", cwd=tmp_path)
    missing = {run["name"]: run["not_shipped"] for run in json.loads(listed.stdout)}
    assert missing == {"once": 0, "resumed": 1}


def test_a_run_whose_end_is_not_in_the_store_is_not_complete(tmp_path):
    place_store(tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    for name, status in (("complete", "FINISHED"), ("open", "RUNNING")):
        run_id = stored(client, name, 1_000, status, 4)
        planted(tmp_path, name, 1_000, run_id, "FINISHED")
    listed = pipeline("runs", cwd=tmp_path)
    commands = [line for line in listed.stdout.splitlines() if "sync" in line]
    assert commands == ["    its end is not in the store: pipeline sync open"]


def test_a_run_that_was_continued_elsewhere_is_listed_as_in_the_store(tmp_path):
    place_store(tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    states = {
        # name: the status, the tags and the steps in the store, a line that resumes
        "finished": ("FINISHED", {"segments": "2"}, 6, False),
        "killed": ("KILLED", {"segments": "3"}, 6, True),
        "twice": ("FINISHED", {"segments": "2"}, 6, True),
        # The run's own segment has not arrived in the store.
        "behind": ("FINISHED", {}, 4, True),
        # The disk was full when the run ended.
        "unwritten": ("FINISHED", {"journal.unwritten": "0"}, 4, False),
    }
    for name, (status, tags, steps, resumed) in states.items():
        run_id = stored(client, name, 1_000, status, steps)
        for key, value in tags.items():
            client.set_tag(run_id, key, value)
        run_dir = planted(tmp_path, name, 1_000, run_id, resumed=resumed)
        with_checkpoint(run_dir)
    runs = listed(tmp_path)
    older = {name for name, run in runs.items() if run["older_copy"]}
    assert older == {"finished", "killed", "twice"}
    for name in older:
        assert runs[name]["status"] == states[name][0].lower()
        assert runs[name]["last"] == pytest.approx(1 / 6)
        assert (runs[name]["next_command"], runs[name]["sync_command"]) == ("", "")
    assert runs["behind"]["next_command"] == "pipeline resume behind"

    table = pipeline("runs", "finished", cwd=tmp_path).stdout.splitlines()
    assert table[1:] == ["    continued elsewhere: finished is an older copy"]


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A folder with runs of 2, 4 and 6 updates, in this order; one is elsewhere."""
    folder = tmp_path_factory.mktemp("several")
    place_store(folder)
    client = MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db")
    for began, updates in enumerate((2, 4, 6), start=1):
        name = f"run {updates}"
        run_id = stored(client, name, began, "FINISHED", updates, width=updates)
        params = {"width": updates, "training.keep_best.metric": "null"}
        planted(folder, name, began, run_id, "FINISHED", updates, params)
    stored(client, "elsewhere", 4, "FAILED", 3, width=4)
    planted(folder, "offline", 5, "", "FINISHED", 8)
    sweep = stored(client, "sweep", 6, "FINISHED", width=4)
    client.set_tag(sweep, "sweep.name", "made")
    return folder


def test_runs_are_sorted_by_a_metric_of_ones_own(tmp_path):
    place_store(tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    for began, (name, value) in enumerate({"high": 3.0, "low": 1.0}.items()):
        run_id = stored(client, name, 1_000 + began, "FINISHED", steps=4)
        client.log_metric(run_id, "train/mine_loss", value, step=4)
        planted(tmp_path, name, 1_000 + began, run_id, "FINISHED")
    runs = listed(tmp_path, "--sort", "train/mine_loss")
    assert {name: run["last"] for name, run in runs.items()} == {"low": 1, "high": 3}
    assert list(runs) == ["low", "high"]


@pytest.mark.parametrize(
    ("key", "names"),
    [
        # The loss is 0.5 + the updates, and the accuracy falls with them.
        ("val/loss", ["run 2", "run 4", "run 6", "offline", "sweep", "elsewhere"]),
        ("val/accuracy", ["run 2", "run 4", "run 6", "offline", "sweep", "elsewhere"]),
        ("train/loss", ["offline", "run 6", "run 4", "elsewhere", "run 2", "sweep"]),
        ("name", ["elsewhere", "offline", "run 2", "run 4", "run 6", "sweep"]),
        ("status", ["elsewhere", "sweep", "offline", "run 6", "run 4", "run 2"]),
        ("started_at", ["sweep", "offline", "elsewhere", "run 6", "run 4", "run 2"]),
        # That of each run is the loss of update 2.
        ("best", ["offline", "run 6", "run 4", "run 2", "sweep", "elsewhere"]),
    ],
)
def test_runs_are_sorted_with_the_best_one_first(several, key, names):
    runs = listed(several, "--sort", key)
    assert list(runs) == names
    if key == "val/accuracy":
        assert runs["run 2"]["metric"] == "val/accuracy"
        assert runs["run 2"]["last"] == pytest.approx(0.7)
        assert runs["elsewhere"]["last"] is None


def test_the_order_is_reversed(several):
    assert list(listed(several, "--reverse")) == [
        *("run 2", "run 4", "run 6", "elsewhere", "offline", "sweep")
    ]
    assert list(listed(several, "--reverse", "--limit", "2")) == ["run 2", "run 4"]
    assert list(listed(several, "--sort", "val/loss", "--reverse")) == [
        *("offline", "run 6", "run 4", "run 2", "sweep", "elsewhere")
    ]
    by_status = listed(several, "--sort", "status", "--reverse")
    assert list(by_status)[-1] == "elsewhere"  # failed


def test_a_folder_lists_its_own_runs_only(several):
    assert list(listed(several, "run 4", "run 2")) == ["run 4", "run 2"]


def test_the_best_runs_are_found_among_all(several):
    assert list(listed(several, "--sort", "val/loss", "--limit", "2")) == [
        "run 2",
        "run 4",
    ]


def test_the_direction_of_a_metric_is_that_of_keep_best():
    kept = {"training.keep_best.metric": "val/f", "training.keep_best.mode": "min"}
    for params, best in ((kept, "low"), ({}, "high")):
        entries = []
        for name, value in (("low", 1.0), ("high", 2.0), ("none", float("nan"))):
            run = ListedRun("", "finished", 1, "e", name, "val/f", None, value)
            entries.append(Entry(run, {"val/f": value}, params))
        names = [run.name for run in sorted_runs(entries, "val/f")]
        assert names[0] == best
        assert names[-1] == "none"
    # Times and memory are costs.
    assert metric_direction.lower_by_params("perf/update_seconds", [{}])
    assert metric_direction.lower_by_params("perf/peak_memory_bytes", [{}])
    assert not metric_direction.lower_by_params("perf/examples_per_second", [{}])


def test_a_filter_selects_runs_as_that_of_reports(several):
    assert list(listed(several, "--filter", "params.width = '4'")) == [
        "elsewhere",
        "run 4",
    ]
    none = pipeline("runs", "--filter", "params.width = '5'", cwd=several)
    assert (none.stdout, none.stderr) == ("", "no run matches\n")
    arguments = ("--filter", "metrics.`train/loss` < 0.4", "--sort", "train/loss")
    assert list(listed(several, *arguments)) == ["run 6", "run 4", "elsewhere"]
    of_experiment = ("--filter", "params.width = '4'", "tracking.experiment=pipeline")
    assert len(listed(several, *of_experiment)) == 2


def test_a_filter_takes_the_words_of_the_list(folder):
    # As MLflow has it, `interrupted` is RUNNING.
    assert list(listed(folder, "--filter", "status='interrupted'")) == ["interrupted"]
    assert list(listed(folder, "--filter", "attributes.status = 'KILLED'")) == [
        "killed"
    ]
    both = "status != 'interrupted' and status != \"finished\""
    # A journal that nobody has locked is that of a run which has ended.
    assert list(listed(folder, "--filter", both)) == ["running", "killed", "failed"]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--filter", "width"], "--filter must be a filter string of MLflow ("),
        (
            ["--filter", "params.width = '4'", "tracking.experiment=none"],
            "tracking.experiment must be an experiment of the store.",
        ),
        (
            ["--sort", "val/los"],
            "--sort must be a column or a metric of a listed run. Received: "
            "'val/los'. Choices: started_at, status, experiment, name, last, best, ",
        ),
        (
            ["--sort", "last"],
            "--sort must be a metric, since this column has values of several metrics. "
            "Received: 'last'. Choices: train/loss, val/loss.",
        ),
        (
            ["--filter", "params.width = '4'", "tracking.uri=sqlite:///none.db"],
            "tracking.uri must be a store that exists",
        ),
    ],
)
def test_a_wrong_query_is_rejected(several, arguments, rule, capsys):
    with chdir(several), pytest.raises(ConfigError) as refused:
        runs_command(arguments)
    assert str(refused.value).startswith(rule)
    assert capsys.readouterr().out == ""


def test_a_run_that_its_store_has_lost_is_absent(tmp_path):
    place_store(tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    kept = stored(client, "kept", 1_000, "FINISHED", 4)
    planted(tmp_path, "kept", 1_000, kept, "FINISHED")
    deleted = stored(client, "deleted", 1_000, "FINISHED", 4)
    client.delete_run(deleted)
    planted(tmp_path, "deleted", 1_000, deleted, "FINISHED")
    planted(tmp_path, "lost", 2_000, "a" * 32, "FINISHED")
    moved = {"store": f"sqlite:///{tmp_path}/moved.db"}
    planted(tmp_path, "moved", 3_000, "b" * 32, "FINISHED", **moved)
    unknown = {"store": "http://127.0.0.1:9"}
    planted(tmp_path, "unknown", 4_000, "c" * 32, "FINISHED", **unknown)
    planted(tmp_path, "offline", 5_000, "", "FINISHED", **unknown)

    runs = listed(tmp_path)
    absent = {name for name, run in runs.items() if run["absent"]}
    assert absent == {"lost", "moved", "offline"}
    assert runs["lost"]["sync_command"] == "pipeline sync lost"
    elsewhere = f"pipeline sync moved tracking.uri={moved['store']}"
    assert runs["moved"]["next_command"] == elsewhere
    offline = "pipeline sync offline tracking.uri=http://127.0.0.1:9"
    assert runs["offline"]["next_command"] == offline
    assert runs["offline"]["store"] == "http://127.0.0.1:9"
    assert runs["unknown"]["not_shipped"] is None
    sync = "pipeline sync unknown tracking.uri=http://127.0.0.1:9"
    assert runs["unknown"]["sync_command"] == sync
    line = f"    unknown whether its store lacks anything: {sync}\n"
    for store in ([], ["tracking.uri=http://127.0.0.1:9"]):
        with chdir(tmp_path), redirect_stdout(io.StringIO()) as out:
            runs_command(["unknown", *store])
        assert out.getvalue().endswith(line)
    # The oldest runs are found, too.
    newest = listed(tmp_path, "--limit", "5")
    assert {name for name, run in newest.items() if run["absent"]} == absent

    (tmp_path / "mlruns").rename(tmp_path / "elsewhere")
    table = pipeline("runs", cwd=tmp_path)
    assert "    absent from the store: pipeline sync kept\n" in table.stdout


def test_a_run_uploaded_to_another_store_is_remembered_there(tmp_path):
    place_store(tmp_path)
    place_store(tmp_path / "other")
    dead = {"store": "http://127.0.0.1:9"}
    planted(tmp_path, "run", 1_000, "", "FINISHED", **dead)
    other = f"tracking.uri=sqlite:///{tmp_path}/other/mlruns/mlflow.db"
    answers = one_process(
        {
            "dead": "sync",
            "other": f"sync run {other}",
            "all": "sync",
            "again": f"sync run {other}",
        },
        tmp_path,
    )
    statuses = {name: answer["status"] for name, answer in answers.items()}
    assert statuses == {"dead": 4, "other": 0, "all": 0, "again": 0}
    assert "0 points sent to the store" in answers["again"]["err"]
    (run,) = listed(tmp_path).values()
    assert len(run["run_id"]) == 32
    assert (run["absent"], run["not_shipped"], run["next_command"]) == (False, 0, "")
    assert run["store"].endswith("/other/mlruns/mlflow.db")
    # The line at the end of the journal has not opened the run again.
    client = MlflowClient(run["store"])
    assert client.get_run(run["run_id"]).info.status == "FINISHED"
    assert listed(tmp_path, other) == {"run": run}

    # What is written later is missing there again.
    past = journal_file.LockedPast.open(tmp_path / "run")
    assert past.uploaded
    writer = past.truncated_writer()
    writer.write({"step": 5, "metrics": {"train/loss": 0.1}})
    writer.close()
    assert not journal_file.Past.read(tmp_path / "run").uploaded
    assert listed(tmp_path)["run"]["not_shipped"] is None
    assert listed(tmp_path, other)["run"]["not_shipped"] == 0


def test_a_run_that_came_to_its_store_later_is_listed_once(tmp_path):
    place_store(tmp_path)
    planted(tmp_path, "run", 1_000, "", "FINISHED")
    assert listed(tmp_path)["run"]["next_command"] == "pipeline sync run"
    pipeline("sync", "run", cwd=tmp_path)
    (run,) = listed(tmp_path).values()
    assert run["not_shipped"] == 0
    assert run["next_command"] == ""


def test_a_job_has_its_sweep_and_the_command_that_resumes_it(tmp_path):
    place_store(tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    sweep = stored(client, "sweep multirun", 1_000, "KILLED")
    client.set_tag(sweep, "sweep.name", "multirun")
    run_ids = {}
    for seed in range(2):
        name = f"digits model=mlp training.dropout=0.5 seed={seed}"
        run_ids[name] = stored(client, name, 2_000, "KILLED", 4)
        tags = {"journal": name, "sweep": sweep}
        run_dir = planted(*(tmp_path, name, 2_000, run_ids[name], "KILLED"), tags=tags)
        with_checkpoint(run_dir)
    again = f"pipeline sweep multirun --again {sweep}"
    runs = listed(tmp_path)
    for name in run_ids:
        assert runs[name]["sweep"] == sweep
        assert runs[name]["next_command"] == again
    # It is also found if it is not among the newest runs.
    newest = listed(tmp_path, "--limit", "2")
    assert [run["next_command"] for run in newest.values()] == [again, again]

    # Names are not cut where they are read by a program.
    table = pipeline("runs", cwd=tmp_path).stdout
    for name in run_ids:
        assert f" {name} val/loss 4.5 best 2.5 sweep {sweep[:8]}\n" in table
    assert table.count(f"    {again}\n") == 3


def test_what_differs_of_long_names_is_shown_in_a_terminal(
    tmp_path, capsys, monkeypatch
):
    for seed in range(2):
        planted(tmp_path, f"digits model=mlp depth=5 seed={seed}", 1_000 + seed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert runs_command([]) == 0
    lines = capsys.readouterr().out.splitlines()
    runs = [line for line in lines if line.startswith("killed ")]
    assert [line.split("pipeline ")[1] for line in runs] == [
        "… seed=1           val/loss 4.5 best 2.5",
        "… seed=0           val/loss 4.5 best 2.5",
    ]


def test_words_of_the_user_are_no_row(tmp_path):
    run_dir = planted(tmp_path, "run", 1_000, params={"tags.goal": "train/loss"})
    summary = JournalSummary.read(run_dir)
    assert summary.updates == 4
    assert summary.last["train/loss"] == 0.25


def append(run_dir, *lines):
    """Append lines to a journal whose checksums nobody reads."""
    with (run_dir / JOURNAL_NAME).open("a") as journal:
        for line in lines:
            journal.write(json.dumps(line) + "\n")


def test_the_best_evaluation_is_one_that_the_run_has(tmp_path):
    run_dir = planted(tmp_path, "run", 1_000)
    assert JournalSummary.read(run_dir).best == 2.5
    # That before the first update is none of the best.
    append(run_dir, {"metrics": {"val/loss": 0.1}, "step": 0, "time": 2_000})
    assert JournalSummary.read(run_dir).best == 2.5
    # A resumed run does not write a row again that it already has.
    append(
        run_dir,
        {"metrics": {"val/loss": 0.5}, "step": 6, "time": 3_000},
        {"resume": {"after": 5}, "time": 4_000},
    )
    summary = JournalSummary.read(run_dir)
    assert (summary.best, summary.best_update) == (0.5, 6)


def test_a_run_of_an_impossible_time_is_left_out(tmp_path):
    assert JournalSummary.read(planted(tmp_path, "late", 10**17)) is None
    assert JournalSummary.read(planted(tmp_path, "run", 10**12)) is not None


def test_a_run_without_a_row_ends_with_its_times_alone(tmp_path):
    recorder = SimpleNamespace(
        updates=3, train_seconds=1.0, compile_seconds=2.0, total_seconds=lambda: 4.0
    )
    without_row = planted(tmp_path, "empty", 1_000, updates=0)
    (times,) = results_and_times(without_row, recorder)
    assert times.startswith("3 updates in 4.0 s: training 1.0 s, compilation 2.0 s")
    results, _ = results_and_times(planted(tmp_path, "run", 1_000), recorder)
    assert results == "last val/loss 4.5000, best 2.5000 after update 2"


def test_run_directories_that_cannot_be_read_hide_no_other_run(tmp_path):
    planted(tmp_path, "whole", 1_000)
    cut = planted(tmp_path, "cut", 2_000) / JOURNAL_NAME
    lines = cut.read_bytes().splitlines(keepends=True)
    cut.write_bytes(b"".join(lines[:3]) + b"\xff\x00{[\n")
    for name in ("gone", "folder", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "gone" / JOURNAL_NAME).symlink_to("nowhere")
    (tmp_path / "folder" / JOURNAL_NAME).mkdir()
    (tmp_path / "empty" / JOURNAL_NAME).touch()

    listed = pipeline("runs", "--json", cwd=tmp_path)
    assert [run["name"] for run in json.loads(listed.stdout)] == ["cut", "whole"]
    left_out = [line for line in listed.stderr.splitlines() if "left out" in line]
    assert [line.partition(" ")[0] for line in left_out] == ["gone", "the"]
    assert "No such file" in left_out[0]


def test_a_run_that_was_copied_is_named(tmp_path):
    planted(tmp_path, "run", 1_000, run_id="1" * 32)
    planted(tmp_path, "other", 2_000, run_id="2" * 32)
    listed = pipeline("runs", cwd=tmp_path)
    assert "was copied" not in listed.stderr

    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    listed = pipeline("runs", cwd=tmp_path)
    line = f"run {'1' * 32} was copied, and is in copy, run: resume and sync only one of them"
    assert line in listed.stderr.splitlines()


def test_mlflow_is_not_imported_without_a_store_to_ask(tmp_path):
    planted(tmp_path, "run", 1_000)
    (answer,) = one_process({"runs": "runs"}, tmp_path, warm=False).values()
    assert answer["status"] == 0
    assert "run" in answer["out"]
    assert "tracking.uri must be a store that exists" in answer["err"]
    assert answer["loaded"] == []
