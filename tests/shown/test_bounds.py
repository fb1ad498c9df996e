"""Files that are shown have a maximum size, also over 1,000 evaluations."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
from PIL import Image

from pipeline.shown import drawing, encoding, tables
from pipeline.shown.collector import BINS, Collected, Example, Reliability
from pipeline.shown.encoding import MOST_BYTES, MOST_THUMBNAIL_BYTES
from pipeline.shown.observer import OutputView
from pipeline.shown.plan import InputKind, ShownInput

EXAMPLES = 64  # the maximum of `tracking.show.examples`
EVALUATIONS = 1000
MOST_OF_ALL = 1.5 * 2**30  # as docs/looking.md says


def examples(shape):
    """Return examples of noise, which no file format makes smaller."""
    generator = np.random.default_rng(0)
    made = []
    for index in range(EXAMPLES):
        view = OutputView(
            np.int32(9), np.int32(8), np.float32(0.5), np.array(True, bool)
        )
        noise = generator.integers(0, 256, shape, np.uint8)
        made.append(Example(index, 123.456, noise, {"": view}))
    return made


def size(picture) -> int:
    assert len(picture.png) <= MOST_BYTES
    assert len(picture.webp) <= MOST_THUMBNAIL_BYTES
    return len(picture.png) + len(picture.webp)


def test_a_thousand_evaluations_of_noise_stay_within_the_stated_size():
    """Each evaluation at all maxima: pictures of noise, 50 classes, 64 examples."""
    sheet = encoding.encoded(drawing.sheet(examples((200, 200, 3))))
    generator = np.random.default_rng(0)
    counts = generator.integers(0, 10**9, (50, 50))
    matrix = encoding.encoded(drawing.confusion_matrix(counts))
    reliability = Reliability()
    confidence = generator.random(10_000)
    reliability.add(confidence, confidence > 0.5)
    curve = encoding.encoded(drawing.reliability_curve(reliability))

    # A text of signs that take four bytes each.
    text = np.array("\U0001f600".encode() * 1000, object)
    shown_input = ShownInput(0, InputKind.TOKENS)
    texts = [
        Example(each.index, each.loss, text, each.views) for each in examples((1, 1, 1))
    ]
    table = tables.of_examples(Collected(fixed=texts, worst=texts), shown_input)
    assert len(table.encode()) <= MOST_BYTES

    of_one = 2 * size(sheet) + size(matrix) + size(curve) + len(table.encode())
    assert of_one * EVALUATIONS <= MOST_OF_ALL
    # Nothing is cut by it that is needed: the sheet is still one.
    assert max(Image.open(io.BytesIO(sheet.png)).size) >= 256


@pytest.mark.parametrize(
    "shape", [(3000, 4000, 3), (1, 5000), (5000, 1, 1), (1, 1), (700, 700, 4)]
)
def test_a_picture_of_a_user_is_bounded(shape):
    noise = np.random.default_rng(0).random(shape)
    picture = encoding.encoded(encoding.picture_of(noise))
    assert size(picture) <= MOST_BYTES + MOST_THUMBNAIL_BYTES
    opened = Image.open(io.BytesIO(picture.png))
    assert max(opened.size) <= encoding.MOST_PIXELS
    assert max(Image.open(io.BytesIO(picture.webp)).size) <= encoding.THUMBNAIL


def test_a_table_of_a_user_is_bounded():
    columns = {f"column {index}": ["x" * 10_000] * 5000 for index in range(100)}
    text = tables.of_columns(columns)
    assert len(text.encode()) <= MOST_BYTES
    names, *rows = csv.reader(io.StringIO(text))
    assert len(names) == tables.MOST_COLUMNS
    for row in rows:
        assert {len(cell) for cell in row} == {tables.LONGEST_CELL}
    short = tables.of_columns({"number": range(5000)})
    assert len(short.splitlines()) == 1 + tables.MOST_ROWS


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([0.0, 100.0, 255.0], [0, 100, 255]),
        ([-3.0, 0.0, 3.0], [0, 128, 255]),
        ([0.0, np.nan, np.inf], [0, 0, 0]),
        ([7.0, 7.0, 7.0], [7, 7, 7]),
    ],
)
def test_the_range_of_a_picture(values, expected):
    (shown,) = encoding.to_bytes([np.array([values])])
    assert shown.tolist() == [expected]


def test_pictures_of_several_sizes_make_one_sheet():
    small = examples((8, 8, 1))[:3]
    large = examples((300, 100, 3))[:3]
    picture = drawing.sheet([*small, *large])
    assert picture.size[0] > picture.size[1]


def test_empty_bins_and_classes_are_drawn():
    assert drawing.reliability_curve(Reliability()).size
    assert Reliability().calibration_error() == 0
    assert drawing.confusion_matrix(np.zeros((2, 2), int)).size
    assert Reliability().positions.shape == (BINS,)
