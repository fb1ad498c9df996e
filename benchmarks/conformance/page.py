"""The tables of docs/conformance.md, from docs/conformance.json."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.conformance.cases import CASES, Case
from benchmarks.conformance.outcome import Outcome
from benchmarks.conformance.ways import LIBRARIES, Call, Library

BEGIN, END = "<!-- what benchmarks.conformance writes -->", "<!-- its end -->"


def text(results: Mapping[str, Any]) -> str:
    """Return what stands between the two comments; `results` is by library, as in the JSON."""
    notes: list[str] = []
    tables = [
        outcomes(results, notes),
        *_numbered(notes),
        "## The cases",
        _cases(),
        "## How each is called",
    ]
    return "\n\n".join([*tables, _calls(results)])


def outcomes(results: Mapping[str, Any], notes: list[str]) -> str:
    """Return a row for each case and a column for each way; what needs more words goes to `notes`."""
    calls = list(_called(results))
    lines = [
        f"| case | {' | '.join(call.title for _, call in calls)} |",
        f"| --- |{' --- |' * len(calls)}",
    ]
    for case in CASES:
        cells = [
            cell(case, results[library.module]["outcomes"][call.name], notes)
            for library, call in calls
        ]
        lines.append(f"| {case.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(case: Case, outcomes: Mapping[str, Any], notes: list[str]) -> str:
    """Return a verdict with its figure, and the number of a note where there is one."""
    if case.name not in outcomes:
        return ""
    outcome = Outcome(**outcomes[case.name])
    verdict = outcome.verdict(case)
    words = {
        "right": "right",
        "wrong": "**wrong**",
        "raises": "**raises**",
        "none": "—",
    }[verdict]
    if outcome.rows not in (None, 1):
        words += f" {outcome.rows:g} rows,"
    if outcome.error is not None:
        words += f" {outcome.error:.1g}"
    more = "; ".join(
        filter(
            None, [f"`` {outcome.raised} ``" if outcome.raised else "", outcome.note]
        )
    )
    if more and more not in notes:
        notes.append(more)
    return f"{words} [{notes.index(more) + 1}]" if more else words


def _called(results: Mapping[str, Any]) -> Iterator[tuple[Library, Call]]:
    return (
        (library, call)
        for library in LIBRARIES
        if library.module in results
        for call in library.calls
    )


def _numbered(notes: list[str]) -> list[str]:
    return (
        [
            "\n".join(
                f"{number}. {note[0].upper()}{note[1:]}."
                for number, note in enumerate(notes, 1)
            )
        ]
        if notes
        else []
    )


def _cases() -> str:
    rows = [f"| {case.title} | {case.trap} |" for case in CASES]
    return "\n".join(["| case | what goes wrong |", "| --- | --- |", *rows])


def _calls(results: Mapping[str, Any]) -> str:
    lines = ["| column | called | versions | measured |", "| --- | --- | --- | --- |"]
    for library, call in _called(results):
        result = results[library.module]
        versions = ", ".join(
            f"{name} {version}" for name, version in result["versions"].items()
        )
        day = time.strftime("%-d %B %Y", time.gmtime(result["begun"]))
        lines.append(
            f"| [{call.title}]({call.page}) | {call.how} | {versions} | {day} |"
        )
    return "\n".join(lines)
