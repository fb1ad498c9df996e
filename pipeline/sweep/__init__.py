"""A sweep: one parent run in MLflow and a child run for each job.

In: the planned jobs of a multirun. Out: the parent run, its page in MLflow's UI, and what is left to run again.
"""

__all__ = ["again", "description", "files", "gpus", "launcher", "local", "parent_run", "search", "slurm"]
