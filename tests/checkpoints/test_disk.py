"""The disk of the run directory fills up and is freed again.

Training goes on, and nothing is missing in the end.
"""

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


# Checkpoints are written after the updates 3, 6, 9 and 12. The last page of a journal
# may have space for some more rows.
@pytest.mark.parametrize(
    ("full", "freed", "missed"),
    [(1, 5, [3]), (4, 10, [6, 9]), (3, 4, [3]), (10, None, [12])],
    ids=str,
)
def test_full_for_some_updates(folder, undisturbed, full, freed, missed):
    err = pipeline(*TRAIN, cwd=folder, FULL=str(full), FREE=str(freed)).stderr
    for update in missed:
        assert f"the checkpoint of update {update} was not written: " in err
    assert err.count("was not written") == len(missed)
    assert "Traceback" not in err
    lost = (
        "the weights after update 12 are lost: the last checkpoint is that of update 9"
    )
    assert (lost in err) == (freed is None)
    if freed:
        assert left_in(folder) == undisturbed
        return
    left = left_in(folder, checkpoint_of=9)
    assert (left.status, left.metrics) == (undisturbed.status, undisturbed.metrics)
    free(folder / "run")


def test_full_at_the_start(folder, undisturbed):
    """The run says why it cannot begin; once there is space, the same command works."""
    fill(folder / "run")
    err = pipeline(*TRAIN, cwd=folder, status=1).stderr
    reason = "[Errno 28] No space left on device (its traceback was not written"
    assert err.splitlines()[-1].startswith(f"pipeline: OSError: {reason}")
    assert "Traceback" not in err
    free(folder / "run")
    pipeline(*TRAIN, "training.resume=auto", cwd=folder)
    left = left_in(folder)
    assert left.metrics == undisturbed.metrics
    assert left.weights == undisturbed.weights
