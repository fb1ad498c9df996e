"""Hydra launchers that plan a batch of jobs and run one job per slot at a time.

They record how each job ended. `SweepLauncher` is the base class.
"""

import os
import signal
import time
from collections import deque
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
from pipeline.common.errors import ConfigError, RunError, first_line, say
from pipeline.common.secrets import mask
from pipeline.common.signals import Terminated
from pipeline.config.overrides import hydra_quoted
from pipeline.config.plain import leaves
from pipeline.config.resolve import RunSpec, resolve
from pipeline.config.schema import HardwareConfig
from pipeline.sweep import mlflow_view, parent_run, sweep_size
from pipeline.sweep.job_call import (
    FAILED,
    FINISHED,
    REJECTED,
    WORST,
    Ending,
    JobCall,
)

# Hydra's sweeper that runs all combinations of the swept values.
_GRID = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
# Seconds that an interrupted job has to close its run, in addition to
# `tracking.patience`.
GRACE = 60.0
# Bytes of a file's name and path on Linux.
LONGEST_NAME = 255
LONGEST_PATH = 4095


@dataclass(frozen=True)
class SweepPlan:
    """The planned jobs of a batch."""

    jobs: dict[str, Sequence[str]]  # overrides by the job's name
    varied: list[str]  # config keys in which the jobs differ
    hardware: list[HardwareConfig]  # the `hardware` group of each job


@dataclass
class Slot:
    """Runs one job at a time, on `gpus`."""

    gpus: list[str]
    name: str = ""
    # The current job, with the methods `start()` and `ending()`. `ending()` returns
    # None while the job runs.
    job: Any = None
    started_at: float = 0.0  # when the job started, by `time.monotonic`, in seconds


