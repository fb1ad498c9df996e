"""A job of a sweep as a picklable callable, to be run in this or another process."""

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

WORST = math.inf  # the loss that a sweeper gets for a job that returned none
FINISHED = "finished"
FAILED = "failed"
REJECTED = "rejected"  # its config was invalid; the job did not train


@dataclass(frozen=True)
class Ending:
    """How a job ended."""

    # FINISHED, FAILED or REJECTED, or the cause, such as `killed by SIGKILL`.
    how: str
    loss: float = WORST
    reason: str = ""  # one line; empty if the job finished


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
        sys.argv = ["pipeline", *self.overrides]  # recorded as the command of the run
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
            # Reading the result of a failed job makes Hydra print the error. Suppress
            # that output: the returned `Ending` holds the reason.
            with contextlib.redirect_stderr(io.StringIO()):
                loss = float(returned.return_value)
        except ConfigError as error:
            return Ending(REJECTED, reason=secrets.mask(str(error)))
        except Exception as error:
            return Ending(FAILED, reason=first_line(error))
        return Ending(FINISHED, loss)


def killed(how: str, printed: str) -> Ending:
    """Return the ending of a job that was killed.

    Args:
        how: what killed the job.
        printed: the output of the job. The reason of the ending is `how`, followed by
            the last non-empty line of the output.
    """
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    reason = how
    if lines:
        reason = f"{how}: {secrets.mask(lines[-1])}"
    return Ending(how, reason=reason)


def importing_only_this_package(
    **variables: str,
) -> contextlib.AbstractContextManager[None]:
    """Set environment variables with which a new Python process imports this package.

    PYTHONSAFEPATH keeps the process from importing modules of the working directory,
    where a file such as `random.py` could hide a library. `variables` are set, too. The
    previous values are restored at the end of the `with` block.
    """
    return imports.variables_set(
        PYTHONSAFEPATH="1", PYTHONPATH=imports.path_of_processes(), **variables
    )
