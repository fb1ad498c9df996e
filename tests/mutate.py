"""Breaks the code in each way of mutations.yaml, and runs the test that has to notice: `python -m tests.mutate`.

Arguments are texts that a mutation's file or test must have, to run a part. The exit status is 1 where one was not
noticed, or is not found in the code any more. Each takes the seconds of one test in a new process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
COPIED = (
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


def main() -> int:
    mutations = yaml.safe_load(
        (Path(__file__).parent / "mutations.yaml").read_text(encoding="utf-8")
    )
    asked = [
        each
        for each in mutations
        if all(text in each["file"] + each["test"] for text in sys.argv[1:])
    ]
    with tempfile.TemporaryDirectory(prefix="mutate-") as name:
        folder = Path(name)
        for top in COPIED:
            shutil.copytree(
                ROOT / top,
                folder / top,
                ignore=shutil.ignore_patterns("__pycache__", "_build"),
            )
        for file in FILES:
            shutil.copy(ROOT / file, folder)
        verdicts = []
        for number, each in enumerate(asked, 1):
            verdicts.append(verdict(folder, **each))
            print(
                f"| {number} | `{each['file']}` | {each['breaks']} | `{each['test']}` | {verdicts[-1]} |",
                flush=True,
            )
    print(f"{verdicts.count('caught')} of {len(asked)} caught")
    return int(verdicts.count("caught") != len(asked))


def verdict(folder: Path, file: str, breaks: str, old: str, new: str, test: str) -> str:
    """Return what became of the mutation of `file` that replaces `old` by `new`; undo it."""
    path = folder / "pipeline" / file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text.count(old) != 1:
        return f"STALE: found {text.count(old)} times"
    path.write_text(text.replace(old, new), encoding="utf-8")
    try:
        chosen = ["-m", "not slow and not soak", f"tests/{test}"]  # as `make test` does
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", *chosen]
        environment = {
            **os.environ,
            "PYTHONPATH": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
    finally:
        path.write_text(text, encoding="utf-8")
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode == 1 and " failed" in last and " error" not in last:
        return "caught"
    return "NOT CAUGHT" if done.returncode == 0 else f"NO TEST: {last}"


if __name__ == "__main__":
    sys.exit(main())
