"""Checkpoint files: RUN_DIR/checkpoints/UPDATE/ and RUN_DIR/checkpoints/best/UPDATE/.

    meta.json       the format, the number of updates, the position in the journal, and
                    all values that are not arrays
    arrays.*        the arrays, as `tf.train.Checkpoint` writes them
    manifest.json   the SHA-256 of each of the files above

A thread writes the files into a folder whose name starts with a dot, syncs the folder
to the disk, verifies it, and renames it. A folder with its final name is therefore
complete, even if the process is killed. The manifest reveals a file that was damaged
later.

Before a checkpoint is written, the rows of all updates so far are added to the journal,
and the journal is synced. The checkpoint records the position in the journal: the
number of bytes, and their checksum. So a run is never resumed after updates whose rows
are lost.

`Checkpoints.due` decides after which updates a checkpoint is written, according to
`training.checkpoint_every`. The training loop calls it after each update. The
checkpoint of the best evaluation is written in addition.

This module does not import TensorFlow.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.common.durable import sync
from pipeline.common.errors import ConfigError, described, first_line, no_space, say
from pipeline.common.recorded import FormError, read
from pipeline.config.plan import RunPlan
from pipeline.tracking.journal_file import Position

if TYPE_CHECKING:
    from pipeline.checkpoints.snapshot import Snapshot
    from pipeline.tracking.journal import Journal

FORMAT = 1
_LOOP = {  # see `LoopState`
    "open": bool,
    "validation": dict,
    "stopped_by": (str, type(None)),
    "best": (dict, type(None)),
    # "batch" is an integer or null. Its type is not checked, since the value is only
    # compared for equality.
}
_RECORDER = {  # see `Recorder.get_state`
    # Require the last learning rate: `pipeline critical` begins with it.
    "last": {"learning_rate": (int, float)},
    "skipped": int,
    "noise": dict,
    "unlogged": list,
    "epoch_sums": dict,
    "epoch_examples": (dict, int),  # one number for all results in older checkpoints
    "explosion?": {"first?": (int, float), "update?": int},
    "cut?": {"micro_steps": int, "tokens": int},
}
_VALUES = {
    "loop": _LOOP,
    "stop_training": bool,  # whether a callback has ended the training
    "recorder": _RECORDER,
    "random": list,  # the state of Python's random generator
    "numpy": list,  # the state of NumPy's random generator
    "callbacks": dict,  # the states of the callbacks, by name
    "kinds": dict,  # the classes of the callbacks, by name
}
_META = {  # see `Meta`
    "format": int,
    "update": int,
    "examples": int,
    "effective_batch_size": int,
    "arrays": [list],
    "values": _VALUES,
    "journal?": {"offset": int, "crc": int},
}

# Number of latest checkpoints to keep. The older one is a spare in case the latest is
# damaged.
KEPT = 2
BEST = "best"  # the subfolder for the checkpoint of the best evaluation
AUTO_SECONDS = 300.0  # minimum time between two checkpoints with `auto`
# With `auto`, minimum ratio of the time between two checkpoints to the time for which
# one checkpoint stalls the training, so that stalls take less than 1% of the time.
STALLS = 100


@dataclass(frozen=True)
class LoopState:
    """The state of the training loop after an update.

    Attributes:
        pending: whether the evaluation and the callbacks after the update have not run
            yet. Its key in `meta.json` is `open`.
        validation: the results of the evaluation after the update, or {} if there was
            no evaluation.
        stopped_by: the name of the callback that has ended the training, or None.
        best: the state of the best evaluation, or None if it is not tracked.
        batch_digest: identifies the batch of the update, so that a resumed run can
            check that it reads the same data. None if the config alone determines the
            data. Its key in `meta.json` is `batch`.
    """

    pending: bool = False
    validation: Mapping[str, float] = field(default_factory=dict)
    stopped_by: str | None = None
    best: dict[str, Any] | None = None
    batch_digest: int | None = None

    @classmethod
    def from_json(cls, loop: Mapping[str, Any]) -> LoopState:
        return cls(
            loop["open"],
            loop["validation"],
            loop["stopped_by"],
            loop["best"],
            loop.get("batch"),
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "open": self.pending,
            "validation": self.validation,
            "stopped_by": self.stopped_by,
            "best": self.best,
            "batch": self.batch_digest,
        }


@dataclass(frozen=True)
class Meta:
    """The content of `meta.json`.

    Attributes:
        updates_done: the number of completed updates. Its key is `update`.
        examples: the number of examples in an epoch.
        effective_batch_size: the effective batch size in examples. With a batch-size
            schedule, it is the size in the first stage.
        arrays: name, shape and dtype of each array, in the order in which the arrays
            are saved.
        values: the JSON values of the snapshot; `_VALUES` lists them.
        journal: the position in the journal after the rows of these updates. None if
            the run has no journal, and in checkpoints of older versions.
    """

    updates_done: int
    examples: int
    effective_batch_size: int
    arrays: list[Any]
    values: dict[str, Any]
    journal: Position | None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Meta:
        journal = None
        if content.get("journal") is not None:
            journal = Position(**content["journal"])
        return cls(
            content["update"],
            content["examples"],
            content["effective_batch_size"],
            content["arrays"],
            content["values"],
            journal,
        )

    def as_json(self) -> dict[str, Any]:
        content = {
            "format": FORMAT,
            "update": self.updates_done,
            "examples": self.examples,
            "effective_batch_size": self.effective_batch_size,
            "arrays": self.arrays,
            "values": self.values,
        }
        if self.journal is not None:
            content["journal"] = asdict(self.journal)
        return content

    @property
    def loop(self) -> LoopState:
        """The state of the training loop."""
        return LoopState.from_json(self.values["loop"])


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint; `pipeline.checkpoints.snapshot.read` loads it.

    Attributes:
        folder: the folder with the checkpoint's files.
        meta: the content of `meta.json`.
    """

    folder: Path
    meta: Meta

    @property
    def updates_done(self) -> int:
        """The number of completed updates."""
        return self.meta.updates_done


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """Writes the checkpoints of one run.

    Leaving the context waits until the last checkpoint is written.

    Args:
        folder: the folder for the checkpoints. It is created with the first checkpoint.
            Incomplete checkpoints in it are removed.
        every: how often to write a checkpoint: a number of updates, `epoch`, `auto`, or
            None to write only that of the best evaluation. `auto` means every five
            minutes, or less often if that would stall the training for more than 1% of
            the time.
        plan: the plan of the run.
        keep: the number of latest checkpoints to keep. The checkpoints of the best
            evaluation to which these refer are kept, too.
        writes: False in a process that only reads the chief's checkpoints.
        journal: the journal of the run, or None. It is synced before each checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        every: int | str | None,
        plan: RunPlan,
        keep: int = KEPT,
        writes: bool = True,
        journal: Journal | None = None,
    ):
        self.folder = folder
        self.every = every
        self.plan = plan
        self.keep = keep
        self.writes = writes
        self.journal = journal
        self._writer: threading.Thread | None = None
        self._next_auto = time.monotonic() + AUTO_SECONDS
        self._is_announced = False  # whether checkpoints by time were announced
        if writes:
            for incomplete in [*folder.glob(".*"), *folder.glob(f"{BEST}/.*")]:
                _remove(incomplete)

    def __exit__(self, *_: object) -> None:
        self.wait()

    def due(self, update: int, *, last: bool = False) -> bool:
        """Return whether a checkpoint is due after `update` updates.

        After the `last` update, a checkpoint is always due, unless `every` is None or
        this process does not write.
        """
        if self.every is None or not self.writes:
            return False
        if last:
            return True
        if self.every == "auto":
            still_writing = self._writer is not None and self._writer.is_alive()
            return time.monotonic() >= self._next_auto and not still_writing
        if isinstance(self.every, str):
            return self.plan.ends_epoch(update)
        return update % self.every == 0

    def save(
        self, update: int, capture: Callable[[], Snapshot], *, best: bool = False
    ) -> None:
        """Capture a snapshot now, and write it in a thread.

        If the snapshot does not fit into memory or cannot be written, print a message,
        so that training can continue. Other errors of `capture` are raised. With
        `auto`, the first checkpoint that is due by time is announced.

        Args:
            update: the number of completed updates.
            capture: copies the state of the run.
            best: whether this is the checkpoint of the best evaluation so far.
        """
        if not self.writes:
            return
        started = time.monotonic()
        self.wait()
        try:
            snapshot = capture()
        except MemoryError as error:
            reason = first_line(error)
            say(f"the checkpoint after update {update} was left out: {reason}")
            return
        position = None
        if self.journal is not None:
            position = self.journal.position()
        ended = time.monotonic()
        pause = max(AUTO_SECONDS, STALLS * (ended - started))
        # A run that ends before this time writes a checkpoint only at its end.
        is_in_time = self.every == "auto" and started >= self._next_auto
        announcement = ""
        if is_in_time and not best and not self._is_announced:
            self._is_announced = True
            announcement = (
                f"first checkpoint, after update {update}: a crash loses only the "
                "updates after the latest checkpoint; the next one is due in "
                f"{pause / 60:.0f} min (training.checkpoint_every)"
            )
        if not best:
            self._next_auto = ended + pause
        # Do not use a daemon thread, so that the interpreter waits until the thread has
        # written everything.
        self._writer = threading.Thread(
            target=self._write,
            args=(update, snapshot, position, best, announcement),
            name="checkpoint",
        )
        self._writer.start()

    def best(self, update: int) -> Checkpoint | None:
        """Return the checkpoint of the best evaluation: the one after `update` updates.

        If the checkpoint is missing or damaged, print a message and return None.
        """
        folder = self.folder / BEST
        if not (folder / str(update)).is_dir():
            say(
                f"the best checkpoint, that of update {update}, does not exist: the "
                "last weights are used instead"
            )
            return None
        try:
            return at(folder, update)
        except ConfigError as error:
            say(str(error))
            return None

    def wait(self) -> None:
        """Wait until the last checkpoint is written or has failed."""
        if self._writer is not None:
            self._writer.join()

    def _write(
        self,
        update: int,
        snapshot: Snapshot,
        position: Position | None,
        best: bool,
        announcement: str,
    ) -> None:
        folder = self.folder / BEST if best else self.folder
        incomplete = folder / f".{update}"
        complete = folder / str(update)
        try:
            if self.journal is not None:
                self.journal.sync()
            _remove(incomplete)
            incomplete.mkdir(parents=True)
            self._write_files(incomplete, update, snapshot, position)
            # Read the files as a resumed run would, before an older checkpoint is
            # removed. This detects a malformed meta.json, for example. `write_arrays`
            # has compared the arrays already.
            _verified(incomplete, update)
            # Replace an existing checkpoint of this update: it is damaged, or the run
            # was resumed from an earlier checkpoint and trains the update again.
            _remove(complete)
            incomplete.rename(complete)
            for parent in (folder, self.folder, self.folder.parent):
                sync(parent)
        except Exception as error:
            # Do not raise the error, so that training continues without the checkpoint.
            # The disk may be full, for example.
            _remove(incomplete)
            reason = no_space(error) or described(error)
            say(f"the checkpoint of update {update} was not written: {reason}")
            return
        if announcement:
            say(announcement)
        if best:
            self._remove_old_best(just_written=update)
        else:
            self._remove_old(update)
            self._remove_old_best(just_written=None)

    def _write_files(
        self, folder: Path, update: int, snapshot: Snapshot, position: Position | None
    ) -> None:
        """Write the files of a checkpoint, and sync them to the disk."""
        snapshot.write_arrays(folder)
        meta = Meta(
            update,
            self.plan.examples,
            self.plan.batching.effective_batch_size,
            snapshot.specs(),
            snapshot.values,
            position,
        )
        _write_json(folder / "meta.json", meta.as_json())
        hashes = {file.name: _sha256(file) for file in sorted(folder.iterdir())}
        _write_json(folder / "manifest.json", {"sha256": hashes})
        for path in [*folder.iterdir(), folder]:
            sync(path)

    def _remove_old(self, latest: int) -> None:
        """Keep the last `keep` checkpoints up to `latest`; remove all others.

        Later checkpoints exist if the run was resumed from an earlier checkpoint.
        """
        existing = saved_updates(self.folder)
        later = [update for update in existing if update > latest]
        earlier = [update for update in existing if update <= latest]
        for update in [*later, *earlier[: -self.keep]]:
            _remove(self.folder / str(update))

    def _remove_old_best(self, just_written: int | None) -> None:
        """Remove the checkpoints of earlier best evaluations.

        Keep those to which one of the latest checkpoints refers, since the run may be
        resumed from that one. Keep the `just_written` checkpoint, too: no other refers
        to it yet.
        """
        referred = {just_written}
        for update in saved_updates(self.folder):
            referred.add(_best_update(self.folder / str(update)))
        for update in saved_updates(self.folder / BEST):
            if update not in referred:
                _remove(self.folder / BEST / str(update))


def linked(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Return a copy of a checkpoint in `folder`, which the run does not remove.

    The files are hard links where the file system allows them, and copies elsewhere.

    Raises:
        OSError: a file cannot be read, since the run has removed the checkpoint.
    """
    copy = folder / checkpoint.folder.name
    try:
        shutil.copytree(checkpoint.folder, copy, copy_function=_link)
    except OSError:
        shutil.rmtree(copy, ignore_errors=True)
        raise
    return replace(checkpoint, folder=copy)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def newest(
    folder: Path,
    is_usable: Callable[[Checkpoint], bool] = lambda _: True,
) -> Checkpoint | None:
    """Return the latest intact and usable checkpoint in `folder`, or None.

    Args:
        folder: the folder with the checkpoints. For each damaged checkpoint that is
            skipped, a message is printed.
        is_usable: returns whether to accept an intact checkpoint.

    Raises:
        ConfigError: a checkpoint has another format.
    """
    for update in reversed(saved_updates(folder)):
        path = folder / str(update)
        try:
            checkpoint = _verified(path, update)
        except FormError as damage:
            say(f"the checkpoint {path} is damaged and is not used: {damage}")
            continue
        if is_usable(checkpoint):
            return checkpoint
    return None


