"""TFDS builders that the package brings along."""

__all__ = ["digits", "tables", "topics"]
