"""Hydra launchers that plan a batch of jobs, run as many at once as there are slots, and note how each one ended."""

import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from pipeline.checkpoints.run_dirs import by_id, quoted
from pipeline.common.errors import ConfigError, first_line, say
from pipeline.common.secrets import mask
from pipeline.config.plain import leaves
from pipeline.config.resolve import RunSpec, resolve
from pipeline.config.schema import HardwareConfig
from pipeline.sweep import mlflow_view, parent_run
from pipeline.sweep.job_call import FAILED, FINISHED, WORST, Ending, JobCall

Jobs = dict[str, Sequence[str]]  # their overrides by name
GRACE = 60.0  # seconds that an interrupted job has to close its run, beside its patience with the store


@dataclass
class Slot:
    """Runs one job at a time, on `gpus`."""

    gpus: list[str]
    name: str = ""
    job: Any = (
        None  # has `start()` and `ending()`, which returns None while the job runs
    )
    since: float = 0.0


class SweepLauncher(Launcher):
    """Plans the jobs of a batch, then runs those that have not finished."""

    config: Any  # Hydra sets this and the next two
    hydra_context: HydraContext
    task_function: TaskFunction
    sweep: parent_run.ParentRun  # from the first batch on
    interval = 0.1  # seconds between two polls of the jobs

    def setup(
        self,
        *,
        hydra_context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
    ) -> None:
        self.config, self.hydra_context, self.task_function = (
            config,
            hydra_context,
            task_function,
        )
        self._begun: dict[
            str, Path
        ] = {}  # run directories of interrupted jobs, by name
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(
                    number, signal.default_int_handler
                )  # KeyboardInterrupt, as for Ctrl-C

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        jobs, varied, hardware = self.plan(job_overrides, initial_job_idx)
        slots = [Slot(gpus) for gpus in self._slots(hardware)]
        if hasattr(self, "sweep"):
            self.sweep.plan(jobs, varied)
        else:
            self.sweep = parent_run.begin(self.config, jobs, varied)
            mlflow_view.announce(self.sweep)
        losses = self.sweep.finished()
        if self.config.tracking.sweep is not None:  # --again
            here = by_id("SWEEP")  # the run directories below the working directory
            runs = {
                name: run.info
                for name, run in self.sweep.children().items()
                if run.info.status == "KILLED"
            }
            self._begun = {
                name: here[info.run_id]
                for name, info in runs.items()
                if info.run_id in here
            }
        numbered = enumerate(jobs.items(), initial_job_idx)
        calls = {
            name: self._call(name, given, number)
            for number, (name, given) in numbered
            if name not in losses
        }
        losses |= self._run(calls, slots)
        return [completed_with(losses.get(name, WORST)) for name in jobs]

    def plan(
        self, job_overrides: Sequence[Sequence[str]], first: int
    ) -> tuple[Jobs, list[str], list[HardwareConfig]]:
        """Compose and check all jobs before any starts; return their overrides by name, what varies, and `hardware`."""
        composed = [self._composed(overrides) for overrides in job_overrides]
        parse = OverridesParser.create().parse_override
        parsed = [list(map(parse, overrides)) for overrides in job_overrides]
        values = [
            {
                o.get_key_element().lstrip("+~"): o.get_value_element_as_str()
                for o in job
            }
            for job in parsed
        ]
        asked: Any = OmegaConf.to_container(
            self.config.hydra.overrides.task, resolve=False
        )
        asked += [
            f"{key}={value}"
            for key, value in (self.config.hydra.sweeper.get("params") or {}).items()
        ]
        # A swept key is in the name even if this batch has one value of it.
        swept = {
            o.get_key_element().lstrip("+~")
            for o in map(parse, asked)
            if o.is_sweep_override()
        }
        keys = dict.fromkeys(key for job in values for key in job)
        varied = [
            key
            for key in keys
            if key in swept or len({job.get(key) for job in values}) > 1
        ]
        differing = [{key: job[key] for key in varied if key in job} for job in values]
        sizes = [spec.batching.effective_batch_size for spec in composed]
        jobs = dict(
            zip(
                parent_run.names_of(differing, sizes, first), job_overrides, strict=True
            )
        )
        return jobs, varied, [spec.config.hardware for spec in composed]

    def _composed(self, overrides: Sequence[str]) -> RunSpec:
        config: DictConfig = self.hydra_context.config_loader.load_sweep_config(
            self.config, list(overrides)
        )
        before = HydraConfig.instance().cfg
        try:
            with open_dict(config):
                # Configs may refer to these as `${hydra:…}`; the job has no number yet.
                config.hydra.job.num, config.hydra.job.id = 0, "0"
                config.hydra.runtime.output_dir = str(
                    Path(config.hydra.sweep.dir).absolute() / "0"
                )
                HydraConfig.instance().set_config(config)
                config.pop("hydra")
                for key, value in leaves(
                    OmegaConf.to_container(config, resolve=False)
                ).items():
                    if (
                        isinstance(value, str) and mask(value) != value
                    ):  # Hydra and submitit write it into files
                        rule = "must come to a sweep as an override, or from the environment as ${oc.env:NAME}"
                        raise ConfigError(key, f"{rule}: it holds a secret", value)
                return resolve(config, overrides)
        finally:
            HydraConfig.instance().cfg = before

    def _slots(self, hardware: Sequence[HardwareConfig]) -> list[list[str]]:
        return [[]]

    def _call(self, name: str, given: Sequence[str], number: int) -> JobCall:
        own = quoted(name)
        overrides = [
            *given,
            f"tracking.sweep={self.sweep.run_id}",
            f"tracking.job={own}",
            f"tracking.run_name={own}",
        ]
        if (place := self._begun.get(name)) is not None:  # resume from its checkpoint
            overrides += [
                "training.resume=auto",
                f"hydra.sweep.dir={quoted(place.absolute())}",
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

    def _run(self, calls: dict[str, JobCall], slots: list[Slot]) -> dict[str, float]:
        """Run all jobs; `calls` and the returned losses are by the job's name."""
        losses: dict[str, float] = {}
        waiting = deque(calls.items())
        try:
            while waiting or any(slot.job for slot in slots):
                for slot in slots:
                    if waiting and slot.job is None:
                        self._start(slot, *waiting.popleft())
                self._wait()
                losses |= self._collect(slots)
        except BaseException:
            self._stop(slots)
            raise
        return losses

    def _start(self, slot: Slot, name: str, call: JobCall) -> None:
        say(f"  {name}: started")
        slot.name, slot.since = name, time.monotonic()
        try:
            slot.job = self._job(
                call, slot.gpus
            )  # set before the job starts: an interruption may come at any time
            slot.job.start()
        except Exception as error:
            self._note(slot, Ending(FAILED, reason=first_line(error)))

    def _collect(self, slots: Sequence[Slot]) -> dict[str, float]:
        losses = {}
        for slot in slots:
            if slot.job and (ending := slot.job.ending()) is not None:
                losses[slot.name] = ending.loss
                self._note(slot, ending)
        return losses

    def _note(self, slot: Slot, ending: Ending) -> None:
        self.sweep.ended[slot.name] = time.monotonic()
        if ending.how != FINISHED:
            self.sweep.lost[slot.name] = ending.reason or ending.how
        say(f"  {slot.name}: {ending.how} after {time.monotonic() - slot.since:.0f} s")
        slot.job = None

    def _stop(self, slots: Sequence[Slot]) -> None:
        """Interrupt all running jobs, so that each closes its run as KILLED; kill late ones."""
        until = time.monotonic() + GRACE + self.config.tracking.patience
        while running := [slot.job for slot in slots if slot.job]:
            try:
                self._ask_to_end(running, late=time.monotonic() > until)
                self._wait()
                self._collect(slots)
            except KeyboardInterrupt:
                until = 0.0  # a second Ctrl-C kills at once

    def _job(self, call: JobCall, gpus: list[str]) -> Any:
        return _InProcessJob(call)

    def _wait(self) -> None:
        time.sleep(self.interval)

    def _ask_to_end(self, running: Sequence[Any], late: bool) -> None:
        """Ask the jobs to end, or kill them if it is `late`; called at every poll."""


@dataclass
class _InProcessJob:
    call: JobCall
    _ending: Ending | None = None

    def start(self) -> None:
        self._ending = self.call()

    def ending(self) -> Ending:
        return self._ending or Ending("interrupted")


class BasicLauncher(SweepLauncher):
    """Runs all jobs in this process, one after the other, for a debugger; they share TensorFlow's global state."""

    interval = 0.0

    def _slots(self, hardware: Sequence[HardwareConfig]) -> list[list[str]]:
        if any(
            each.workers != 1 for each in hardware
        ):  # TensorFlow joins a cluster once in a process
            raise ConfigError(
                "hydra/launcher", "must not be basic with several workers", "basic"
            )
        return super()._slots(hardware)


def completed_with(loss: float) -> JobReturn:
    """Return `loss` as Hydra's result of a job; a job that failed has the loss `WORST`."""
    returned = JobReturn(status=JobStatus.COMPLETED)
    returned.return_value = loss
    return returned
