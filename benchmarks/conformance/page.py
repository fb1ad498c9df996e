"""The tables of docs/conformance.md, from docs/conformance.json."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.conformance.cases import CASES, Case
from benchmarks.conformance.outcome import Outcome
from benchmarks.conformance.ways import LIBRARIES, Call, Library

BEGIN = "<!-- what benchmarks.conformance writes -->"
END = "<!-- its end -->"
WORDS = {
    "right": "right",
    "wrong": "**wrong**",
    "raises": "**raises**",
    "none": "—",
}


class Column(NamedTuple):
    """A column of the table of outcomes."""

    library: Library
    call: Call


def text(results: Mapping[str, Any]) -> str:
    """Return the text between the two comments; `results` are those of the JSON."""
    notes: list[str] = []
    paragraphs = [outcomes(results, notes)]
    if notes:
        paragraphs.append(_numbered(notes))
    paragraphs += ["## The cases", _cases()]
    paragraphs += ["## How each is called", _calls(results)]
    return "\n\n".join(paragraphs)


def outcomes(results: Mapping[str, Any], notes: list[str]) -> str:
    """Return a row for each case and a column for each way.

    Explanations are added to `notes`.
    """
    columns = _columns(results)
    titles = [column.call.title for column in columns]
    lines = [
        f"| case | {' | '.join(titles)} |",
        f"| --- |{' --- |' * len(columns)}",
    ]
    for case in CASES:
        cells = []
        for library, call in columns:
            outcomes_by_case = results[library.module]["outcomes"][call.name]
            cells.append(cell(case, outcomes_by_case, notes))
        lines.append(f"| {case.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(case: Case, outcomes: Mapping[str, Any], notes: list[str]) -> str:
    """Return a verdict with its figure, and the number of its note, if it has one."""
    if case.name not in outcomes:
        return ""
    outcome = Outcome(**outcomes[case.name])
    words = WORDS[outcome.verdict(case)]
    if outcome.rows not in (None, 1):
        words += f" {outcome.rows:g} rows,"
    if outcome.error is not None:
        words += f" {outcome.error:.1g}"

    parts = []
    if outcome.raised:
        parts.append(f"`` {outcome.raised} ``")
    if outcome.note:
        parts.append(outcome.note)
    note = "; ".join(parts)
    if not note:
        return words
    if note not in notes:
        notes.append(note)
    return f"{words} [{notes.index(note) + 1}]"


def _columns(results: Mapping[str, Any]) -> list[Column]:
    """Return the ways that were measured, in the order of `LIBRARIES`."""
    columns = []
    for library in LIBRARIES:
        if library.module in results:
            columns += [Column(library, call) for call in library.calls]
    return columns


def _numbered(notes: list[str]) -> str:
    lines = []
    for number, note in enumerate(notes, 1):
        lines.append(f"{number}. {note[0].upper()}{note[1:]}.")
    return "\n".join(lines)


def _cases() -> str:
    rows = [f"| {case.title} | {case.trap} |" for case in CASES]
    return "\n".join(["| case | what goes wrong |", "| --- | --- |", *rows])


def _calls(results: Mapping[str, Any]) -> str:
    lines = ["| column | called | versions | measured |", "| --- | --- | --- | --- |"]
    for library, call in _columns(results):
        result = results[library.module]
        versions = [f"{name} {version}" for name, version in result["versions"].items()]
        day = time.strftime("%-d %B %Y", time.gmtime(result["begun"]))
        cells = [f"[{call.title}]({call.page})", call.how, ", ".join(versions), day]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
