"""The same run again from what MLflow recorded, compared with the first one point by point.

In: a run ID and overrides. Out: a new run, the verdict, and an exit status.
"""

__all__ = ["command"]
