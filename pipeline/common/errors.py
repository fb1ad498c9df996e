"""Exceptions with one-line messages, and functions that print messages."""

import argparse
import difflib
import errno
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from itertools import pairwise
from typing import Any, NoReturn, TextIO

from pipeline.common.secrets import mask

# Environment variable that `--quiet` sets; jobs and workers inherit it.
QUIET = "PIPELINE_QUIET"
NOT_SHIPPED = 4  # exit status if a run's record is not yet complete in the store
# Beginnings of lines in which Keras and TensorFlow state the location of an error. The
# line with the cause follows them.
_PREAMBLE = (
    "Exception encountered when calling ",
    "Graph execution error:",
    "Detected at node",
    "<stack traces",
)
_IN_A_LAYER = re.compile(r"Exception encountered when calling (\w+)\.")
# Matches a line on which a sentence continues, and not one such as OmegaConf's
# `full_key: …`.
_CONTINUATION = re.compile(r"[a-z][a-z\-]*[ ,]")
_TERMINAL_COLOR = re.compile(r"\x1b\[[0-9;]*m")
# Texts that TensorFlow writes around the cause on the same line, each with its
# replacement: positions in the graph, the iterator, the list of all labels, and the
# text around the message of an assertion.
_AROUND_THE_CAUSE = (
    (r"\{\{.*?\}\} | \[Op:.*$", ""),
    (r"^Error in user-defined function .* iterator: Iterator::\S+ ", ""),
    (r" +Label values: .*$", ""),
    (r"^assertion failed: \[(.*?)\] \[Condition .*$", r"\1"),
    (r"^assertion failed: \[([^\[\]]*)\]$", r"\1"),
)
# Texts that MLflow, requests, urllib3 and SQLAlchemy write around the cause of a failed
# request to a store, each with its replacement. What remains is the request and the
# cause, such as `runs/get: Read timed out. (read timeout=30)`.
_REQUEST = (
    r"^API request to (?:endpoint )?(?:\w+://[^/\s]+)?/(?:api/2\.0/mlflow/)?(\S+)"
)
_AROUND_A_STORES_CAUSE = (
    (_REQUEST + r" failed with (?:\w+ )?exception .*\(Caused by (.*)\)$", r"\1: \2"),
    (_REQUEST + r" failed with (?:\w+ )?exception (.*)$", r"\1: \2"),
    (
        _REQUEST + r" failed with error code (\d+) != 200\. Response body: '?<.*$",
        r"\1: the server answered \2",
    ),
    (
        _REQUEST + r" failed with error code (\d+) != 200\. Response body: '(.*?)'?$",
        r"\1: the server answered \2, \3",
    ),
    # urllib3's exceptions and connections.
    (r"(^|: )\w+Error\((['\"])(.*)\2\)$", r"\1\3"),
    (r"(^|: )(?:HTTPS?Connection(?:Pool)?\([^)]*\)|<[^>]*>): ", r"\1"),
    (r"\w*\('Connection aborted\.', \w+\((?:\d+, )?['\"](.*)['\"]\)\)$", r"\1"),
    (r"^\((?:\w+\.)+\w+\) ", ""),  # the exception that SQLAlchemy has wrapped
)
_NOT_GIVEN: Any = object()
_LONGEST_VALUE = 300  # characters; a longer value is cut in messages
_MOST_CHOICES = 40


