"""A Parquet file that is written in parts, so that a killed command can continue.

    OUT.parts/identity.json     what the rows depend on
    OUT.parts/BATCHES.parquet   rows up to that number of batches, since the part before
    OUT.parts/whole.parquet     all parts, once the last one is written
    OUT                         a link to that file; OUT.parts is then removed

Each file appears atomically, and is on the disk before the next one is begun. OUT never
replaces a file.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.common import durable
from pipeline.common.errors import ConfigError

KEY = "--out"  # names the file in errors
# A part has at least this many rows or bytes. The bytes bound the memory; the rows
# bound what is computed again after a kill.
ROWS = 4096
BYTES = 2**24
_WHOLE = "whole.parquet"


class PartFiles:
    """The parts of one file; create it with `opened`.

    Attributes:
        out: the file to write.
        batches_done: the number of batches whose rows are in the parts.
        rows_done: the number of these rows.
    """

    def __init__(self, out: Path):
        self.out = out
        self.batches_done = 0
        self.rows_done = 0
        self._folder = _folder_of(out)
        for part in self._parts():
            self.batches_done = int(part.stem)
            self.rows_done += pq.read_metadata(part).num_rows
        self._tables: list[pa.Table] = []
        self._batches = self.batches_done

    def add(self, table: pa.Table) -> None:
        """Add the rows of the next batch; write a part if there are enough rows."""
        self._tables.append(table)
        self._batches += 1
        rows = sum(entry.num_rows for entry in self._tables)
        size = sum(entry.nbytes for entry in self._tables)
        if rows >= ROWS or size >= BYTES:
            self._write()

    def finish(self) -> None:
        """Write the file from the parts, and remove them.

        Raises:
            ConfigError: the file has appeared since the command began. The parts stay.
        """
        self._write()
        parts = self._parts()
        new = self._folder / _WHOLE
        with pq.ParquetWriter(new, pq.read_schema(parts[0])) as writer:
            for part in parts:
                writer.write_table(pq.read_table(part))
        durable.sync(new)
        try:
            _move_to_free_name(new, self.out)
        except FileExistsError as error:
            rule = (
                "must be a file that does not exist, but it has appeared meanwhile: move "
                f"it away and repeat the command, which takes the rows in {self._folder}"
            )
            raise ConfigError(KEY, rule, str(self.out)) from error
        durable.sync(self.out.parent)
        shutil.rmtree(self._folder)

    def _write(self) -> None:
        if not self._tables:
            return
        table = pa.concat_tables(self._tables)
        part = self._folder / f"{self._batches:010d}.parquet"
        new = part.with_name(f".{part.name}")
        pq.write_table(table, new)
        durable.sync(new)
        new.replace(part)
        durable.sync(self._folder)
        self.batches_done = self._batches
        self.rows_done += table.num_rows
        self._tables = []

    def _parts(self) -> list[Path]:
        return sorted(self._folder.glob("[0-9]*.parquet"))


def check_free(out: Path) -> None:
    """Check that a file does not exist, and can be created.

    If the file was made from its parts, these are removed.

    Raises:
        ConfigError: the file exists, or its folder does not exist.
    """
    if out.exists():
        whole = _folder_of(out) / _WHOLE
        if whole.exists() and whole.samefile(out):
            shutil.rmtree(whole.parent, ignore_errors=True)
        raise ConfigError(KEY, "must be a file that does not exist", str(out))
    if not out.parent.is_dir():
        raise ConfigError(KEY, "must lie in a folder that exists", str(out))


@contextmanager
def opened(out: Path, identity: Mapping[str, Any]) -> Iterator[PartFiles]:
    """Yield the parts of a file: new ones, or those that an earlier command began.

    Args:
        out: the file to write.
        identity: what the rows depend on, as JSON.

    Raises:
        ConfigError: there are parts of other rows, or another process writes the file.
    """
    folder = _folder_of(out)
    text = json.dumps(identity, indent=1, sort_keys=True) + "\n"
    folder.mkdir(exist_ok=True)
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        rule = "must be a file that no other process is writing"
        raise ConfigError(KEY, rule, str(out)) from error
    try:
        file = folder / "identity.json"
        if not file.exists():
            durable.write_text(file, text)
        elif file.read_text(encoding="utf-8") != text:
            rule = (
                f"must be a different file, since {folder} contains a part of other "
                "predictions"
            )
            raise ConfigError(KEY, rule, str(out))
        yield PartFiles(out)
    finally:
        lock.release()


def _move_to_free_name(file: Path, target: Path) -> None:
    """Give a file another name in place of its own, or in addition to it.

    Raises:
        FileExistsError: there is a file of this name.
    """
    try:
        os.link(file, target)
    except FileExistsError:
        raise
    except OSError:
        # The file system has no hard links. Reserve the name, which is then replaced.
        target.touch(exist_ok=False)
        file.replace(target)


def _folder_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.parts")
