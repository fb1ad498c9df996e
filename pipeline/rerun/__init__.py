"""Reruns a recorded run and compares the two point by point.

In: a run ID and overrides. Out: a new run, the verdict, and an exit status.
"""

__all__ = ["command"]