class SweepLauncher(Launcher):
    """Plans the jobs of a batch, then runs those that have not finished.

    Subclasses override `_slots`, `_job`, `_wait` and `_ask_to_end`.
    """

    config: Any  # `setup` sets `config`, `hydra_context` and `task_function`
    hydra_context: HydraContext
    task_function: TaskFunction
    sweep: parent_run.ParentRun  # set when the first batch is launched
    interval = 0.1  # seconds between two polls of the jobs
    _trained_before = False  # whether an earlier command or batch has started a run

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
            ConfigError: a grid has no jobs, or too many.
        """
        self.config = config
        self.hydra_context = hydra_context
        self.task_function = task_function
        if config.hydra.sweeper._target_ == _GRID:
            sweep_size.check(_parsed(self._task_overrides()))
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, _terminate)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the jobs of a batch that have not finished; return the loss of each job.

        The first call creates or reopens the parent run.

        Args:
            job_overrides: the overrides of each job.
            initial_job_idx: number of the first job.

        Raises:
            ConfigError: there are no jobs, or the config of a job is invalid.
            RunError: the first job to end was rejected because of its config.
        """
        if not job_overrides:
            swept = [
                override.input_line
                for override in _parsed(self._task_overrides())
                if override.is_sweep_override()
            ]
            rule = "must match at least one config, for a sweep to have a job"
            raise ConfigError("override", rule, " ".join(map(str, swept)))
        plan = self.plan(job_overrides, initial_job_idx)
        slots = [Slot(gpus) for gpus in self._slots(plan.hardware)]

        if hasattr(self, "sweep"):
            self.sweep.plan(plan.jobs, plan.varied)
        else:
            self.sweep = parent_run.begin(self.config, plan.jobs, plan.varied)
            mlflow_view.announce(self.sweep)
        losses = self.sweep.finished()
        self._trained_before = bool(self.sweep.children())
        run_dirs = {}
        if self.config.tracking.sweep is not None:  # --again
            run_dirs = self._interrupted_run_dirs()

        calls = {}
        for number, (name, overrides) in enumerate(plan.jobs.items(), initial_job_idx):
            if name not in losses:
                calls[name] = self._call(name, overrides, number, run_dirs.get(name))
        losses |= self._run(calls, slots)
        return [completed_with(losses.get(name, WORST)) for name in plan.jobs]

    def plan(self, job_overrides: Sequence[Sequence[str]], first: int) -> SweepPlan:
        """Compose and check the configs of all jobs before any job starts.

        Args:
            job_overrides: the overrides of each job.
            first: number of the first job.
        """
        hardware = []
        batches = []
        values = []
        for overrides in job_overrides:
            spec = self._resolve(overrides)
            hardware.append(spec.config.hardware)
            batches.append(spec.batching.effective_batch_size)
            values.append(_values_by_key(overrides))

        varied = self._varied(values)
        varied_values = []
        for job in values:
            varied_values.append({key: job[key] for key in varied if key in job})
        names = parent_run.names_of(varied_values, batches, first)
        jobs = dict(zip(names, job_overrides, strict=True))
        return SweepPlan(jobs, varied, hardware)

    def _varied(self, values: Sequence[Mapping[str, str]]) -> list[str]:
        """Return the keys that the sweep varies, given each job's values by key."""
        # A swept key counts even if it has the same value in all jobs of this batch.
        swept = set()
        for override in _parsed(self._task_overrides()):
            if override.is_sweep_override():
                swept.add(_key(override))

        keys: dict[str, None] = {}  # an ordered set
        for job in values:
            keys.update(dict.fromkeys(job))
        varied = []
        for key in keys:
            if key in swept or len({job.get(key) for job in values}) > 1:
                varied.append(key)
        return varied

    def _task_overrides(self) -> list[str]:
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

    def _interrupted_run_dirs(self) -> dict[str, Path]:
        """Return the run directories of interrupted jobs, by the job's name.

        Only directories below the working directory are found.
        """
        run_dirs_by_id = by_id("SWEEP")
        run_dirs = {}
        for name, run in self.sweep.children().items():
            run_id = run.info.run_id
            if run.info.status == "KILLED" and run_id in run_dirs_by_id:
                run_dirs[name] = run_dirs_by_id[run_id]
        return run_dirs

    def _slots(self, hardware: Sequence[HardwareConfig]) -> list[list[str]]:
        """Return one list of GPUs per concurrent job.

        Overridden methods also check the launcher's requirements and prepare it for the
        jobs.
        """
        return [[]]

    def _call(
        self, name: str, overrides: Sequence[str], number: int, run_dir: Path | None
    ) -> JobCall:
        """Return the callable of a job; it resumes the run in `run_dir`, if given."""
        overrides = [
            *overrides,
            f"tracking.sweep={hydra_quoted(self.sweep.run_id)}",
            f"tracking.job={hydra_quoted(name)}",
            f"tracking.run_name={hydra_quoted(name)}",
        ]
        if self.sweep.experiment:
            experiment = hydra_quoted(self.sweep.experiment)
            overrides.append(f"tracking.experiment={experiment}")
        if run_dir is not None:
            overrides += [
                "training.resume=auto",
                f"hydra.sweep.dir={hydra_quoted(run_dir.absolute())}",
                "hydra.sweep.subdir=.",
            ]
        return JobCall(
            overrides,
            number,
            self.config,
            self.hydra_context,
            self.task_function,
            Singleton.get_state(),
        )

    def _run(self, calls: Mapping[str, JobCall], slots: list[Slot]) -> dict[str, float]:
        """Run all jobs, and return their losses. Both dicts are keyed by job name.

        If an exception is raised, all running jobs are interrupted first.
        """
        losses: dict[str, float] = {}
        waiting = deque(calls.items())
        try:
            while waiting or any(slot.job for slot in slots):
                for slot in slots:
                    if waiting and slot.job is None:
                        name, call = waiting.popleft()
                        self._start(slot, name, call)
                self._wait()
                losses |= self._collect(slots)
                self._check_first_ending()
        except BaseException:
            self._stop(slots)
            raise
        return losses

    def _start(self, slot: Slot, name: str, call: JobCall) -> None:
        """Start a job in a slot. A job that cannot be started counts as failed."""
        say(f"  {name}: started")
        slot.name = name
        slot.started_at = time.monotonic()
        try:
            # Assign the job before it starts, so that `_stop` finds it if the start is
            # interrupted.
            slot.job = self._job(call, slot.gpus)
            slot.job.start()
        except Exception as error:
            self._note(slot, Ending(FAILED, reason=first_line(error)))

    def _collect(self, slots: Sequence[Slot]) -> dict[str, float]:
        """Return the losses of the jobs that have ended, and free their slots."""
        losses = {}
        for slot in slots:
            if not slot.job:
                continue
            ending = slot.job.ending()
            if ending is not None:
                losses[slot.name] = ending.loss
                self._note(slot, ending)
        return losses

    def _note(self, slot: Slot, ending: Ending) -> None:
        """Record and print how the job of a slot ended, and free the slot."""
        is_first = not self.sweep.ended and not self._trained_before
        if is_first and ending.how == REJECTED:
            self.sweep.ended_by = slot.name
        self.sweep.ended[slot.name] = time.monotonic()
        if ending.how != FINISHED:
            self.sweep.lost[slot.name] = ending.reason or ending.how
        seconds = time.monotonic() - slot.started_at
        say(f"  {slot.name}: {ending.how} after {seconds:.0f} s")
        slot.job = None

    def _check_first_ending(self) -> None:
        """Raise a `RunError` if the first job to end was rejected for its config.

        The configs of the other jobs probably have the same error.
        """
        name = self.sweep.ended_by
        if name:
            raise RunError(
                f"{self.sweep.lost[name]} The sweep was ended for it, as {name} was "
                "its first job to end."
            )

    def _stop(self, slots: Sequence[Slot]) -> None:
        """Interrupt all running jobs, so that each closes its run, and wait for them.

        Jobs that still run after `GRACE` plus `tracking.patience` seconds are killed.
        """
        deadline = time.monotonic() + GRACE + self.config.tracking.patience
        while any(slot.job for slot in slots):
            try:
                running = [slot.job for slot in slots if slot.job]
                self._ask_to_end(running, late=time.monotonic() > deadline)
                self._wait()
                self._collect(slots)
            except (KeyboardInterrupt, Terminated):
                deadline = 0.0  # a second signal kills at once

    def _job(self, call: JobCall, gpus: list[str]) -> Any:
        """Return the job, not yet started, that runs `call` on `gpus`."""
        return _InProcessJob(call)

    def _wait(self) -> None:
        """Wait for `interval` seconds; a subclass may also poll the jobs' states."""
        time.sleep(self.interval)

    def _ask_to_end(self, running: Sequence[Any], late: bool) -> None:
        """Ask running jobs to end, or kill them if `late`. Called at every poll."""


