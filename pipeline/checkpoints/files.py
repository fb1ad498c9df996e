"""Checkpoints in RUN_DIR/checkpoints/UPDATE/: written beside by a thread, synced, verified, renamed into place.

That of the best evaluation is in RUN_DIR/checkpoints/best/UPDATE/.

    meta.json       the format, the update, what is no array
    tensors.*       the arrays, as `tf.train.Checkpoint` writes them
    manifest.json   the SHA-256 of each of these files

A folder under its final name is whole: who kills the process leaves a folder whose name starts with a dot. What a disk
does to it later is seen in the manifest. `snapshot` says what is in a checkpoint. Imports no TensorFlow.
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pipeline.common.errors import ConfigError, described, first_line, say
from pipeline.config.sizes import Plan

if TYPE_CHECKING:
    from pipeline.checkpoints.snapshot import State

FORMAT = 1
BEST = "best"  # the folder in that of all checkpoints
AUTO_SECONDS = 300.0  # at least, between two checkpoints of `auto`
STALLS = 100  # and so many times as long as one stalls training: under 1%


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint; `pipeline.checkpoints.snapshot.read` gives what is in it."""

    folder: Path
    update: int  # completed updates
    meta: dict[str, Any]


class Checkpoints:
    """Writes the checkpoints of one run. At the end of `with` the last one is written.

    Args:
        folder: of all checkpoints of the run; made with the first one. What a killed process left half-written in it
            is removed.
        every: None for no checkpoint; a number of updates; `epoch`; `auto` for five minutes, and more where one
            stalls training for more than 1% of that.
        plan: where epochs end, and what the data's position follows from.
        keep: how many of the latest stay. Of the best stays the one that each of these knows as the best.
        writes: whether this process writes any; else another one does, in whose folder they are read.
    """

    def __init__(self, folder: Path, every: int | str | None, plan: Plan, keep: int = 2, writes: bool = True):
        self.folder, self.every, self.plan, self.keep, self.writes = folder, every, plan, keep, writes
        self._writer: threading.Thread | None = None
        self._next = time.monotonic() + AUTO_SECONDS
        for half_written in (*folder.glob(".*"), *folder.glob(f"{BEST}/.*")) if writes else ():
            shutil.rmtree(half_written, ignore_errors=True)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.wait()

    def due(self, update: int, *, last: bool = False) -> bool:
        """Return whether a checkpoint is wanted after `update` updates; after the last one it is."""
        if self.every is None or not self.writes:
            return False
        if self.every == "auto":
            writing = self._writer is not None and self._writer.is_alive()
            return last or (time.monotonic() >= self._next and not writing)
        return last or (self.plan.ends_epoch(update) if isinstance(self.every, str) else update % self.every == 0)

    def save(self, update: int, capture: Callable[[], State], *, best: bool = False) -> None:
        """Write what `capture` returns, a copy, as the checkpoint of `update`; return as soon as it is copied.

        It waits until the checkpoint before is written. A checkpoint that cannot be written is reported in one line.
        The `best` one lies apart, and is none that a run goes on from.
        """
        if not self.writes:
            return
        began = time.monotonic()
        self.wait()
        try:
            state = capture()
        except MemoryError as error:
            say(f"the checkpoint after update {update} was left out: {first_line(error)}")
            return
        folder = self.folder / BEST if best else self.folder
        # No daemon: the interpreter waits for what is being written.
        self._writer = threading.Thread(target=self._write, args=(folder, update, state), name="checkpoint")
        self._writer.start()
        ended = time.monotonic()
        if not best:
            self._next = ended + max(AUTO_SECONDS, STALLS * (ended - began))

    def best(self, update: int) -> Checkpoint | None:
        """Return the checkpoint of the best evaluation, that after `update` updates; None where it is not whole."""
        self.wait()
        try:
            return at(self.folder / BEST, update)
        except ConfigError as error:
            say(str(error))
            return None

    def wait(self) -> None:
        """Return once the last checkpoint is written, or has failed."""
        if self._writer is not None:
            self._writer.join()

    def _write(self, folder: Path, update: int, state: State) -> None:
        new, place = folder / f".{update}", folder / str(update)
        try:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            size = {"examples": self.plan.examples, "effective_batch_size": self.plan.batching.effective_batch_size}
            _write(new / "meta.json", {"format": FORMAT, "update": update, **size, **state.write(new)})
            hashes = {file.name: _hash(file) for file in sorted(new.iterdir())}
            _write(new / "manifest.json", {"sha256": hashes})
            for written in (*new.iterdir(), new):
                _sync(written)
            _verified(new, update)
            shutil.rmtree(place, ignore_errors=True)  # damaged, or of a run that went on from before it
            new.rename(place)
            _sync(folder)
        except Exception as error:  # training goes on without it: the disk may be full
            shutil.rmtree(new, ignore_errors=True)
            say(f"the checkpoint of update {update} was not written: {described(error)}")
            return
        if folder == self.folder:
            done = updates(folder)
            later = [other for other in done if other > update]  # of the run before it went on from an earlier update
            for other in later + [other for other in done if other <= update][: -self.keep]:
                shutil.rmtree(folder / str(other), ignore_errors=True)
        best = self.folder / BEST
        known = {_best(self.folder / str(other)) for other in updates(self.folder)}  # a run may go on from each
        for other in updates(best):
            if other not in known and not (folder == best and other == update):
                shutil.rmtree(best / str(other), ignore_errors=True)


