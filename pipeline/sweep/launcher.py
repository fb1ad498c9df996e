"""The base class of this package's Hydra launchers.

A launcher plans the jobs of a batch, and runs those that have not finished:

    plan ─► slots ─► prepare ─► parent run ─► backend ─► `JobBatch`

With `--dry`, it only lists the jobs after the second step.
"""

import os
import shlex
import signal
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from pipeline.checkpoints.run_dirs import by_id
from pipeline.common.errors import ConfigError, count, say
from pipeline.common.secrets import mask
from pipeline.common.signals import Terminated
from pipeline.config import session
from pipeline.config.overrides import hydra_quoted
from pipeline.config.plain import leaves
from pipeline.config.resolve import RunSpec, resolve
from pipeline.config.schema import HardwareConfig
from pipeline.sweep import again, dry_run, mlflow_view, opening, sweep_size
from pipeline.sweep.ending import WORST
from pipeline.sweep.job_batch import Backend, JobBatch, Slot
from pipeline.sweep.job_names import job_names
from pipeline.sweep.job_task import JobTask
from pipeline.sweep.parent_run import finished_losses
from pipeline.sweep.running_sweep import RunningSweep

# Hydra's sweeper that runs all combinations of the swept values.
_GRID = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
# Maximum number of bytes in a file name and in a path on Linux.
LONGEST_NAME = 255
LONGEST_PATH = 4095


@dataclass(frozen=True)
class SweepPlan:
    """The planned jobs of a batch."""

    jobs: dict[str, Sequence[str]]  # overrides by the job's name
    varied: list[str]  # config keys that the sweep varies
    hardware_of_jobs: list[HardwareConfig]  # the `hardware` group of each job
    sizes_of_jobs: list[str]  # the sizes of each job, in words
    experiment: str  # the experiment in MLflow of all jobs


