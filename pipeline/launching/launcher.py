"""A batch of jobs: planned, then each launched on its own by one of as many threads as there are places."""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher as HydrasBasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf, open_dict

from pipeline import config as configuration
from pipeline.errors import ConfigError
from pipeline.masking import mask
from pipeline.sweep import parent_run

THREAD = "pipeline-job"  # name of those that launch
GRACE = 60.0  # seconds for a job to close its run before it is killed


class SweepLauncher(Launcher):
    """Plans the jobs of a batch, then launches each alone with `_run`."""

    config: Any  # set by Hydra
    hydra_context: Any
    params: dict[str, Any]

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Keeps what all jobs share; who calls `launch` more than once does so within."""
        with _signals_interrupt():
            yield

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        # In the order of their numbers; the name of a job is known before any of them starts.
        with self.serving():
            composed = [self._composed(overrides) for overrides in job_overrides]
            jobs, varied = self._jobs(job_overrides, [settings for _, settings in composed], initial_job_idx)
            places: queue.Queue[list[str]] = queue.Queue()
            for place in self._places([config.hardware for config, _ in composed]):
                places.put(place)
            with open_dict(self.config):
                current = parent_run.begin(self.config, jobs, varied)
            done = current.finished()

            def one(number: int, job: parent_run.PlannedJob) -> JobReturn:
                if job.name in done:
                    return gave(done[job.name])
                place = places.get()
                try:
                    return self._one(current, job, initial_job_idx + number, place)
                finally:
                    places.put(place)

            return self._each(one, jobs, places.qsize(), current)

    def _each(
        self,
        one: Callable[[int, parent_run.PlannedJob], JobReturn],
        jobs: list[parent_run.PlannedJob],
        at_once: int,
        current: parent_run.ParentRun,
    ) -> list[JobReturn]:
        # The threads' processes inherit that Ctrl-C is not theirs: this process hears it, and ends them in good order.
        pool = ThreadPoolExecutor(at_once, THREAD, signal.pthread_sigmask, (signal.SIG_BLOCK, {signal.SIGINT}))
        try:
            futures = [pool.submit(one, number, job) for number, job in enumerate(jobs)]
            return [future.result() for future in futures]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            until = time.monotonic() + GRACE
            # Not by the futures: the interruption may have come before they were at hand.
            while any(thread.name.startswith(THREAD) for thread in threading.enumerate()):
                try:
                    self._end_jobs(current, late=time.monotonic() > until)
                    time.sleep(0.5)
                except KeyboardInterrupt:
                    until = 0.0  # asked a second time: at once
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _composed(self, overrides: Sequence[str]) -> tuple[DictConfig, configuration.Settings]:
        """The config of one job, checked: a wrong one is refused before the first job starts."""
        config: DictConfig = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        before = HydraConfig.instance().cfg
        try:
            with open_dict(config):
                # What a job's config may refer to as `hydra:`, as far as it is known before the job has its number.
                config.hydra.job.num, config.hydra.job.id = 0, "0"
                config.hydra.runtime.output_dir = str(Path(config.hydra.sweep.dir).absolute() / "0")
                HydraConfig.instance().set_config(config)
                config.pop("hydra")
                _refuse_secrets(config)
                return config, self._check(config, overrides)
        finally:
            HydraConfig.instance().cfg = before

    def _check(self, config: DictConfig, overrides: Sequence[str]) -> configuration.Settings:
        return configuration.check(config, overrides)

    def _jobs(
        self, job_overrides: Sequence[Sequence[str]], settings: Sequence[configuration.Settings], first: int
    ) -> tuple[list[parent_run.PlannedJob], list[str]]:
        """The jobs, each with its name, and the keys in which they differ."""
        parse = OverridesParser.create().parse_override
        values = [
            {o.get_key_element().lstrip("+~"): o.get_value_element_as_str() for o in map(parse, overrides)}
            for overrides in job_overrides
        ]
        asked: Any = OmegaConf.to_container(self.config.hydra.overrides.task, resolve=False)
        asked += [f"{key}={value}" for key, value in (self.config.hydra.sweeper.get("params") or {}).items()]
        # What is swept is in the name also where this batch, of a sweeper that goes in batches, has one value of it.
        swept = {o.get_key_element().lstrip("+~") for o in map(parse, asked) if o.is_sweep_override()}
        keys = dict.fromkeys(key for job in values for key in job)
        varied = [key for key in keys if key in swept or len({job.get(key) for job in values}) > 1]
        differing = [{key: job[key] for key in varied if key in job} for job in values]
        names = parent_run.names_of(differing, [of.batching.effective_batch_size for of in settings], first)
        return [parent_run.PlannedJob(name, tuple(o)) for name, o in zip(names, job_overrides, strict=True)], varied

    def _one(
        self, current: parent_run.ParentRun, job: parent_run.PlannedJob, number: int, place: list[str]
    ) -> JobReturn:
        quoted = "'" + job.name.replace("'", "\\'") + "'"
        of_sweep = [f"tracking.sweep={current.run_id}", f"tracking.job={quoted}", f"tracking.run_name={quoted}"]
        _say(f"  {job.name}: started")
        began = time.monotonic()
        try:
            returned = self._run([*job.overrides, *of_sweep], number, place, current)
        except Exception as error:  # the process died; what it had logged is in its run
            current.lost[job.name] = str(error) or type(error).__name__
            returned = gave(float("inf"))
        finally:
            current.ended[job.name] = time.monotonic()
        if returned.status == JobStatus.FAILED:
            current.lost[job.name] = (str(returned._return_value).splitlines() or ["failed"])[0]
            returned = gave(float("inf"))
        _say(f"  {job.name}: ended after {time.monotonic() - began:.0f} s")
        return returned

    def _run(self, overrides: list[str], number: int, place: list[str], current: parent_run.ParentRun) -> JobReturn:
        """Runs one job to its end; raises where its process died."""
        raise NotImplementedError

    def _places(self, hardware: Sequence[DictConfig]) -> list[list[str]]:
        """One entry for each job that may run at once: the GPUs it is given."""
        return [[]]

    def _end_jobs(self, current: parent_run.ParentRun, late: bool) -> None:
        """Asks the jobs that run to end, so that each closes its run as KILLED; ends them itself when it is late."""


class BasicLauncher(SweepLauncher, HydrasBasicLauncher):
    """All jobs in this process, one after the other: for a debugger. TensorFlow's global state is shared."""

    def _each(
        self,
        one: Callable[[int, parent_run.PlannedJob], JobReturn],
        jobs: list[parent_run.PlannedJob],
        at_once: int,
        current: parent_run.ParentRun,
    ) -> list[JobReturn]:
        return [one(number, job) for number, job in enumerate(jobs)]

    def _run(self, overrides: list[str], number: int, place: list[str], current: parent_run.ParentRun) -> JobReturn:
        (returned,) = HydrasBasicLauncher.launch(self, [overrides], number)
        return returned


class PlainSweeper(BasicSweeper):
    """Hydra's own, which composes every job once more before the launcher does; there each is checked as well."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Left to the launcher, which refuses a wrong job before the first one starts."""


def _refuse_secrets(config: DictConfig) -> None:
    """A sweep's config goes to its jobs through files, which must not hold what is to be masked everywhere."""
    for key, value in configuration.leaves(OmegaConf.to_container(config, resolve=False)).items():
        if isinstance(value, str) and mask(value) != value:
            rule = "must come to a sweep as an override, or from the environment as ${oc.env:NAME}: it holds a secret"
            raise ConfigError(key, rule, value)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")  # in one piece: `print` writes the line's end on its own, and threads mix


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that is closed, end the jobs as Ctrl-C does."""
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]  # as nohup wants it
    before = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def gave(value: float) -> JobReturn:
    """Of a job that has its value from before, or that gave none: a sweeper that searches reads inf as the worst."""
    returned = JobReturn(status=JobStatus.COMPLETED)
    returned.return_value = value
    return returned
