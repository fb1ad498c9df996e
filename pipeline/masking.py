"""Secrets kept out of whatever is written: the one place that knows what a secret looks like."""

from __future__ import annotations

import json
import os
import re
from typing import Any
from urllib.parse import quote, quote_plus

HIDDEN = "***"
_CREDENTIALS = re.compile(r"(?<=://)[^/\s\"']+@")  # to the last @: a password may hold one
_IN_QUERY = re.compile(r"(?<=[?&])([\w\-]*(?:token|secret|passw|key|signature|sig)[\w\-]*=)[^&\s\"']+", re.IGNORECASE)
_SECRET_NAMES = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|APIKEY|_(KEY|PASS|PWD|PAT|AUTH)$", re.IGNORECASE
)
_SHORTEST_SECRET = 6  # characters: masking shorter values would hide half of every text


def mask(text: str) -> str:
    """`text` without the user and password of any URI, and without what secret environment variables hold."""
    text = _IN_QUERY.sub(rf"\g<1>{HIDDEN}", _CREDENTIALS.sub(f"{HIDDEN}@", text))
    secrets = {form for name, value in os.environ.items() if _SECRET_NAMES.search(name) for form in _forms(value)}
    for secret in sorted(secrets, key=len, reverse=True):  # one may hold another
        text = text.replace(secret, HIDDEN)
    return text


def masked(node: Any) -> Any:
    """A plain config, each text in it masked: YAML would fold a long secret over two lines."""
    if isinstance(node, dict):
        return {key: masked(value) for key, value in node.items()}
    if isinstance(node, list):
        return [masked(value) for value in node]
    return mask(node) if isinstance(node, str) else node


def _forms(value: str) -> set[str]:
    """The ways in which Python, JSON and URLs write `value`; each line of it, as a private key has many."""
    backslashes = value.replace("\\", "\\\\")
    forms = {backslashes, backslashes.replace("'", "\\'"), repr(value)[1:-1], json.dumps(value)[1:-1]}
    forms |= {json.dumps(value, ensure_ascii=False)[1:-1], quote(value, safe=""), quote_plus(value), quote(value)}
    forms |= {value, value.strip(), *(line.strip() for line in value.splitlines())}
    return {form for form in forms if len(form) >= _SHORTEST_SECRET}
