"""The command line as it is installed: a wheel in a folder of its own, run from an empty one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline import __version__
from tests.running import ROOT

# What bash does on a tab: the words so far, the function that Hydra installed, and what it answers.
TAB = """
eval "$(pipeline train -sc install=bash)"
COMP_LINE=$1 COMP_POINT=${#1}
read -ra words <<< "$1"
COMP_CWORD=$(( ${#words[@]} - 1 ))
[[ $1 == *" " ]] && COMP_CWORD=${#words[@]}
$(complete -p pipeline | sed 's/.*-F \\([^ ]*\\).*/\\1/')
echo "${COMPREPLY[@]}"
"""


class Installed:
    """The console script of the wheel, and an empty folder to run it in."""

    def __init__(self, site: Path, folder: Path):
        self.site, self.folder = site, folder
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(site),
            "PATH": f"{site / 'bin'}:{os.environ['PATH']}",
        }

    def run(self, *command: str, status: int = 0) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == status, done.stderr
        assert done.stderr == ""
        return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
    )
    (wheel,) = folder.glob("*.whl")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
    ]
    subprocess.run([*pip, "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


@pytest.fixture
def installed(wheel, tmp_path) -> Installed:
    return Installed(wheel, tmp_path)


@pytest.mark.slow
def test_help_names_every_verb(installed):
    from pipeline.__main__ import VERBS

    said = installed.run("pipeline", "--help")
    assert installed.run("pipeline") == said
    for verb, (_, does) in VERBS.items():
        assert f"{verb:9}{does}" in said
    assert installed.run("pipeline", "--version") == f"{__version__}\n"
    assert (
        installed.run("pipeline", "train", "--version") == f"{__version__}\n"
    )  # and not Hydra's


@pytest.mark.slow
def test_help_of_train_lists_the_groups_and_their_options(installed):
    said = installed.run("pipeline", "train", "--help")
    assert (
        "dataset: breast_cancer, cifar10, diabetes, digits, digits_shifted, mnist, tfds, topics"
        in said
    )
    assert "optimizer: adam, adamw, lion, momentum, rmsprop, sgd" in said


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
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "pipeline", *arguments],
        cwd=installed.folder,
        env=installed.environment,
        capture_output=True,
        text=True,
    )
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0]
        for line in done.stderr.splitlines()
    }
    assert "pipeline" in imported
    assert not imported & {
        "tensorflow",
        "keras",
        "mlflow",
        "numpy",
        "tensorflow_datasets",
        "plotly",
    }


def test_the_wheel_brings_its_configs_and_its_sweeps(installed):
    config = yaml.safe_load(
        installed.run(sys.executable, "-m", "pipeline", "train", "--cfg", "job")
    )
    assert config["dataset"]["_target_"] == "pipeline.dataset.digits"
    for folder in ("conf", "sweeps"):
        files = {
            str(file.relative_to(ROOT)) for file in (ROOT / folder).rglob("*.yaml")
        }
        assert files == {
            str(file.relative_to(installed.site / "pipeline"))
            for file in yamls(installed.site, folder)
        }
    assert list(installed.folder.iterdir()) == []


def yamls(site: Path, folder: str) -> list[Path]:
    return list((site / "pipeline" / folder).rglob("*.yaml"))


def test_overrides_may_stand_on_both_sides_of_an_option(installed):
    said = installed.run(
        "pipeline", "train", "seed=1", "--cfg", "job", "model=mlp", "model.hidden=[8]"
    )
    config = yaml.safe_load(said)
    assert (config["seed"], config["model"]["hidden"]) == (1, [8])


@pytest.mark.slow
def test_a_users_own_configs_by_config_dir(installed):
    own = {
        "model/wide.yaml": "_target_: my.models.wide\nunits: 4096\n",
        "experiment/mine.yaml": "# @package _global_\ndefaults:\n  - override /model: wide\nseed: 7\n",
    }
    for name, text in own.items():
        (installed.folder / "conf" / name).parent.mkdir(parents=True)
        (installed.folder / "conf" / name).write_text(text)
    said = installed.run(
        "pipeline", "train", "--config-dir", "conf", "experiment=mine", "--cfg", "job"
    )
    found = subprocess.run(
        ["pipeline", "train", "experiment=mine", "--cfg", "job"],
        cwd=installed.folder,
        env=installed.environment,
        capture_output=True,
        text=True,
    )
    assert found.stderr == f"pipeline: with the configs in {installed.folder}/conf\n"
    assert found.stdout == said
    config = yaml.safe_load(said)
    assert (config["seed"], config["model"]) == (
        7,
        {"_target_": "my.models.wide", "units": 4096},
    )
    assert config["optimizer"]["_target_"] == "keras.optimizers.AdamW"


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        ("pipeline tr", "train"),
        pytest.param(
            *(
                "pipeline train dataset=d",
                "dataset=diabetes dataset=digits dataset=digits_shifted",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pipeline train dataset=t",
            "dataset=tfds dataset=topics",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pipeline train dataset=digits training.ep",
            "training.epochs=",
            marks=pytest.mark.slow,
        ),
        ("pipeline train model=mlp model.hi", "model.hidden."),
        pytest.param(
            *(
                "pipeline sweep factor_w",
                "factor_with_linear_scaling factor_with_sqrt_scaling",
            ),
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
    (installed.folder / "mine" / "model").mkdir(parents=True)
    (installed.folder / "mine" / "model" / "wide.yaml").write_text(
        "_target_: my.models.wide\n"
    )
    assert installed.run("bash", "-c", TAB, "bash", line).split() == choices.split()


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("train --config-dir mine --cfg job", 0),
        ("sweep seeds --config-dir mine nope=1", 2),
    ],
)
def test_a_config_with_the_name_of_a_built_in_is_said_to_be_unused(
    installed, line, status
):
    (installed.folder / "mine" / "model").mkdir(parents=True)
    (installed.folder / "mine" / "model" / "cnn.yaml").write_text(
        "_target_: my.models.cnn\n"
    )
    done = subprocess.run(
        ["pipeline", *line.split()],
        cwd=installed.folder,
        env=installed.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    unused, *others = done.stderr.splitlines()
    assert (
        unused
        == "pipeline: model=cnn is the built-in config; mine/model/cnn.yaml is not used, rename it"
    )
    if status == 0:
        assert others == []
        assert "_target_: pipeline.components.model.cnn" in done.stdout


def test_the_process_ends_with_its_status_after_all_exit_handlers_and_without_destructors(
    installed,
):
    code = (
        "import atexit, sys, pipeline.__main__ as m\n"
        "class Slow:\n    def __del__(self):\n        print('destructor')\n"
        "m.main, kept = (lambda: atexit.register(print, 'handler') and 3), Slow()\n"
        "sys.modules['kept'] = kept\nm.command()"
    )
    assert installed.run(sys.executable, "-c", code, status=3) == "handler\n"


def test_quiet_leaves_errors_alone(installed):
    command = ["pipeline", "train", "--quiet", "training.epochs=none"]
    done = subprocess.run(
        command,
        cwd=installed.folder,
        env=installed.environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("pipeline: training.epochs must be ")


def test_help_of_ui_is_its_own(installed):
    said = installed.run("pipeline", "ui", "--help")
    assert "--port PORT" in said
    assert "dataset:" not in said


def test_an_exported_store_that_is_empty_is_none(installed):
    installed.environment["MLFLOW_TRACKING_URI"] = ""
    shown = installed.run("pipeline", "train", "--cfg", "job", "--resolve")
    assert yaml.safe_load(shown)["tracking"]["uri"] == "sqlite:///mlruns/mlflow.db"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_is_no_file_of_ours(installed, closed):
    """What a process opens first would take its number, and then be written to by `print`."""
    code = "import os, pipeline.__main__ as m; m.main = lambda: print('said') or os.open('opened', 66) < 3; m.command()"
    done = subprocess.run(
        ["sh", "-c", f'{sys.executable} -c "{code}" {closed}'],
        cwd=installed.folder,
        env=installed.environment,
    )
    assert done.returncode == 0
    assert (installed.folder / "opened").read_text() == ""
