"""Text of the command line in the grammar of Hydra's overrides."""

import re


def hydra_quoted(text: object) -> str:
    """Return `text` as a quoted value in Hydra's grammar.

    A backslash escapes only before a quote, so those before one are doubled.
    """

    def escape(match: re.Match[str]) -> str:
        backslashes, quote = match.groups()
        return 2 * backslashes + quote.replace("'", "\\'")

    escaped = re.sub(r"(\\*)('|\Z)", escape, str(text))
    return f"'{escaped}'"
