"""TFDS builders that the package brings along.

A new one needs a module here, and the name of its function both in the public names of
`pipeline.dataset` and in `trust.trusted_names`.
"""

__all__ = ["digits", "tables", "topics"]
