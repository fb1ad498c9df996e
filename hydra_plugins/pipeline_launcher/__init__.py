"""Hydra's launchers for a sweep: the published ones, made to outlive a job that fails, dies or is killed.

Each job is launched on its own, by one of as many threads as jobs may run at once. So a job that dies takes no other
with it, a machine is never given more jobs than it has places for, and no two jobs are on one GPU.
"""

from __future__ import annotations

import contextlib
import copy
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher as HydrasBasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra_plugins.hydra_submitit_launcher import submitit_launcher
from hydra_plugins.hydra_submitit_launcher.config import LocalQueueConf, SlurmQueueConf
from omegaconf import open_dict

from pipeline import config as configuration
from pipeline import sweep


class _Sweeping(Launcher):
    """Plans the jobs of a batch, then launches each alone with `super().launch`."""

    config: Any  # set by Hydra
    hydra_context: Any
    params: dict[str, Any]

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        # In the order of their numbers; the name of a job is known before any of them starts.
        config = self.config
        jobs, varied = self._jobs(job_overrides)
        with open_dict(config):
            name = config.hydra.job.config_name
            current = sweep.begin(config, "multirun" if name == "config" else name, jobs, varied)
        done = current.finished()
        places: queue.Queue[list[str]] = queue.Queue()
        for place in self._places():
            places.put(place)

        def one(number: int, job: sweep.Job) -> JobReturn:
            if job.name in done:
                return _nothing()
            place = places.get()
            try:
                return self._launch_one(current, job, initial_job_idx + number, place)
            finally:
                places.put(place)

        return self._each(one, jobs, places.qsize(), current)

    def _each(
        self, one: Callable[[int, sweep.Job], JobReturn], jobs: list[sweep.Job], at_once: int, current: sweep.Sweep
    ) -> list[JobReturn]:
        pool = ThreadPoolExecutor(at_once)
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            futures = [pool.submit(one, number, job) for number, job in enumerate(jobs)]
            return [future.result() for future in futures]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            self._end_jobs(current)
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
            pool.shutdown(cancel_futures=True)

    def _jobs(self, job_overrides: Sequence[Sequence[str]]) -> tuple[list[sweep.Job], list[str]]:
        """Composes every job, so that a wrong one is refused before the first starts."""
        parser = OverridesParser.create()
        values, batches = [], []
        for overrides in job_overrides:
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                config.pop("hydra")
                settings = configuration.check(config, overrides)
            parsed = parser.parse_overrides(list(overrides))
            values.append({o.get_key_element().lstrip("+~"): o.get_value_element_as_str() for o in parsed})
            batches.append(settings.batching.effective_batch_size)
        keys = dict.fromkeys(key for job in values for key in job)
        varied = [key for key in keys if len({job.get(key) for job in values}) > 1]
        differing = [{key: job[key] for key in varied if key in job} for job in values]
        names = sweep.names_of(differing, batches)
        return [sweep.Job(name, tuple(o)) for name, o in zip(names, job_overrides, strict=True)], varied

    def _launch_one(self, current: sweep.Sweep, job: sweep.Job, number: int, place: list[str]) -> JobReturn:
        quoted = "'" + job.name.replace("'", "\\'") + "'"
        of_sweep = [f"tracking.sweep={current.run_id}", f"tracking.job={quoted}", f"tracking.run_name={quoted}"]
        print(f"  {job.name}: started", file=sys.stderr)
        try:
            launcher: Any = super(_Sweeping, self._at(place, current))  # the published one of these places
            (returned,) = launcher.launch([[*job.overrides, *of_sweep]], number)
        except Exception as error:  # the process died; what it had logged is in its run
            lines = [line for line in str(error).splitlines() if line.strip()]
            current.lost[job.name] = lines[-1].strip() if lines else type(error).__name__
            returned = _nothing()
        if returned.status == JobStatus.FAILED:
            current.lost[job.name] = (str(returned._return_value).splitlines() or ["failed"])[0]
            returned = _nothing()
        print(f"  {job.name}: ended", file=sys.stderr)
        return returned

    def _places(self) -> list[list[str]]:
        """One entry for each job that may run at once: the GPUs it is given."""
        return [[]]

    def _at(self, place: list[str], current: sweep.Sweep) -> _Sweeping:
        return self

    def _end_jobs(self, current: sweep.Sweep) -> None:
        """Ends the jobs that run, so that each closes its run as KILLED."""