def newest(folder: Path, most: float = math.inf) -> Checkpoint | None:
    """Return the latest whole checkpoint in `folder` of at most `most` updates; a damaged one is reported in one line.

    Raises:
        ConfigError: it is of another format.
    """
    for update in reversed([update for update in updates(folder) if update <= most]):
        try:
            return _verified(folder / str(update), update)
        except _DamagedError as damage:
            say(f"the checkpoint {folder / str(update)} is damaged, and not used: {damage}")
    return None


def at(folder: Path, update: int) -> Checkpoint:
    """Return the checkpoint of `update` in `folder`.

    Raises:
        ConfigError: there is none, or it is damaged, or of another format.
    """
    place = folder / str(update)
    if not place.is_dir():
        raise ConfigError(f"the checkpoint {place}", "must be there", update, updates(folder))
    try:
        return _verified(place, update)
    except _DamagedError as damage:
        raise ConfigError(f"the checkpoint {place}", f"must not be damaged ({damage})") from damage


class _DamagedError(Exception):
    """What is in the folder is not what was written into it."""


def _verified(folder: Path, update: int) -> Checkpoint:
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        hashes = manifest["sha256"]
        there = {file.name for file in folder.iterdir()} - {"manifest.json"}
        if there != set(hashes) or "meta.json" not in there:
            raise _DamagedError(f"manifest.json names other files than {', '.join(sorted(there)) or 'none'}")
        for name, expected in hashes.items():
            if _hash(folder / name) != expected:
                raise _DamagedError(f"{name} is not as manifest.json says")
        meta = json.loads((folder / "meta.json").read_bytes())
        format_, written = meta["format"], meta["update"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _DamagedError(described(error)) from error
    if format_ != FORMAT:
        raise ConfigError(f"the checkpoint {folder}", f"must be of format {FORMAT}", format_)
    if written != update:
        raise _DamagedError(f"it is of update {written}")
    return Checkpoint(folder, update, meta)


def updates(folder: Path) -> list[int]:
    """Return the updates whose checkpoints are in `folder`, the latest one last."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal() and str(int(name)) == name)


def _best(folder: Path) -> int | None:
    """Return the update of the best evaluation before a checkpoint, as that knows it."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # it is damaged
        return int(json.loads((folder / "meta.json").read_bytes())["values"]["loop"]["best"]["update"])
    return None


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _sync(place: Path) -> None:
    """Return once what is in a file, or which names a folder has, is on the disk."""
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
