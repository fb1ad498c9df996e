"""Finds sweep files in `sweeps/` of the working directory and of the package.

The header of each sweep file states the question that the sweep answers.
"""

import re
from pathlib import Path

from pipeline.config.compose import directory


def sweep_files() -> dict[str, Path]:
    """Return the paths of the sweep files by name, without the ending.

    A file of the working directory replaces the package's file of the same name.
    """
    files = {}
    for folder in (Path(directory("sweeps")), Path("sweeps").absolute()):
        for file in sorted(folder.glob("*.yaml")):
            files[file.stem] = file
    return files


def question(name: str) -> str:
    """Return the question in the header of a sweep file, or "" if there is none."""
    file = sweep_files().get(name)
    if file is None:
        return ""
    match = re.search(
        r"^# Question: *((?:.*\n#  +)*.*)$",
        file.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    if match is None:
        return ""
    return " ".join(match[1].replace("#", " ").split())
