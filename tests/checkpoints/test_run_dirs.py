"""A run directory is found by its path, or by the ID of its run."""

import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.checkpoints import run_dirs
from pipeline.common.errors import ConfigError


def test_a_run_that_never_began_is_trained_again(tmp_path):
    (tmp_path / "run").mkdir()
    rule = (
        r"^RUN must be one run directory, or .*\. A run directory has a journal\.jsonl: "
        r"a run that was killed before it began has none, so train it again\. Received: "
    )
    with pytest.raises(ConfigError, match=rule):
        run_dirs.find(str(tmp_path / "run"), "RUN")
    with pytest.raises(ConfigError) as error:
        run_dirs.find(str(tmp_path / "none"), "RUN")
    assert "train it again" not in str(error.value)


@pytest.mark.parametrize("name", ["run", "my run", "rate=0.1,seed=2", "it's", "[x](2)"])
def test_the_override_that_starts_at_a_checkpoint_is_one_value(name):
    (word,) = shlex.split(run_dirs.start_override(Path("/runs") / name, 5))
    override = OverridesParser.create().parse_override(word)
    assert override.key_or_group == "start.run"
    assert override.value() == f"/runs/{name}@5"
