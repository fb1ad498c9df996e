"""Hydra's launchers for a sweep: the published ones, made to outlive a job that fails, dies or is killed.

Each job is launched on its own, by one of as many threads as jobs may run at once. So a job that dies takes no other
with it, a machine is never given more jobs than it has places for, and no two jobs are on one GPU.
"""

from __future__ import annotations

import contextlib
import copy
import glob
import itertools
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher as HydrasBasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra_plugins.hydra_submitit_launcher import submitit_launcher
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf, LocalQueueConf, SlurmQueueConf
from omegaconf import DictConfig, OmegaConf, open_dict

from pipeline import config as configuration
from pipeline import forkserver, showing, sweep
from pipeline.errors import ConfigError
from pipeline.masking import mask

GRACE = 60.0  # seconds for a job to close its run before it is killed
SLURM_INTERVAL = 5.0  # seconds between two questions to Slurm, whatever the number of jobs


class _Sweeping(Launcher):
    """Plans the jobs of a batch, then launches each alone with `_run`."""

    config: Any  # set by Hydra
    hydra_context: Any
    params: dict[str, Any]

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        # In the order of their numbers; the name of a job is known before any of them starts.
        with _signals_interrupt():
            composed = [self._composed(overrides) for overrides in job_overrides]
            jobs, varied = self._jobs(job_overrides, [settings for _, settings in composed], initial_job_idx)
            places: queue.Queue[list[str]] = queue.Queue()
            for place in self._places([config.hardware for config, _ in composed]):
                places.put(place)
            with open_dict(self.config):
                current = sweep.begin(self.config, jobs, varied)
            done = current.finished()

            def one(number: int, job: sweep.Job) -> JobReturn:
                if job.name in done:
                    return _gave(done[job.name])
                place = places.get()
                try:
                    return self._one(current, job, initial_job_idx + number, place)
                finally:
                    places.put(place)

            return self._each(one, jobs, places.qsize(), current)

    def _each(
        self, one: Callable[[int, sweep.Job], JobReturn], jobs: list[sweep.Job], at_once: int, current: sweep.Sweep
    ) -> list[JobReturn]:
        # The threads' processes inherit that Ctrl-C is not theirs: this process hears it, and ends them in good order.
        pool = ThreadPoolExecutor(at_once, "job", signal.pthread_sigmask, (signal.SIG_BLOCK, {signal.SIGINT}))
        try:
            futures = [pool.submit(one, number, job) for number, job in enumerate(jobs)]
            futures[0].add_done_callback(lambda _: showing.prepare())  # the first has the machine for itself
            return [future.result() for future in futures]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            until = time.monotonic() + GRACE
            while not all(future.done() for future in futures):
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
    ) -> tuple[list[sweep.Job], list[str]]:
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
        names = sweep.names_of(differing, [of.batching.effective_batch_size for of in settings], first)
        return [sweep.Job(name, tuple(o)) for name, o in zip(names, job_overrides, strict=True)], varied

    def _one(self, current: sweep.Sweep, job: sweep.Job, number: int, place: list[str]) -> JobReturn:
        quoted = "'" + job.name.replace("'", "\\'") + "'"
        of_sweep = [f"tracking.sweep={current.run_id}", f"tracking.job={quoted}", f"tracking.run_name={quoted}"]
        _say(f"  {job.name}: started")
        began = time.monotonic()
        try:
            returned = self._run([*job.overrides, *of_sweep], number, place, current)
        except Exception as error:  # the process died; what it had logged is in its run
            current.lost[job.name] = str(error) or type(error).__name__
            returned = _gave(float("inf"))
        finally:
            current.ended[job.name] = time.monotonic()
        if returned.status == JobStatus.FAILED:
            current.lost[job.name] = (str(returned._return_value).splitlines() or ["failed"])[0]
            returned = _gave(float("inf"))
        _say(f"  {job.name}: ended after {time.monotonic() - began:.0f} s")
        return returned

    def _run(self, overrides: list[str], number: int, place: list[str], current: sweep.Sweep) -> JobReturn:
        """Runs one job to its end; raises where its process died."""
        raise NotImplementedError

    def _places(self, hardware: Sequence[DictConfig]) -> list[list[str]]:
        """One entry for each job that may run at once: the GPUs it is given."""
        return [[]]

    def _end_jobs(self, current: sweep.Sweep, late: bool) -> None:
        """Asks the jobs that run to end, so that each closes its run as KILLED; ends them itself when it is late."""


