"""Sweeps: one parent run in MLflow with a child run for each job, here or on Slurm.

In: the jobs of a Hydra multirun. Out: the parent run with its page in MLflow's UI, and
the jobs that have not finished. Slurm's own options are `hydra.launcher.*`, and need no
code here.
"""

__all__ = [
    "again",
    "files",
    "gpus",
    "launcher",
    "local",
    "mlflow_view",
    "parent_run",
    "search",
    "slurm",
]