class LocalLauncher(_Sweeping, submitit_launcher.LocalLauncher):
    """Each job a process of its own on this machine: as many at once as `hardware.parallel_jobs` says."""

    def _places(self) -> list[list[str]]:
        hardware = self.config.hardware
        gpus = visible_gpus() if hardware.device.name != "cpu" else []
        size = hardware.gpus_per_job * hardware.replicas if gpus else 0
        places = [gpus[first : first + size] for first in range(0, len(gpus) - size + 1, size)] if size else []
        if hardware.parallel_jobs is None:
            return places or [[]]
        return places[: hardware.parallel_jobs] if places else [[] for _ in range(hardware.parallel_jobs)]

    def _at(self, place: list[str], current: sweep.Sweep) -> _Sweeping:
        launcher = copy.copy(self)
        # Without them submitit hides every GPU from its jobs.
        gpus = {"gpus_per_node": len(place), "visible_gpus": [int(gpu) for gpu in place]} if place else {}
        launcher.params = {**self.params, **gpus}
        return launcher

    def _end_jobs(self, current: sweep.Sweep) -> None:
        import psutil

        jobs = [child for child in psutil.Process().children(recursive=True) if _is_job(child)]
        for job in jobs:
            _quietly(job.send_signal, signal.SIGTERM)
        _, alive = psutil.wait_procs(jobs, timeout=60)
        for job in alive:
            _quietly(job.kill)


class SlurmLauncher(_Sweeping, submitit_launcher.SlurmLauncher):
    """Each job a Slurm job; Slurm decides how many run at once, and where."""

    def _places(self) -> list[list[str]]:
        return [[] for _ in range(self.params.get("array_parallelism") or 256)]

    def _at(self, place: list[str], current: sweep.Sweep) -> _Sweeping:
        launcher = copy.copy(self)
        launcher.params = {**self.params, "name": f"pipeline-{current.run_id}"}
        return launcher

    def _end_jobs(self, current: sweep.Sweep) -> None:
        subprocess.run(["scancel", "--signal=TERM", "--full", f"--name=pipeline-{current.run_id}"], check=False)


class BasicLauncher(_Sweeping, HydrasBasicLauncher):
    """All jobs in this process, one after the other: for a debugger. TensorFlow's global state is shared."""

    def _each(
        self, one: Callable[[int, sweep.Job], JobReturn], jobs: list[sweep.Job], at_once: int, current: sweep.Sweep
    ) -> list[JobReturn]:
        return [one(number, job) for number, job in enumerate(jobs)]


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


def visible_gpus() -> list[str]:
    """Numbers of the NVIDIA GPUs that this process may use; none where no driver answers."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [gpu.strip() for gpu in listed.split(",") if gpu.strip().isdigit()]
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(number) for number, line in enumerate(answer.stdout.splitlines()) if line.startswith("GPU ")]


def _is_job(process: Any) -> bool:
    try:
        return "submitit.core._submit" in process.cmdline()
    except Exception:
        return False


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _nothing() -> JobReturn:
    """What a job that gave nothing returns: a sweeper that searches reads it as the worst value."""
    returned = JobReturn(status=JobStatus.COMPLETED)
    returned.return_value = float("inf")
    return returned


def _quietly(call: Any, *arguments: Any) -> None:
    with contextlib.suppress(Exception):  # it has ended by itself
        call(*arguments)