class _Submitting(_Sweeping):
    """Each job in a process of its own, through submitit."""

    _EXECUTOR: str
    place: list[str] | None = None  # the GPUs of this job; None: they are not ours to choose

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        # In the job's process, before TensorFlow looks for GPUs. Submitit's own way knows no GPU by its UUID.
        if self.place is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.place)
        return super().__call__(*arguments, **named)  # type: ignore[misc]  # the published launcher's

    def _run(self, overrides: list[str], number: int, place: list[str], current: sweep.Sweep) -> JobReturn:
        # What the published launcher does, but for its waiting: a second at a time, and fifteen for what a job that
        # died has not left.
        import submitit

        launcher = copy.copy(self)
        launcher.place = self._given(place)
        params = {**self.params, **self._more(current)}
        folder = params.pop("submitit_folder").replace("%j", f"{number}/%j")  # process numbers come again
        timeouts = {f"{self._EXECUTOR}_{key}": params.pop(key) for key in ("max_num_timeout",) if key in params}
        executor = submitit.AutoExecutor(folder, cluster=self._EXECUTOR, **timeouts)
        shared = set(OmegaConf.structured(BaseQueueConf).keys())
        executor.update_parameters(
            **{key if key in shared else f"{self._EXECUTOR}_{key}": value for key, value in params.items()}
        )
        job = executor.submit(launcher, overrides, "hydra.sweep.dir", number, str(number), Singleton.get_state())
        how = launcher._wait(job, time.monotonic(), current)
        if not job.paths.result_pickle.exists():
            lines = [line.strip() for line in (job.stderr() or "").splitlines() if line.strip()]
            raise RuntimeError(": ".join([how, *lines[-1:]]))
        # `job.result` waits for the process a second at a time.
        outcome, returned = submitit.core.utils.pickle_load(job.paths.result_pickle)
        if outcome == "error":  # with a whole traceback
            said = [line for line in returned.splitlines() if re.match(r"[\w.]+: ", line)]
            raise RuntimeError(said[-1] if said else "the process failed")
        assert isinstance(returned, JobReturn)
        return returned

    def _given(self, place: list[str]) -> list[str] | None:
        return place

    def _more(self, current: sweep.Sweep) -> dict[str, Any]:
        """Parameters of submitit beside those of the config."""
        return {}

    def _wait(self, job: Any, submitted: float, current: sweep.Sweep) -> str:
        """Waits until the job is over; returns how it ended where it left no result."""
        raise NotImplementedError


