"""Marks the parameters of long tables: `make test` takes a few of them.

`make test-all` takes more, and `make soak` the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(
    values: Iterable[Any], fast: Collection[Any], slow: Collection[Any] | None = None
) -> list[Any]:
    """Return the values as parameters; a tuple holds several arguments.

    Args:
        values: all parameters of the test.
        fast: those that get no mark.
        slow: those that are marked slow; all others are marked soak. None to mark all
            others slow.
    """
    values = list(values)
    chosen = list(fast)
    if slow is not None:
        chosen += slow
    unknown = [value for value in chosen if value not in values]
    assert not unknown, f"a renamed parameter would be tested by nobody: {unknown}"

    parameters = []
    for value in values:
        if value in fast:
            parameters.append(value)
            continue
        mark = pytest.mark.soak
        if slow is None or value in slow:
            mark = pytest.mark.slow
        arguments = value if isinstance(value, tuple) else (value,)
        parameters.append(pytest.param(*arguments, marks=mark))
    return parameters