@dataclass
class _InProcessJob:
    call: JobCall
    _ending: Ending | None = None

    def start(self) -> None:
        self._ending = self.call()

    def ending(self) -> Ending:
        return self._ending or Ending("interrupted")


class BasicLauncher(SweepLauncher):
    """Runs all jobs in this process, one after the other, for use with a debugger.

    The jobs share TensorFlow's global state.
    """

    interval = 0.0

    def _slots(self, hardware: Sequence[HardwareConfig]) -> list[list[str]]:
        # Reject several workers: a process can join a TensorFlow cluster only once.
        if any(job.workers != 1 for job in hardware):
            raise ConfigError(
                "hydra/launcher", "must not be basic with several workers", "basic"
            )
        return super()._slots(hardware)


def _terminate(number: int, _frame: object) -> NoReturn:
    raise Terminated(signal.Signals(number).name)


def completed_with(loss: float) -> JobReturn:
    """Return a completed `JobReturn` with `loss`, which is `WORST` for a failed job."""
    returned = JobReturn(status=JobStatus.COMPLETED)
    returned.return_value = loss
    return returned


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
    """Reject a folder of a job that has a longer name or path than Linux takes.

    Hydra makes the folder when the job starts.
    """
    subdir = str(config.hydra.sweep.subdir)
    folder = Path(config.hydra.sweep.dir, subdir).absolute()
    limit = ""
    if len(os.fsencode(folder)) > LONGEST_PATH:
        limit = f"its path has at most {LONGEST_PATH} bytes"
    for name in folder.parts:
        if len(os.fsencode(name)) > LONGEST_NAME:
            limit = f"a name has at most {LONGEST_NAME} bytes"
    if limit:
        rule = f"must be a folder that can be made ({limit})"
        raise ConfigError("hydra.sweep.subdir", rule, subdir)


def _check_for_secrets(config: DictConfig) -> None:
    """Reject a config with a secret: Hydra and submitit write configs to files."""
    values = OmegaConf.to_container(config, resolve=False)
    for key, value in leaves(values).items():
        if isinstance(value, str) and mask(value) != value:
            rule = (
                "must come to a sweep as an override, or from the environment "
                "as ${oc.env:NAME}: it holds a secret"
            )
            raise ConfigError(key, rule, value)
