"""A run directory is found by its path, or by the ID of its run."""

import pytest

from pipeline.checkpoints import run_dirs
from pipeline.common.errors import ConfigError


def test_a_run_that_never_began_is_trained_again(tmp_path):
    (tmp_path / "run").mkdir()
    rule = (
        r"^RUN must be a run directory, which has a journal\.jsonl; a run that was "
        r"killed before it began has none: train it again\. Received: "
    )
    with pytest.raises(ConfigError, match=rule):
        run_dirs.find(str(tmp_path / "run"), "RUN")
    with pytest.raises(ConfigError, match=r"^RUN must be one run directory, or "):
        run_dirs.find(str(tmp_path / "none"), "RUN")
