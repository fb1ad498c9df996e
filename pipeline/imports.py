"""Imports that nobody needs, left out of the start."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Makes `import` of these packages fail, as where they are not installed; one that is loaded already stays.

    Large libraries import others for a corner of what they do, and do without where those are missing. Afterwards
    everything can be imported again.
    """
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None is how Python marks such a name
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
