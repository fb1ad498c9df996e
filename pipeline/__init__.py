"""Gradient accumulation that gives exactly what one large batch would have given, tracked in MLflow."""

__version__ = "0.1.0"
