"""Loads a dataset, and makes the batches for updates and evaluations.

From the `dataset` group of a config, this package makes a `Data` with the splits. From
a `Data`, it makes batches, and computes the checksums of the data files.
"""

from importlib import import_module
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
    "non_finite",
    "padding",
    "single_examples",
    "source",
    "splits",
    "stream",
    "tokens",
]

# Public names, and the modules of this package that define them. Configs refer to some
# of these names, such as `pipeline.dataset.digits`.
_MODULES_OF_NAMES = {
    "Data": "splits",
    "Stored": "splits",
    "from_tfds": "load",
    "digits": "builtin.digits",
    "text_files": "texts.text_files",
    "topics": "builtin.topics",
    "breast_cancer": "builtin.tables",
    "diabetes": "builtin.tables",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, as importing TensorFlow takes seconds."""
    if name not in _MODULES_OF_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES_OF_NAMES[name]}")
    return getattr(module, name)
