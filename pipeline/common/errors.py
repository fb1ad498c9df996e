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

# Environment variable that `--quiet` sets, for jobs and workers, too.
QUIET = "PIPELINE_QUIET"
NOT_SHIPPED = 4  # exit status
# Lines of TensorFlow that name no cause.
PREAMBLE = ("Graph execution error:", "Detected at node", "<stack traces")
_NOT_GIVEN: Any = object()
_LONGEST_VALUE = 300  # characters
_MOST_CHOICES = 40


class ConfigError(Exception):
    """The config or the arguments are wrong, and nothing was created. Exit status 2.

    Args:
        key: Of the config, or the name of an argument.
        rule: That the value broke, such as `must be positive`. The message begins with
            the key and the rule.
        received: The value.
        choices: The accepted values, which are listed. A close one is suggested.
        similar: Accepted values that are too many to list. A close one is suggested.
    """

    def __init__(
        self,
        key: str,
        rule: str,
        received: object = _NOT_GIVEN,
        choices: Iterable[object] | None = None,
        similar: Iterable[object] | None = (),
    ):
        # All is kept as text, so that the error can be sent to another process.
        self.key = key
        self.rule = rule
        self.received = None if received is _NOT_GIVEN else _shown(received)
        self.choices: list[str] | None = None
        if choices is not None:
            self.choices = [str(choice) for choice in choices]
        self.close = ""
        if isinstance(received, str):
            accepted = [*(self.choices or ()), *map(str, similar or ())]
            matches = difflib.get_close_matches(received, accepted, n=1, cutoff=0.7)
            if matches:
                self.close = matches[0]
        super().__init__(key, rule)

    def __str__(self) -> str:
        line = f"{self.key} {self.rule}."
        if self.received is not None:
            line += f" Received: {self.received}."
        if self.choices is not None:
            listed = self.choices[:_MOST_CHOICES]
            more = len(self.choices) - len(listed)
            if more:
                listed.append(f"and {more} more")
            line += f" Choices: {', '.join(listed) or 'none'}."
        if self.close:
            line += f" Did you mean {self.close!r}?"
        return printable(" ".join(line.split()))


class DataError(ValueError):
    """The data cannot be read, or have changed; the message is one line."""


class OutOfMemoryError(Exception):
    """Memory ran out, and no smaller micro-batch helps; the message is one line."""


class RunError(Exception):
    """A run failed. Exit status 1.

    The message is one line, and names the file with the traceback.
    """


class NotShippedError(Exception):
    """A run trained, but a part of it is not in the store. Exit status 4.

    `pipeline sync` ships the rest.

    Args:
        message: One line.
        loss: The last loss of the run.
    """

    def __init__(self, message: str, loss: float):
        super().__init__(message)
        self.loss = loss


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as a `ConfigError`."""

    def error(self, message: str) -> NoReturn:
        rule = f"must be as {self.prog} --help says ({message})"
        raise ConfigError("arguments", rule)


def say(*lines: str, to: TextIO | None = None, always: bool = False) -> None:
    """Print lines without secrets and control characters.

    Args:
        lines: What to print.
        to: Where; standard error by default.
        always: Whether to print with `--quiet`, too.
    """
    if QUIET in os.environ and not always:
        return
    stream = to or sys.stderr
    try:
        for line in lines:
            print(printable(mask(line)), file=stream, flush=True)
    except OSError as error:
        # The run goes on, and is closed, even if its terminal or the reader of its pipe
        # is gone. From then on nothing fails that prints there, at exit included.
        with suppress(OSError):
            if error.errno != errno.ENOSPC:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say_id(run_id: str) -> None:
    """With `--quiet`, print a run's ID alone to standard output."""
    if QUIET in os.environ and run_id:
        say(run_id, to=sys.stdout, always=True)


def printable(text: str) -> str:
    """Return `text` with `?` for each control character.

    The names and messages of a store are not trusted.
    """
    return "".join(_printable_character(character) for character in text)


def _printable_character(character: str) -> str:
    return character if character.isprintable() else "?"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message; its type if it has none."""
    # TensorFlow appends its position in the graph.
    text = re.sub(r"\{\{.*?\}\} | \[Op:\w+\].*", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # AutoGraph puts its trace first.
    line = lines[-1] if lines[0] == "in user code:" else lines[0]
    return line.rstrip(".")


def cause(error: BaseException) -> str:
    """Return the cause that TensorFlow names.

    Its position in the graph and its iterator are left out.
    """
    line = _line_of_cause(error)
    line = re.sub(r"\{\{.*?\}\} | \[Op:.*$", "", line)
    iterator = r"^Error in user-defined function .* iterator: Iterator::\S+ "
    line = re.sub(iterator, "", line)
    line = re.sub(r"^assertion failed: \[(.*?)\] \[Condition .*$", r"\1", line)
    return line.rstrip(".")


def _line_of_cause(error: BaseException) -> str:
    """Return the line before that of the position in the graph."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "[[{{node PyFunc}}]]" in lines:
        # Python code raised it: the exception comes first, then its traceback, then its
        # message once more.
        for line in lines:
            if not line.startswith(PREAMBLE):
                return line
    positions = [i for i, line in enumerate(lines) if "[[{{node" in line]
    if positions and positions[0] > 0:
        return lines[positions[0] - 1]
    return first_line(error)


def described(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


@contextmanager
def exits_as_failures() -> Iterator[None]:
    """Turn an exit of the user's code into a failure.

    The status of that exit, which may be 0, is not that of the command.
    """
    try:
        yield
    except SystemExit as error:
        raise RunError(f"code of the run has called exit({error.code!r})") from error


@contextmanager
def refused(key: str, rule: str, received: object, way: str = "") -> Iterator[None]:
    """Turn any error into a `ConfigError` about `key`.

    The `rule` is followed by the error in parentheses, and by a `way` on.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = described(error)
        if isinstance(error, ValueError):
            reason = first_line(error)
        rule = f"{rule} ({reason})"
        if way:
            rule += f": {way}"
        raise ConfigError(key, rule, received) from error


def _shown(value: object) -> str:
    # It is masked before it is cut: half a secret would not be recognized.
    text = mask(_yaml(value))
    if len(text) <= _LONGEST_VALUE:
        return text
    return f"{text[: _LONGEST_VALUE - 1]}…"


def _yaml(value: object) -> str:
    """Return a value as a user would write it in YAML."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        entries = [f"{key}: {_yaml(entry)}" for key, entry in value.items()]
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    return repr(value)
