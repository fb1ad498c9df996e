"""Sweeps: a parent run in MLflow with a child run per job, locally or on Slurm.

Input: the jobs of a Hydra multirun. Output: the parent run with its page in MLflow's
UI, and a run for each job that has not finished before. Slurm options are set as
`hydra.launcher.*` and passed to submitit.
"""

__all__ = [
    "again",
    "basic",
    "closing",
    "files",
    "liveness",
    "local",
    "mlflow_view",
    "running_sweep",
    "search",
    "slurm",
    "sweep_file",
]
