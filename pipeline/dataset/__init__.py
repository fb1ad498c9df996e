"""Splits → examples → effective batches.

In: the `dataset` group of a config. Out: `Data`, its batches for updates and evaluations, and what can be recorded of
its files.
"""

from typing import Any

__all__ = [
    "Data",
    "Stored",
    "bad_example",
    "batches",
    "cache",
    "checksums",
    "class_weights",
    "load",
    "longest_batch",
]
__all__ += ["source", "splits", "stream", "tokens"]

_AT_THE_DOOR = {
    **dict.fromkeys(("Data", "Stored"), "splits"),
    **dict.fromkeys(("digits", "from_tfds", "topics"), "load"),
    **dict.fromkeys(("breast_cancer", "diabetes"), "builtin.tables"),
}


def __getattr__(name: str) -> Any:
    """Import what configs name, such as `pipeline.dataset.digits`, when it is asked for: TensorFlow takes seconds."""
    from importlib import import_module

    if name not in _AT_THE_DOOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_AT_THE_DOOR[name]}"), name)
