"""Reads and checks the path in the URI of a SQLite store.

SQLAlchemy decodes codes such as `%41` in the path, and reads the text after a `?` as
options. MLflow creates the folder of the path without decoding it. So only paths that
both libraries read in the same way are accepted.
"""

import os
from urllib.parse import unquote

SQLITE = "sqlite:///"


def path_in(uri: str) -> str:
    """Return the path in the URI of a SQLite store, without the options."""
    return uri.removeprefix(SQLITE).partition("?")[0]


def absolute(uri: str) -> str:
    """Return the URI of a store, in which the path of a SQLite file is absolute."""
    if not uri.startswith(SQLITE):
        return uri
    _, mark, options = uri.partition("?")
    return SQLITE + os.path.abspath(path_in(uri)) + mark + options


def misread(uri: str) -> str:
    """Return the rule that the absolute path in a SQLite URI breaks, or "" if none.

    A run records the absolute path. So for a relative path, the path of the working
    directory must follow the rule, too.
    """
    path = os.path.abspath(path_in(uri))
    if "?" in path:
        return f"must have no ? in its path, which would end there: {path}"
    if unquote(path) != path:
        return f"must have no %-code in its path: the path is read as {unquote(path)}"
    return ""


def is_missing(uri: str) -> bool:
    """Return whether a URI is that of a SQLite file that does not exist."""
    if not uri.startswith(SQLITE) or misread(uri):
        return False
    return not os.path.exists(path_in(uri))
