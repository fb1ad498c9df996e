"""The disk of the run directory fills up and is freed again: training goes on, and nothing is missing in the end."""

from __future__ import annotations

import pytest

from tests.checkpoints.test_kills import RUN, left_in
from tests.disks import disk, fill, free
from tests.running import pipeline

MINE = """
import os, pathlib, time
import keras
from tests import disks

class Disk(keras.callbacks.Callback):
    "Fills the disk after the update FULL and frees it after the update FREE."
    done = 0

    def on_train_batch_end(self, batch, logs=None):
        self.done += 1
        if str(self.done) in (os.environ.get("FULL"), os.environ.get("FREE")):
            time.sleep(2)  # a thread may still be writing a checkpoint
        if str(self.done) == os.environ.get("FULL"):
            disks.fill(pathlib.Path("run"))
        if str(self.done) == os.environ.get("FREE"):
            disks.free(pathlib.Path("run"))
"""
pytestmark = pytest.mark.soak
TRAIN = ("train", *RUN, "+training.callbacks.disk={_target_: mine.Disk}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "mine.py").write_text(MINE)
    pipeline(*TRAIN, cwd=folder)
    return left_in(folder)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    with disk(tmp_path / "run"):
        yield tmp_path


# The checkpoints are of the updates 3, 6, 9 and 12; a journal's last page may have room for some rows more.
@pytest.mark.parametrize(
    ("full", "freed", "missed"),
    [(1, 5, [3]), (4, 10, [6, 9]), (3, 4, [3]), (10, None, [12])],
    ids=str,
)
def test_full_for_some_updates(folder, undisturbed, full, freed, missed):
    said = pipeline(*TRAIN, cwd=folder, FULL=str(full), FREE=str(freed)).stderr
    for update in missed:
        assert f"the checkpoint of update {update} was not written: " in said
    assert said.count("was not written") == len(missed)
    assert "Traceback" not in said
    if freed:
        assert left_in(folder) == undisturbed
        return
    assert left_in(folder, checkpoint_of=9)[:2] == undisturbed[:2]
    free(folder / "run")


def test_full_at_the_start(folder, undisturbed):
    """The run says why it cannot begin; once there is room the same command does."""
    fill(folder / "run")
    said = pipeline(*TRAIN, cwd=folder, status=1).stderr
    reason = "No space left on device"
    assert said.splitlines()[-1].startswith(
        f"pipeline: OSError: [Errno 28] {reason} (its traceback was not written"
    )
    assert "Traceback" not in said
    free(folder / "run")
    pipeline(*TRAIN, "training.resume=auto", cwd=folder)
    assert left_in(folder)[1:3] == undisturbed[1:3]
