"""A store that is away, slow, broken or silent.

After `pipeline sync` it has what an undisturbed run leaves in it.
"""

from __future__ import annotations

import json
import shutil
import threading
import time

import pytest

from pipeline.common.errors import NOT_SHIPPED, ConfigError, StoreError
from pipeline.tracking.foreign_store import OwnStore
from pipeline.tracking.journal import Journal
from pipeline.tracking.journal_file import JOURNAL_NAME, LockedPast
from pipeline.tracking.journal_lines import Tags
from pipeline.tracking.sync_run import sync_run
from tests.parameters import mostly_slow
from tests.running import wait
from tests.shared import place_store
from tests.tracking.shipped import (
    BUSY,
    UPDATES,
    begin,
    fields,
    opened,
    sync,
    times,
    train,
)

HALF = UPDATES // 2
pytestmark = pytest.mark.usefixtures("impatient_requests", "forked_shippers")


@pytest.fixture(scope="module")
def undisturbed(mlflow_server, tmp_path_factory):
    journal = opened(
        mlflow_server, tmp_path_factory.mktemp("undisturbed"), "undisturbed"
    )
    train(journal, 1, UPDATES)
    assert journal.close("FINISHED") is None
    return fields(mlflow_server, "undisturbed")


@pytest.fixture
def check_complete(mlflow_server, undisturbed, tmp_path, request):
    """Return a function that checks all fields and times of this test's one run."""

    def check():
        assert fields(mlflow_server, request.node.name) == undisturbed
        text = (tmp_path / JOURNAL_NAME).read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        # `sync` may have written after the end where the run is.
        ends = [line["time"] for line in lines if "end" in line]
        began = lines[0]["time"]
        assert times(mlflow_server, request.node.name) == (began, ends[-1])

    return check


def shipped(mlflow_server, experiment, steps):
    """Return whether the store has so many updates."""
    return (
        len(fields(mlflow_server, experiment)["metrics"].get("train/loss", ())) >= steps
    )


@pytest.mark.slow
def test_down_at_the_start_is_refused_in_a_line(tmp_path, proxy, capsys):
    proxy.down()
    with pytest.raises(
        ConfigError,
        match=r"tracking.uri must be a store that answers \(127.0.0.1:\d+: .*refused\)",
    ):
        opened(proxy.address, tmp_path, "refused")
    assert not (tmp_path / JOURNAL_NAME).exists()


@pytest.mark.slow
def test_down_at_the_start_and_waited_for(
    tmp_path, proxy, check_complete, capsys, request
):
    proxy.down()
    threading.Timer(3, proxy.up).start()
    journal = opened(
        proxy.address, tmp_path, request.node.name, when_unreachable="wait"
    )
    train(journal, 1, UPDATES)
    assert journal.close("FINISHED") is None
    assert "refused): waiting for it" in capsys.readouterr().err
    check_complete()


