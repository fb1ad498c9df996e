"""The one error that a user's input can cause, said in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(Exception):
    """The config or the arguments are wrong; nothing has been created. Exit status 2.

    Args:
        key: dotted name of the config key, or the command-line argument.
        rule: what the value must be, as the end of a sentence that starts with the key.
        received: the value that broke the rule; left out of the line when it is not given.
        choices: the values that would have been accepted, where they can be counted.
    """

    _UNSAID = object()

    def __init__(self, key: str, rule: str, received: object = _UNSAID, choices: Iterable[object] | None = None):
        self.key, self.rule, self.received = key, rule, received
        self.choices = None if choices is None else [str(choice) for choice in choices]
        super().__init__(self.key, self.rule)

    def __str__(self) -> str:
        line = f"{self.key} {self.rule}."
        if self.received is not self._UNSAID:
            line += f" Received: {self.received!r}."
        if self.choices is not None:
            line += f" Choices: {', '.join(self.choices) or 'none'}."
            close = difflib.get_close_matches(str(self.received), self.choices, n=1)
            if close and close[0] != str(self.received):
                line += f" Did you mean {close[0]!r}?"
        return " ".join(line.split())
