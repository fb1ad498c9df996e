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


def _from_0(config: dict[str, Any]) -> dict[str, Any]:
    """Migrate a record from before the schema had a version: nothing was renamed since."""
    return config


MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {0: _from_0}


def check(config: Mapping[str, Any], run_id: str, environment: Mapping[str, Any]) -> None:
    """Refuse a record that this code cannot read, before anything of it is believed.

    Args:
        config: a recorded one, not checked yet.
        run_id, environment: of the run, for what is said.

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
    short = type(version) is int and abs(version) < 10**9  # anything else may be without end
    raise ConfigError("RUN_ID", rule, version if short else type(version).__name__)


def migrate(config: Mapping[str, Any], run_id: str) -> dict[str, Any]:
    """Return `config` in the current schema.

    Args:
        config: a recorded one that `check` let pass.
        run_id: of the run, for what is said.
    """
    migrated, version = dict(config), config.get("schema", 0)
    if version != SCHEMA:
        say(f"the record of {run_id} is of schema {version}: brought to schema {SCHEMA}")
    while version != SCHEMA:
        migrated = MIGRATIONS[version](migrated)
        version += 1
    return {**migrated, "schema": SCHEMA}
