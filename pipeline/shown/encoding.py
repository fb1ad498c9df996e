"""Encodes pictures as files of bounded size."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from pipeline.tracking.shown_files import EncodedPicture

MOST_PIXELS = 1024  # maximum width and height
MOST_BYTES = 2**18  # maximum size of a file
THUMBNAIL = 256  # maximum width and height of MLflow's compressed pictures
MOST_THUMBNAIL_BYTES = 2**16

# Pillow's modes whose values may not fit in a byte. Pillow clips them to 0 and 255.
_MORE_THAN_BYTES = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")


def encoded(picture: Image.Image) -> EncodedPicture:
    """Return a picture as a PNG, and as the small WebP that MLflow's page shows first.

    A picture that is too large is made smaller until it fits.
    """
    fitting = _within(picture, MOST_PIXELS)
    # The fastest compression: files get a fifth larger, in a third of the time.
    png = _as_bytes(fitting, MOST_BYTES, "PNG", compress_level=1)
    # Averages over whole blocks take a tenth of the time of `Image.thumbnail`.
    thumbnail = fitting.reduce(-(-max(fitting.size) // THUMBNAIL))
    webp = _as_bytes(thumbnail, MOST_THUMBNAIL_BYTES, "WEBP", method=1)
    return EncodedPicture(png, webp)


def picture_of(value: Any) -> Image.Image | None:
    """Return a picture for an array, a picture of Pillow or a figure of Matplotlib.

    Return None for anything else. A figure of `pyplot` is closed.

    Raises:
        ValueError: an array does not have the shape of a picture.
    """
    if isinstance(value, Image.Image):
        if value.mode in _MORE_THAN_BYTES:
            return of_array(np.asarray(value))
        return _plain(value)
    # Only a function that has made a figure has imported Matplotlib.
    figures = sys.modules.get("matplotlib.figure")
    if figures is not None and isinstance(value, figures.Figure):
        return _of_figure(value)
    if isinstance(value, np.ndarray) or hasattr(value, "__array__"):
        return of_array(np.asarray(value))
    return None


def of_array(array: np.ndarray) -> Image.Image:
    """Return a picture for an array of (height, width) or (height, width, channels).

    See `to_bytes` for the range of the values.

    Raises:
        ValueError: the array has another shape, or is empty.
    """
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    has_channels = array.ndim == 3 and array.shape[-1] in (3, 4)
    if not (array.ndim == 2 or has_channels) or not array.size:
        rule = "must have the shape (height, width) or (height, width, 1, 3 or 4)"
        raise ValueError(f"a picture {rule}. Received: shape {array.shape}")
    (values,) = to_bytes([array])
    return _plain(Image.fromarray(values))


def to_bytes(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the values of pictures as bytes from 0 to 255, in the same way for all.

    Arrays that all hold bytes are returned unchanged. Otherwise, the values are mapped
    from the first of the ranges 0 … 1, −1 … 1 and 0 … 255 that contains them all, or
    else from the range between their minimum and maximum. Values that are not finite
    are first set to 0.
    """
    if all(array.dtype == np.uint8 for array in arrays):
        return list(arrays)
    pictures = []
    for array in arrays:
        values = array.astype(np.float32)
        pictures.append(np.nan_to_num(values, posinf=0.0, neginf=0.0))
    low = min(float(values.min()) for values in pictures)
    high = max(float(values.max()) for values in pictures)
    if low >= 0 and high <= 1:
        low = 0.0
        high = 1.0
    elif low >= -1 and high <= 1:
        low = -1.0
        high = 1.0
    elif low >= 0 and high <= 255:
        low = 0.0
        high = 255.0
    factor = 255 / max(high - low, 1e-30)
    return [np.rint((values - low) * factor).astype(np.uint8) for values in pictures]


def _of_figure(figure: Any) -> Image.Image:
    content = io.BytesIO()
    figure.savefig(content, format="png")
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(figure)  # Otherwise `pyplot` keeps each figure of the run.
    return _plain(Image.open(content))


def _plain(picture: Image.Image) -> Image.Image:
    """Return a picture in RGB on white, or in gray if it has no color."""
    if picture.mode == "L":
        return picture
    if picture.mode == "1":
        return picture.convert("L")
    with_alpha = picture.convert("RGBA")
    background = Image.new("RGBA", with_alpha.size, "white")
    return Image.alpha_composite(background, with_alpha).convert("RGB")


def _within(picture: Image.Image, side: int) -> Image.Image:
    """Return a copy of which no side is longer than `side` pixels."""
    copy = picture.copy()
    copy.thumbnail((side, side))
    return copy


def _as_bytes(picture: Image.Image, most: int, form: str, **options: int) -> bytes:
    """Return a picture in a file format, halved until it has at most `most` bytes."""
    while True:
        content = io.BytesIO()
        picture.save(content, form, **options)
        if content.tell() <= most or max(picture.size) == 1:
            return content.getvalue()
        picture = _within(picture, max(picture.size) // 2)
