"""Mounts a small disk for one test, which may fill it."""

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
    """Mount a tmpfs at `folder`; skip the test where that is not allowed.

    Args:
        folder: where it is mounted; made if it does not exist.
        size: as mount's option `size` takes it.
    """
    folder.mkdir(exist_ok=True)
    if not _mount(folder, size):
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


def _mount(folder: Path, size: str) -> bool:
    if os.geteuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0
