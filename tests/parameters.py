"""Parameters of which `make test` takes a few, and `make test-all` all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Return the values as parameters; those not in `fast` are marked slow. A tuple holds several arguments."""
    values = list(values)
    assert all(value in values for value in fast), "a parameter that was renamed would be tested by nobody"
    return [value if value in fast else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
