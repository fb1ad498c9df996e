"""Writes tables as CSV of bounded size, which MLflow's page shows as tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.shown.collector import Collected, Example
from pipeline.shown.encoding import MOST_BYTES
from pipeline.shown.observer import OutputView
from pipeline.shown.plan import InputKind, ShownInput

MOST_ROWS = 200
MOST_COLUMNS = 50
LONGEST_CELL = 300  # characters
_MOST_NUMBERS = 100  # numbers of an input that are written

Row = Sequence[Any]


def of_examples(collected: Collected, shown_input: ShownInput) -> str:
    """Return a table with a row for each example that is shown, as CSV.

    The input of an example is text if the dataset decodes its tokens, else numbers. It
    is left out if it is a picture.
    """
    rows = []
    for name, examples in (("worst", collected.worst), ("fixed", collected.fixed)):
        for example in examples:
            rows.append({"set": name, **_row(example, shown_input)})
    columns: dict[str, None] = {}  # an ordered set
    for row in rows:
        columns |= dict.fromkeys(row)
    names = list(columns)
    return as_csv(names, [[row.get(name, "") for name in names] for row in rows])


def of_columns(columns: Mapping[str, Any]) -> str:
    """Return the table that a user's function has returned, as CSV.

    Args:
        columns: the values of each column, by its name.

    Raises:
        ValueError: a column is not a sequence, or the columns differ in length.
    """
    values = []
    for name, column in columns.items():
        if isinstance(column, str) or not hasattr(column, "__len__"):
            received = type(column).__name__
            raise ValueError(
                f"column {name!r} must be a sequence. Received: {received}"
            )
        values.append(list(column))
    if len({len(column) for column in values}) > 1:
        lengths = ", ".join(str(len(column)) for column in values)
        raise ValueError(f"columns must have the same length. Received: {lengths}")
    return as_csv(list(columns), list(zip(*values, strict=True)))


def as_csv(names: Sequence[Any], rows: Sequence[Row]) -> str:
    """Return a table as CSV, cut to the maximum numbers of rows, columns and bytes."""
    kept = [_line(names)]
    size = len(kept[0].encode())
    for row in rows[:MOST_ROWS]:
        line = _line(row)
        size += len(line.encode())
        if size > MOST_BYTES:
            break
        kept.append(line)
    return "".join(kept)


def _line(cells: Iterable[Any]) -> str:
    texts = [_cell(value) for value in list(cells)[:MOST_COLUMNS]]
    content = io.StringIO()
    csv.writer(content, lineterminator="\n").writerow(texts)
    return content.getvalue()


def _cell(value: Any) -> str:
    text = _number(value)
    if isinstance(value, np.floating):
        text = _number(float(value))
    if len(text) > LONGEST_CELL:
        text = f"{text[: LONGEST_CELL - 1]}…"
    # A lone surrogate cannot be written in UTF-8.
    return text.encode(errors="replace").decode()


def _row(example: Example, shown_input: ShownInput) -> dict[str, Any]:
    """Return the cells of an example by column."""
    row: dict[str, Any] = {"index": example.index}
    if example.loss is not None:
        row["loss"] = example.loss
    is_text = shown_input.kind is InputKind.TOKENS
    decode = shown_input.decode if is_text else None
    for name, view in example.views.items():
        suffix = f" {name}" if len(example.views) > 1 else ""
        row[f"label{suffix}"] = _shown(view.label, view, decode)
        row[f"prediction{suffix}"] = _shown(view.predicted, view, decode)
        if view.has_classes:
            counted = view.confidence[view.counted]
            confidence = counted.mean() if counted.size else ""
            row[f"confidence{suffix}"] = confidence
    if shown_input.kind is not InputKind.PICTURE:
        values = _without_padding(example.shown_input, shown_input.padding)
        row["input"] = _text(values, decode)
    return row


def _shown(values: Any, view: OutputView, decode: Callable[[Any], str] | None) -> str:
    """Return a label or a prediction as text, at the positions that count."""
    if isinstance(values, tuple):
        return ""
    if view.has_classes and np.ndim(values):
        return _text(values[view.counted], decode)
    return _text(values, None)


def _text(values: np.ndarray, decode: Callable[[Any], str] | None) -> str:
    if values.dtype.kind in "OS":  # strings of TensorFlow
        return " ".join(_decoded(value) for value in np.ravel(values))
    if decode is not None:
        return decode(values)
    flat = np.ravel(values)
    text = " ".join(_number(value) for value in flat[:_MOST_NUMBERS].tolist())
    return f"{text} …" if flat.size > _MOST_NUMBERS else text


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _decoded(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _without_padding(values: np.ndarray, padding: float | None) -> np.ndarray:
    """Return a sequence without the values at its end that equal the padding."""
    if padding is None or values.ndim != 1 or values.dtype.kind not in "iuf":
        return values
    others = np.flatnonzero(values != padding)
    end = others[-1] + 1 if others.size else 0
    return values[:end]
