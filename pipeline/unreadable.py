"""Which example of which file could not be read: TensorFlow says what was wrong with it, and not where it is."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from pipeline.dataset import Data
from pipeline.errors import DataError, first_line, say
from pipeline.tracking.checksums import Files

SECONDS = 120.0  # of reading the splits once more


@contextmanager
def located(data: Data, files: Files) -> Iterator[None]:
    """Raise an error of reading `data` as one line that names the example, where one is found that cannot be read.

    Raises:
        DataError: the data could not be read.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if "Iterator" not in str(error) and not isinstance(error, tf.errors.DataLossError):
            raise  # of the model
        files.check()
        found = _first(data)
        if not found and "Iterator::" not in str(error):
            raise  # of the model, too: an error after the batch was got may name that step
        raise DataError(f"the data cannot be read: {found or _cause(error)}") from error


def _cause(error: tf.errors.OpError) -> str:
    """Return what was wrong, without where in its graph and in which of its iterators TensorFlow was."""
    lines = [line.strip() for line in str(error).splitlines()]
    before = next((number for number, line in enumerate(lines) if "[[{{node" in line), 0)
    said = lines[before - 1] if before else first_line(error)
    said = re.sub(r"\{\{.*?\}\} | \[Op:.*$", "", said)
    said = re.sub(r"^assertion failed: \[(.*?)\] \[Condition .*$", r"\1", said)
    return re.sub(r"^Error in user-defined function .* iterator: Iterator::\S+ ", "", said).rstrip(".")


def _first(data: Data) -> str:
    """Return the first example that cannot be read, and why; empty where all can, or the search takes too long."""
    say("an example could not be read: looking for it")
    until = time.monotonic() + SECONDS
    for name, split in data.splits.items():
        examples = iter(split)
        for number in itertools.count():
            try:
                if next(examples, None) is None:
                    break
            except tf.errors.OpError as error:
                return (
                    f"example {number} of the {name} split{_file(data, name, number)}, counted from 0: {_cause(error)}"
                )
            if time.monotonic() > until:
                return ""
    return ""


def _file(data: Data, name: str, number: int) -> str:
    for shard in data.shards.get(name, ()):
        if number < shard.examples:
            return f", which is example {shard.first + number} of {shard.path}"
        number -= shard.examples
    return ""
