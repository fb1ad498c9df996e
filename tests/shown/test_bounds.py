"""Files that are shown have a maximum size, also over 1,000 evaluations."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

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

# A sign that takes four bytes in UTF-8.
EMOJI = "\U0001f600"


def examples(shape):
    """Return examples of noise, which no file format makes smaller."""
    generator = np.random.default_rng(0)
    wrong = OutputView(
        label=np.int32(9),
        predicted=np.int32(8),
        confidence=np.float32(0.5),
        counted=np.array(True, bool),
    )
    noisy_examples = []
    for index in range(EXAMPLES):
        noise = generator.integers(0, 256, shape, np.uint8)
        example = Example(index, 123.456, noise, {"": wrong})
        noisy_examples.append(example)
    return noisy_examples


def examples_of_text():
    """Return examples of 1,000 signs of four bytes each."""
    text = np.array(EMOJI.encode() * 1000, object)
    return [replace(example, shown_input=text) for example in examples((1, 1, 1))]


def size(picture) -> int:
    """Return the bytes of a picture and its thumbnail, each within its bound."""
    assert len(picture.png) <= MOST_BYTES
    assert len(picture.webp) <= MOST_THUMBNAIL_BYTES
    return len(picture.png) + len(picture.webp)


def sides(image: bytes) -> tuple[int, int]:
    """Return the width and the height of an encoded image, in pixels."""
    return Image.open(io.BytesIO(image)).size


def test_a_thousand_evaluations_of_noise_stay_within_the_stated_size():
    """Each evaluation at all maxima: pictures of noise, 50 classes, 64 examples."""
    sheet = encoding.encoded(drawing.sheet(examples((200, 200, 3))))
    generator = np.random.default_rng(0)
    counts = generator.integers(0, 10**9, (50, 50))
    matrix = encoding.encoded(drawing.confusion_matrix(counts))

    reliability = Reliability()
    confidence = generator.random(10_000)
    correct = confidence > 0.5
    reliability.add(confidence, correct)
    curve = encoding.encoded(drawing.reliability_curve(reliability))

    texts = examples_of_text()
    tokens = ShownInput(0, InputKind.TOKENS)
    table = tables.of_examples(Collected(fixed=texts, worst=texts), tokens)
    table_size = len(table.encode())
    assert table_size <= MOST_BYTES

    # One sheet is of the fixed examples, the other one of the worst.
    pictures_size = 2 * size(sheet) + size(matrix) + size(curve)
    assert EVALUATIONS * (pictures_size + table_size) <= MOST_OF_ALL
    # The bound cuts nothing that is needed: the sheet is still one.
    assert max(sides(sheet.png)) >= 256


@pytest.mark.parametrize(
    "shape", [(1500, 2000, 3), (1, 5000), (5000, 1, 1), (1, 1), (700, 700, 4)]
)
def test_a_picture_of_a_user_is_bounded(shape):
    noise = np.random.default_rng(0).random(shape)
    picture = encoding.encoded(encoding.picture_of(noise))
    assert size(picture) <= MOST_BYTES + MOST_THUMBNAIL_BYTES
    assert max(sides(picture.png)) <= encoding.MOST_PIXELS
    assert max(sides(picture.webp)) <= encoding.THUMBNAIL


def test_a_table_of_a_user_is_bounded():
    long_cells = ["x" * 10_000] * 5000
    columns = {f"column {index}": long_cells for index in range(100)}
    text = tables.of_columns(columns)
    assert len(text.encode()) <= MOST_BYTES
    names, *rows = csv.reader(io.StringIO(text))
    assert len(names) == tables.MOST_COLUMNS
    for row in rows:
        lengths = {len(cell) for cell in row}
        assert lengths == {tables.LONGEST_CELL}

    short_cells = tables.of_columns({"number": range(5000)})
    header_lines = 1
    assert len(short_cells.splitlines()) == header_lines + tables.MOST_ROWS


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


@pytest.mark.parametrize(
    ("mode", "dtype", "values", "expected"),
    [
        ("F", np.float32, [0.0, 0.5, 1.0], [0, 128, 255]),
        ("I", np.int32, [-1000, 0, 1000], [0, 128, 255]),
        ("I;16", np.uint16, [0, 1000, 2000], [0, 128, 255]),
        ("L", np.uint8, [0, 1, 2], [0, 1, 2]),
    ],
)
def test_a_picture_of_pillow_has_the_range_of_an_array(mode, dtype, values, expected):
    """Values beyond a byte were clipped, so that most pictures were black or white."""
    picture = Image.fromarray(np.array([values], dtype))
    assert picture.mode == mode
    shown = encoding.picture_of(picture)
    assert np.asarray(shown).tolist() == [expected]


def test_pictures_of_several_sizes_make_one_sheet():
    small = examples((8, 8, 1))[:3]
    large = examples((300, 100, 3))[:3]
    picture = drawing.sheet([*small, *large])
    width, height = picture.size
    assert width > height


def test_empty_bins_and_classes_are_drawn():
    empty = Reliability()
    assert empty.positions.shape == (BINS,)
    assert empty.calibration_error() == 0
    assert drawing.reliability_curve(empty).size

    no_counts = np.zeros((2, 2), int)
    assert drawing.confusion_matrix(no_counts).size
