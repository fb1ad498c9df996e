"""The example of batches of your own trains by the commands on its top."""

from __future__ import annotations

import shutil

import pytest

from tests.examples.commands import command_on_top_of
from tests.running import ROOT, Store, pipeline, python

PROJECT = ROOT / "examples" / "own_batches"


@pytest.mark.slow
def test_the_images_are_written_and_trained_on(tmp_path):
    folder = shutil.copytree(PROJECT, tmp_path / "own_batches")
    assert python("photos.py", cwd=folder, warm=False).wait(timeout=120) == 0
    command = command_on_top_of(folder / "photos.py")
    pipeline(*command, "tracking.system_metrics=false", cwd=folder)
    run = Store(folder).run()
    sizes = Store(folder).history(run, "train/effective_batch_size")
    assert list(sizes.values()) == 2 * [12, 12, 12, 2]
