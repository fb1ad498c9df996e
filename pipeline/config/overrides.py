"""Quotes values in the grammar of Hydra's overrides."""

import re


def hydra_quoted(text: object) -> str:
    """Return `text` as a quoted value in Hydra's grammar.

    In this grammar, a backslash is an escape only before a quote. So backslashes before
    a quote are doubled, also those before the closing quote.
    """

    def escape(match: re.Match[str]) -> str:
        backslashes, quote = match.groups()
        return 2 * backslashes + quote.replace("'", "\\'")

    escaped = re.sub(r"(\\*)('|\Z)", escape, str(text))
    return f"'{escaped}'"
