"""Paths for libraries that read some characters of a path as something else."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PATTERN = re.compile(r"[\[\]*?\\]")


@contextmanager
def without_pattern(folder: Path) -> Iterator[Path]:
    """Yield a path of `folder` that is no pattern.

    TensorFlow reads the path of a checkpoint as a pattern, in which `[64,64]` is one
    character. A folder whose path has such characters is reached by a link.
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
