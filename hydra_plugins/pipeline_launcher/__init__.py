"""The launchers of `pipeline.launching`, under the names that configs choose them by.

Hydra instantiates only classes that are defined in `hydra_plugins`, so each is derived here.
"""

from __future__ import annotations

from hydra.core.config_store import ConfigStore
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf

from pipeline import compose
from pipeline.launching import launcher, local, slurm


class LocalLauncher(local.LocalLauncher):
    """Each job a process on this machine."""


class SlurmLauncher(slurm.SlurmLauncher):
    """Each job a Slurm job."""


class BasicLauncher(launcher.BasicLauncher):
    """All jobs in this process, one after the other: for a debugger."""


def _register() -> None:
    here = local.LocalConfig(_target_=f"{__name__}.LocalLauncher")
    nodes = {
        "local": here,
        "submitit_local": here,  # of recorded sweeps
        "submitit_slurm": SlurmQueueConf(_target_=f"{__name__}.SlurmLauncher", timeout_min=1440),
        "basic": {"_target_": f"{__name__}.BasicLauncher"},
    }
    for name, node in nodes.items():
        ConfigStore.instance().store(group="hydra/launcher", name=name, node=node, provider="pipeline")


compose.on_plugins_found(__name__, _register)
