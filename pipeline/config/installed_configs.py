"""Finds the folders of config groups that other installed packages provide.

A package names its folder by an entry point in its pyproject.toml:

    [project.entry-points."pipeline.configs"]
    my_package = "my_package.conf"
"""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

from pipeline.common.errors import say

GROUP = "pipeline.configs"


@cache
def folders() -> Sequence[str]:
    """Return the folders, in the order of the entry points' names.

    An entry point that leads to no folder is left out, with a line that says so.
    """
    existing = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        folder = _folder(entry)
        if folder is not None:
            existing.append(str(folder))
            continue
        say(
            f"pipeline: the entry point {entry.name} = {entry.value} of {GROUP} names no "
            "folder of an installed package, so its configs are left out"
        )
    return tuple(existing)


def _folder(entry: EntryPoint) -> Path | None:
    """Return the folder that an entry point names, or None if there is none.

    The package is only located, not imported, because an import may take long. Locating
    a submodule would import its parent packages, so only the top-level package is
    located.
    """
    package, *names = entry.value.split(".")
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    for location in spec.submodule_search_locations or ():
        folder = Path(location, *names)
        if folder.is_dir():
            return folder
    return None
