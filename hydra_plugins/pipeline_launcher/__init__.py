"""Hydra's launchers for a sweep: the published ones, made to outlive a job that fails, dies or is killed.

Each job is launched on its own, by one of as many threads as jobs may run at once. So a job that dies takes no other
with it, a machine is never given more jobs than it has places for, and no two jobs are on one GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydra._internal.core_plugins.basic_launcher import BasicLauncher as HydrasBasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra_plugins.hydra_submitit_launcher.config import LocalQueueConf, SlurmQueueConf

from hydra_plugins.pipeline_launcher.slurm import SlurmLauncher
from hydra_plugins.pipeline_launcher.submitting import LocalLauncher
from hydra_plugins.pipeline_launcher.sweeping import Sweeping
from pipeline import sweep

__all__ = ["BasicLauncher", "LocalLauncher", "PlainSweeper", "SlurmLauncher", "register"]


class BasicLauncher(Sweeping, HydrasBasicLauncher):
    """All jobs in this process, one after the other: for a debugger. TensorFlow's global state is shared."""

    def _each(
        self, one: Callable[[int, sweep.Job], JobReturn], jobs: list[sweep.Job], at_once: int, current: sweep.Sweep
    ) -> list[JobReturn]:
        return [one(number, job) for number, job in enumerate(jobs)]

    def _run(self, overrides: list[str], number: int, place: list[str], current: sweep.Sweep) -> JobReturn:
        (returned,) = HydrasBasicLauncher.launch(self, [overrides], number)
        return returned


@dataclass
class LocalConf(LocalQueueConf):
    """Published parameters, and ours."""

    _target_: str = f"{__name__}.submitting.LocalLauncher"
    fork: bool = True  # fork the jobs from a process that has imported TensorFlow


class PlainSweeper(BasicSweeper):
    """Hydra's own, which composes every job once more before the launcher does; there each is checked as well."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Left to the launcher, which refuses a wrong job before the first one starts."""


def register() -> None:
    """Puts these launchers under the published names; call it once Hydra has found its plugins."""
    here = f"{__name__}."
    store = ConfigStore.instance().store
    year, day = 525600, 1440  # minutes after which submitit ends a job
    local = LocalConf(timeout_min=year)
    slurm = SlurmQueueConf(_target_=here + "slurm.SlurmLauncher", timeout_min=day)
    store(group="hydra/launcher", name="submitit_local", node=local, provider="pipeline")
    store(group="hydra/launcher", name="submitit_slurm", node=slurm, provider="pipeline")
    store(group="hydra/launcher", name="basic", node={"_target_": here + "BasicLauncher"}, provider="pipeline")
    plain = BasicSweeperConf(_target_=here + "PlainSweeper")
    store(group="hydra/sweeper", name="basic", node=plain, provider="pipeline")