def newest_of_run(
    folder: Path,
    is_usable: Callable[[Checkpoint], bool] = lambda _: True,
) -> Checkpoint | None:
    """Return the checkpoint from which a run is resumed, or None.

    It is the newest one that is intact and usable. If there is none, it is that of the
    best evaluation, which is just as complete. For the arguments, see `newest`.
    """
    checkpoint = newest(folder, is_usable)
    if checkpoint is None:
        checkpoint = newest(folder / BEST, is_usable)
        if checkpoint is not None:
            say(f"the checkpoint of the best evaluation is used: {checkpoint.folder}")
    return checkpoint


def intact(folder: Path) -> dict[int, Checkpoint]:
    """Return all intact checkpoints of a run, by update.

    Args:
        folder: the folder with the checkpoints, which may have a subfolder `BEST`.
    """
    checkpoints = {}
    for parent in (folder / BEST, folder):
        for update in saved_updates(parent):
            with suppress(ConfigError):
                checkpoints[update] = at(parent, update)
    return dict(sorted(checkpoints.items()))


def at(folder: Path, update: int) -> Checkpoint:
    """Return the checkpoint of `update` in `folder`.

    Raises:
        ConfigError: the checkpoint is missing, damaged or of another format.
    """
    path = folder / str(update)
    if not path.is_dir():
        raise ConfigError(
            f"the checkpoint {path}", "must exist", update, saved_updates(folder)
        )
    try:
        return _verified(path, update)
    except FormError as damage:
        rule = f"must not be damaged ({damage})"
        raise ConfigError(f"the checkpoint {path}", rule) from damage


