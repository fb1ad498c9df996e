"""Trains one run from a composed config, and searches for its micro-batch size."""

__all__ = ["run"]
