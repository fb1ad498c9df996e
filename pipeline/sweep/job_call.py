"""A job of a sweep as a picklable call: this process or another one runs it."""

import contextlib
import io
import sys
from dataclasses import dataclass
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from pipeline.common import imports, secrets
from pipeline.common.errors import first_line

WORST = float(
    "inf"
)  # loss of a job that returned none: the worst, for a sweeper that searches
FINISHED, FAILED = "finished", "failed"


@dataclass(frozen=True)
class Ending:
    """How a job ended."""

    how: str  # `finished`, `failed`, or what ended it, such as `killed by SIGKILL`
    loss: float = WORST
    reason: str = ""  # one line; empty if it finished


@dataclass(frozen=True)
class JobCall:
    """Composes the config of job `number` from its `overrides` and trains it; the other fields are Hydra's."""

    overrides: list[str]
    number: int
    config: DictConfig
    hydra_context: HydraContext
    task_function: TaskFunction
    singletons: Any  # Hydra's global state

    def __call__(self) -> Ending:
        sys.argv = ["pipeline", *self.overrides]  # the run records how it was started
        Singleton.set_state(self.singletons)
        setup_globals()
        config = self.hydra_context.config_loader.load_sweep_config(
            self.config, self.overrides
        )
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = str(self.number), self.number
        returned = run_job(
            self.task_function,
            config,
            "hydra.sweep.dir",
            "hydra.sweep.subdir",
            self.hydra_context,
        )
        try:
            with contextlib.redirect_stderr(
                io.StringIO()
            ):  # the ending says what Hydra prints here
                return Ending(FINISHED, float(returned.return_value))
        except Exception as error:
            return Ending(FAILED, reason=first_line(error))


def killed(how: str, printed: str) -> Ending:
    """Return the ending of a job that was killed; the last line that it printed is the reason."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return Ending(how, reason=": ".join([how, *map(secrets.mask, lines[-1:])]))


def importing_only_this_package(**more: str) -> contextlib.AbstractContextManager[None]:
    """Set `more` variables, and that a new Python process imports no `random.py` of the user's before it is a job."""
    return imports.variables_set(
        PYTHONSAFEPATH="1", PYTHONPATH=imports.path_of_processes(), **more
    )
