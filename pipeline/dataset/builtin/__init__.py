"""TFDS builders that the package brings along.

A new one has a module here, its function's name at the door of `dataset`, and another in `trust.allowlist`.
"""

__all__ = ["digits", "tables", "topics"]
