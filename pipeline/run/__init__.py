"""Trains one run from a composed config; finds its micro-batch size and its use of XLA."""

__all__ = ["run"]
