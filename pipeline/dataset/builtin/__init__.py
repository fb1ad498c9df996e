"""TFDS builders that the package brings along.

A new one needs a module here, and its function's name both at the door of `dataset` and in `trust.allowlist`.
"""

__all__ = ["digits", "tables", "topics"]
