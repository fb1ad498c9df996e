"""Composes a config with Hydra, and runs a task on it.

The config comes from a command line, or from a record with overrides. A sweep runs the
task for each of its jobs. Errors have one-line messages.
"""

__all__ = ["hydra_job", "recorded_job"]
