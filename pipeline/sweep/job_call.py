"""One job of a sweep as a call, which another process can make as well as this one."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from pipeline.common import imports
from pipeline.common.errors import first_line
from pipeline.common.secrets import mask

WORST = float("inf")  # loss of a job that gave none: a sweeper that searches takes it as the worst
FINISHED, FAILED = "finished", "failed"


@dataclass(frozen=True)
class Ending:
    """How a job ended, with the loss that it returned, or with the reason why it did not finish, in one line."""

    how: str  # `finished`, `failed`, or what ended it, such as `killed by SIGKILL`
    loss: float = WORST
    reason: str = ""


@dataclass(frozen=True)
class JobCall:
    """Composes one job's config and trains it; all but `overrides` and `number` is of the sweep, as Hydra has it."""

    overrides: list[str]
    number: int
    config: DictConfig
    hydra_context: HydraContext
    task_function: TaskFunction
    singletons: Any  # Hydra's global state

    def __call__(self) -> Ending:
        sys.argv = ["pipeline", *self.overrides]  # for the run, which says how it was started
        Singleton.set_state(self.singletons)
        setup_globals()
        config = self.hydra_context.config_loader.load_sweep_config(self.config, self.overrides)
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = str(self.number), self.number
        returned = run_job(
            hydra_context=self.hydra_context,
            task_function=self.task_function,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # Hydra prints that it failed, which the ending says
                return Ending(FINISHED, float(returned.return_value))
        except Exception as error:
            return Ending(FAILED, reason=first_line(error))


def killed(how: str, printed: str) -> Ending:
    """Return the ending of a job that could say nothing more than the last line of what it printed."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return Ending(how, reason=": ".join([how, *map(mask, lines[-1:])]))


@contextlib.contextmanager
def importing_only_this_package() -> Iterator[None]:
    """Let the Python processes that are started meanwhile import this package, and no file of the working directory.

    What they import before they are a job would else be the user's `pipeline.py` or `random.py`, where there is one.
    """
    ours = {"PYTHONSAFEPATH": "1", "PYTHONPATH": imports.path_of_processes()}
    before = {name: os.environ[name] for name in ours if name in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]
        os.environ.update(before)
