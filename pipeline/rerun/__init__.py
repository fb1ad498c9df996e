"""Reruns a recorded run, and compares the two runs point by point.

Input: a run ID and overrides. Output: a new run, a verdict, and an exit status.
"""

__all__ = ["adapted_config", "command", "recorded_run", "request"]
