"""Records of older schemas, brought to the current one.

Raise `SCHEMA` when a key of the config is renamed, removed or given another meaning, and say here how an older
record becomes a newer one. A key that is new needs nothing: the schema's own default is what older code did.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.config import SCHEMA
from pipeline.errors import ConfigError, say

# Of an older version → what makes the next one of it. Of 0, before there were versions, nothing was renamed.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {0: dict}


def check(config: Mapping[str, Any], run_id: str, environment: Mapping[str, Any]) -> None:
    """Refuse a record that this code cannot read, before anything of it is believed.

    Raises:
        ConfigError: it is of a newer schema, or of one that is no longer known.
    """
    version = config.get("schema", 0)
    if type(version) is int and (version == SCHEMA or version in MIGRATIONS):
        return
    # Of hexadecimal digits, since it is to be typed into a shell.
    commit = str((environment.get("git") or {}).get("commit"))
    on = f"git checkout {commit} && " if re.fullmatch(r"[0-9a-f]{7,64}", commit) else "on its own commit: "
    rule = f"must have a record of schema 0 to {SCHEMA}; the code that made it runs it: {on}pipeline rerun {run_id}"
    short = type(version) is int and abs(version) < 10**9  # anything else may be long
    raise ConfigError("RUN_ID", rule, version if short else type(version).__name__)


def migrate(config: Mapping[str, Any], run_id: str) -> dict[str, Any]:
    """Return `config`, which `check` let pass, in the current schema."""
    migrated, version = dict(config), config.get("schema", 0)
    if version != SCHEMA:
        say(f"the record of {run_id} is of schema {version}: brought to schema {SCHEMA}")
    while version != SCHEMA:
        migrated = MIGRATIONS[version](migrated)
        version += 1
    return {**migrated, "schema": SCHEMA}