class LocalLauncher(_Submitting, submitit_launcher.LocalLauncher):
    """Each job a process of its own on this machine: as many at once as `hardware.parallel_jobs` says."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        with forkserver.serving():
            return super().launch(job_overrides, initial_job_idx)

    def _places(self, hardware: Sequence[DictConfig]) -> list[list[str]]:
        at_once = self.config.hardware.parallel_jobs
        gpus = visible_gpus()
        size = max((max(h.gpus_per_job, h.replicas) for h in hardware if h.device.name != "cpu"), default=0)
        if not gpus or not size:
            return [[] for _ in range(at_once or 1)]
        if size > len(gpus):
            raise ConfigError("hardware.gpus_per_job", f"must be at most the {len(gpus)} GPUs of this machine", size)
        places = [gpus[first : first + size] for first in range(0, len(gpus) - size + 1, size)]
        return places[:at_once]

    def _wait(self, job: Any, submitted: float, current: sweep.Sweep) -> str:
        # A job that has its result is over once its process has let go of its GPUs; without any, at once.
        while not job.done() and (self.place or not job.paths.result_pickle.exists()):
            time.sleep(0.01)
        return "the process died"

    def _end_jobs(self, current: sweep.Sweep, late: bool) -> None:
        import psutil

        for process in psutil.Process().children(recursive=True):
            # Again and again: until TensorFlow is about to be imported, submitit lets SIGTERM pass by.
            if _runs(process, "submitit.core._submit"):
                with contextlib.suppress(psutil.Error):  # it has ended by itself
                    process.send_signal(signal.SIGKILL if late else signal.SIGTERM)


class SlurmLauncher(_Submitting, submitit_launcher.SlurmLauncher):
    """Each job a Slurm job; Slurm decides how many run at once, and where."""

    def _places(self, hardware: Sequence[DictConfig]) -> list[list[str]]:
        if shutil.which("sbatch") is None:
            raise ConfigError("hydra/launcher", "must be one of this machine, which has no sbatch", "submitit_slurm")
        wanted = max((max(h.gpus_per_job, h.replicas) for h in hardware if h.device.name != "cpu"), default=0)
        asked = [key for key in ("gpus_per_node", "gpus_per_task", "gres") if self.params.get(key) is not None]
        if wanted and not asked and (self._has_gpus() or any(h.device.name == "gpu" for h in hardware)):
            self.params["gpus_per_node"] = wanted
        return [[] for _ in range(self.params.get("array_parallelism") or 256)]

    def _has_gpus(self) -> bool:
        """Whether the nodes that a job may come to have GPUs to give."""
        partition = [f"--partition={self.params['partition']}"] if self.params.get("partition") else []
        answer = subprocess.run(["sinfo", "--noheader", "--format=%G", *partition], capture_output=True, text=True)
        return "gpu" in answer.stdout

    def _check(self, config: DictConfig, overrides: Sequence[str]) -> configuration.Settings:
        device = config.hardware.device
        config.hardware.device = "auto"  # the job's machine may have the GPU that this one lacks
        try:
            return super()._check(config, overrides)
        finally:
            config.hardware.device = device

    def _given(self, place: list[str]) -> list[str] | None:
        return None

    def _more(self, current: sweep.Sweep) -> dict[str, Any]:
        return {"name": f"pipeline-{current.run_id}"}

    def _wait(self, job: Any, submitted: float, current: sweep.Sweep) -> str:
        states = _SlurmStates.of(f"pipeline-{current.run_id}")
        while not job.paths.result_pickle.exists():
            ended = states.ended(job.job_id, submitted)
            if ended:
                until = time.monotonic() + 2 * SLURM_INTERVAL  # a network's file system may show the file late
                while not job.paths.result_pickle.exists() and time.monotonic() < until:
                    time.sleep(0.5)
                return f"Slurm job {job.job_id}: {ended}"
            time.sleep(0.5)
        return ""

    def _end_jobs(self, current: sweep.Sweep, late: bool) -> None:
        # Those that wait are gone, those that run get SIGTERM, and SIGKILL after Slurm's KillWait.
        subprocess.run(["scancel", f"--name=pipeline-{current.run_id}"], check=False)


class BasicLauncher(_Sweeping, HydrasBasicLauncher):
    """All jobs in this process, one after the other: for a debugger. TensorFlow's global state is shared."""

    def _each(
        self, one: Callable[[int, sweep.Job], JobReturn], jobs: list[sweep.Job], at_once: int, current: sweep.Sweep
    ) -> list[JobReturn]:
        return [one(number, job) for number, job in enumerate(jobs)]

    def _run(self, overrides: list[str], number: int, place: list[str], current: sweep.Sweep) -> JobReturn:
        (returned,) = HydrasBasicLauncher.launch(self, [overrides], number)
        return returned


