"""Secrets kept out of whatever is written: the one place that knows what a secret looks like."""

from __future__ import annotations

import json
import os
import re
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus

HIDDEN = "***"
# To the last @ of the word, since a password may hold any sign, a slash and a quote too; without a colon, where no
# password is, to the last @ before a slash, which starts a path.
_CREDENTIALS = re.compile(r"(?<=://)(?:[^/\s:@]*:\S*|[^/\s\"']+)@")
# Of a text that is a URI, or an override with one, to the last @ of the line: there a blank belongs to the password.
_WHOLE = re.compile(r"\A([+~]*(?:[\w.\-]+=)?[\"']?[\w+\-]+://)[^/:@\n]*:.*@")
# `viewStateShareKey` of MLflow's pages names a saved view.
_NAME = (
    r"((?:[?&;]|%3B)(?!viewStateShareKey=)"
    r"[\w\-]*(?:token|secret|passw|pwd|key|signature|sig|odbc_connect)[\w\-]*(?:=|%3D))"
)
# A quote or a full stop that ends the sentence around it stays.
_IN_QUERY = re.compile(_NAME + r"[^&\s]+?(?=[\"')\]}.,:]*(?:[&\s]|$))", re.IGNORECASE)
_QUERY_VALUE = re.compile(_NAME + r"([^&;\n]+)", re.IGNORECASE)
_SECRET_NAMES = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|APIKEY|_(KEY|PASS|PWD|PAT|AUTH)$", re.IGNORECASE
)
_remembered: set[str] = set()  # of this process: what fails has no other way to say which URI it was about
_SHORTEST_SECRET = 6  # characters: masking shorter values would hide half of every text


def remember(uri: str) -> None:
    """From here on the secrets of this URI are masked wherever they stand, in pieces too.

    What fails to read an address names the piece that it stumbled over, which looks like no URI any more: of
    `http://me:Hunter7#x@host` a parser says that the port is no number, 'Hunter7'.
    """
    rest = uri.partition("://")[2]
    user, colon, password = rest.rpartition("@")[0].partition(":")
    secrets = set() if "/" in user else {password if colon else user}  # after a slash it is a path
    # The string for ODBC is a query of its own, whose other values are no secrets.
    values = (found for text in (rest, unquote_plus(rest)) for found in _QUERY_VALUE.finditer(text))
    secrets |= {found[2] for found in values if "odbc_connect" not in found[1].lower()}
    for form in {form for secret in secrets for form in (secret, unquote(secret), unquote_plus(secret))}:
        _remembered.update({form, *re.split(r"[:@/?#]", form)})


def mask(text: str) -> str:
    """Mask the user and password of any URI in `text`, those of the URIs in use, and what secret environment
    variables hold."""
    text = _CREDENTIALS.sub(f"{HIDDEN}@", _WHOLE.sub(rf"\g<1>{HIDDEN}@", text))
    text = _IN_QUERY.sub(rf"\g<1>{HIDDEN}", text)
    values = _remembered | {value for name, value in os.environ.items() if _SECRET_NAMES.search(name)}
    secrets = {form for value in values for form in _forms(value)}
    for secret in sorted(secrets, key=len, reverse=True):  # one may hold another
        text = text.replace(secret, HIDDEN)
    return text


def masked(node: Any) -> Any:
    """Mask each text in a plain config: YAML would fold a long secret over two lines."""
    if isinstance(node, dict):
        return {key: masked(value) for key, value in node.items()}
    if isinstance(node, list):
        return [masked(value) for value in node]
    return mask(node) if isinstance(node, str) else node


def _forms(value: str) -> set[str]:
    """Return the ways in which Python, JSON and URLs write `value`, and each of its lines: a private key has many."""
    backslashes = value.replace("\\", "\\\\")
    forms = {backslashes, backslashes.replace("'", "\\'"), repr(value)[1:-1], json.dumps(value)[1:-1]}
    forms |= {json.dumps(value, ensure_ascii=False)[1:-1], quote(value, safe=""), quote_plus(value), quote(value)}
    forms |= {value, value.strip(), *(line.strip() for line in value.splitlines())}
    return {form for form in forms if len(form) >= _SHORTEST_SECRET}