class SweepLauncher(Launcher):
    """Plans the jobs of a batch, then runs those that have not finished.

    Subclasses override `_slots`, `_prepare` and `_backend`, which are called in this
    order for each batch.
    """

    config: Any  # `setup` sets `config`, `hydra_context` and `task_function`
    hydra_context: HydraContext
    task_function: TaskFunction
    sweep: RunningSweep | None = None  # None until the first batch is launched
    experiment: str | None = None  # that of the jobs; None until the first batch

    def setup(
        self,
        *,
        hydra_context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
    ) -> None:
        """Store the arguments, check the size of a grid, and install signal handlers.

        SIGTERM and SIGHUP raise `Terminated`, so that running jobs are interrupted and
        close their runs.

        Raises:
            ConfigError: a grid has no jobs, or too many, or `--dry` is given for a
                search.
        """
        self.config = config
        self.hydra_context = hydra_context
        self.task_function = task_function
        if config.hydra.sweeper._target_ == _GRID:
            sweep_size.check(_parsed(self._sweep_overrides()))
        elif session.session().dry:
            rule = (
                "must be left out of a search, whose jobs are chosen by the results of "
                "earlier jobs"
            )
            raise ConfigError("--dry", rule)
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, _terminate)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the jobs of a batch that have not finished; return the loss of each job.

        The first call creates or reopens the parent run. With `--dry`, only print the
        jobs.

        Args:
            job_overrides: the overrides of each job.
            initial_job_idx: number of the first job.

        Raises:
            ConfigError: there are no jobs, or the config of a job is invalid.
            RunError: no job of the sweep had a run before, and the first job to end was
                rejected because of its config.
        """
        if not job_overrides:
            swept = [
                override.input_line
                for override in _parsed(self._sweep_overrides())
                if override.is_sweep_override()
            ]
            rule = "must select at least one option, so that the sweep has a job"
            raise ConfigError("override", rule, " ".join(map(str, swept)))
        plan = self.plan(job_overrides, initial_job_idx)
        slots = [Slot(gpus) for gpus in self._slots(plan.hardware_of_jobs)]
        if session.session().dry:
            sizes_by_job = dict(zip(plan.jobs, plan.sizes_of_jobs, strict=True))
            dry_run.show(self.config, sizes_by_job)
            return [completed_with(WORST) for _ in plan.jobs]
        self._prepare()

        is_first_batch = self.sweep is None
        sweep = self._opened_sweep(plan)
        children = sweep.parent.children()
        losses = finished_losses(children)
        run_dirs = {}
        if self.config.tracking.sweep is not None:  # --again
            run_dirs = _interrupted_run_dirs(children)

        tasks = {}
        for number, (name, overrides) in enumerate(plan.jobs.items(), initial_job_idx):
            if name not in losses:
                run_dir = run_dirs.get(name)
                tasks[name] = self._task(sweep, name, overrides, number, run_dir)
        if self.config.tracking.sweep is not None and is_first_batch:
            self._say_what_is_missing(sweep, len(tasks), len(plan.jobs))
        batch = JobBatch(
            self._backend(sweep, plan.hardware_of_jobs),
            slots,
            sweep.endings,
            stop_if_first_is_rejected=not children,
            patience=self.config.tracking.patience,
        )
        batch.run(tasks)
        losses |= sweep.endings.losses(tasks)
        return [completed_with(losses.get(name, WORST)) for name in plan.jobs]

    def _say_what_is_missing(
        self, sweep: RunningSweep, missing: int, planned: int
    ) -> None:
        """Print which jobs of a reopened sweep are run, and its overrides."""
        parent = sweep.parent
        what = f"{missing} of {count(planned, 'job')} to run"
        if self.config.hydra.sweeper.get("trials"):
            what = "the search continues"
        say(f"sweep {parent.run_id} ({parent.name}): {what}")
        overrides = again.recordable(self.config.hydra.overrides.task)
        if overrides:
            say(f"overrides: {shlex.join(overrides)}")
        say(*sweep.lines_on_unplanned())

    def _opened_sweep(self, plan: SweepPlan) -> RunningSweep:
        """Open the sweep for its first batch, or add the jobs of a later batch."""
        if self.sweep is None:
            self.sweep = opening.open_sweep(
                self.config, plan.jobs, plan.varied, plan.experiment
            )
            mlflow_view.announce(self.sweep.parent, self.sweep.closed)
        else:
            self.sweep.parent.plan(plan.jobs, plan.varied)
        return self.sweep

    def plan(self, job_overrides: Sequence[Sequence[str]], first: int) -> SweepPlan:
        """Compose and check the configs of all jobs before any job starts.

        Args:
            job_overrides: the overrides of each job.
            first: number of the first job.

        Raises:
            ConfigError: the config of a job is invalid, or the jobs of a new sweep are
                in different experiments.
        """
        hardware_of_jobs = []
        experiments = []
        sizes_of_jobs = []
        batch_sizes = []
        values_of_jobs = []
        for overrides in job_overrides:
            spec = self._resolve(overrides)
            hardware_of_jobs.append(spec.config.hardware)
            experiments.append(str(spec.config.tracking.experiment))
            sizes_of_jobs.append(dry_run.sizes(spec))
            batch_sizes.append(spec.batching.effective_batch_size)
            values_of_jobs.append(_values_by_key(overrides))

        varied = self._varied_keys(values_of_jobs)
        varied_values = []
        for values in values_of_jobs:
            varied_values.append({key: values[key] for key in varied if key in values})
        names = job_names(varied_values, batch_sizes, first)
        jobs = dict(zip(names, job_overrides, strict=True))
        experiment = self._common_experiment(experiments)
        return SweepPlan(jobs, varied, hardware_of_jobs, sizes_of_jobs, experiment)

    def _common_experiment(self, experiments: Sequence[str]) -> str:
        """Return the experiment in MLflow of all jobs of a sweep.

        The parent run is in this experiment, too, and its jobs are looked for only
        there. The jobs of a reopened sweep get the experiment of the parent run.

        Raises:
            ConfigError: the jobs of a new sweep, including those of earlier batches,
                are in different experiments.
        """
        if self.experiment is None:
            self.experiment = experiments[0]
        for experiment in experiments:
            if experiment != self.experiment and not self.config.tracking.sweep:
                rule = "must be the same for all jobs of a sweep"
                known = [self.experiment]
                raise ConfigError("tracking.experiment", rule, experiment, known)
        return self.experiment

    def _varied_keys(self, values_of_jobs: Sequence[Mapping[str, str]]) -> list[str]:
        """Return the keys that the sweep varies, given each job's values by key."""
        # A swept key counts even if it has the same value in all jobs of this batch.
        swept = set()
        for override in _parsed(self._sweep_overrides()):
            if override.is_sweep_override():
                swept.add(_key(override))

        keys: dict[str, None] = {}  # an ordered set
        for values in values_of_jobs:
            keys.update(dict.fromkeys(values))
        varied = []
        for key in keys:
            distinct_values = {values.get(key) for values in values_of_jobs}
            if key in swept or len(distinct_values) > 1:
                varied.append(key)
        return varied

    def _sweep_overrides(self) -> list[str]:
        """Return the overrides in `hydra.sweeper.params`, then the command line's."""
        overrides = []
        params = self.config.hydra.sweeper.get("params") or {}
        for key, value in params.items():
            overrides.append(f"{key}={value}")
        on_command_line: Any = OmegaConf.to_container(
            self.config.hydra.overrides.task, resolve=False
        )
        return [*overrides, *on_command_line]

    def _resolve(self, overrides: Sequence[str]) -> RunSpec:
        """Compose and check the config of a job."""
        config: DictConfig = self.hydra_context.config_loader.load_sweep_config(
            self.config, list(overrides)
        )
        before = HydraConfig.instance().cfg
        try:
            with open_dict(config):
                # Set placeholders, since configs may refer to these keys as
                # `${hydra:…}` and the job has no number yet.
                config.hydra.job.num = 0
                config.hydra.job.id = "0"
                output_dir = Path(config.hydra.sweep.dir).absolute() / "0"
                config.hydra.runtime.output_dir = str(output_dir)
                HydraConfig.instance().set_config(config)
                _check_folder(config)
                config.pop("hydra")
                _check_for_secrets(config)
                return resolve(config, overrides)
        finally:
            HydraConfig.instance().cfg = before

    @abstractmethod
    def _slots(self, hardware_of_jobs: Sequence[HardwareConfig]) -> list[list[str]]:
        """Check what the jobs require, and return the GPUs of each concurrent job.

        Args:
            hardware_of_jobs: the `hardware` group of each job.
        """

    def _prepare(self) -> None:
        """Start slow preparations, which continue while this process opens the sweep."""

    @abstractmethod
    def _backend(
        self, sweep: RunningSweep, hardware_of_jobs: Sequence[HardwareConfig]
    ) -> Backend:
        """Return the backend that runs the jobs of one batch.

        Args:
            sweep: the running sweep that the jobs belong to.
            hardware_of_jobs: the `hardware` group of each job.
        """

    def _task(
        self,
        sweep: RunningSweep,
        name: str,
        overrides: Sequence[str],
        number: int,
        run_dir: Path | None,
    ) -> JobTask:
        """Return the task of a job; it resumes the run in `run_dir`, if given."""
        overrides = [
            *overrides,
            f"tracking.sweep={hydra_quoted(sweep.parent.run_id)}",
            f"tracking.job={hydra_quoted(name)}",
            f"tracking.run_name={hydra_quoted(name)}",
        ]
        if sweep.experiment:
            experiment = hydra_quoted(sweep.experiment)
            overrides.append(f"tracking.experiment={experiment}")
        if run_dir is not None:
            overrides += [
                "training.resume=auto",
                f"hydra.sweep.dir={hydra_quoted(run_dir.absolute())}",
                "hydra.sweep.subdir=.",
            ]
        return JobTask(
            overrides,
            number,
            self.config,
            self.hydra_context,
            self.task_function,
            Singleton.get_state(),
        )


