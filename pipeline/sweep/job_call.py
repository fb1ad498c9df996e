"""A job of a sweep as a picklable call: this process or another one runs it."""

import contextlib
import io
import math
import sys
from dataclasses import dataclass
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from pipeline.common import imports, secrets
from pipeline.common.errors import ConfigError, first_line

WORST = math.inf  # loss of a job that returned none, for a sweeper that searches
FINISHED = "finished"
FAILED = "failed"
REJECTED = "rejected"  # for its config, before it trained


@dataclass(frozen=True)
class Ending:
    """How a job ended."""

    how: str  # one of these, or what ended it, such as `killed by SIGKILL`
    loss: float = WORST
    reason: str = ""  # one line; empty if it finished


@dataclass(frozen=True)
class JobCall:
    """Composes the config of job `number` from its `overrides` and trains it."""

    overrides: list[str]
    number: int
    config: DictConfig  # the config of the multirun
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
            config.hydra.job.id = str(self.number)
            config.hydra.job.num = self.number

        returned = run_job(
            self.task_function,
            config,
            "hydra.sweep.dir",
            "hydra.sweep.subdir",
            self.hydra_context,
        )
        try:
            # The ending has what Hydra prints when the result of a failed job is read.
            with contextlib.redirect_stderr(io.StringIO()):
                loss = float(returned.return_value)
        except ConfigError as error:
            return Ending(REJECTED, reason=secrets.mask(str(error)))
        except Exception as error:
            return Ending(FAILED, reason=first_line(error))
        return Ending(FINISHED, loss)


def killed(how: str, printed: str) -> Ending:
    """Return the ending of a job that was killed.

    Its reason is `how` and the last line that the job printed.
    """
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    reason = how
    if lines:
        reason = f"{how}: {secrets.mask(lines[-1])}"
    return Ending(how, reason=reason)


def importing_only_this_package(
    **variables: str,
) -> contextlib.AbstractContextManager[None]:
    """Set `variables`, and those that let a new Python process import this package.

    Until it is a job, that process imports nothing from the user's folder, where a file
    may have the name of a library, such as `random.py`.
    """
    return imports.variables_set(
        PYTHONSAFEPATH="1", PYTHONPATH=imports.path_of_processes(), **variables
    )
