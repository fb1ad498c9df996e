"""Checks, for a config, that an update in micro-batches equals a large-batch update.

The input is a config, or an `Update` and batches. The output is the difference between
the two updates, and how much of it rounding explains.
"""

__all__ = ["command"]
