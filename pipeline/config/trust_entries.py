"""Parses the entries of `trust.allow` and `--allow`: names of code, and places.

A place is a folder or URI in which artifacts may lie.
"""

import re
from collections.abc import Iterable

from pipeline.common.errors import ConfigError

DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
# Matches an absolute folder or a URI.
_PLACE = re.compile(r"(/|[a-z][a-z0-9+\-]*:/)[^\\\r\n\t]*", re.ASCII)


def check_allowed(allow: Iterable[str]) -> None:
    """Reject an entry that is neither a dotted name nor a place."""
    for entry in allow:
        if not (DOTTED.fullmatch(entry) or _PLACE.fullmatch(entry)):
            rule = (
                "must list dotted names, such as mypkg.models, and places, such as "
                "/folder or https://host/path"
            )
            raise ConfigError("trust.allow", rule, entry)


def allowed_names(allow: Iterable[str]) -> list[str]:
    """Return the entries that are dotted names of code."""
    return [entry for entry in allow if DOTTED.fullmatch(entry)]


def allowed_places(allow: Iterable[str]) -> list[str]:
    """Return the entries that are folders or URIs of artifacts."""
    return [entry for entry in allow if _PLACE.fullmatch(entry)]
