"""A cache that is kept between runs: one file per entry in the user's cache folder; it may be deleted at any time."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.common import recorded


def place(kind: str, key: str) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "pipeline" / kind / hashlib.sha256(key.encode()).hexdigest()


def recall(file: Path, form: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry in `file`; an empty dict if it cannot be read, or is not of the `form` that `recorded` takes."""
    with suppress(OSError, recorded.FormError):
        return dict(recorded.read(file, form))
    return {}


def remember(file: Path, entry: Mapping[str, object]) -> None:
    """Write `entry` to `file`; without a home directory or room on the disk, nothing is cached."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, delete=False, encoding="utf-8"
        ) as new:
            json.dump(entry, new)
        os.replace(new.name, file)
