"""What the package imports is what its wheel asks for: the development group is not there where it is installed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest

from tests.running import ROOT

OURS = {"pipeline", "hydra_plugins"}


def normal(requirement: str) -> str:
    """The name of a distribution as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.\-]+", requirement)[0]).lower()


def imported() -> dict[str, set[str]]:
    """Every top-level module that is not of the standard library, and the files that import it."""
    found: dict[str, set[str]] = {}
    for path in (path for folder in OURS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            names += (
                [node.module]
                if isinstance(node, ast.ImportFrom) and node.module and not node.level
                else []
            )
            for name in (
                {name.split(".")[0] for name in names} - OURS - sys.stdlib_module_names
            ):
                found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


def test_every_import_is_of_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    extras = [
        requirement
        for extra in project["optional-dependencies"].values()
        for requirement in extra
    ]
    declared = {
        normal(requirement) for requirement in [*project["dependencies"], *extras]
    }
    providers = metadata.packages_distributions()
    assert "tensorflow" in imported()
    undeclared = {
        name: files
        for name, files in imported().items()
        if not declared & set(map(normal, providers.get(name, [])))
    }
    assert undeclared == {}


def test_both_locks_pin_every_dependency_without_an_address():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    base = versions("requirements.lock")
    for_gpus = versions("requirements-gpu.lock")
    gpu_lock = (ROOT / "requirements-gpu.lock").read_text(encoding="utf-8")

    assert {normal(requirement) for requirement in project["dependencies"]} <= set(base)
    # The lock for GPUs includes the other one and repeats nothing of it.
    assert gpu_lock.startswith("-r requirements.lock\n")
    assert {"nvidia-cudnn-cu12", "nvidia-ml-py"} <= set(for_gpus)
    assert base.keys() & for_gpus.keys() == set()
    for lock in ("requirements.lock", "requirements-gpu.lock"):
        assert "://" not in (ROOT / lock).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("version", "refused"), [((3, 10), True), ((3, 14), True), ((3, 13), False)]
)
def test_make_refuses_a_python_that_tensorflow_has_no_wheel_for(
    tmp_path, version, refused
):
    for name in (
        "Makefile",
        "pyproject.toml",
        "requirements.lock",
        "requirements-gpu.lock",
    ):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"))
    python = tmp_path / "python"  # that makes no environment
    code = f"import sys; sys.version_info = {version}; exec(sys.argv[1])"
    python.write_text(
        f"#!/bin/sh\n[ $1 = -c ] && exec {sys.executable} -c '{code}' \"$2\"\nexit 9\n"
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "setup", f"PYTHON={python}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    line = f"Python 3.11 to 3.13 is needed, for which TensorFlow has wheels, this is 3.{version[1]}: make PYTHON=…"
    assert done.returncode == 2
    assert (line in done.stderr.splitlines()) == refused
    assert ("Setting up .venv" in done.stdout) != refused
    rest = subprocess.run(
        ["make", "-n", "setup"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # A run records what was installed: one lock, or the lock for GPUs and the other.
    assert re.search(
        r"^cat (requirements-gpu\.lock )?requirements\.lock"
        r" > \.venv/requirements(-gpu)?\.lock\.installed$",
        rest,
        re.MULTILINE,
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    assert project["requires-python"] == ">=3.11,<3.14"


def test_the_peers_have_a_lock_of_their_own_that_shares_versions():
    """`make bench` runs MLflow in both environments."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "dependency-groups"
    ]
    peers, ours = (
        versions(lock) for lock in ("requirements-peers.lock", "requirements.lock")
    )
    assert {normal(requirement) for requirement in groups["peers"]} <= set(peers)
    assert {name: peers[name] for name in peers.keys() & ours.keys()} == {
        name: ours[name] for name in peers.keys() & ours.keys()
    }
    assert "torch" not in ours
    text = (ROOT / "requirements-peers.lock").read_text(encoding="utf-8")
    assert "://" not in text
    assert text.count("==") <= text.count("--hash=sha256:")


def versions(lock: str) -> dict[str, set[str]]:
    """The pinned versions of each distribution: there may be one for each version of Python."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(
        r"^([\w.\-]+)(?:\[.*\])?==(\S+)",
        (ROOT / lock).read_text(encoding="utf-8"),
        re.MULTILINE,
    ):
        found.setdefault(normal(name), set()).add(version)
    return found