def _terminate(number: int, _frame: object) -> NoReturn:
    raise Terminated(signal.Signals(number).name)


def completed_with(loss: float) -> JobReturn:
    """Return a completed `JobReturn` with `loss`, which is `WORST` for a failed job."""
    returned = JobReturn(status=JobStatus.COMPLETED)
    returned.return_value = loss
    return returned


def _interrupted_run_dirs(children: Mapping[str, Any]) -> dict[str, Path]:
    """Return the run directories of interrupted jobs, by the job's name.

    Only directories below the working directory are found.

    Args:
        children: the runs of the sweep's jobs, by the job's name.
    """
    run_dirs_by_id = by_id("SWEEP")
    run_dirs = {}
    for name, run in children.items():
        run_id = run.info.run_id
        if run.info.status == "KILLED" and run_id in run_dirs_by_id:
            run_dirs[name] = run_dirs_by_id[run_id]
    return run_dirs


def _values_by_key(overrides: Sequence[str]) -> dict[str, str]:
    values = {}
    for override in _parsed(overrides):
        values[_key(override)] = override.get_value_element_as_str()
    return values


def _parsed(overrides: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create()
    return [parser.parse_override(text) for text in overrides]


def _key(override: Override) -> str:
    return override.get_key_element().lstrip("+~")


def _check_folder(config: DictConfig) -> None:
    """Reject a job's folder if its name or path is longer than Linux allows.

    Otherwise the error would come only when the job starts, since Hydra then creates
    the folder.
    """
    subdir = str(config.hydra.sweep.subdir)
    folder = Path(config.hydra.sweep.dir, subdir).absolute()
    limit = ""
    if len(os.fsencode(folder)) > LONGEST_PATH:
        limit = f"its path may have at most {LONGEST_PATH} bytes"
    for name in folder.parts:
        if len(os.fsencode(name)) > LONGEST_NAME:
            limit = f"a name may have at most {LONGEST_NAME} bytes"
    if limit:
        rule = f"must be a folder that can be created ({limit})"
        raise ConfigError("hydra.sweep.subdir", rule, subdir)


def _check_for_secrets(config: DictConfig) -> None:
    """Reject a config with a secret: Hydra and submitit write configs to files."""
    values = OmegaConf.to_container(config, resolve=False)
    for key, value in leaves(values).items():
        if isinstance(value, str) and mask(value) != value:
            rule = (
                "must reach a sweep as an override, or through the environment as "
                "${oc.env:NAME}, because it holds a secret"
            )
            raise ConfigError(key, rule, value)
