"""Keeps secrets out of everything that is written.

Only this module knows what a secret looks like.
"""

import json
import os
import re
from urllib.parse import quote, quote_plus, unquote, unquote_plus

HIDDEN = "***"

# The credentials of a URI within a text. With a password, they reach up to the last @
# in the word, since a password may contain any character, even a slash or a quote.
# Without a colon, and so without a password, they end at the last @ before a slash,
# where the path starts.
_CREDENTIALS = re.compile(r"(?<=://)(?:[^/\s:@]*:\S*|[^/\s\"']+)@")
# In a text that is a URI, or an override with one, the credentials reach up to the last
# @ of the line, as a blank is part of the password.
_CREDENTIALS_OF_LINE = re.compile(
    r"\A([+~]*(?:[\w.\-]+=)?[\"']?[\w+\-]+://)[^/:@\n]*:.*@"
)
# The name of a secret in a query. `viewStateShareKey` of MLflow's pages names a saved
# view, and is not a secret.
_NAME = (
    r"((?:[?&;]|%3B)(?!viewStateShareKey=)"
    r"[\w\-]*(?:token|secret|passw|pwd|key|sig|odbc_connect)[\w\-]*(?:=|%3D))"
)
# A quote or full stop after the value belongs to the sentence around it.
_IN_QUERY = re.compile(_NAME + r"[^&\s]+?(?=[\"')\]}.,:]*(?:[&\s]|$))", re.IGNORECASE)
_QUERY_VALUE = re.compile(_NAME + r"([^&;\n]+)", re.IGNORECASE)
# The path of a file with a secret, in an override or in YAML.
_SECRET_FILE = re.compile(
    r"""(secret_file['"]?\s*[=:]\s*(?!\s|null)['"]?)"""
    r"""((?<=')[^']+|(?<=")[^"]+|[^\s,}'"]+)"""
)
# Environment variables with secrets, by a part of their name.
_SECRET_PARTS = re.compile(
    r"TOKEN|SECRET|PASSW(OR)?D|PASSPHRASE|CREDENTIAL|APIKEY", re.IGNORECASE
)
# The same by a word of their name, such as MY_KEY_PROD, unless they only say something
# about a secret, such as SSH_AUTH_SOCK and KEY_TYPE. PWD alone is a folder.
_WORDS = r"(KEY|PASS|PWD|PAT|AUTH|COOKIE|JWT|BEARER|SAS|DSN)S?[0-9]*"
_SECRET_WORDS = re.compile(rf"_{_WORDS}(_|$)|^{_WORDS}_", re.IGNORECASE)
_ABOUT_SECRETS = re.compile(
    r"_(SOCK|FILE|PATH|DIR|NAME|TYPE|KIND|MODE|METHOD|ALGORITHM|SIZE|LENGTH|VERSION)$",
    re.IGNORECASE,
)
# Masking shorter values would hide half of every text.
_SHORTEST_SECRET = 6  # characters

# The secrets of this process. Errors quote pieces of URIs that no pattern recognizes.
_remembered: set[str] = set()


def remember(uri: str) -> None:
    """Mask the secrets of this URI, and pieces of them, from now on.

    An error may quote a piece: for `http://me:Hunter7#x@host`, a parser reports the
    port 'Hunter7', which is not a number.
    """
    rest = uri.partition("://")[2]
    secrets = _credentials(rest)
    for text in (rest, unquote_plus(rest)):
        for match in _QUERY_VALUE.finditer(text):
            # An ODBC string is a query of its own. Not all of its values are secrets.
            if "odbc_connect" not in match[1].lower():
                secrets.add(match[2])
    for secret in secrets:
        for form in (secret, unquote(secret), unquote_plus(secret)):
            _remembered.update({form, *re.split(r"[:@/?#]", form)})


def _credentials(rest: str) -> set[str]:
    """Return the password of a URI without its scheme, or its user if it has none."""
    user, colon, password = rest.rpartition("@")[0].partition(":")
    if "/" in user:
        return set()  # After a slash it is a path.
    return {password} if colon else {user}


def mask(text: str) -> str:
    """Mask the secrets in `text`.

    They are credentials of URIs, remembered secrets, and the values of environment
    variables whose names are those of secrets.
    """
    text = _CREDENTIALS_OF_LINE.sub(rf"\g<1>{HIDDEN}@", text)
    text = _CREDENTIALS.sub(f"{HIDDEN}@", text)
    text = _IN_QUERY.sub(rf"\g<1>{HIDDEN}", text)
    text = _SECRET_FILE.sub(rf"\g<1>{HIDDEN}", text)

    values = set(_remembered)
    for name, value in os.environ.items():
        if _names_secret(name):
            values.add(value)
    secrets: set[str] = set()
    for value in values:
        secrets.update(_forms(value))
    # The longest first, as one secret may contain another.
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def _names_secret(variable: str) -> bool:
    """Return whether an environment variable of this name holds a secret."""
    if _SECRET_PARTS.search(variable):
        return True
    if _ABOUT_SECRETS.search(variable):
        return False
    return _SECRET_WORDS.search(variable) is not None


def _forms(value: str) -> set[str]:
    """Return the forms in which Python, JSON and URLs write `value`.

    Each of its lines is a form, too: a private key has many lines.
    """
    backslashes_doubled = value.replace("\\", "\\\\")
    forms = {
        value,
        value.strip(),
        backslashes_doubled,
        backslashes_doubled.replace("'", "\\'"),
        repr(value)[1:-1],
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        quote(value, safe=""),
        quote_plus(value),
        quote(value),
    }
    forms.update(line.strip() for line in value.splitlines())
    return {form for form in forms if len(form) >= _SHORTEST_SECRET}
