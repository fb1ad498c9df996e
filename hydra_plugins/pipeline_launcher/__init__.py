"""The launchers of `pipeline.launching`, under the names that configs choose them by.

Hydra instantiates only classes that are defined in `hydra_plugins`, so each is derived here.
"""

from __future__ import annotations

from hydra._internal.core_plugins.basic_sweeper import BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra_plugins.hydra_submitit_launcher.config import LocalQueueConf, SlurmQueueConf

from pipeline import compose
from pipeline.launching import launcher, local, slurm


class LocalLauncher(local.LocalLauncher):
    """Each job a process of its own on this machine."""


class SlurmLauncher(slurm.SlurmLauncher):
    """Each job a Slurm job."""


class BasicLauncher(launcher.BasicLauncher):
    """All jobs in this process, one after the other: for a debugger."""


class PlainSweeper(launcher.PlainSweeper):
    """Hydra's own sweeper, which leaves the check of the jobs to the launcher."""


def _register() -> None:
    store = ConfigStore.instance().store
    year, day = 525600, 1440  # minutes after which a job is ended
    local_node = LocalQueueConf(_target_=f"{__name__}.LocalLauncher", timeout_min=year)
    slurm_node = SlurmQueueConf(_target_=f"{__name__}.SlurmLauncher", timeout_min=day)
    for name in ("local", "submitit_local"):  # the second is that of recorded sweeps
        store(group="hydra/launcher", name=name, node=local_node, provider="pipeline")
    store(group="hydra/launcher", name="submitit_slurm", node=slurm_node, provider="pipeline")
    basic = {"_target_": f"{__name__}.BasicLauncher"}
    store(group="hydra/launcher", name="basic", node=basic, provider="pipeline")
    plain = BasicSweeperConf(_target_=f"{__name__}.PlainSweeper")
    store(group="hydra/sweeper", name="basic", node=plain, provider="pipeline")


compose.on_plugins_found(__name__, _register)
