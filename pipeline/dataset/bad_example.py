"""Finds which example of which file could not be read: TensorFlow reports what is wrong, but not where."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from pipeline.common.errors import DataError, cause, say
from pipeline.common.signals import Terminated
from pipeline.dataset.checksums import Files
from pipeline.dataset.splits import Data

SECONDS = 120.0  # limit of the search, which reads the splits once more
SILENCE = 5.0  # seconds of searching before a line says so


@contextmanager
def located(data: Data, files: Files) -> Iterator[None]:
    """Turn an error of reading `data` into a DataError that names the example that cannot be read, if it is found."""
    try:
        yield
    except tf.errors.OpError as error:
        of_loader = bool(data.loaders) and "[[IteratorGetNext]]" in str(error)
        of_data = (
            of_loader
            or "Iterator::" in str(error)
            or isinstance(error, tf.errors.DataLossError)
        )
        if not of_data and (
            "Iterator" not in str(error)
            or isinstance(error, tf.errors.ResourceExhaustedError)
        ):
            raise  # of the model
        files.check()
        try:
            # What fails in padding or in a user's loader is of a whole batch.
            found = "" if of_loader or "[dataset.pad" in str(error) else _first(data)
        except (KeyboardInterrupt, Terminated):  # interrupts only the search
            found = ""
        if not found and not of_data:
            raise  # of the model, too: an error after the batch was read may name that step
        raise DataError(f"the data cannot be read: {found or cause(error)}") from error


def _first(data: Data) -> str:
    """Return the first example that cannot be read, and why; empty where all can, or the search takes too long."""
    start, silent = time.monotonic(), True
    for name, split in data.splits.items():
        examples = iter(split)
        for number in itertools.count():
            try:
                if next(examples, None) is None:
                    break
            except tf.errors.OpError as error:
                # The split is shorter than its cardinality: no example of a file is at fault.
                place = (
                    ""
                    if "expected to contain" in str(error)
                    else _file(data, name, number)
                )
                return f"example {number} of the {name} split{place}, counted from 0: {cause(error)}"
            elapsed = time.monotonic() - start
            if elapsed > SECONDS:
                return ""
            if silent and elapsed > SILENCE:
                say("an example could not be read: looking for it")
                silent = False
    return ""


def _file(data: Data, name: str, number: int) -> str:
    shards = data.shards.get(name, ())
    if sum(shard.examples for shard in shards) != int(data.splits[name].cardinality()):
        return ""  # examples were filtered out or added
    for shard in shards:
        if number < shard.examples:
            return f", which is example {shard.first + number} of {shard.path}"
        number -= shard.examples
    return ""
