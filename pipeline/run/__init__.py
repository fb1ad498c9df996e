"""One run, and the search for a micro-batch size that fits.

In: a composed config. Out: a closed run in MLflow and its last loss.
"""

__all__ = ["run"]
