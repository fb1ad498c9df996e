"""Trains one run from a composed config.

Before training, finds the micro-batch size, and decides whether XLA compiles the run.
"""

__all__ = ["run"]
