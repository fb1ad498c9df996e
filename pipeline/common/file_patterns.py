"""Finds the files that a path or a glob pattern names."""

import glob
import os
from pathlib import Path

# Files in a folder count as texts if they have one of these suffixes.
TEXT_SUFFIXES = (".jsonl", ".txt")


def matching(pattern: str) -> list[Path]:
    """Return the files that a pattern names, sorted by their paths.

    The pattern is the path of a file, the path of a folder, or a glob pattern, in which
    `**` stands for any folders. A folder stands for all files below it with one of the
    `TEXT_SUFFIXES`. A leading `~` is the home directory. Hidden files are left out
    unless the pattern names them.
    """
    path = os.path.expanduser(pattern)
    if os.path.isfile(path):
        return [Path(path)]
    if os.path.isdir(path):
        below = os.path.join(glob.escape(path), "**", "*")
        names = glob.glob(below, recursive=True)
        names = [name for name in names if name.endswith(TEXT_SUFFIXES)]
    else:
        names = glob.glob(path, recursive=True)
    return [Path(name) for name in sorted(set(names)) if os.path.isfile(name)]
