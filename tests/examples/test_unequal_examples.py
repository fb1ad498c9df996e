"""Examples that count by unequal amounts: texts of unequal length, weighted pixels.

Each trains by the command on its top, and its update is verified.
"""

from __future__ import annotations

import shutil

import pytest

from tests.examples.commands import command_on_top_of
from tests.running import ROOT, Store, pipeline

MODULES = {
    "text_classification/paragraphs.py": ("val/accuracy", 0.85),
    "segmentation/shapes.py": ("val/iou", 0.8),
}


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_it_trains_and_its_update_is_that_of_the_batch(tmp_path, module):
    file = ROOT / "examples" / module
    folder = tmp_path / "example"
    shutil.copytree(file.parent, folder)
    verb, *arguments = command_on_top_of(file)
    assert verb == "train"
    err = pipeline(verb, *arguments, cwd=folder).stderr
    assert "Warning" not in err
    metric, least = MODULES[module]
    assert Store(folder).run().data.metrics[metric] > least

    verdict = pipeline("verify", *arguments, cwd=folder).stdout
    assert verdict.splitlines()[1].endswith("are equal within rounding")
