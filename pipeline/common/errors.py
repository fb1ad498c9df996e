"""Errors that are shown in one line: wrong input, and a run that failed."""

import argparse
import difflib
import errno
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, NoReturn, TextIO

from pipeline.common.secrets import mask

QUIET = "PIPELINE_QUIET"  # environment variable: set by `--quiet`, also for jobs and workers
NOT_SHIPPED = 4  # exit status
PREAMBLE = (
    "Graph execution error:",
    "Detected at node",
    "<stack traces",
)  # lines of TensorFlow's that name no cause
_NOT_GIVEN: Any = object()
_Some = Iterable[object] | None
_LONGEST = 300  # characters of a value
_MOST = 40  # choices that are listed


class ConfigError(Exception):
    """The config or the arguments are wrong, and nothing was created. Exit status 2.

    The message begins with the `key`, of the config or an argument, and the `rule` that the value `received` broke. Of
    the accepted values, the `choices`, or those `similar` where they are too many to list, a close one is suggested.
    """

    def __init__(
        self,
        key: str,
        rule: str,
        received: object = _NOT_GIVEN,
        choices: _Some = None,
        similar: _Some = (),
    ):
        # Kept as text, so that the error can be pickled and sent to another process.
        self.key, self.rule = key, rule
        self.received = None if received is _NOT_GIVEN else _shown(received)
        self.choices = None if choices is None else [str(choice) for choice in choices]
        self.close = ""
        if isinstance(received, str):
            accepted = [*(self.choices or ()), *map(str, similar or ())]
            self.close = next(
                iter(difflib.get_close_matches(received, accepted, n=1, cutoff=0.7)), ""
            )
        super().__init__(key, rule)

    def __str__(self) -> str:
        line = f"{self.key} {self.rule}."
        if self.received is not None:
            line += f" Received: {self.received}."
        if self.choices is not None:
            more = len(self.choices) - _MOST
            listed = self.choices[:_MOST] + ([f"and {more} more"] if more > 0 else [])
            line += f" Choices: {', '.join(listed) or 'none'}."
        if self.close:
            line += f" Did you mean {self.close!r}?"
        return printable(" ".join(line.split()))


class DataError(ValueError):
    """The data cannot be read, or have changed; the message is one line."""


class OutOfMemoryError(Exception):
    """Memory ran out, and no smaller micro-batch helps; the message is one line."""


class RunError(Exception):
    """A run failed. The message is one line and names the file with the traceback. Exit status 1."""


class NotShippedError(Exception):
    """A run trained to its last `loss`, but a part is not in the store: see `pipeline sync`. Exit status 4."""

    def __init__(self, message: str, loss: float):
        super().__init__(message)
        self.loss = loss


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as a `ConfigError`."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            "arguments", f"must be as {self.prog} --help says ({message})"
        )


def say_id(run_id: str) -> None:
    """Print a run's ID alone to standard output, with `--quiet`."""
    if QUIET in os.environ and run_id:
        say(run_id, to=sys.stdout, always=True)


def printable(text: str) -> str:
    """Return `text` with `?` for each control character, since a store's names and messages are not trusted."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def say(*lines: str, to: TextIO | None = None, always: bool = False) -> None:
    """Print lines to standard error, or `to`, without secrets and control characters; if quiet, only if `always`."""
    if QUIET in os.environ and not always:
        return
    stream = to or sys.stderr
    try:
        for line in lines:
            print(printable(mask(line)), file=stream, flush=True)
    except OSError as error:  # the run goes on, and is closed, even if its terminal or the reader of its pipe is gone
        with suppress(OSError):
            if (
                error.errno != errno.ENOSPC
            ):  # then nothing fails any more that prints there, also at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type if it has no message."""
    text = re.sub(
        r"\{\{.*?\}\} | \[Op:\w+\].*", "", str(error)
    )  # TensorFlow's position in its graph
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [
        type(error).__name__
    ]
    return (lines[-1] if lines[0] == "in user code:" else lines[0]).rstrip(
        "."
    )  # AutoGraph puts its trace first


def cause(error: BaseException) -> str:
    """Return the cause that TensorFlow names, without its position in the graph and its iterator."""
    lines = [said for line in str(error).splitlines() if (said := line.strip())]
    before = next(
        (number for number, line in enumerate(lines) if "[[{{node" in line), 0
    )
    if (
        "[[{{node PyFunc}}]]" in lines
    ):  # of Python code: the exception, its traceback, and its message once more
        before = 1 + next(
            number for number, line in enumerate(lines) if not line.startswith(PREAMBLE)
        )
    said = lines[before - 1] if before else first_line(error)
    said = re.sub(r"\{\{.*?\}\} | \[Op:.*$", "", said)
    said = re.sub(
        r"^Error in user-defined function .* iterator: Iterator::\S+ ", "", said
    )
    return re.sub(r"^assertion failed: \[(.*?)\] \[Condition .*$", r"\1", said).rstrip(
        "."
    )


def _shown(value: object) -> str:
    text = mask(_yaml(value))  # before it is cut: half a secret would not be recognized
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


@contextmanager
def exits_as_failures() -> Iterator[None]:
    """Turn an exit of the user's code into a failure: its status, which may be 0, is not that of the command."""
    try:
        yield
    except SystemExit as error:
        raise RunError(f"code of the run has called exit({error.code!r})") from error


@contextmanager
def refused(key: str, rule: str, received: object) -> Iterator[None]:
    """Turn any error into a `ConfigError` about `key`, whose rule ends with the error in parentheses."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        cause = first_line(error) if isinstance(error, ValueError) else described(error)
        raise ConfigError(key, f"{rule} ({cause})", received) from error


def described(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def _yaml(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{key}: {_yaml(entry)}" for key, entry in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return repr(value)
