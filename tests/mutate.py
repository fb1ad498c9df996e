"""Breaks the code in each way of mutations.yaml, and runs the test that has to notice.

    python -m tests.mutate [TEXT …]

Only the mutations whose file or test contains all texts are run. Each takes the seconds
of one test in a new process. The exit status is 1 if a test did not notice one, or if
one does not match the code any more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    "pipeline",
    "hydra_plugins",
    "conf",
    "sweeps",
    "tests",
    "examples",
    "docs",
    "benchmarks",
)
FILES = ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")


@dataclass(frozen=True)
class Mutation:
    """One entry of mutations.yaml.

    Attributes:
        file: below pipeline/.
        breaks: what goes wrong, for a reader.
        old: text that the file has exactly once.
        new: text that replaces it.
        test: below tests/, which has to fail.
    """

    file: str
    breaks: str
    old: str
    new: str
    test: str


def main() -> int:
    """Run the mutations that the command line chooses, and print a table of them."""
    mutations = chosen_mutations(sys.argv[1:])
    caught = 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as name:
        folder = Path(name)
        copy_project(folder)
        for number, mutation in enumerate(mutations, 1):
            outcome = verdict(folder, mutation)
            if outcome == "caught":
                caught += 1
            cells = [f"`{mutation.file}`", mutation.breaks, f"`{mutation.test}`"]
            print("|", " | ".join([str(number), *cells, outcome]), "|", flush=True)
    print(f"{caught} of {len(mutations)} caught")
    return 0 if caught == len(mutations) else 1


def chosen_mutations(texts: list[str]) -> list[Mutation]:
    """Return the mutations whose file or test contains all texts."""
    file = Path(__file__).parent / "mutations.yaml"
    chosen = []
    for entry in yaml.safe_load(file.read_text(encoding="utf-8")):
        mutation = Mutation(**entry)
        if all(text in mutation.file + mutation.test for text in texts):
            chosen.append(mutation)
    return chosen


def copy_project(folder: Path) -> None:
    """Copy what the tests need to `folder`, where the mutations are made."""
    ignored = shutil.ignore_patterns("__pycache__", "_build")
    for top in FOLDERS:
        shutil.copytree(ROOT / top, folder / top, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, folder)


def verdict(folder: Path, mutation: Mutation) -> str:
    """Make a mutation in `folder`, run its test, undo it, and return the outcome."""
    path = folder / "pipeline" / mutation.file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text.count(mutation.old) != 1:
        return f"STALE: found {text.count(mutation.old)} times"

    broken = text.replace(mutation.old, mutation.new)
    path.write_text(broken, encoding="utf-8")
    try:
        done = run_test(folder, mutation.test)
    finally:
        path.write_text(text, encoding="utf-8")

    lines = done.stdout.strip().splitlines()
    summary = lines[-1] if lines else ""
    if done.returncode == 1 and " failed" in summary and " error" not in summary:
        return "caught"
    if done.returncode == 0:
        return "NOT CAUGHT"
    return f"NO TEST: {summary}"


def run_test(folder: Path, test: str) -> subprocess.CompletedProcess[str]:
    """Run a test of the copy in `folder`, if it is one of those of `make test`."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header"]
    command += ["-m", "not slow and not soak", f"tests/{test}"]
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


if __name__ == "__main__":
    sys.exit(main())
