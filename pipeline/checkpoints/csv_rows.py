"""Lets a resumed run continue the file of a `keras.callbacks.CSVLogger`.

In `on_train_begin`, Keras empties the file, unless the user has set `append`. A resumed
run keeps the rows up to its checkpoint, and removes those of the epochs that it trains
again.
"""

import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras


def keep_rows(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Let each `CSVLogger` append to its file; call it before `on_train_begin`."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True


def state_of(logger: keras.callbacks.CSVLogger) -> dict[str, Any]:
    """Return the columns, and the length and a checksum of the file so far."""
    content = _content(logger)
    return {"keys": logger.keys, "bytes": len(content), "crc": zlib.crc32(content)}


def restore(logger: keras.callbacks.CSVLogger, state: Mapping[str, Any]) -> None:
    """Remove the rows after the checkpoint; call it after `on_train_begin`.

    If the file does not begin with the content at the checkpoint, nothing is changed.
    """
    length = state["bytes"]
    content = _content(logger)
    if zlib.crc32(content[:length]) != state["crc"]:
        return
    logger.keys = state["keys"]
    logger.append_header = length == 0
    if len(content) > length:
        os.truncate(logger.filename, length)


def _content(logger: keras.callbacks.CSVLogger) -> bytes:
    """Return the content of the file; empty if it is not a file on a local disk."""
    path = Path(logger.filename)
    return path.read_bytes() if path.is_file() else b""
