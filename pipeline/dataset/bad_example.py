"""Finds which example of which file cannot be read: TensorFlow reports only why."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from pipeline.common.errors import DataError, first_line, say
from pipeline.common.signals import Terminated
from pipeline.dataset.checksums import DataFiles
from pipeline.dataset.splits import Data

SECONDS = 120.0  # limit of the search, which reads the splits once more
SILENCE = 5.0  # seconds of searching before a line says so


@contextmanager
def located(data: Data, files: DataFiles) -> Iterator[None]:
    """Turn an error of reading `data` into a `DataError` that names the example.

    If the example is not found, the `DataError` has TensorFlow's reason. Errors of the
    model pass through. A file in `files` that has changed is reported instead.
    """
    try:
        yield
    except tf.errors.OpError as error:
        text = str(error)
        in_loader = bool(data.loaders) and "[[IteratorGetNext]]" in text
        is_of_data = (
            in_loader
            or "Iterator::" in text
            or isinstance(error, tf.errors.DataLossError)
        )
        may_be_of_data = "Iterator" in text and not isinstance(
            error, tf.errors.ResourceExhaustedError
        )
        if not is_of_data and not may_be_of_data:
            raise
        files.check()

        # An error in padding or in a user's loader concerns a batch, not an example.
        place = ""
        if not in_loader and "[dataset.pad" not in text:
            place = _search(data)
        # Every example can be read: the text named the iterator after a good batch.
        if not place and not is_of_data:
            raise
        # The error of a loader names the batch.
        cause = first_line(error).removeprefix("DataError: ")
        raise DataError(f"the data cannot be read: {place or cause}") from error


def _search(data: Data) -> str:
    """Return what `_first_unreadable` returns; an interrupt ends only the search."""
    try:
        return _first_unreadable(data)
    except (KeyboardInterrupt, Terminated):
        return ""


def _first_unreadable(data: Data) -> str:
    """Return the first example that cannot be read, and why.

    The text is empty if all can be read, or if the search takes too long.
    """
    start = time.monotonic()
    announced = False
    for name, split in data.splits.items():
        examples = iter(split)
        for number in itertools.count():
            try:
                example = next(examples, None)
            except tf.errors.OpError as error:
                place = f"example {number} of the {name} split"
                # If a split is shorter than its cardinality, no file is at fault.
                if "expected to contain" not in str(error):
                    place += _place_in_file(data, name, number)
                return f"{place}, counted from 0: {first_line(error)}"
            if example is None:
                break

            elapsed = time.monotonic() - start
            if elapsed > SECONDS:
                return ""
            if not announced and elapsed > SILENCE:
                say("an example could not be read: looking for it")
                announced = True
    return ""


def _place_in_file(data: Data, name: str, number: int) -> str:
    """Return where in a file an example of a split is; empty if that is unknown."""
    shards = data.shards.get(name, ())
    stored_examples = sum(shard.examples for shard in shards)
    if stored_examples != int(data.splits[name].cardinality()):
        return ""  # examples were filtered out or added
    for shard in shards:
        if number < shard.examples:
            return f", which is example {shard.first + number} of {shard.path}"
        number -= shard.examples
    return ""
