"""The path in the URI of a SQLite store.

SQLAlchemy decodes `%41` in it, and takes what follows a `?` for options. MLflow makes
the folder of the path as it is written. So a path is used only where all of them read
the same.
"""

import os
from urllib.parse import unquote

SQLITE = "sqlite:///"


def path_in(uri: str) -> str:
    """Return the path that a URI of SQLite names, without its options."""
    return uri.removeprefix(SQLITE).partition("?")[0]


def absolute(uri: str) -> str:
    """Return the URI of a store, with the absolute path of a SQLite file."""
    if not uri.startswith(SQLITE):
        return uri
    _, mark, options = uri.partition("?")
    return SQLITE + os.path.abspath(path_in(uri)) + mark + options


def misread(uri: str) -> str:
    """Return the rule that the absolute path of a SQLite file breaks; empty for none.

    A run records the absolute path, so that of the working folder counts, too.
    """
    path = os.path.abspath(path_in(uri))
    if "?" in path:
        return f"must have no ? in its path, which ends there: {path}"
    if unquote(path) != path:
        return f"must have no %-code in its path, which is read as {unquote(path)}"
    return ""
