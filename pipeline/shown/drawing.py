"""Draws the examples, the confusion matrix and the reliability curve.

Everything is drawn with Pillow: drawing with Matplotlib takes ten times as long, and
importing Matplotlib takes two seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from pipeline.shown import encoding
from pipeline.shown.collector import BINS, Example, Reliability
from pipeline.shown.observer import OutputView

_COLUMNS = 8  # of a sheet of examples
_SIDE = 80  # maximum width and height of an example, in pixels
_CELL = 104  # width of an example with its margin
_LINE = 13  # height of a line of text
_LONGEST_CAPTION = 17  # characters that fit into a cell
_FONT_SIZE = 11
_MARGIN = 40  # around a matrix or a curve, for its labels
_MATRIX = 400  # width and height of a matrix, roughly
_MOST_COUNTS = 12  # classes up to which the counts are written into the matrix
_CURVE = 300  # width and height of the curve

_BLACK = (0, 0, 0)
_RED = (190, 20, 20)
_BLUE = (31, 90, 160)
_GRAY = (150, 150, 150)


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(_FONT_SIZE)


def sheet(examples: Sequence[Example]) -> Image.Image:
    """Return one picture of all examples, with their labels, predictions and losses.

    The caption of an example that is classified wrongly is red.
    """
    columns = min(_COLUMNS, len(examples))
    rows = -(-len(examples) // columns)
    height = _SIDE + 4 * _LINE
    picture = Image.new("RGB", (columns * _CELL, rows * height), "white")
    draw = ImageDraw.Draw(picture)
    # All examples have the same brightness and contrast.
    stretched = encoding.to_bytes([example.shown_input for example in examples])
    for number, example in enumerate(examples):
        row, column = divmod(number, columns)
        corner = (column * _CELL + 4, row * height + 4)
        picture.paste(_sized(encoding.of_array(stretched[number])), corner)
        caption = _caption(example)
        place = (corner[0], corner[1] + _SIDE + 2)
        draw.multiline_text(place, caption, _color(example), _font(), spacing=2)
    return picture


def confusion_matrix(counts: np.ndarray) -> Image.Image:
    """Return a picture of a confusion matrix.

    Args:
        counts: the number of positions of each class (rows) that were predicted to be
            of each class (columns). A cell's color shows its share of the row.
    """
    classes = len(counts)
    cell = max(4, _MATRIX // classes)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    colors = 255 - shares[..., np.newaxis] * (255 - np.array(_BLUE))
    cells = Image.fromarray(np.rint(colors).astype(np.uint8))
    side = cell * classes
    picture = Image.new("RGB", (side + 2 * _MARGIN, side + 2 * _MARGIN), "white")
    draw = ImageDraw.Draw(picture)
    picture.paste(cells.resize((side, side), Image.Resampling.NEAREST), (_MARGIN,) * 2)
    draw.rectangle((_MARGIN, _MARGIN, _MARGIN + side, _MARGIN + side), outline=_GRAY)
    draw.text((_MARGIN, 4), "label (down), predicted (across)", _BLACK, _font())

    step = max(1, -(-20 // cell))  # so that the names of classes do not overlap
    for index in range(0, classes, step):
        middle = _MARGIN + index * cell + cell // 2
        for place in ((middle, _MARGIN - 10), (_MARGIN - 14, middle)):
            draw.text(place, str(index), _BLACK, _font(), anchor="mm")
    if classes <= _MOST_COUNTS:
        for row, column in np.ndindex(classes, classes):
            place = (
                _MARGIN + column * cell + cell // 2,
                _MARGIN + row * cell + cell // 2,
            )
            color = "white" if shares[row, column] > 0.5 else "black"
            text = str(counts[row, column])
            draw.text(place, text, color, _font(), anchor="mm")
    return picture


def reliability_curve(reliability: Reliability) -> Image.Image:
    """Return a picture of the share of correct predictions by their confidence.

    For each bin of the confidence, a bar shows the share. A line shows where share and
    confidence are equal. The title has the expected calibration error.
    """
    side = _CURVE + 2 * _MARGIN
    picture = Image.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(picture)
    bottom = _MARGIN + _CURVE
    width = _CURVE // BINS
    for index in range(BINS):
        positions = reliability.positions[index]
        if not positions:
            continue
        share = reliability.correct[index] / positions
        left = _MARGIN + index * width
        top = bottom - round(share * _CURVE)
        draw.rectangle((left + 1, top, left + width - 1, bottom), fill=_BLUE)
        text = _short_count(int(positions))
        draw.text((left + width // 2, top - 7), text, _GRAY, _font(), anchor="mm")

    draw.rectangle((_MARGIN, _MARGIN, bottom, bottom), outline=_GRAY)
    draw.line((_MARGIN, bottom, bottom, _MARGIN), fill=_RED, width=2)
    title = f"correct by confidence, ECE {reliability.calibration_error():.4f}"
    draw.text((_MARGIN, 4), title, _BLACK, _font())
    for tenth in range(0, 11, 2):
        offset = round(tenth / 10 * _CURVE)
        text = f"{tenth / 10:.1f}"
        draw.text((_MARGIN + offset, bottom + 10), text, _BLACK, _font(), anchor="mm")
        draw.text((_MARGIN - 14, bottom - offset), text, _BLACK, _font(), anchor="mm")
    return picture


def _short_count(count: int) -> str:
    """Return a number in at most four characters up to 999 million."""
    if count < 1000:
        return str(count)
    if count < 1_000_000:
        return f"{count // 1000}k"
    return f"{count // 1_000_000}M"


def _sized(picture: Image.Image) -> Image.Image:
    """Return a picture of at most `_SIDE` pixels; a small one is enlarged in blocks."""
    longest = max(picture.size)
    if longest > _SIDE:
        smaller = picture.copy()
        smaller.thumbnail((_SIDE, _SIDE))
        return smaller
    times = _SIDE // longest
    width, height = picture.size
    size = (width * times, height * times)
    return picture.resize(size, Image.Resampling.NEAREST)


def _caption(example: Example) -> str:
    lines = [f"#{example.index}"]
    if example.loss is not None:
        lines[0] += f"  loss {example.loss:.4g}"
    view = _first_view(example)
    if view is not None:
        if not isinstance(view.label, tuple):
            lines.append(f"label {_numbers(view.label)}")
        predicted = _numbers(view.predicted)
        if view.has_classes and not np.ndim(view.confidence):
            predicted += f" ({view.confidence:.2f})"
        lines.append(f"pred. {predicted}")
    return "\n".join(line[:_LONGEST_CAPTION] for line in lines)


def _color(example: Example) -> tuple[int, int, int]:
    view = _first_view(example)
    if view is not None and view.has_classes:
        if np.any((view.label != view.predicted) & view.counted):
            return _RED
    return _BLACK


def _first_view(example: Example) -> OutputView | None:
    """Return the view of the first output that has something to show."""
    for view in example.views.values():
        if not isinstance(view.predicted, tuple):
            return view
    return None


def _numbers(values: np.ndarray) -> str:
    return " ".join(f"{value:.4g}" for value in np.ravel(values)[:4])
