"""A cache on disk that is kept between runs, with one file per entry.

The files are in the user's cache folder, and may be deleted at any time.
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
    """Return the path of the file for the entry with the given `kind` and `key`."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = hashlib.sha256(key.encode()).hexdigest()
    return Path(home) / "pipeline" / kind / name


def recall(file: Path, form: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry in `file`, or an empty dict if there is no valid entry.

    An entry is valid if it has the `form`; `pipeline.common.recorded` describes forms.
    """
    with suppress(OSError, recorded.FormError):
        return dict(recorded.read(file, form))
    return {}


def remember(file: Path, entry: Mapping[str, object]) -> None:
    """Write `entry` to `file`.

    If the file cannot be written, for example on a full disk, nothing is cached.
    """
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, delete=False, encoding="utf-8"
        ) as new:
            json.dump(entry, new)
        os.replace(new.name, file)
