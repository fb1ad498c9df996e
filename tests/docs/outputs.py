"""Compares the output that a page shows with what its command printed.

A page shows the output of one run. Of another one these may differ:

    …                       stands for any text, or none
    a line break            is a space, since a page wraps long lines
    a run ID                may be any
    3 ms, 55 MiB            a time, a size or a speed may be any
    loss 0.4911             a loss, an accuracy or a rate may differ by a tenth: other
                            processors round differently, and training amplifies it
    0.2175                  any other number with a decimal point may be any

Everything else has to be equal: words, names of metrics, counts.
"""

from __future__ import annotations

import re

import pytest

PIECE = re.compile(
    r"(?P<some_words> … )"
    r"|(?P<anything>…)"
    r"|(?P<run_id>\b[0-9a-f]{32}\b)"
    r"|\b\d[\d.,]* (?P<unit>s|ms|MiB|examples/s)(?!\w)"
    r"|(?P<name>\b(?:loss|accuracy|lr)) (?P<value>\d+\.\d+)"
    r"|(?P<decimal>-?\d+\.\d+(?:e[+-]?\d+)?)"
)
NUMBER = r"-?\d[\d.,]*(?:e[+-]?\d+)?"
TOLERANCE = 0.1


def is_shown(shown: str, printed: str) -> bool:
    """Return whether a page that shows `shown` is right about `printed`."""
    pattern, values = pattern_of(one_line(shown))
    match = re.fullmatch(pattern, one_line(printed))
    if match is None:
        return False
    found = [float(text) for text in match.groups()]
    return found == pytest.approx(values, rel=TOLERANCE)


def one_line(text: str) -> str:
    return " ".join(text.split())


def pattern_of(shown: str) -> tuple[str, list[float]]:
    """Return the pattern of an output, and the values that its groups should have."""
    pattern = ""
    values = []
    end = 0
    for piece in PIECE.finditer(shown):
        pattern += re.escape(shown[end : piece.start()])
        end = piece.end()
        if piece["some_words"]:
            pattern += "(?: .*?)? "
        elif piece["anything"]:
            pattern += ".*?"
        elif piece["run_id"]:
            pattern += "[0-9a-f]{32}"
        elif piece["unit"]:
            pattern += f"{NUMBER} {piece['unit']}"
        elif piece["name"]:
            pattern += rf"{piece['name']} (\d+\.\d+)"
            values.append(float(piece["value"]))
        else:
            pattern += NUMBER
    return pattern + re.escape(shown[end:]), values
