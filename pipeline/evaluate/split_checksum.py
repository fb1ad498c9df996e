"""Identifies the data of a split."""

import hashlib
import json
from typing import TYPE_CHECKING, Any

from pipeline.config import key_kinds
from pipeline.config.plain import plain

if TYPE_CHECKING:  # importing this takes seconds
    from pipeline.components.assembly import Parts


def checksum_of(parts: "Parts", split: str) -> str:
    """Return a checksum of the data of a split.

    It covers the checksums of the data, and the config values that select them. Values
    that only say where the data lie, or how they are read, are left out.
    """
    record = parts.record.dataset
    values: dict[str, Any] = {}
    for key, value in dict(plain(parts.spec.dataset)).items():
        is_of_split = key != "validations"
        if is_of_split and not key_kinds.facts_of(f"dataset.{key}").same_data:
            values[key] = value
    identity = [
        values,
        record["name"],
        record["version"],
        record["files"],
        record["examples"].get(split),
        record["content"].get(split),
    ]
    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
