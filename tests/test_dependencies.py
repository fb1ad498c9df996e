"""What the package imports is declared as a dependency, and the locks pin it.

The development group is not there where the wheel is installed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata

import pytest

from tests.running import ROOT

OURS = {"pipeline", "hydra_plugins"}
LOCKS = ("requirements.lock", "requirements-gpu.lock")
PINNED = re.compile(r"^([\w.\-]+)(?:\[.*\])?==(\S+)", re.MULTILINE)


def normal(requirement: str) -> str:
    """Return the name of a distribution in the form in which PEP 503 compares it."""
    name = re.match(r"[\w.\-]+", requirement)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def normal_names(requirements: Iterable[str]) -> set[str]:
    return {normal(requirement) for requirement in requirements}


def read(name: str) -> str:
    """Return the text of a file at the root of the project."""
    return (ROOT / name).read_text(encoding="utf-8")


def pyproject(table: str) -> dict:
    """Return a table of pyproject.toml."""
    return tomllib.loads(read("pyproject.toml"))[table]


def versions(lock: str) -> dict[str, set[str]]:
    """Return the pinned versions of each distribution.

    There may be one for each version of Python.
    """
    versions_by_name: dict[str, set[str]] = {}
    for name, version in PINNED.findall(read(lock)):
        versions_by_name.setdefault(normal(name), set()).add(version)
    return versions_by_name


def imported() -> dict[str, set[str]]:
    """Return, by top-level module, the files that import it.

    The standard library and this project are left out.
    """
    files_by_module: dict[str, set[str]] = {}
    for folder in OURS:
        for path in (ROOT / folder).rglob("*.py"):
            for name in imported_by(path.read_text(encoding="utf-8")):
                if name not in OURS and name not in sys.stdlib_module_names:
                    files = files_by_module.setdefault(name, set())
                    files.add(str(path.relative_to(ROOT)))
    return files_by_module


def imported_by(source: str) -> Iterator[str]:
    """Yield the top-level modules that a source imports, without relative imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")[0]
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_every_import_is_of_a_declared_dependency():
    project = pyproject("project")
    declared = normal_names(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        declared |= normal_names(extra)

    providers = metadata.packages_distributions()
    files_by_module = imported()
    assert "tensorflow" in files_by_module
    undeclared = {}
    for name, files in files_by_module.items():
        if not declared & normal_names(providers.get(name, [])):
            undeclared[name] = files
    assert undeclared == {}


def test_both_locks_pin_every_dependency_without_an_address():
    base = versions("requirements.lock")
    for_gpus = versions("requirements-gpu.lock")
    dependencies = normal_names(pyproject("project")["dependencies"])
    assert dependencies <= set(base)
    # The lock for GPUs includes the other one and repeats nothing of it.
    assert read("requirements-gpu.lock").startswith("-r requirements.lock\n")
    assert {"nvidia-cudnn-cu12", "nvidia-ml-py"} <= set(for_gpus)
    assert base.keys() & for_gpus.keys() == set()
    for lock in LOCKS:
        assert "://" not in read(lock)


@pytest.mark.parametrize(
    ("version", "rejected"), [((3, 10), True), ((3, 14), True), ((3, 13), False)]
)
def test_make_rejects_a_python_that_tensorflow_has_no_wheel_for(
    tmp_path, version, rejected
):
    for name in ("Makefile", "pyproject.toml", *LOCKS):
        (tmp_path / name).write_text(read(name))
    python = tmp_path / "python"  # that makes no environment
    code = f"import sys; sys.version_info = {version}; exec(sys.argv[1])"
    python.write_text(
        f"#!/bin/sh\n[ $1 = -c ] && exec {sys.executable} -c '{code}' \"$2\"\nexit 9\n"
    )
    python.chmod(0o755)

    done = make(tmp_path, "setup", f"PYTHON={python}")
    line = (
        "Python 3.11 to 3.13 is needed, for which TensorFlow has wheels, "
        f"this is 3.{version[1]}: make PYTHON=…"
    )
    assert done.returncode == 2
    assert (line in done.stderr.splitlines()) == rejected
    assert ("Setting up .venv" in done.stdout) != rejected

    planned = make(tmp_path, "-n", "setup")
    planned.check_returncode()
    # A run records what was installed: one lock, or the lock for GPUs and the other.
    copy = re.compile(
        r"^cat (requirements-gpu\.lock )?requirements\.lock"
        r" > \.venv/requirements(-gpu)?\.lock\.installed$",
        re.MULTILINE,
    )
    assert copy.search(planned.stdout)
    assert pyproject("project")["requires-python"] == ">=3.11,<3.14"


def make(folder, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *arguments], cwd=folder, capture_output=True, text=True
    )


def test_the_peers_have_a_lock_of_their_own_that_shares_versions():
    """`make bench` runs MLflow in both environments."""
    peers = versions("requirements-peers.lock")
    ours = versions("requirements.lock")
    assert normal_names(pyproject("dependency-groups")["peers"]) <= set(peers)
    for name in peers.keys() & ours.keys():
        assert peers[name] == ours[name], name
    assert "torch" not in ours

    text = read("requirements-peers.lock")
    assert "://" not in text
    assert text.count("==") <= text.count("--hash=sha256:")


def test_the_image_is_set_up_by_the_commands_of_make(tmp_path):
    """Those of the recipe that installs, as `make -n` prints them."""
    for name in ("Makefile", "pyproject.toml", *LOCKS):
        (tmp_path / name).write_text(read(name))
    planned = make(tmp_path, "-n", "setup", "PYTHON=python3", "LOCK=requirements.lock")
    of_make = []
    for line in planned.stdout.splitlines():
        if line.startswith(("python3 -m", ".venv/bin/python -m", "cat ")):
            of_make.append(line.replace("requirements.lock", "$LOCK"))
    of_the_image = re.findall(r"^RUN (.+)$", read("Dockerfile"), re.MULTILINE)
    # Their last one keeps a copy of the locks, of which there are one or two.
    assert of_the_image[:-1] == of_make[:-1]
    assert of_the_image[-1].endswith(of_make[-1].removeprefix("cat $LOCK"))
    assert len(of_make) == 4


def test_the_version_is_the_same_everywhere():
    version = pyproject("project")["version"]
    assert f'\n__version__ = "{version}"\n' in read("pipeline/__init__.py")
    assert f"\n## [{version}] - " in read("CHANGELOG.md")
    assert f"version: {version}\n" in read("CITATION.cff")
    assert f"accumulation_pipeline-{version}-" in read("docs/gpu.md")
    pythons = []
    for classifier in pyproject("project")["classifiers"]:
        if match := re.fullmatch(
            r"Programming Language :: Python :: (3\.\d+)", classifier
        ):
            pythons.append(match[1])
    assert pythons == ["3.11", "3.12", "3.13"]
