"""The entries of `trust.allow` and `--allow`: dotted names of code, and places of artifacts."""

import re
from collections.abc import Iterable

from pipeline.common.errors import ConfigError

DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_PLACE = re.compile(
    r"(/|[a-z][a-z0-9+\-]*:/)[^\\\r\n\t]*", re.ASCII
)  # a folder or a URI


def check_allowed(allow: Iterable[str]) -> None:
    for entry in allow:
        if not (DOTTED.fullmatch(entry) or _PLACE.fullmatch(entry)):
            rule = "must list dotted names, such as mypkg.models, and places, such as /folder or https://host/path"
            raise ConfigError("trust.allow", rule, entry)


def allowed_names(allow: Iterable[str]) -> list[str]:
    return [entry for entry in allow if DOTTED.fullmatch(entry)]


def allowed_places(allow: Iterable[str]) -> list[str]:
    return [entry for entry in allow if _PLACE.fullmatch(entry)]
