"""Sweep files: one question each, in `sweeps/` of the working directory and of the package."""

import re
from pathlib import Path

from pipeline.config.compose import directory


def sweep_files() -> dict[str, Path]:
    """Return the sweep files by name; one of the working directory replaces the package's of that name."""
    folders = [Path(directory("sweeps")), Path("sweeps").absolute()]
    return {
        file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))
    }


def question(name: str) -> str:
    """Return the question in the sweep file's header; empty without a question or without the file."""
    if (file := sweep_files().get(name)) is None:
        return ""
    found = re.search(
        r"^# Question: *((?:.*\n#  +)*.*)$",
        file.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    return " ".join(found[1].replace("#", " ").split()) if found else ""
