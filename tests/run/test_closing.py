"""How a run is closed when its end is interrupted."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.common.signals import Terminated
from pipeline.run import run
from pipeline.tracking.journal_file import JOURNAL_NAME

INTERRUPTIONS = [KeyboardInterrupt(), Terminated("SIGTERM")]


def config_of(sweep="1", every="auto"):
    """The keys of a config that decide what is printed at the end."""
    return SimpleNamespace(
        tracking=SimpleNamespace(sweep=sweep),
        training=SimpleNamespace(checkpoint_every=every),
    )


def parts_of(error):
    """A tracker whose end waits for its store, and is interrupted; and a recorder."""

    def end(status, failure):
        raise error

    journal = SimpleNamespace(uri="sqlite:///x")
    tracker = SimpleNamespace(
        begun=True,
        end=end,
        run_dir=Path("run"),
        journal=journal,
        updates_done=0,
        has_model=False,
    )
    progress = SimpleNamespace(close=lambda: None)
    return tracker, SimpleNamespace(progress=progress, fetch=lambda: None)


@pytest.mark.parametrize("error", INTERRUPTIONS, ids=repr)
def test_a_run_that_has_trained_is_not_killed_by_an_interruption_of_its_upload(error):
    """It is FINISHED in the store once `sync` has shipped the rest: exit status 4."""
    with run._closing(*parts_of(error), config_of()) as closing:
        pass
    line = "not all of the run is in the store sqlite:///x (interrupted): pipeline sync run"
    assert closing.unshipped.startswith(line)


@pytest.mark.parametrize("error", INTERRUPTIONS, ids=repr)
def test_a_run_that_was_killed_stays_so(error):
    with pytest.raises(type(error)), run._closing(*parts_of(error), config_of()):
        raise KeyboardInterrupt


def test_another_error_stays_an_error(capsys):
    with (
        pytest.raises(OSError, match="no"),
        run._closing(*parts_of(OSError("no")), config_of()),
    ):
        pass
    assert "not all of the run is in the store sqlite:///x: " in capsys.readouterr().err


@pytest.mark.parametrize(("waits", "soon"), [(True, 0.0), (False, 60.0)])
def test_a_wait_for_the_store_says_which_checkpoint_is_written(
    waits, soon, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(run, "SOON", soon)
    tracker, recorder = parts_of(None)
    tracker.end = lambda status, failure: time.sleep(0.2)
    tracker.run_dir = tmp_path
    (tmp_path / JOURNAL_NAME).touch()
    for update in (40, 80):
        (tmp_path / "checkpoints" / str(update)).mkdir(parents=True)
    recorder.updates = 85
    with (
        pytest.raises(KeyboardInterrupt),
        run._closing(tracker, recorder, config_of(sweep=None)),
    ):
        raise KeyboardInterrupt
    lines = [f"resume from update 80: pipeline resume {tmp_path}"]
    if waits:
        lines.insert(0, "the checkpoint of update 80 is written")
    assert capsys.readouterr().err.splitlines() == lines


def test_weights_that_are_lost_are_named_with_the_way_on(tmp_path, capsys):
    tracker, recorder = parts_of(None)
    tracker.end = lambda status, failure: None
    tracker.run_dir = tmp_path
    tracker.updates_done = 360
    (tmp_path / "checkpoints" / "80").mkdir(parents=True)
    with run._closing(tracker, recorder, config_of()):
        pass
    assert capsys.readouterr().err.endswith(
        "the weights after update 360 are lost: the last checkpoint is that of update "
        "80; to train on from there, begin a new run with the same overrides and "
        f"start.run={tmp_path}@80\n"
    )


@pytest.mark.parametrize(("every", "value"), [("auto", "auto"), (None, "null")])
def test_an_interruption_before_the_first_checkpoint_says_what_is_lost(
    every, value, tmp_path, capsys
):
    tracker, recorder = parts_of(None)
    tracker.run_dir = tmp_path
    tracker.begun = False
    (tmp_path / JOURNAL_NAME).touch()
    recorder.updates = 37
    with (
        pytest.raises(KeyboardInterrupt),
        run._closing(tracker, recorder, config_of(sweep=None, every=every)),
    ):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == (
        "interrupted before the first checkpoint (training.checkpoint_every="
        f"{value}): 37 updates will be trained again; to train from the start: "
        f"pipeline resume {tmp_path} training.resume=auto\n"
    )
