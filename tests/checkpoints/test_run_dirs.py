"""A run directory is found by its path, or by the ID of its run."""

import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.checkpoints import run_dirs
from pipeline.common.errors import ConfigError
from pipeline.tracking import run_paths


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


@pytest.mark.parametrize("name", ["checkpoints/400", "best.keras", "checkpoints"])
def test_a_path_in_a_run_directory_is_answered_with_the_directory(
    tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints" / "400").mkdir(parents=True)
    (tmp_path / "run" / "journal.jsonl").touch()
    (tmp_path / "run" / "best.keras").touch()
    with pytest.raises(ConfigError) as error:
        run_dirs.find(f"run/{name}", "RUN")
    assert str(error.value).endswith(f"Received: 'run/{name}'. Did you mean 'run'?")
    assert "train it again" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("run/checkpoints/400", "run@400"),
        ("run/checkpoints/best/300/meta.json", "run@300"),
        ("run/best.keras", "run"),
        ("run/checkpoints/500", ""),  # there is no such folder
        ("elsewhere.keras", ""),
    ],
)
def test_the_checkpoint_of_a_path_is_named_by_its_update(
    tmp_path, monkeypatch, path, meant
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints" / "400").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "best" / "300").mkdir(parents=True)
    for name in ("journal.jsonl", "best.keras", "checkpoints/best/300/meta.json"):
        (tmp_path / "run" / name).touch()
    (tmp_path / "elsewhere.keras").touch()
    assert run_paths.meant_run(path) == meant


@pytest.mark.parametrize("name", ["run", "my run", "rate=0.1,seed=2", "it's", "[x](2)"])
def test_the_override_that_starts_at_a_checkpoint_is_one_value(name):
    (word,) = shlex.split(run_dirs.start_override(Path("/runs") / name, 5))
    override = OverridesParser.create().parse_override(word)
    assert override.key_or_group == "start.run"
    assert override.value() == f"/runs/{name}@5"
