"""The command while its store is away.

Tested are its messages, its exit status, and what `pipeline sync` does with its run.
"""

from __future__ import annotations

import re
import shlex
import signal
import threading
import time

import pytest

from tests.checkpoints.test_kills import RUN, UPDATES
from tests.running import pipeline, start, wait
from tests.tracking.shipped import BUSY, fields

MINE = """
import pathlib, time
import keras

class Pause(keras.callbacks.Callback):
    "Waits after the sixth update until the test says go."
    def on_train_batch_end(self, batch, logs=None):
        if batch == 5:
            pathlib.Path("half").touch()
            while not pathlib.Path("go").exists():
                time.sleep(0.05)
"""
TRAIN = (
    "train",
    *RUN,
    "tracking.patience=5",
    "+training.callbacks.pause={_target_: mine.Pause}",
)

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("impatient_requests")]


class Training:
    """`pipeline train` in `folder`, which waits after its sixth update."""

    def __init__(self, folder, proxy, experiment, *arguments):
        (folder / "mine.py").write_text(MINE)
        self.folder = folder
        store = (f"tracking.uri={proxy.address}", f"tracking.experiment={experiment}")
        self.process = start(*TRAIN, *store, *arguments, cwd=folder, warm=True)

    def half(self):
        wait((self.folder / "half").exists)

    def ended(self):
        """Let it go on; return its exit status and what it said."""
        (self.folder / "go").touch()
        _, printed = self.process.communicate(timeout=240)
        assert "Traceback" not in printed
        return self.process.returncode, printed


def sync_as_printed(printed, folder, status=0):
    (line,) = re.findall(r"pipeline sync .*", printed)
    return pipeline(*shlex.split(line)[1:], cwd=folder, status=status)


def check_complete(mlflow_server, experiment, status="FINISHED"):
    found = fields(mlflow_server, experiment)
    assert found["status"] == status
    steps = [step for step, _, _ in found["metrics"]["train/loss"]]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) == UPDATES or status == "KILLED"
    names = [name for name, _ in found["artifacts"]]
    assert {
        "config.yaml",
        "dataset.json",
        "environment.json",
        "links.json",
        "overrides.yaml",
    } <= set(names)


def test_refused(tmp_path, proxy):
    proxy.down()
    status, printed = Training(tmp_path, proxy, "refused").ended()
    assert status == 2
    assert re.fullmatch(
        r"pipeline: tracking.uri must be a store that answers .*",
        printed.splitlines()[-1],
    )
    assert not (tmp_path / "run" / "journal.jsonl").exists()


def test_offline(tmp_path, proxy, mlflow_server):
    proxy.down()
    status, printed = Training(
        tmp_path, proxy, "offline", "tracking.when_unreachable=offline"
    ).ended()
    assert status == 4
    assert "the run trains offline and is kept in" in printed
    (line,) = [
        line
        for line in printed.splitlines()
        if "pipeline sync run" in line or "pipeline sync /" in line
    ]
    sync_as_printed(line, tmp_path, status=4)
    proxy.up()
    sync_as_printed(line, tmp_path)
    check_complete(mlflow_server, "offline")


def test_wait(tmp_path, proxy, mlflow_server):
    proxy.down()
    training = Training(tmp_path, proxy, "wait", "tracking.when_unreachable=wait")
    threading.Timer(20, proxy.up).start()  # by then it has looked, on this machine too
    training.half()
    status, printed = training.ended()
    assert status == 0
    assert "refused): waiting for it" in printed
    check_complete(mlflow_server, "wait")


@pytest.mark.parametrize("mode", ["down", "hanging"])
def test_away_at_the_end(tmp_path, proxy, mlflow_server, mode):
    training = Training(tmp_path, proxy, mode)
    training.half()
    proxy.harm(mode)
    began = time.monotonic()
    status, printed = training.ended()
    assert (
        time.monotonic() - began < 5 + 2 + 2 * BUSY
    )  # the patience, the grace of the shipper; and the other half
    assert status == 4
    assert printed.splitlines()[-1].startswith(
        f"pipeline: not all of the run is in the store {proxy.address} ("
    )
    proxy.heal()
    sync_as_printed(printed, tmp_path)
    check_complete(mlflow_server, mode)


def test_a_second_interrupt_ends_the_wait_for_a_store_that_hangs(
    tmp_path, proxy, mlflow_server
):
    training = Training(tmp_path, proxy, "interrupted", "tracking.patience=300")
    training.half()
    proxy.mode = "hanging"
    training.process.send_signal(signal.SIGINT)
    (tmp_path / "go").touch()
    wait(
        lambda: '"end":"KILLED"' in (tmp_path / "run" / "journal.jsonl").read_text(),
        2 * BUSY,
    )
    began = time.monotonic()
    training.process.send_signal(signal.SIGINT)
    status, printed = training.ended()
    assert time.monotonic() - began < 2 + BUSY  # the grace of the shipper
    assert status == 130
    assert "finishing this update; once more ends it at once" in printed
    proxy.mode = "up"
    sync_as_printed(printed, tmp_path)
    check_complete(mlflow_server, "interrupted", "KILLED")


def test_a_wrong_password_is_refused_in_a_line(tmp_path, proxy):
    proxy.password = "right"
    status, printed = Training(tmp_path, proxy, "password").ended()
    assert status == 2
    assert "401" in printed.splitlines()[-1]