class ConfigError(Exception):
    """The config or an argument is wrong, and no run was created. Exit status 2.

    Args:
        key: the key of the config, or the name of an argument.
        rule: the rule that the value breaks, such as `must be positive`. The message
            begins with the key and the rule.
        received: the value.
        choices: the accepted values. The message lists them, and suggests a close one.
        similar: accepted values that are too many to list. The message suggests a close
            one.
        meant: what the user probably meant, if no accepted value is close.
    """

    def __init__(
        self,
        key: str,
        rule: str,
        received: object = _NOT_GIVEN,
        choices: Iterable[object] | None = None,
        similar: Iterable[object] | None = (),
        meant: str = "",
    ):
        # Keep all values as text, so that the error can be sent to another process.
        self.key = key
        self.rule = rule
        self.received = None if received is _NOT_GIVEN else _shown(received)
        self.choices: list[str] | None = None
        if choices is not None:
            self.choices = [str(choice) for choice in choices]
        self.close = meant  # a choice that is similar outranks it
        if isinstance(received, str):
            # A key may exist at another place: do not suggest the word received.
            accepted = [*(self.choices or ()), *map(str, similar or ())]
            others = [choice for choice in accepted if choice != received]
            self.close = _nearest(received, others) or meant
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


def _nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the most similar of several names, or None if none is similar."""
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    if matches:
        return matches[0]
    # In a short name, two swapped letters make half of the name differ.
    for other in names:
        if sorted(name) == sorted(other):
            return other
    return None


class DataError(ValueError):
    """The data cannot be read, or has changed; the message is one line."""


class OutOfMemoryError(Exception):
    """Memory ran out, and no smaller micro-batch helps; the message is one line."""


class RunError(Exception):
    """A run failed. Exit status 1.

    The message is one line. It names the file with the traceback, if there is one.
    """


class NotShippedError(Exception):
    """A run has finished training, but its record in the store is incomplete.

    `pipeline sync` uploads the missing parts. Exit status 4.

    Args:
        message: the message, in one line.
        loss: the last loss of the run.
    """

    def __init__(self, message: str, loss: float):
        super().__init__(message)
        self.loss = loss


class StoreError(Exception):
    """The store did not accept a run, which therefore does not train.

    The message is one line, with the command that uploads the run. Exit status 4 for a
    run that has trained before and was to be resumed, otherwise 1.

    Args:
        message: the message.
        has_trained: whether the run was to be resumed.
    """

    def __init__(self, message: str, *, has_trained: bool):
        super().__init__(message)
        self.has_trained = has_trained


class Parser(argparse.ArgumentParser):
    """The argument parser of a verb.

    It raises a `ConfigError` for a wrong command line. Its usage line ends with
    `[overrides]`, because every verb also takes overrides, which this parser does not
    read.
    """

    def format_help(self) -> str:
        """Return the help text."""
        usage = self.format_usage().removeprefix("usage: ").removesuffix("\n")
        if "[overrides" not in usage:
            usage += " [overrides]"
        self.usage = usage.replace("%", "%%")
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Raise a `ConfigError` with a message of argparse."""
        see = f"see {self.prog} --help"
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            raise ConfigError(missing, f"must be given: {see}")
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            rule = f"must be those of {self.prog}: {see}"
            raise ConfigError("arguments", rule, unknown)
        rule = f"of {self.prog} cannot be read ({message}): {see}"
        raise ConfigError("arguments", rule)


def say(*lines: str, to: TextIO | None = None, always: bool = False) -> None:
    """Print lines, with secrets masked and unprintable characters replaced.

    Args:
        lines: the lines to print.
        to: the stream; standard error by default.
        always: whether to print even with `--quiet`.
    """
    if QUIET in os.environ and not always:
        return
    stream = to or sys.stderr
    try:
        for line in lines:
            print(printable(mask(line)), file=stream, flush=True)
    except OSError as error:
        # Ignore the error, so that a run continues even if its terminal, or the reader
        # of its pipe, is gone. Redirect the stream to the null device, so that no later
        # output fails, not even at exit; keep it if only the disk is full.
        with suppress(OSError):
            if error.errno != errno.ENOSPC:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say_id(run_id: str) -> None:
    """With `--quiet`, print a run's ID to standard output; otherwise print nothing."""
    if QUIET in os.environ and run_id:
        say(run_id, to=sys.stdout, always=True)


def count(n: int, noun: str, plural: str = "") -> str:
    """Return `n` followed by the noun, which is in the plural unless `n` is 1.

    By default, the plural is the noun with an s.
    """
    if n == 1:
        return f"{n} {noun}"
    if not plural:
        plural = f"{noun}s"
    return f"{n} {plural}"


