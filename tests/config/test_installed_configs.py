"""Configs that another installed package provides are found without --config-dir."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.common.errors import ConfigError
from pipeline.config import compose, installed_configs
from tests.parameters import mostly_slow

METADATA = "Metadata-Version: 2.1\nName: other\nVersion: 1\n"


@pytest.fixture
def site(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder of installed packages, with one that fails when it is imported."""
    package = tmp_path / "other_package"
    (package / "conf/dataset").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('it was imported')")
    metadata = tmp_path / "other-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(str(tmp_path))
    name_entry(tmp_path, "other_package.conf")
    yield tmp_path
    installed_configs.folders.cache_clear()


def name_entry(site: Path, value: str) -> None:
    entry = f"[pipeline.configs]\nother = {value}\n"
    (site / "other-1.dist-info/entry_points.txt").write_text(entry)
    importlib.invalidate_caches()
    installed_configs.folders.cache_clear()


def test_a_dataset_of_another_package_is_an_option(site):
    file = site / "other_package/conf/dataset/stars.yaml"
    file.write_text("_target_: other_package.stars\n")
    config = compose.composed(["dataset=stars"])
    assert config.dataset._target_ == "other_package.stars"
    with pytest.raises(ConfigError, match=r"Choices: .*\bstars\b.* Did you mean 'sta"):
        compose.composed(["dataset=starz"])


def test_built_in_configs_come_first_and_the_users_own_last(site, tmp_path, capsys):
    for folder in (site / "other_package/conf", tmp_path / "own"):
        (folder / "dataset").mkdir(parents=True, exist_ok=True)
        for name in ("digits", "stars"):
            target = f"of_{folder.name}.{name}"
            (folder / f"dataset/{name}.yaml").write_text(f"_target_: {target}\n")
    own = ["--config-dir", str(tmp_path / "own")]
    stars = compose.composed([*own, "dataset=stars"])
    assert stars.dataset._target_ == "of_conf.stars"
    digits = compose.composed([*own, "dataset=digits"])
    assert digits.dataset._target_ == "pipeline.dataset.digits"
    lines = capsys.readouterr().err
    assert "dataset=digits is the built-in config" in lines
    assert f"dataset=stars is the config in {site}/other_package/conf/dataset" in lines


@pytest.mark.parametrize(
    "value",
    mostly_slow(
        ["other_package.nowhere", "no_package.conf", "."], ["other_package.nowhere"]
    ),
)
def test_an_entry_point_without_a_folder_is_named_once_and_left_out(
    value, site, capsys
):
    name_entry(site, value)
    for _ in range(2):
        assert compose.composed(["dataset=digits"]).dataset._target_
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.startswith(f"pipeline: the entry point other = {value} of pipeline.con")
