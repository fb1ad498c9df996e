"""The bound on a YAML file's values holds for sweep files and searched folders too."""

from __future__ import annotations

import re

import pytest

from pipeline.__main__ import main
from pipeline.common.errors import ConfigError
from pipeline.config import compose
from tests.config.test_yaml_size import laughs

LINE = "must hold at most 100,000 values with its aliases expanded.\n"
SWEEP = "defaults: [config, _self_]\nhydra: {mode: MULTIRUN, searchpath: [%s]}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with an empty folder for sweeps, and one with a huge file."""
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "other" / "model").mkdir(parents=True)
    (tmp_path / "other" / "model" / "huge.yaml").write_text(laughs(9))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_sweep_file(folder, capsys):
    (folder / "sweeps" / "mine.yaml").write_text(SWEEP % "" + laughs(9))
    assert main(["sweep", "mine"]) == 2
    file = folder / "sweeps" / "mine.yaml"
    assert capsys.readouterr().err == f"pipeline: {file} {LINE}"


def test_a_folder_that_a_sweep_file_searches(folder, capsys):
    (folder / "sweeps" / "mine.yaml").write_text(SWEEP % f"file://{folder}/other")
    assert main(["sweep", "mine", "model=huge"]) == 2
    file = folder / "other" / "model" / "huge.yaml"
    assert capsys.readouterr().err == f"pipeline: {file} {LINE}"


@pytest.mark.parametrize("entry", ["file://{}/other", "{}/other"])
def test_a_folder_that_the_command_line_searches(folder, capsys, entry):
    entry = entry.format(folder)
    override = f'hydra.searchpath=["pkg://nowhere","{entry}"]'
    assert main(["train", override, "model=huge"]) == 2
    file = folder / "other" / "model" / "huge.yaml"
    assert capsys.readouterr().err == f"pipeline: {file} {LINE}"


def test_other_searched_folders_are_left_to_hydra(folder, capsys):
    (folder / "other" / "model" / "huge.yaml").write_text("hidden: [1]\n")
    for value in ("[", "text", "null", '["file:///no where","pkg://x",3]'):
        assert main(["train", f"hydra.searchpath={value}", "seed=-1"]) == 2
        assert "100,000" not in capsys.readouterr().err
    (folder / "sweeps" / "mine.yaml").write_text("hydra: {searchpath: ${oc.env:X}}")
    assert main(["sweep", "mine", "seed=-1"]) == 2
    assert "100,000" not in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--config-dir", "--config-path"])
@pytest.mark.parametrize("name", ["mine", "mine.v1", "mine.yaml"])
def test_a_folder_that_a_config_of_any_name_searches(folder, option, name):
    (folder / "own").mkdir()
    file = folder / "own" / f"{name.removesuffix('.yaml')}.yaml"
    file.write_text(f"hydra: {{searchpath: [{folder}/other]}}\n")
    arguments = [option, str(folder / "own"), "--config-name", name, "model=huge"]
    with pytest.raises(ConfigError, match=re.escape(LINE.strip())):
        compose.read_command_line(arguments)


def test_a_folder_of_config_path(folder):
    arguments = ["--config-path", str(folder / "other"), "model=huge"]
    with pytest.raises(ConfigError, match=re.escape(LINE.strip())):
        compose.read_command_line(arguments)
