"""A small disk of a test's own, which it may fill."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FILLER = "filler"


@contextmanager
def disk(folder: Path, size: str = "3m") -> Iterator[Path]:
    """A tmpfs at `folder`; the test is skipped where none can be mounted."""
    folder.mkdir(exist_ok=True)
    mounted = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
    )
    if not mounted or mounted.returncode:
        pytest.skip("only root may mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no free page on the disk of `folder`."""
    with (folder / FILLER).open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def free(folder: Path) -> None:
    """Give back what `fill` took."""
    (folder / FILLER).unlink()
