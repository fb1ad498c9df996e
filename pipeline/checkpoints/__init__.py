"""The state of a run between two updates, and its files.

In: a run's state or directory. Out: checkpoints, and what a run goes on from
(`resume_rules`) or begins with (`fork`).
"""

__all__ = ["csv_rows", "files", "fork", "resume_rules", "run_dirs", "snapshot"]
