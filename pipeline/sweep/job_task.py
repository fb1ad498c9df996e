"""A job of a sweep as a picklable function, to be run in this or another process."""

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
from pipeline.common.errors import ConfigError, first_line
from pipeline.sweep.ending import Ending, Outcome


@dataclass(frozen=True)
class JobTask:
    """A function without arguments that trains one job.

    It composes the config of job `number` from `overrides`, runs the job, and returns
    its `Ending`.
    """

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
            return Ending(Outcome.REJECTED, reason=secrets.mask(str(error)))
        except Exception as error:
            return Ending(Outcome.FAILED, reason=first_line(error))
        return Ending(Outcome.FINISHED, loss)


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
