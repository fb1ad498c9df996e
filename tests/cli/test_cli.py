"""The command line as it is installed: a wheel, run from an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline import __version__
from pipeline.config import compose
from tests.running import ROOT

# What bash does on a tab: it gives the words so far to the function that Hydra
# installed, which answers with the completions.
TAB = """
eval "$(pipeline train -sc install=bash)"
COMP_LINE=$1 COMP_POINT=${#1}
read -ra words <<< "$1"
COMP_CWORD=$(( ${#words[@]} - 1 ))
[[ $1 == *" " ]] && COMP_CWORD=${#words[@]}
$(complete -p pipeline | sed 's/.*-F \\([^ ]*\\).*/\\1/')
echo "${COMPREPLY[@]}"
"""


# Imports that take long.
HEAVY = {"tensorflow", "keras", "mlflow", "numpy", "tensorflow_datasets", "plotly"}


class Installed:
    """The console script of the wheel, and an empty folder to run it in."""

    def __init__(self, site: Path, folder: Path):
        self.site = site
        self.folder = folder
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(site),
            "PATH": f"{site / 'bin'}:{os.environ['PATH']}",
        }

    def process(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )

    def run(self, *command: str, status: int = 0) -> str:
        """Run a command that writes no error, and return what it prints."""
        done = self.process(*command)
        assert done.returncode == status, done.stderr
        assert done.stderr == ""
        return done.stdout

    def write(self, name: str, text: str) -> None:
        """Write a file in the folder."""
        file = self.folder / name
        file.parent.mkdir(parents=True)
        file.write_text(text)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The folder that the package's wheel is installed in."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    subprocess.run([*build, "-d", str(folder)], cwd=ROOT, check=True)
    (file,) = folder.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet"]
    install += ["--no-deps", "--no-index", "--no-compile"]
    site = folder / "site"
    subprocess.run([*install, "--target", str(site), str(file)], check=True)
    return site


@pytest.fixture
def installed(wheel, tmp_path) -> Installed:
    return Installed(wheel, tmp_path)


@pytest.mark.slow
def test_help_names_every_verb(installed):
    from pipeline.__main__ import VERBS

    out = installed.run("pipeline", "--help")
    assert installed.run("pipeline") == out
    for verb, (_, does) in VERBS.items():
        assert f"{verb:9}{does}" in out
    assert installed.run("pipeline", "--version") == f"{__version__}\n"
    # This one is not Hydra's.
    assert installed.run("pipeline", "train", "--version") == f"{__version__}\n"


@pytest.mark.slow
def test_help_of_train_lists_the_groups_and_their_options(installed):
    out = installed.run("pipeline", "train", "--help")
    datasets = (
        "breast_cancer, cifar10, diabetes, digits, digits_shifted, mnist, text_files, "
        "tfds, topics"
    )
    # Long lists go on in the next line.
    assert f"dataset: {datasets}" in " ".join(out.split())
    assert (
        "optimizer: adafactor, adam, adamw, lion, momentum, muon, rmsprop, sgd" in out
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--help"],
        ["train", "training.epochs=none"],
        pytest.param(["--help"], marks=pytest.mark.slow),
        pytest.param(["nope"], marks=pytest.mark.slow),
    ],
)
def test_an_answer_without_a_run_imports_nothing_heavy(installed, arguments):
    python = (sys.executable, "-X", "importtime")
    done = installed.process(*python, "-m", "pipeline", *arguments)
    imported = set()
    for line in done.stderr.splitlines():
        module = line.rpartition("|")[2].strip()
        imported.add(module.partition(".")[0])
    assert "pipeline" in imported
    assert not imported & HEAVY


def test_the_wheel_brings_its_configs_and_its_sweeps(installed):
    shown = installed.run(sys.executable, "-m", "pipeline", "train", "--cfg", "job")
    assert yaml.safe_load(shown)["dataset"]["_target_"] == "pipeline.dataset.digits"
    package = installed.site / "pipeline"
    for folder in ("conf", "sweeps"):
        assert yaml_files(package, folder) == yaml_files(ROOT, folder)
    assert list(installed.folder.iterdir()) == []


def yaml_files(root: Path, folder: str) -> set[str]:
    return {str(file.relative_to(root)) for file in (root / folder).rglob("*.yaml")}


def test_overrides_may_stand_on_both_sides_of_an_option(installed):
    overrides = ("model=mlp", "model.hidden=[8]")
    shown = installed.run("pipeline", "train", "seed=1", "--cfg", "job", *overrides)
    config = yaml.safe_load(shown)
    assert config["seed"] == 1
    assert config["model"]["hidden"] == [8]


def test_a_config_that_hydra_would_not_find_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("seed: 7")
    assert compose.read_command_line(["seed=1"]).options.overrides == ["seed=1"]
    assert capsys.readouterr().err == (
        f"pipeline: {tmp_path}/conf/config.yaml is not used: rename it, and select it "
        "by --config-name\n"
    )


@pytest.mark.slow
def test_a_users_own_configs_by_config_dir(installed):
    experiment = "# @package _global_\ndefaults:\n  - override /model: wide\nseed: 7\n"
    model = "_target_: my.models.wide\nunits: 4096\n"
    installed.write("conf/model/wide.yaml", model)
    installed.write("conf/experiment/mine.yaml", experiment)
    show = ("experiment=mine", "--cfg", "job")
    shown = installed.run("pipeline", "train", "--config-dir", "conf", *show)

    # The folder `conf` is found without the option.
    done = installed.process("pipeline", "train", *show)
    assert done.stderr == f"pipeline: using the configs in {installed.folder}/conf\n"
    assert done.stdout == shown
    config = yaml.safe_load(shown)
    assert config["seed"] == 7
    assert config["model"] == {"_target_": "my.models.wide", "units": 4096}
    assert config["optimizer"]["_target_"] == "keras.optimizers.AdamW"


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        ("pipeline tr", "train"),
        pytest.param(
            "pipeline train dataset=d",
            "dataset=diabetes dataset=digits dataset=digits_shifted",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pipeline train dataset=t",
            "dataset=text_files dataset=tfds dataset=topics",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pipeline train dataset=digits training.ep",
            "training.epochs=",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pipeline train model=mlp model.hi",
            "model.hidden.",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pipeline sweep factor_w",
            "factor_with_linear_scaling factor_with_sqrt_scaling",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pipeline sweep seeds model=mlp model.hi",
            "model.hidden.",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pipeline train --config-dir mine model=w",
            "model=wide",
            marks=pytest.mark.slow,
        ),
        ("pipeline sweep seeds -cd mine model=w", "model=wide"),
    ],
)
def test_a_tab_in_bash_completes_verbs_sweeps_groups_and_keys(installed, line, choices):
    installed.write("mine/model/wide.yaml", "_target_: my.models.wide\n")
    assert installed.run("bash", "-c", TAB, "bash", line).split() == choices.split()


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("train --config-dir mine --cfg job", 0),
        pytest.param("sweep seeds --config-dir mine nope=1", 2, marks=pytest.mark.slow),
    ],
)
def test_a_config_with_the_name_of_a_built_in_is_said_to_be_unused(
    installed, line, status
):
    installed.write("mine/model/cnn.yaml", "_target_: my.models.cnn\n")
    done = installed.process("pipeline", *line.split())
    assert done.returncode == status, done.stderr
    unused, *others = done.stderr.splitlines()
    assert unused == (
        "pipeline: model=cnn is the built-in config; mine/model/cnn.yaml is not used: "
        "rename it"
    )
    if status == 0:
        assert others == []
        assert "_target_: pipeline.components.model.cnn" in done.stdout


EXIT = """
import atexit
import sys

import pipeline.__main__


class Kept:
    def __del__(self):
        print("destructor")


def main():
    atexit.register(print, "handler")
    return 3


kept = Kept()
sys.modules["kept"] = kept
pipeline.__main__.main = main
pipeline.__main__.command()
"""


def test_the_process_exits_after_its_exit_handlers_and_without_destructors(installed):
    assert installed.run(sys.executable, "-c", EXIT, status=3) == "handler\n"


def test_quiet_leaves_errors_alone(installed):
    done = installed.process("pipeline", "train", "--quiet", "training.epochs=none")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("pipeline: training.epochs must be ")


def test_help_of_ui_is_its_own(installed):
    out = installed.run("pipeline", "ui", "--help")
    assert "--port PORT" in out
    assert "dataset:" not in out


def test_an_exported_store_that_is_empty_is_none(installed):
    installed.environment["MLFLOW_TRACKING_URI"] = ""
    shown = installed.run("pipeline", "train", "--cfg", "job", "--resolve")
    assert yaml.safe_load(shown)["tracking"]["uri"] == "sqlite:///mlruns/mlflow.db"


OPENS_A_FILE = """
import os

import pipeline.__main__


def main():
    print("printed")
    descriptor = os.open("opened", os.O_CREAT | os.O_RDWR)
    return int(descriptor < 3)


pipeline.__main__.main = main
pipeline.__main__.command()
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_is_no_file_of_ours(installed, closed):
    """The first file that a process opens would take its number.

    `print` would then write to that file.
    """
    done = subprocess.run(
        ["sh", "-c", f'{sys.executable} -c "$0" {closed}', OPENS_A_FILE],
        cwd=installed.folder,
        env=installed.environment,
    )
    assert done.returncode == 0
    assert (installed.folder / "opened").read_text() == ""
