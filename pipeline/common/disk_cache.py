"""A cache that is kept between runs, with one file per entry.

It is in the user's cache folder, and may be deleted at any time.
"""

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
    """Return the file of the entry of this `kind` with this `key`."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = hashlib.sha256(key.encode()).hexdigest()
    return Path(home) / "pipeline" / kind / name


def recall(file: Path, form: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry in `file`, or an empty dict.

    The dict is empty if the file cannot be read or does not have the `form`.
    `pipeline.common.recorded` describes forms.
    """
    with suppress(OSError, recorded.FormError):
        return dict(recorded.read(file, form))
    return {}


def remember(file: Path, entry: Mapping[str, object]) -> None:
    """Write `entry` to `file`.

    Without a home directory, or on a full disk, nothing is cached.
    """
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, delete=False, encoding="utf-8"
        ) as new:
            json.dump(entry, new)
        os.replace(new.name, file)
