"""Trains one run from a composed config.

Before that, finds its micro-batch size, and decides whether XLA compiles it.
"""

__all__ = ["run"]
