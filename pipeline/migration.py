"""Records of older schemas, brought to the current one.

Raise `SCHEMA` when a key of the config is renamed, removed or given another meaning, and say here how an older
record becomes a newer one. A key that is new needs nothing: the schema's own default is what older code did.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.config import SCHEMA
from pipeline.errors import ConfigError


def _from_0(config: dict[str, Any]) -> dict[str, Any]:
    """Records from before the schema had a version: nothing was renamed since."""
    return config


MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {0: _from_0}


def migrate(config: Mapping[str, Any], run_id: str, environment: Mapping[str, Any]) -> dict[str, Any]:
    """`config` in the current schema.

    Args:
        config: a recorded one.
        run_id, environment: of the run, for what is said.

    Raises:
        ConfigError: it is of a newer schema, or of one that is no longer known.
    """
    migrated, version = dict(config), config.get("schema", 0)
    if version != SCHEMA:
        print(f"the record of {run_id} is of schema {version}: brought to schema {SCHEMA}", file=sys.stderr)
    while version != SCHEMA:
        if version not in MIGRATIONS:
            commit = (environment.get("git") or {}).get("commit") or "its own commit"
            rule = f"must have a record of schema 0 to {SCHEMA}; on the code that made it this runs: "
            raise ConfigError("RUN_ID", f"{rule}git checkout {commit} && pipeline rerun {run_id}", version)
        migrated = MIGRATIONS[version](migrated)
        version += 1
    return {**migrated, "schema": SCHEMA}
