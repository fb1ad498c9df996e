"""Finds the example that cannot be read, and its file.

TensorFlow's error gives only the reason.
"""

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from pipeline.common.errors import DataError, first_line
from pipeline.common.signals import Terminated
from pipeline.dataset.checksums import DataFiles
from pipeline.dataset.search_time import SearchTime
from pipeline.dataset.splits import Data

# The step that gets the next element: in a traced function, and outside of one.
_NEXT = ("[[IteratorGetNext]]", "__wrapped__IteratorGetNext")

_OUR_ERROR = re.compile(r"^([a-z]+\.)*(DataError|ConfigError): ")


@contextmanager
def errors_located(data: Data, files: DataFiles) -> Iterator[None]:
    """Raise a `DataError` in place of an error that occurs while reading `data`.

    The `DataError` names the example, or gives TensorFlow's reason if the example is
    not found. If a file in `files` has changed, the error names that file instead.
    Errors of the model are raised unchanged.
    """
    try:
        yield
    except tf.errors.OpError as error:
        text = str(error)
        in_loader = bool(data.loaders) and any(name in text for name in _NEXT)
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
        # Raise the error unchanged if every example can be read: errors of the model
        # may mention the iterator, too.
        if not place and not is_of_data:
            raise
        # An error in a loader already names the batch or the rule.
        cause = _OUR_ERROR.sub("", first_line(error))
        raise DataError(f"the data cannot be read: {place or cause}") from error


def _search(data: Data) -> str:
    """Return the result of `_first_unreadable`, or "" if the search is interrupted."""
    try:
        return _first_unreadable(data)
    except (KeyboardInterrupt, Terminated):
        return ""


def _first_unreadable(data: Data) -> str:
    """Return a phrase with the first unreadable example and the reason.

    The phrase is empty if all examples can be read, or if the search takes too long.
    """
    search_time = SearchTime("an example could not be read: looking for it")
    for name, split in data.splits.items():
        examples = iter(split)
        for number in itertools.count():
            try:
                example = next(examples, None)
            except tf.errors.OpError as error:
                place = f"example {number} of the {name} split"
                # Do not name a file if the split merely has fewer examples than its
                # cardinality states.
                if "expected to contain" not in str(error):
                    place += _place_in_file(data, name, number)
                return f"{place}, counted from 0: {first_line(error)}"
            if example is None:
                break
            if search_time.is_over():
                return ""
    return ""


def _place_in_file(data: Data, name: str, number: int) -> str:
    """Return a phrase with the file of an example, or "" if the file is unknown."""
    shards = data.shards.get(name, ())
    stored_examples = sum(shard.examples for shard in shards)
    if stored_examples != int(data.splits[name].cardinality()):
        return ""  # examples were filtered out or added
    for shard in shards:
        if number < shard.examples:
            return f", which is example {shard.first + number} of {shard.path}"
        number -= shard.examples
    return ""
