"""Masks secrets in all text that is printed, logged or written to a file.

Only this module has rules that recognize a secret.
"""

import json
import os
import re
from urllib.parse import quote, quote_plus, unquote, unquote_plus

HIDDEN = "***"

# Matches the credentials of a URI within a text. With a password, they extend to the
# last @ in the word, as a password may contain any character, even a slash or a quote.
# Without a colon there is no password, and they end at the last @ before a slash, where
# the path starts.
_CREDENTIALS = re.compile(r"(?<=://)(?:[^/\s:@]*:\S*|[^/\s\"']+)@")
# If the whole text is a URI, or an override with a URI, the credentials extend to the
# last @ in the line, as the password may contain blanks.
_CREDENTIALS_OF_LINE = re.compile(
    r"\A([+~]*(?:[\w.\-]+=)?[\"']?[\w+\-]+://)[^/:@\n]*:.*@"
)
# Matches the name of a secret parameter in the query of a URI. `viewStateShareKey` in
# MLflow's pages names a saved view, and is not a secret.
_NAME = (
    r"((?:[?&;]|%3B)(?!viewStateShareKey=)"
    r"[\w\-]*(?:token|secret|passw|pwd|key|sig|odbc_connect)[\w\-]*(?:=|%3D))"
)
# Does not match punctuation after the value, as it is part of the sentence around it.
_IN_QUERY = re.compile(_NAME + r"[^&\s]+?(?=[\"')\]}.,:]*(?:[&\s]|$))", re.IGNORECASE)
_QUERY_VALUE = re.compile(_NAME + r"([^&;\n]+)", re.IGNORECASE)
# Matches the key and the path of a file with a secret, in an override or in YAML.
_SECRET_FILE = re.compile(
    r"""(secret_file['"]?\s*[=:]\s*(?!\s|null|['"]?None\b)['"]?)"""
    r"""((?<=')[^']+|(?<=")[^"]+|[^\s,}'"]+)"""
)
# Matches a part of the name of an environment variable that holds a secret.
_SECRET_PARTS = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW(OR)?D|PASSPHRASE|CREDENTIAL|APIKEY", re.IGNORECASE
)
# Matches the name of a variable that may hold a number of tokens, such as MAX_TOKENS.
_TOKENS = re.compile(r"TOKENS(_|$)", re.IGNORECASE)
# Matches a whole word in such a name, such as MY_KEY_PROD. Names that match
# `_ABOUT_SECRETS`, such as SSH_AUTH_SOCK and KEY_TYPE, are excluded, as they only
# describe a secret. PWD alone does not match: it is the working directory.
_WORDS = r"(KEY|PASS|PWD|PAT|AUTH|COOKIE|JWT|BEARER|SAS|DSN)S?[0-9]*"
_SECRET_WORDS = re.compile(
    rf"_{_WORDS}(_|$)|^{_WORDS}_|^(?!PWD$){_WORDS}$", re.IGNORECASE
)
_ABOUT_SECRETS = re.compile(
    r"_(SOCK|FILE|PATH|DIR|NAME|TYPE|KIND|MODE|METHOD|ALGORITHM|SIZE|LENGTH|VERSION)$",
    re.IGNORECASE,
)
# Shorter values are not masked, as they occur in ordinary text.
_SHORTEST_SECRET = 6  # characters

# Secrets that are masked wherever they occur. They are needed because errors quote
# pieces of URIs that no pattern recognizes.
_remembered: set[str] = set()


def remember(uri: str) -> None:
    """From now on, mask the secrets in `uri`, and pieces of them, in any text.

    An error may quote a piece: for `http://me:Hunter7#x@host`, a parser reports that
    the port 'Hunter7' is not a number.
    """
    rest = uri.partition("://")[2]
    secrets = _credentials(rest)
    for text in (rest, unquote_plus(rest)):
        for match in _QUERY_VALUE.finditer(text):
            # Skip a whole ODBC string: its parameters are matched separately, and not
            # all of them are secrets.
            if "odbc_connect" not in match[1].lower():
                secrets.add(match[2])
    for secret in secrets:
        for form in (secret, unquote(secret), unquote_plus(secret)):
            _remembered.update({form, *re.split(r"[:@/?#]", form)})


def _credentials(rest: str) -> set[str]:
    """Return a set with the password in a URI, or with the user name if it has none.

    `rest` is the URI without its scheme. The set is empty if the only `@` is in the
    path.
    """
    user, colon, password = rest.rpartition("@")[0].partition(":")
    if "/" in user:
        return set()  # The @ is part of a path.
    return {password} if colon else {user}


def mask(text: str) -> str:
    """Mask the secrets in `text`.

    These are credentials and secret parameters in URIs, paths of secret files,
    remembered secrets, and the values of environment variables whose names suggest a
    secret.
    """
    text = _CREDENTIALS_OF_LINE.sub(rf"\g<1>{HIDDEN}@", text)
    text = _CREDENTIALS.sub(f"{HIDDEN}@", text)
    text = _IN_QUERY.sub(rf"\g<1>{HIDDEN}", text)
    text = _SECRET_FILE.sub(rf"\g<1>{HIDDEN}", text)

    values = set(_remembered)
    for name, value in os.environ.items():
        if _names_secret(name) and not _is_token_count(name, value):
            values.add(value)
    secrets: set[str] = set()
    for value in values:
        secrets.update(_forms(value))
    # Replace the longest first, as one secret may contain another.
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def _names_secret(variable: str) -> bool:
    """Return whether an environment variable holds a secret, judging by its name."""
    if _SECRET_PARTS.search(variable):
        return True
    if _ABOUT_SECRETS.search(variable):
        return False
    return _SECRET_WORDS.search(variable) is not None


def _is_token_count(variable: str, value: str) -> bool:
    """Return whether the value of an environment variable is a number of tokens.

    The same number may be the value of a config key, which has to stay readable.
    """
    return _TOKENS.search(variable) is not None and value.strip().isdecimal()


def _forms(value: str) -> set[str]:
    """Return the forms in which Python, JSON and URLs write `value`.

    Each line of `value` is also a form, as a private key has many lines. Forms that are
    too short to be masked are left out.
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