def printable(text: str) -> str:
    """Return `text` with `?` in place of each character that is not printable.

    Control characters, line breaks and all blanks except the space are not printable;
    see `str.isprintable`. Names and messages from a store are not trusted, and could
    otherwise control the terminal.
    """
    return "".join(_printable_character(character) for character in text)


def _printable_character(character: str) -> str:
    return character if character.isprintable() else "?"


def first_line(error: BaseException) -> str:
    """Return the line of an exception's message that names the cause.

    This is the first line, unless Keras, AutoGraph or TensorFlow put lines about the
    location of the error before it. If a layer failed, its class is appended. For an
    exception without a message, the name of its type is returned.
    """
    text = _TERMINAL_COLOR.sub("", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    line = _line_of_cause(lines, _is_raised_by_keras(error))
    for pattern, replacement in (*_AROUND_THE_CAUSE, *_AROUND_A_STORES_CAUSE):
        line = re.sub(pattern, replacement, line)
    line = line.rstrip(".")
    layer = _IN_A_LAYER.match(lines[0])
    if layer:
        line += f" (in {layer[1]})"
    return line


def _is_raised_by_keras(error: BaseException) -> bool:
    module = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
    return module.startswith("keras.")


def _line_of_cause(lines: list[str], is_of_keras: bool) -> str:
    """Return the line of a message that names the cause.

    Keras wraps its messages, so the returned line includes those that continue it.
    """
    if "[[{{node PyFunc}}]]" in lines:
        # Python code in the graph raised the error: the message has the exception
        # first, then its traceback, then the exception's message again.
        return _without_preamble(lines)[0]

    # TensorFlow prints the position in the graph on the line after the cause.
    for i, line in enumerate(lines):
        if i > 0 and "[[{{node" in line:
            return lines[i - 1]

    # AutoGraph prints its trace first, and the cause on the last line.
    if lines[0] == "in user code:":
        return lines[-1]

    # Keras failed to infer the shape of a layer's output; the cause follows this line.
    for i, line in enumerate(lines[:-1]):
        if line.endswith("Error encountered:"):
            return lines[i + 1]
    message = _without_preamble(lines)
    return _sentence(message) if is_of_keras else message[0]


def _without_preamble(lines: list[str]) -> list[str]:
    for i, line in enumerate(lines):
        if not line.startswith(_PREAMBLE):
            return lines[i:]
    return lines


def _sentence(lines: list[str]) -> str:
    """Return the first line, with the lines on which Keras continues its sentence."""
    sentence = lines[0]
    for before, line in pairwise(lines):
        has_ended = before.endswith((".", ":", "!", "?"))
        if has_ended or not _CONTINUATION.match(line):
            break
        sentence += f" {line}"
    return sentence


def described(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def no_space(error: BaseException) -> str:
    """Return the cause of an exception if a disk is full; otherwise an empty text.

    TensorFlow and `shutil` wrap the error of the operating system in errors of their
    own, whose messages name their temporary files.
    """
    cause = os.strerror(errno.ENOSPC)
    return cause if cause in str(error) else ""


@contextmanager
def exits_as_failures() -> Iterator[None]:
    """Raise a `RunError` if the user's code in the block calls `exit`.

    The exit status of that call, which may be 0, must not become that of the command.
    """
    try:
        yield
    except SystemExit as error:
        raise RunError(f"the run's code called exit({error.code!r})") from error


@contextmanager
def as_config_error(
    key: str, rule: str, received: object, way: str = ""
) -> Iterator[None]:
    """Convert exceptions in the block to a `ConfigError` about `key`.

    The message has the `rule`, then the exception's message in parentheses, then `way`,
    advice on how to avoid the error, if given. A `ConfigError` is raised unchanged.
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
    # Mask secrets before cutting the text, as half a secret would not be recognized.
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
