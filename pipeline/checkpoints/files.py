"""Checkpoint files in RUN_DIR/checkpoints/UPDATE/, that of the best evaluation in RUN_DIR/checkpoints/best/UPDATE/.

    meta.json       the format, the update, everything that is not an array
    arrays.*        the arrays, as `tf.train.Checkpoint` writes them
    manifest.json   the SHA-256 of each of these files

A thread writes them to a folder whose name starts with a dot, syncs, verifies and renames it: under its final name a
folder is complete, whenever the process is killed. Damage by the disk shows in the manifest. Imports no TensorFlow.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.common.errors import ConfigError, described, first_line, say
from pipeline.common.recorded import FormError, read
from pipeline.config.plan import Plan

if TYPE_CHECKING:
    from pipeline.checkpoints.snapshot import State

FORMAT = 1
_LOOP = {
    "open": bool,
    "validation": dict,
    "stopped_by": (str, type(None)),
    "best": (dict, type(None)),
}
_STATE = {
    "loop": _LOOP,
    "stop_training": bool,
    "recorder": dict,
    "random": list,
    "numpy": list,
}
META = {
    "format": int,
    "update": int,
    "arrays": [list],
    "values": {**_STATE, "callbacks": dict, "kinds": dict},
}
BEST = "best"  # the subfolder of the best evaluation's checkpoint
AUTO_SECONDS = 300.0  # the least time between two checkpoints with `auto`
STALLS = 100  # the least ratio of that time to the time that a checkpoint stalls training: under 1%


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint; `pipeline.checkpoints.snapshot.read` loads it."""

    folder: Path
    update: int  # completed updates
    meta: dict[str, Any]


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """Writes the checkpoints of one run. Leaving the `with` block waits for the last one.

    The `folder` is made with the first one; incomplete ones in it are removed. `every` is None, a number of updates,
    `epoch`, or `auto`: five minutes, more if that stalls training by over 1%. The latest `keep` are kept, and the best
    ones that these refer to. A process that never `writes` reads what the chief writes.
    """

    def __init__(
        self,
        folder: Path,
        every: int | str | None,
        plan: Plan,
        keep: int = 2,
        writes: bool = True,
    ):
        self.folder, self.every, self.plan, self.keep, self.writes = (
            folder,
            every,
            plan,
            keep,
            writes,
        )
        self._writer: threading.Thread | None = None
        self._next = time.monotonic() + AUTO_SECONDS
        for half_written in (
            (*folder.glob(".*"), *folder.glob(f"{BEST}/.*")) if writes else ()
        ):
            shutil.rmtree(half_written, ignore_errors=True)

    def __exit__(self, *_: object) -> None:
        self.wait()

    def due(self, update: int, *, last: bool = False) -> bool:
        """Return whether to write a checkpoint after `update` updates; always after the `last` one."""
        if self.every is None or not self.writes:
            return False
        if last:
            return True
        if self.every == "auto":
            return time.monotonic() >= self._next and not (
                self._writer is not None and self._writer.is_alive()
            )
        return (
            self.plan.ends_epoch(update)
            if isinstance(self.every, str)
            else update % self.every == 0
        )

    def save(
        self, update: int, capture: Callable[[], State], *, best: bool = False
    ) -> None:
        """Write what `capture` returns as the checkpoint of `update`, in a thread; a failure is said, in one line."""
        if not self.writes:
            return
        began = time.monotonic()
        self.wait()
        try:
            state = capture()
        except MemoryError as error:
            say(
                f"the checkpoint after update {update} was left out: {first_line(error)}"
            )
            return
        # Not a daemon: the interpreter waits until it is written.
        self._writer = threading.Thread(
            target=self._write, args=(update, state, best), name="checkpoint"
        )
        self._writer.start()
        if not best:
            ended = time.monotonic()
            self._next = ended + max(AUTO_SECONDS, STALLS * (ended - began))

    def best(self, update: int) -> Checkpoint | None:
        """Return the checkpoint of the best evaluation, at `update`; None, after a message, if it is damaged."""
        try:
            return at(self.folder / BEST, update)
        except ConfigError as error:
            say(str(error))
            return None

    def wait(self) -> None:
        """Wait until the last checkpoint is written, or has failed."""
        if self._writer is not None:
            self._writer.join()

    def _write(self, update: int, state: State, best: bool) -> None:
        folder = self.folder / BEST if best else self.folder
        new, place = folder / f".{update}", folder / str(update)
        try:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            size = {
                "examples": self.plan.examples,
                "effective_batch_size": self.plan.batching.effective_batch_size,
            }
            meta = {"format": FORMAT, "update": update, **size, **state.write(new)}
            (new / "meta.json").write_text(
                json.dumps(meta, indent=1) + "\n", encoding="utf-8"
            )
            manifest = {
                "sha256": {file.name: _hash(file) for file in sorted(new.iterdir())}
            }
            (new / "manifest.json").write_text(
                json.dumps(manifest, indent=1) + "\n", encoding="utf-8"
            )
            for written in (*new.iterdir(), new):
                _sync(written)
            _verified(new, update)
            shutil.rmtree(
                place, ignore_errors=True
            )  # damaged, or of a run that went on from before it
            new.rename(place)
            _sync(folder)
        except Exception as error:  # training goes on without it: the disk may be full
            shutil.rmtree(new, ignore_errors=True)
            say(
                f"the checkpoint of update {update} was not written: {described(error)}"
            )
            return
        if not best:
            done = updates(self.folder)
            later = [
                other for other in done if other > update
            ]  # of a run that resumed from before them
            for old in later + done[: len(done) - len(later)][: -self.keep]:
                shutil.rmtree(self.folder / str(old), ignore_errors=True)
        needed = {
            _best(self.folder / str(other)) for other in updates(self.folder)
        }  # a run may resume from each
        for old in (
            set(updates(self.folder / BEST)) - needed - ({update} if best else set())
        ):
            shutil.rmtree(self.folder / BEST / str(old), ignore_errors=True)


