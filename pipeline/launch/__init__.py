"""Runs a task on the config that Hydra composes: a run, each job of a sweep, a record.

In: a command line, or a recorded config with overrides. Out: the task has run, or an
error in one line.
"""

__all__ = ["hydra_job", "recorded_job"]
