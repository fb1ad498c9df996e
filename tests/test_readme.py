"""Everything that README.md tells a reader to type, typed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from pipeline import config as configuration
from tests.running import ROOT, Store, environment, pipeline

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
COMMANDS = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
TRAIN = [shlex.split(line, comments=True)[2:] for line in COMMANDS if line.startswith("pipeline train")]
OWN = [
    shlex.split(line, comments=True)[2:]
    for line in README.split("## Bringing your own")[1].split("\n## ")[0].splitlines()
    if line.startswith("pipeline train")
]
QUIET = {"training.updates": "3", "tracking.log_model": "false", "tracking.system_metrics": "false"}


def files() -> dict[str, str]:
    """The files that the README shows, by the name in their first line; blocks of one file follow each other."""
    found: dict[str, str] = defaultdict(str)
    for _, text in BLOCKS:
        if named := re.match(r"# (\S+\.(?:py|yaml))\n", text):
            found[named[1]] += text + "\n"
    return found


@pytest.fixture
def folder(tmp_path):
    for name, text in files().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def without_config_dir(arguments: list[str]) -> list[str]:
    return [each for each in arguments if each not in ("-m", "--config-dir", "my_conf")]


def test_the_readme_was_read():
    assert set(files()) == {"mine.py", "own_loop.py", "my_conf/dataset/moons.yaml", "my_conf/model/tiny.yaml"}
    assert len(TRAIN) >= 20
    assert len(OWN) == 4


def settle(overrides: list[str], *searchpath: Path) -> configuration.Settings:
    configuration.register()
    GlobalHydra.instance().clear()
    paths = ",".join(f"file://{path}" for path in searchpath)
    with initialize_config_dir(configuration.directory(), version_base="1.3"):
        config = compose("config", [*overrides, f"hydra.searchpath=[{paths}]"])
    return configuration.check(config, overrides)


@pytest.mark.parametrize("arguments", TRAIN, ids=" ".join)
def test_every_command_composes_and_passes_the_checks(arguments, folder):
    settle([each.replace("1,2,4,8", "2") for each in without_config_dir(arguments)], folder / "my_conf")


def test_what_a_user_brings_is_trained(folder):
    """All of it in one run: the dataset, the model, the loss and the metric of the README."""
    values = dict(each.split("=", 1) for command in OWN for each in without_config_dir(command))
    overrides = [f"{key}={value}" for key, value in (values | QUIET).items()]
    pipeline("train", "--config-dir", "my_conf", *overrides, cwd=folder)
    store = Store(folder)
    run = store.run()
    assert run.data.params["dataset._target_"] == "mine.moons"
    assert run.data.params["model._target_"] == "mine.tiny"
    assert run.data.params["training.loss._target_"] == "mine.focal"
    assert run.data.params["derived.parameters"] == str(3 * 64 + 65 * 2)
    assert set(store.history(run, "train/confidence")) == {1, 2, 3}
    assert 0.5 <= run.data.metrics["val/confidence"] <= 1


def test_a_loop_of_ones_own_learns(folder):
    done = subprocess.run(
        [sys.executable, "own_loop.py"], cwd=folder, env=environment(), capture_output=True, text=True, check=True
    )
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("epoch")]
    assert len(losses) == 5
    assert losses[-1] < 0.3


def test_examples_of_ones_own_are_under_ten_lines():
    for kind, text in BLOCKS:
        if kind == "python" and text.startswith("# mine.py"):
            assert len(text.strip().splitlines()) - 1 < 10


def test_the_sums_beside_the_sizes_are_right():
    sums = re.findall(r"^pipeline train (.*?) +# (\d+) = (\d+) × (\d+)", README, re.MULTILINE)
    sums += re.findall(r"^pipeline train (.*?) +# (\d+)$", README, re.MULTILINE)
    assert len(sums) == 3
    for command, *numbers in sums:
        sizes = settle(command.split()).batching
        expected = (sizes.effective_batch_size, sizes.micro_batch_size, sizes.factor)
        assert tuple(map(int, numbers)) == expected[: len(numbers)]


def test_every_file_that_is_named_exists():
    tree = README.split("## The tree")[1]
    named = re.findall(r"^(?: {4}| {6})([\w.]+(?:\.py|/))(?= )", tree, re.MULTILINE)
    groups = tree.splitlines()[3].split()
    assert {path.name + "/" for path in (ROOT / "conf").iterdir() if path.is_dir()} == set(groups)
    modules = {path.name for path in (ROOT / "pipeline").glob("*.py")} - {"__init__.py"}
    assert {name for name in modules if name not in tree} == set()
    for name in set(named) - set(groups):
        assert (ROOT / name).exists() or (ROOT / "pipeline" / name).exists(), name
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        assert (ROOT / link).exists(), link