def newest(folder: Path, most: float = math.inf) -> Checkpoint | None:
    """Return the latest intact checkpoint in `folder` of at most `most` updates; one line reports each damaged one."""
    for update in reversed([update for update in updates(folder) if update <= most]):
        try:
            return _verified(folder / str(update), update)
        except FormError as damage:
            say(
                f"the checkpoint {folder / str(update)} is damaged, and not used: {damage}"
            )
    return None


def at(folder: Path, update: int) -> Checkpoint:
    """Return the checkpoint of `update` in `folder`; a `ConfigError` says why it cannot be used."""
    place = folder / str(update)
    if not place.is_dir():
        raise ConfigError(
            f"the checkpoint {place}", "must be there", update, updates(folder)
        )
    try:
        return _verified(place, update)
    except FormError as damage:
        raise ConfigError(
            f"the checkpoint {place}", f"must not be damaged ({damage})"
        ) from damage


def _verified(folder: Path, update: int) -> Checkpoint:
    try:
        hashes = read(folder / "manifest.json", {"sha256": {str: str}})["sha256"]
        there = {file.name for file in folder.iterdir()} - {"manifest.json"}
        if there != set(hashes) or "meta.json" not in there:
            raise FormError(
                f"manifest.json names other files than {', '.join(sorted(there)) or 'none'}"
            )
        for name, expected in hashes.items():
            if _hash(folder / name) != expected:
                raise FormError(f"{name} is not as manifest.json says")
        meta = read(folder / "meta.json", META)
        if meta["format"] != FORMAT:
            raise ConfigError(
                f"the checkpoint {folder}",
                f"must be of format {FORMAT}",
                meta["format"],
            )
        if meta["update"] != update:
            raise FormError(f"it is of update {meta['update']}")
    except OSError as error:
        raise FormError(described(error)) from error
    return Checkpoint(folder, update, meta)


def updates(folder: Path) -> list[int]:
    """Return the updates of the checkpoints in `folder`, in ascending order."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(
        int(name)
        for name in names
        if name.isascii() and name.isdecimal() and str(int(name)) == name
    )


def _best(folder: Path) -> int | None:
    """Return the update of the best evaluation so far, as a checkpoint recorded it."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged checkpoint
        return int(
            json.loads((folder / "meta.json").read_bytes())["values"]["loop"]["best"][
                "update"
            ]
        )
    return None


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(place: Path) -> None:
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
