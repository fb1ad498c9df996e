"""Parameters of which `make test` takes a few, `make test-all` more, and `make soak` the rest of long tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(
    values: Iterable[Any], fast: Collection[Any], slow: Collection[Any] | None = None
) -> list[Any]:
    """Return the values as parameters. A tuple holds several arguments.

    Those not in `fast` are marked slow; of these, where `slow` is given, those not in it are marked soak.
    """
    values = list(values)
    assert all(value in values for value in (*fast, *(slow or ()))), (
        "a renamed parameter would be tested by nobody"
    )

    def parameter(value: Any) -> Any:
        if value in fast:
            return value
        mark = pytest.mark.slow if slow is None or value in slow else pytest.mark.soak
        return pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=mark
        )

    return [parameter(value) for value in values]
