"""One run.

In: a composed config. Out: a closed run in MLflow and its last loss; on the way, a micro-batch size that fits.
"""

__all__ = ["run"]
