"""Which charts the pictures of the documentation await."""

from __future__ import annotations

import re

from docs import screenshot
from tests.running import TINY, Store, pipeline


def test_the_search_box_finds_the_charts_that_the_picture_of_a_run_awaits(tmp_path):
    pipeline(*screenshot.COMMANDS["run"], *TINY, cwd=tmp_path)
    metrics = Store(tmp_path).run().data.metrics
    shown = [key for key in metrics if re.search(screenshot.CHARTS, key)]
    assert len(shown) == screenshot.NUMBER_OF_CHARTS
    assert {"train/loss", "train/accuracy", "train/gradient_norm"} <= set(shown)
