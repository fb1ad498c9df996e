"""The check of an argument that has a few choices, such as a mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_choice(
    name: str, value: Any, choices: Sequence[bool | str], remark: str = ""
) -> None:
    """Reject a value that is none of the choices.

    Args:
        name: the name of the argument.
        value: its value. The number 1 is not the choice True.
        choices: the allowed values, at least two.
        remark: an addition to the rule in the message.

    Raises:
        ValueError: the value is none of the choices.
    """
    for choice in choices:
        if isinstance(value, type(choice)) and value == choice:
            return
    *others, last = map(str, choices)
    rule = f"{name} must be {', '.join(others)} or {last}{remark}"
    raise ValueError(f"{rule}. Received: {value!r}")