def test_a_run_that_was_kept_offline_is_complete_after_sync(tmp_path, capsys):
    """It has all that a run has whose store was there."""
    place_store(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    journal = opened(uri, tmp_path / "undisturbed", "undisturbed")
    train(journal, 1, UPDATES)
    assert journal.close("FINISHED") is None

    run_dir = tmp_path / "offline"
    away = "http://127.0.0.1:9"
    journal = opened(away, run_dir, "offline", when_unreachable="offline")
    train(journal, 1, UPDATES)
    assert journal.close("FINISHED") == "the store was not contacted"
    assert sync_run(str(run_dir), OwnStore(away), 1.0, named=True) == NOT_SHIPPED
    for _ in range(2):
        assert sync_run(str(run_dir), OwnStore(uri), 60.0, named=True) == 0
    assert "0 points sent to the store" in capsys.readouterr().err
    assert fields(uri, "offline") == fields(uri, "undisturbed")
    began, *_, end = (run_dir / JOURNAL_NAME).read_text().splitlines()[:-1]
    assert times(uri, "offline") == (json.loads(began)["time"], json.loads(end)["time"])


def test_a_run_that_was_continued_from_a_copy_keeps_its_end(tmp_path, capsys):
    """An older copy of its directory sends neither its end nor its tags."""
    place_store(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    journal = opened(uri, tmp_path / "newer", "copied")
    train(journal, 1, HALF)
    shutil.copytree(tmp_path / "newer", tmp_path / "killed")
    journal.write(Tags({"failure": "interrupted"}))
    assert journal.close("KILLED") is None
    shutil.copytree(tmp_path / "newer", tmp_path / "interrupted")

    journal = Journal(uri, "copied")
    journal.ready()
    journal.resume(LockedPast.open(tmp_path / "newer"), {})
    journal.write(Tags({"segments": "2"}))
    train(journal, HALF + 1, UPDATES)
    assert journal.close("FINISHED") is None
    finished = fields(uri, "copied")
    ended = times(uri, "copied")
    assert finished["status"] == "FINISHED"

    for name in ("killed", "interrupted"):
        for named in (True, False):
            older = str(tmp_path / name)
            assert sync_run(older, OwnStore(uri), 60.0, named=named) == 0
            assert fields(uri, "copied") == finished
            assert times(uri, "copied") == ended
            assert (
                "is FINISHED: it was continued from another copy of this directory\n"
            ) in capsys.readouterr().err


@pytest.mark.slow
def test_down_from_the_start_to_the_end(
    tmp_path, proxy, check_complete, capsys, request
):
    proxy.down()
    journal = opened(
        proxy.address, tmp_path, request.node.name, when_unreachable="offline"
    )
    train(journal, 1, UPDATES)
    assert journal.close("FINISHED") == "the store was not contacted"
    assert sync(tmp_path, "tracking.patience=1") == 4
    proxy.up()
    assert sync(tmp_path) == 0
    check_complete()
    assert sync(tmp_path) == 0
    assert "0 points sent to the store" in capsys.readouterr().err
    check_complete()


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["down", "hanging"])
def test_away_in_the_middle(
    tmp_path, proxy, check_complete, mlflow_server, request, mode
):
    """The store is away for two tries of the shipper.

    Each is longer than MLflow's own: 5 s and twice 4 s.
    """
    journal = opened(proxy.address, tmp_path, request.node.name)
    train(journal, 1, HALF)
    wait(lambda: shipped(mlflow_server, request.node.name, HALF), BUSY)
    proxy.harm(mode)
    train(journal, HALF + 1, UPDATES)
    time.sleep(26)
    proxy.heal()
    assert journal.close("FINISHED") is None
    check_complete()


@pytest.mark.parametrize("mode", mostly_slow(["down", "hanging"], [], ["down"]))
def test_away_at_the_end_for_good(
    tmp_path, proxy, check_complete, mlflow_server, request, mode
):
    journal = opened(proxy.address, tmp_path, request.node.name)
    train(journal, 1, UPDATES)
    proxy.harm(mode)
    journal.patience = 3
    began = time.monotonic()
    assert journal.close("FINISHED")
    assert (
        time.monotonic() - began < 3 + 2 + BUSY
    )  # the patience, and the grace of the shipper
    assert sync(tmp_path, "tracking.patience=1") == 4
    proxy.heal()
    assert sync(tmp_path) == 0
    check_complete()


@pytest.mark.slow
def test_hanging_at_the_start_is_bounded(tmp_path, proxy, capsys, monkeypatch):
    monkeypatch.setattr("pipeline.tracking.journal.SILENCE", 1.0)
    proxy.mode = "hanging"
    began = time.monotonic()
    with pytest.raises(ConfigError, match="no answer within 3 s"):
        opened(proxy.address, tmp_path, "hanging", patience=3.0)
    assert time.monotonic() - began < 3 + 2 + BUSY
    assert f"waiting for the store {proxy.address}" in capsys.readouterr().err
    assert not (tmp_path / JOURNAL_NAME).exists()


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("failing", marks=pytest.mark.slow),
        pytest.param("cutting", marks=pytest.mark.slow),
        pytest.param("slow", marks=pytest.mark.soak),
    ],
)
def test_a_bad_server(tmp_path, proxy, check_complete, request, mode):
    """The server is bad from before the run is created.

    A request that was done and not answered leaves no second run.
    """
    proxy.mode = mode
    journal = opened(proxy.address, tmp_path, request.node.name, patience=90.0)
    train(journal, 1, UPDATES)
    assert journal.close("FINISHED") is None
    assert proxy.harmed or mode == "slow"
    check_complete()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hanging", "down"])
def test_away_while_the_run_is_created(tmp_path, proxy, mlflow_server, request, mode):
    """The store answered, and is gone when the run is to begin."""
    journal = Journal(proxy.address, request.node.name, patience=4.0)
    journal.ready()
    proxy.harm(mode)
    with pytest.raises(
        StoreError, match=r"the store .* did not accept the run .*: pipeline sync "
    ):
        begin(journal, tmp_path)
    assert not journal.shipper.alive()
    proxy.heal()
    assert sync(tmp_path) == 0
    found = fields(mlflow_server, request.node.name)  # one run
    assert (found["status"], found["metrics"]) == ("KILLED", {})


@pytest.mark.slow
def test_away_while_the_run_is_created_and_trained_offline(
    tmp_path, proxy, check_complete, capsys, request
):
    journal = Journal(
        proxy.address, request.node.name, patience=4.0, when_unreachable="offline"
    )
    journal.ready()
    proxy.down()
    assert begin(journal, tmp_path) is None
    assert "the run trains offline and is kept in" in capsys.readouterr().err
    train(journal, 1, UPDATES)
    assert journal.close("FINISHED") == "the store was not contacted"
    proxy.up()
    assert sync(tmp_path) == 0
    check_complete()


@pytest.mark.slow
def test_away_while_the_run_is_created_and_waited_for(
    tmp_path, proxy, check_complete, request
):
    journal = Journal(
        proxy.address, request.node.name, patience=4.0, when_unreachable="wait"
    )
    journal.ready()
    proxy.down()
    threading.Timer(6, proxy.up).start()
    assert begin(journal, tmp_path).run_id
    train(journal, 1, UPDATES)
    assert journal.close("FINISHED") is None
    check_complete()


@pytest.mark.slow
def test_a_wrong_password_at_the_start(tmp_path, proxy, monkeypatch):
    proxy.password = "right"
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong")
    with pytest.raises(
        ConfigError, match=r"tracking.uri must be a store that answers \(.*401.*\)"
    ):
        opened(proxy.address, tmp_path, "wrong")


@pytest.mark.slow
def test_a_password_that_changes_in_the_middle(
    tmp_path, proxy, check_complete, request, monkeypatch, mlflow_server
):
    proxy.password = "right"
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "right")
    journal = opened(proxy.address, tmp_path, request.node.name, patience=3.0)
    train(journal, 1, HALF)
    wait(lambda: shipped(mlflow_server, request.node.name, HALF), BUSY)
    proxy.password = "changed"
    train(journal, HALF + 1, UPDATES)
    assert "401" in journal.close(
        "FINISHED"
    )  # what the server says, not that time is up
    assert sync(tmp_path, "tracking.patience=1") == 4
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "changed")
    assert sync(tmp_path) == 0
    check_complete()