def best_update(folder: Path) -> int | None:
    """Return the update of the best evaluation in a folder of checkpoints, or None.

    None means that no checkpoint of a best evaluation is kept.
    """
    kept = saved_updates(folder / BEST)
    if not kept:
        return None
    existing = saved_updates(folder)
    # A best evaluation after the latest checkpoint is in no other checkpoint yet.
    if existing and kept[-1] < existing[-1]:
        return _best_update(folder / str(existing[-1]))
    return kept[-1]


def are_in(folder: Path) -> bool:
    """Return whether a folder has a checkpoint, including that of the best evaluation."""
    return bool(saved_updates(folder) or saved_updates(folder / BEST))


def saved_updates(folder: Path) -> list[int]:
    """Return the updates of the checkpoints in `folder`, in ascending order."""
    if not folder.is_dir():
        return []
    numbers = []
    for path in folder.iterdir():
        name = path.name
        # Accept only names that this package writes: `int` would also accept `007` and
        # `1_000`.
        if name.isascii() and name.isdecimal() and str(int(name)) == name:
            numbers.append(int(name))
    return sorted(numbers)


def _verified(folder: Path, update: int) -> Checkpoint:
    """Verify the checksums of the files in `folder`, and return the checkpoint.

    Raises:
        FormError: the checkpoint is damaged.
        ConfigError: the checkpoint has another format.
    """
    try:
        _verify_files(folder)
        content = read(folder / "meta.json", _META)
    except OSError as error:
        raise FormError(described(error)) from error
    if content["format"] != FORMAT:
        rule = f"must be of format {FORMAT}"
        raise ConfigError(f"the checkpoint {folder}", rule, content["format"])
    if content["update"] != update:
        raise FormError(f"it was written after update {content['update']}")
    return Checkpoint(folder, Meta.from_json(content))


def _verify_files(folder: Path) -> None:
    hashes = read(folder / "manifest.json", {"sha256": {str: str}})["sha256"]
    names = {file.name for file in folder.iterdir()} - {"manifest.json"}
    if names != set(hashes) or "meta.json" not in names:
        existing = ", ".join(sorted(names)) or "none"
        raise FormError(f"manifest.json does not fit the existing files, {existing}")
    for name, expected in hashes.items():
        if _sha256(folder / name) != expected:
            raise FormError(f"{name} does not match manifest.json")


def _best_update(folder: Path) -> int | None:
    """Return the update of the best evaluation in a checkpoint, or None if unknown."""
    # Ignore a checkpoint that is damaged or records no best evaluation.
    with suppress(OSError, ValueError, KeyError, TypeError):
        meta = json.loads((folder / "meta.json").read_bytes())
        return int(meta["values"]["loop"]["best"]["update"])
    return None


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
