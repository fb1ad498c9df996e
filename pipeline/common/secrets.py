"""Keeps secrets out of everything that is written. Only this module knows what a secret looks like."""

import json
import os
import re
from urllib.parse import quote, quote_plus, unquote, unquote_plus

HIDDEN = "***"
# Up to the last @ of the word, since a password may contain any character, even a slash or a quote; without a colon,
# and so without a password, up to the last @ before a slash, where the path starts.
_CREDENTIALS = re.compile(r"(?<=://)(?:[^/\s:@]*:\S*|[^/\s\"']+)@")
# In a text that is a URI, or an override with one, up to the last @ of the line: a blank belongs to the password.
_WHOLE = re.compile(r"\A([+~]*(?:[\w.\-]+=)?[\"']?[\w+\-]+://)[^/:@\n]*:.*@")
# `viewStateShareKey` of MLflow's pages names a saved view.
_NAME = r"((?:[?&;]|%3B)(?!viewStateShareKey=)[\w\-]*(?:token|secret|passw|pwd|key|sig|odbc_connect)[\w\-]*(?:=|%3D))"
# A quote or full stop after the value belongs to the sentence around it.
_IN_QUERY = re.compile(_NAME + r"[^&\s]+?(?=[\"')\]}.,:]*(?:[&\s]|$))", re.IGNORECASE)
_QUERY_VALUE = re.compile(_NAME + r"([^&;\n]+)", re.IGNORECASE)
# In an override: where a secret is.
_SECRET_FILE = re.compile(
    r"""(secret_file['"]?\s*[=:]\s*(?!\s|null)['"]?)((?<=')[^']+|(?<=")[^"]+|[^\s,}'"]+)"""
)
_SECRET_NAMES = re.compile(
    r"TOKEN|SECRET|PASSW(OR)?D|PASSPHRASE|CREDENTIAL|APIKEY|_(KEY|PASS|PWD|PAT|AUTH)$",
    re.I,
)
_remembered: set[str] = (
    set()
)  # of this process: errors quote pieces of URIs that no pattern recognizes
_SHORTEST_SECRET = 6  # characters: masking shorter values would hide half of every text


def remember(uri: str) -> None:
    """Mask the secrets of this URI, and pieces of them, wherever they occur from now on.

    An error may quote a piece: of `http://me:Hunter7#x@host` a parser reports 'Hunter7', a port that is no number.
    """
    rest = uri.partition("://")[2]
    user, colon, password = rest.rpartition("@")[0].partition(":")
    secrets = (
        set() if "/" in user else {password if colon else user}
    )  # after a slash it is a path
    # An ODBC string is a query of its own; not all of its values are secrets.
    values = (
        found
        for text in (rest, unquote_plus(rest))
        for found in _QUERY_VALUE.finditer(text)
    )
    secrets |= {found[2] for found in values if "odbc_connect" not in found[1].lower()}
    for form in {
        form
        for secret in secrets
        for form in (secret, unquote(secret), unquote_plus(secret))
    }:
        _remembered.update({form, *re.split(r"[:@/?#]", form)})


def mask(text: str) -> str:
    """Mask credentials of URIs in `text`, remembered secrets, and the values of secret environment variables."""
    text = _CREDENTIALS.sub(f"{HIDDEN}@", _WHOLE.sub(rf"\g<1>{HIDDEN}@", text))
    text = _SECRET_FILE.sub(rf"\g<1>{HIDDEN}", _IN_QUERY.sub(rf"\g<1>{HIDDEN}", text))
    values = _remembered | {
        value for name, value in os.environ.items() if _SECRET_NAMES.search(name)
    }
    secrets = {form for value in values for form in _forms(value)}
    for secret in sorted(secrets, key=len, reverse=True):  # one may contain another
        text = text.replace(secret, HIDDEN)
    return text


def _forms(value: str) -> set[str]:
    """Return the ways in which Python, JSON and URLs write `value`, and each of its lines: a private key has many."""
    backslashes = value.replace("\\", "\\\\")
    forms = {
        backslashes,
        backslashes.replace("'", "\\'"),
        repr(value)[1:-1],
        json.dumps(value)[1:-1],
    }
    forms |= {
        json.dumps(value, ensure_ascii=False)[1:-1],
        quote(value, safe=""),
        quote_plus(value),
        quote(value),
    }
    forms |= {value, value.strip(), *(line.strip() for line in value.splitlines())}
    return {form for form in forms if len(form) >= _SHORTEST_SECRET}
