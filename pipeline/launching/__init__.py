"""The jobs of a sweep as processes: on this machine, on Slurm, or one after the other in this process.

In: the overrides of each job, from Hydra. Out: the value that each job returned. `hydra_plugins` registers the classes.
"""

__all__ = ["gpus", "launcher", "local", "search", "slurm"]