class PlainSweeper(BasicSweeper):
    """Hydra's own, which composes every job once more before the launcher does; there each is checked as well."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Left to the launcher, which refuses a wrong job before the first one starts."""


class _SlurmStates:
    """What Slurm says of the jobs of one name, asked once for all of them.

    `squeue` answers on every cluster; submitit asks `sacct`, which needs a database, and where there is none it
    waits for a job that died for ever.
    """

    _ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")
    _by_name: dict[str, _SlurmStates] = {}  # noqa: RUF012

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._asked = self._answered = float("-inf")
        self._states: dict[str, str] = {}

    @classmethod
    def of(cls, name: str) -> _SlurmStates:
        return cls._by_name.setdefault(name, cls(name))

    def ended(self, job_id: str, submitted: float) -> str:
        """The state in which the job ended; empty where it has not, or Slurm has not been asked since `submitted`."""
        with self._lock:
            now = time.monotonic()
            if now - self._asked > SLURM_INTERVAL:
                command = ["squeue", "--noheader", "--states=all", f"--name={self._name}", "--format=%i %T"]
                answer = subprocess.run(command, capture_output=True, text=True)
                self._asked = now
                if answer.returncode == 0:
                    self._answered = now
                    self._states = dict(line.split()[:2] for line in answer.stdout.splitlines() if line.strip())
            if self._answered < submitted:
                return ""
            state = self._states.get(job_id, "gone")
            return state if state == "gone" or state in self._ENDED else ""


def register() -> None:
    """Puts these launchers under the published names; call it once Hydra has found its plugins."""
    here = f"{__name__}."
    store = ConfigStore.instance().store
    year, day = 525600, 1440  # minutes after which submitit ends a job
    local = LocalQueueConf(_target_=here + "LocalLauncher", timeout_min=year)
    slurm = SlurmQueueConf(_target_=here + "SlurmLauncher", timeout_min=day)
    store(group="hydra/launcher", name="submitit_local", node=local, provider="pipeline")
    store(group="hydra/launcher", name="submitit_slurm", node=slurm, provider="pipeline")
    store(group="hydra/launcher", name="basic", node={"_target_": here + "BasicLauncher"}, provider="pipeline")
    plain = BasicSweeperConf(_target_=here + "PlainSweeper")
    store(group="hydra/sweeper", name="basic", node=plain, provider="pipeline")


def visible_gpus() -> list[str]:
    """The NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them: by number or UUID."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        names = (gpu.strip() for gpu in listed.split(","))
        return list(itertools.takewhile(lambda gpu: gpu and not gpu.startswith("-"), names))  # as CUDA reads it
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=30)
        count = sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
    except (OSError, subprocess.SubprocessError):
        count = len(glob.glob("/dev/nvidia[0-9]*"))
    return [str(number) for number in range(count)]


def _refuse_secrets(config: DictConfig) -> None:
    """A sweep's config goes to its jobs through files, which must not hold what is to be masked everywhere."""
    for key, value in configuration.leaves(OmegaConf.to_container(config, resolve=False)).items():
        if isinstance(value, str) and mask(value) != value:
            rule = "must come to a sweep as an override, or from the environment as ${oc.env:NAME}: it holds a secret"
            raise ConfigError(key, rule, value)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")  # in one piece: `print` writes the line's end on its own, and threads mix


def _runs(process: Any, module: str) -> bool:
    try:
        return any(argument.startswith(module) for argument in process.cmdline())
    except Exception:  # it has ended
        return False


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


def _gave(value: float) -> JobReturn:
    """Of a job that has its value from before, or that gave none: a sweeper that searches reads inf as the worst."""
    returned = JobReturn(status=JobStatus.COMPLETED)
    returned.return_value = value
    return returned
