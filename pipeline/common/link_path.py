"""Provides paths for libraries that read a path as a glob pattern."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PATTERN = re.compile(r"[\[\]*?\\]")


@contextmanager
def without_pattern(folder: Path) -> Iterator[Path]:
    """Yield a path to `folder` that has no special characters of glob patterns.

    TensorFlow reads the path of a checkpoint as a pattern, in which `[64,64]` matches
    one character. If the path of `folder` has special characters, yield a symbolic link
    that is removed at the end of the block.
    """
    if not _PATTERN.search(str(folder)):
        yield folder
        return
    parent = tempfile.gettempdir()
    if _PATTERN.search(parent):
        parent = "/tmp"
    with tempfile.TemporaryDirectory(dir=parent) as temporary:
        link = Path(temporary) / "link"
        link.symlink_to(folder.absolute(), target_is_directory=True)
        yield link
