"""docs/tutorial.md does what it says: its own text is run, in a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from tests.docs.outputs import is_shown
from tests.docs.pages import TUTORIAL, command_lines, read_blocks, read_pages
from tests.docs.walkthrough import Step, Walkthrough
from tests.running import ROOT, environment, pipeline

PAGE = read_pages()[TUTORIAL]
BLOCKS = read_blocks({TUTORIAL: PAGE})
OUTPUTS = [block.text for block in BLOCKS if block.kind == "text"]


# On Linux, a new process begins with the peak memory of the program that started it. A
# worker of the tests may have needed more than the script; a shell needs little.
IN_A_SHELL = ["sh", "-c", '"$0" "$@"; exit $?']


def run_from_source(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with this checkout; a script in a new process, for its memory."""
    if words[0] == "pipeline":
        return pipeline(*words[1:], cwd=folder, status=None)
    command = [*IN_A_SHELL, sys.executable, *words[1:]]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True
    )


def assert_shown(steps: list[Step]) -> None:
    for step in steps:
        assert is_shown(step.shown, step.printed), (
            f"{step.commands}\nThe page shows:\n{step.shown}\nIt prints:\n{step.printed}"
        )


def assert_less_memory(steps: list[Step]) -> None:
    """Accumulating takes less than half of the memory of the plain script."""
    printed = "".join(step.printed for step in steps)
    plain, accumulated = re.findall(r"^peak memory of fit: (\d+)", printed, re.M)
    assert int(accumulated) < int(plain) / 2


def test_the_memory_of_a_script_is_its_own(tmp_path):
    used = np.ones(2**28, np.uint8)
    script = "import resource; print(resource.getrusage(0).ru_maxrss)"
    (tmp_path / "script.py").write_text(script)
    done = run_from_source(["python", "script.py"], tmp_path)
    assert 0 < int(done.stdout) * 1024 < used.size


@pytest.mark.slow
def test_it_does_what_it_shows(tmp_path):
    steps = Walkthrough(tmp_path, run_from_source).follow(BLOCKS)
    assert len(steps) == len(OUTPUTS)
    assert_shown(steps)
    assert_less_memory(steps)


def install_wheel(folder: Path) -> Path:
    """Install this checkout's wheel; return the folder of the environment's programs.

    The environment borrows its other packages from that of the tests. A folder that a
    `.pth` file names is not searched for `.pth` files, such as that of this checkout.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, *build, "--wheel-dir", folder, ROOT], check=True)
    (wheel,) = folder.glob("*.whl")

    environment = folder / "environment"
    create = [sys.executable, "-m", "venv", "--without-pip", environment]
    subprocess.run(create, check=True)
    programs = environment / "bin"
    python_option = f"--python={programs / 'python'}"
    install = ["install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run([*pip, python_option, *install], check=True)

    # Afterwards, so that pip does not find this project among the borrowed packages.
    base = {"base": str(environment), "platbase": str(environment)}
    site = Path(sysconfig.get_path("purelib", "venv", base))
    borrowed = sysconfig.get_path("purelib")
    (site / "borrowed.pth").write_text(f"{borrowed}\n", encoding="utf-8")
    return programs


@pytest.mark.slow
def test_its_first_half_runs_with_the_wheel(tmp_path):
    programs = install_wheel(tmp_path)
    variables = dict(os.environ)
    for name in ("PYTHONPATH", "MLFLOW_TRACKING_URI"):
        variables.pop(name, None)
    variables["PATH"] = f"{programs}:{variables['PATH']}"

    def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=folder, env=variables, capture_output=True, text=True
        )

    show = "import pipeline; print(pipeline.__file__)"
    imported = run(["python", "-c", show], tmp_path).stdout
    assert imported.startswith(str(programs.parent))

    first_half = PAGE.partition("\n## A sweep")[0]
    steps = Walkthrough(tmp_path, run).follow(read_blocks({TUTORIAL: first_half}))
    # Memory is not compared: the first imports of a new environment may take more of it
    # at once than the training.
    assert len(steps) == 4
    assert_shown(steps)


def test_each_command_has_its_output():
    """A block of the shell that runs Python is followed by what it prints."""
    runs = 0
    for block, following in zip(BLOCKS, [*BLOCKS[1:], None], strict=True):
        if block.kind != "sh":
            continue
        programs = {line.partition(" ")[0] for line in command_lines(block)}
        if programs & {"pipeline", "python"}:
            assert following is not None
            assert following.kind == "text", block.text
            runs += 1
    assert runs == len(OUTPUTS) >= 6


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("loss 0.4911", "loss 0.6911"),
        ("equal within rounding", "different"),
        ("512 = 32 × 16", "512 = 64 × 8"),
        ("val/accuracy", "val/precision"),
        ("6 of 6 jobs", "5 of 6 jobs"),
        ("Do not accumulate", "Accumulate by 16"),
        ("higher by", "lower by"),
        ("bit-equal", "different from update 3 on"),
        ("14 metrics\n0\n", "14 metrics\n3\n"),
    ],
)
def test_a_wrong_output_is_found(right, wrong):
    changed = [output for output in OUTPUTS if right in output]
    assert changed
    for output in changed:
        assert is_shown(output, output)
        assert not is_shown(output.replace(right, wrong), output)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        (
            "MLflow run 0123456789abcdef0123456789abcdef in a",
            f"MLflow run {'f' * 32} in a",
        ),
        ("5,558 examples/s  0 s left", "12.5 examples/s  31 s left"),
        ("peak memory of fit: 224 MiB", "peak memory of fit: 198 MiB"),
        ("loss 0.4911", "loss 0.4712"),
        ("higher by 0.3689 (95%: 0.2175 to 0.5204)", "higher by 1 (95%: -3e-5 to 2.1)"),
        ("a long line,\nwrapped", "a long line, wrapped"),
        ("first\n…\nlast", "first\nsecond\nthird\nlast"),
        ("first\n…\nlast", "first\nlast"),
        ("in …/conf", "in /home/me/conf"),
    ],
)
def test_what_another_run_prints_is_accepted(shown, printed):
    assert is_shown(shown, printed)
