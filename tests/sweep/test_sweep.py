"""Sweeps: real processes, a real store, jobs that fail in earnest."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import time
from pathlib import Path

import psutil
import pytest
from mlflow.entities import Run

from pipeline.report.job_results import JobResult
from pipeline.sweep.job_names import job_names
from tests.parameters import mostly_slow
from tests.running import ROOT, TINY, Store, one_process, pipeline, start, wait

MINE = """
import fcntl, os, resource, signal, time
from pathlib import Path
import keras


class Trouble(keras.callbacks.Callback):
    # What goes wrong in a job, until a file `healed` is there.

    def __init__(self, mode):
        super().__init__()
        self.mode = "none" if Path("healed").exists() else mode
        place = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.place = open(f"place {place}".replace("/", "-"), "w")
        if place:
            # Raises where another job holds it.
            fcntl.flock(self.place, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def on_train_batch_end(self, batch, logs=None):
        if self.mode == "slow":
            time.sleep(0.2)
        if batch < 5:
            return
        if self.mode == "raise":
            raise ValueError("the sixth update is cursed")
        if self.mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mode == "memory":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + 2**28
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            self.hoard = [bytearray(2**24) for _ in range(100)]
"""
TROUBLES = """
defaults:
  - config
  - override model: mlp
  - _self_
training:
  epochs: 1
  callbacks:
    trouble: {_target_: mine.Trouble, mode: none}
tracking: {log_model: false, system_metrics: false}
hardware: {parallel_jobs: 2}
hydra:
  sweeper:
    params:
      training.callbacks.trouble.mode: raise,one,kill,two,memory
"""


def parent_and_children(store: Store) -> tuple[Run, dict[str, list[Run]]]:
    """Return the one parent, and its children by the job's name.

    A child is beneath its parent in both of MLflow's ways.
    """
    runs = store.runs()
    (parent,) = [run for run in runs if "sweep.name" in run.data.tags]
    children: dict[str, list[Run]] = {}
    for run in runs:
        if run is not parent:
            assert run.data.tags["sweep"] == parent.info.run_id
            assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
            name = run.data.tags["sweep.job"]
            assert run.info.run_name == name
            children.setdefault(name, []).append(run)
    return parent, children


def table(printed: str) -> dict[str, str]:
    """Return the status by job, as the sweep printed it at its end."""
    statuses = {}
    for line in printed.splitlines():
        if line.startswith("  ") and " started" not in line:
            words = line.split()
            if not words[0].endswith(":"):
                statuses[words[0]] = words[1]
    return statuses


GPU_LISTING = """
import os, sys
if 'list_physical_devices' in sys.orig_argv[-1]:
    print(2, flush=True)
    os._exit(0)
"""


def gpus(folder: Path, visible: str) -> dict[str, str]:
    """Return the environment of a machine with GPUs.

    TensorFlow lists two of those that CUDA_VISIBLE_DEVICES shows.
    """
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(GPU_LISTING)
    return {
        "CUDA_VISIBLE_DEVICES": visible,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)]),
    }


# Jobs that fail


@pytest.fixture(scope="module")
def troubles(tmp_path_factory):
    """Run a user's own sweep of five jobs, of which three fail, two at once.

    Then run what is missing of it.
    """
    folder = tmp_path_factory.mktemp("troubles")
    (folder / "mine.py").write_text(MINE)
    (folder / "sweeps").mkdir()
    (folder / "sweeps" / "troubles.yaml").write_text(TROUBLES)
    (folder / "my conf").mkdir()
    call = ("sweep", "troubles", "--config-dir", "my conf", "hydra.sweep.dir=its own")
    first = pipeline(*call, cwd=folder, status=1)
    store = Store(folder)
    before = parent_and_children(store)
    (folder / "healed").touch()
    (rest,) = re.findall(
        "^run what is missing with: pipeline (.+)$", first.stderr, re.MULTILINE
    )
    again = pipeline(*shlex.split(rest), cwd=folder)  # as it was printed
    return first.stderr, before, again.stderr, parent_and_children(store)


@pytest.mark.slow
def test_jobs_that_raise_die_and_run_out_of_memory_stop_no_other(troubles):
    printed, (parent, children), *_ = troubles
    statuses = {
        name: [run.info.status for run in runs] for name, runs in children.items()
    }
    assert statuses == {
        "mode=raise": ["FAILED"],
        "mode=one": ["FINISHED"],
        "mode=kill": ["KILLED"],
        "mode=two": ["FINISHED"],
        "mode=memory": ["FAILED"],
    }
    assert table(printed) == {name: status for name, (status,) in statuses.items()}
    assert "ValueError: the sixth update is cursed" in printed
    assert "ended without a message after update" in printed
    assert "MemoryError" in printed
    assert "Traceback" not in printed
    endings = {
        "raise": "failed",
        "kill": "killed by SIGKILL",
        "memory": "failed",
        "one": "finished",
    }
    for mode, how in endings.items():
        assert re.search(rf"^  mode={mode}: {how} after \d+ s$", printed, re.MULTILINE)
    assert parent.info.status == "FAILED"
    again = f"sweep troubles --again {parent.info.run_id} --config-dir 'my conf'\n"
    assert f"pipeline {again}" in printed


@pytest.mark.slow
def test_what_is_missing_runs_again_and_nothing_is_doubled(troubles):
    _, (_, before), printed, (parent, after) = troubles
    assert parent.info.status == "FINISHED"
    assert set(table(printed).values()) == {"FINISHED"}
    for name, runs in after.items():
        finished = [run for run in runs if run.info.status == "FINISHED"]
        assert len(finished) == 1, name
        # One that was killed goes on in its run; one that failed is run anew.
        has_failed = before[name][0].info.status == "FAILED"
        new_runs = 1 if has_failed else 0
        assert len(runs) == len(before[name]) + new_runs
        assert finished[0].data.metrics["train/examples_seen"] == 1437


@pytest.mark.slow
def test_one_job_at_once_on_each_gpu_that_cuda_is_shown(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    lasting = [
        *TINY,
        "training.epochs=10",
        "+training.callbacks.trouble={_target_: mine.Trouble, mode: none}",
    ]
    call = ("train", "-m", *lasting, "seed=0,1,2", "hydra.sweep.dir=jobs")
    printed = pipeline(*call, cwd=tmp_path, **gpus(tmp_path, "3,GPU-beef,-1,7")).stderr
    assert {file.name for file in tmp_path.glob("place *")} == {
        "place 3",
        "place GPU-beef",
    }
    running = 0
    most = 0
    for line in printed.splitlines():
        if line.endswith(": started"):
            running += 1
        if re.fullmatch(r"  \S+: .+ after \d+ s", line):
            running -= 1
        most = max(running, most)
    assert most == 2


@pytest.mark.slow
def test_two_sweeps_at_once_share_no_gpu(tmp_path):
    """The one whose callback finds the GPU's lock taken would raise."""
    (tmp_path / "mine.py").write_text(MINE)
    shown = {**gpus(tmp_path, "GPU-cafe/1"), "TMPDIR": str(tmp_path)}
    lasting = [
        *TINY,
        "training.epochs=10",
        "+training.callbacks.trouble={_target_: mine.Trouble, mode: none}",
    ]
    sweeps = [
        start(
            "train",
            "-m",
            *lasting,
            "seed=0,1",
            f"hydra.sweep.dir={name}",
            cwd=tmp_path,
            **shown,
        )
        for name in ("one", "two")
    ]
    printed = [process.communicate(timeout=240)[1] for process in sweeps]
    assert [process.returncode for process in sweeps] == [0, 0], printed
    logs = [file.read_text() for file in tmp_path.glob("*/*/job.log")]
    assert len(logs) == 4
    assert any(
        "waits for GPU GPU-cafe/1, which another run is using" in log for log in logs
    )


@pytest.mark.slow
def test_two_jobs_share_a_gpu_if_they_are_asked_to(tmp_path):
    call = (
        "train",
        "-m",
        *TINY,
        "seed=0,1",
        "hardware.jobs_per_gpu=2",
        "hydra.sweep.dir=jobs",
    )
    printed = pipeline(
        *call, cwd=tmp_path, warm=False, TMPDIR=str(tmp_path), **gpus(tmp_path, "3")
    ).stderr
    assert re.findall("^  seed=.: (started|finished)", printed, re.MULTILINE)[:2] == [
        "started",
        "started",
    ]
    logs = [file.read_text() for file in tmp_path.glob("jobs/*/job.log")]
    assert len(logs) == 2
    assert not any("waits for GPU" in log for log in logs)
    assert (tmp_path / f"pipeline-{os.getuid()}-gpu-3.lock").exists()


@pytest.mark.slow
def test_the_parent_says_what_the_sweep_was(troubles):
    *_, (parent, _) = troubles
    assert parent.info.run_name == "sweep troubles"
    assert parent.data.params["sweep"] == "troubles"
    assert parent.data.params["jobs"] == "5"
    assert parent.data.params["varied"] == "training.callbacks.trouble.mode"
    modes = ["raise", "one", "kill", "two", "memory"]
    names = [f"mode={mode}" for mode in modes]
    assert json.loads(parent.data.tags["sweep.jobs"]) == names


# Interruptions

LATER = (
    ((), 0.5),
    (("+hydra.job.env_set.A=b",), 1),
    pytest.param((), 1, marks=pytest.mark.soak),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_group", "at_once"),
    [
        pytest.param(signal.SIGINT, True, 2, id="ctrl-c"),
        pytest.param(signal.SIGTERM, False, 1, id="sigterm"),
    ],
)
def test_an_interrupted_sweep_ends_its_jobs_and_closes_their_runs(
    tmp_path, number, to_group, at_once
):
    seeds = ",".join(str(seed) for seed in range(at_once + 1))
    jobs = (f"seed={seeds}", f"hardware.parallel_jobs={at_once}")
    process = start(
        "train",
        "-m",
        *TINY,
        "training.epochs=100000",
        *jobs,
        "hydra.sweep.dir=jobs",
        cwd=tmp_path,
    )

    def trains(job):
        journal = tmp_path / "jobs" / str(job) / "journal.jsonl"
        return journal.exists() and journal.read_text().count("train/loss") > 20

    wait(lambda: all(trains(job) for job in range(at_once)))
    if to_group:  # as a terminal does it
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    printed = process.communicate(timeout=90)[1]
    assert process.returncode == 128 + number, printed
    parent, children = parent_and_children(Store(tmp_path))
    assert parent.info.status == "KILLED"
    assert set(children) == {f"seed={seed}" for seed in range(at_once)}
    for (run,) in children.values():
        assert run.info.status == "KILLED"
        assert "SIGTERM" in run.data.tags["failure"]  # as it wrote itself
    assert f"  seed={at_once}  NOT RUN" in printed
    assert printed.count(": interrupted after ") == at_once
    assert "killed by" not in printed
    again = f"pipeline sweep multirun --again {parent.info.run_id}"
    assert f"run what is missing with: {again}\n" in printed
    assert "Traceback" not in printed
    wait(lambda: processes_in(tmp_path) == [], 30)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "seconds"),
    [((), 0), *LATER],
)
def test_a_sweep_that_is_interrupted_at_once_leaves_nothing_running(
    tmp_path, more, seconds
):
    process = start("train", "-m", *TINY, "seed=0,1", *more, cwd=tmp_path, warm=False)
    assert process.stderr is not None
    while "started" not in process.stderr.readline():
        pass
    # The job imports, or what it is forked from does, or it has done so.
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=90)[1]
    assert process.returncode == 130, printed
    parent, children = parent_and_children(Store(tmp_path))
    assert parent.info.status == "KILLED"
    for runs in children.values():
        assert {run.info.status for run in runs} == {"KILLED"}
    wait(lambda: processes_in(tmp_path) == [], 30)
    assert "Traceback" not in printed


@pytest.mark.slow
def test_an_interruption_does_not_wait_for_an_import_that_hangs(tmp_path):
    process = start("train", "-m", *TINY, "seed=0,1", cwd=tmp_path, warm=False)

    def forkservers():
        servers = []
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.Error):  # another one has ended
                if "multiprocessing.forkserver" in " ".join(child.cmdline()):
                    servers.append(child)
        return servers

    wait(forkservers)
    (server,) = forkservers()
    server.suspend()
    assert process.stderr is not None
    while "started" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=30)[1]
    assert process.returncode == 130, printed
    wait(lambda: processes_in(tmp_path) == [], 30)


@pytest.mark.slow
def test_a_job_that_waits_for_a_gpu_can_be_interrupted(tmp_path):
    with (tmp_path / f"pipeline-{os.getuid()}-gpu-3.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shown = {**gpus(tmp_path, "3"), "TMPDIR": str(tmp_path)}
        # Not warm: that process has looked up its TMPDIR by now.
        process = start(
            "train",
            "-m",
            *TINY,
            "seed=0,1",
            "hydra.sweep.dir=jobs",
            cwd=tmp_path,
            warm=False,
            **shown,
        )
        log = tmp_path / "jobs" / "0" / "job.log"
        wait(lambda: log.exists() and "waits for GPU 3" in log.read_text())
        process.send_signal(signal.SIGINT)
        printed = process.communicate(timeout=30)[1]
    assert process.returncode == 130, printed
    assert parent_and_children(Store(tmp_path))[1] == {}
    wait(lambda: processes_in(tmp_path) == [], 30)


def processes_in(folder: Path) -> list[str]:
    """Return the command lines of the processes that work in `folder`."""
    commands = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder):
                commands.append(" ".join(process.cmdline()))
    return commands


# Searches


@pytest.mark.slow
def test_a_search_finds_the_better_rate_and_goes_on_after_an_interruption(tmp_path):
    """Optuna's choices follow from the seed: a finished job is not run again.

    `--again` needs no override again; a new one replaces the recorded one.
    """
    search = ("sweep", "search_learning_rate")
    first = pipeline(
        *search, *TINY, "accumulation.factor=4", "hydra.sweeper.trials=2", cwd=tmp_path
    )
    store = Store(tmp_path)
    parent, before = parent_and_children(store)
    more = pipeline(
        *search, "--again", parent.info.run_id, "hydra.sweeper.trials=3", cwd=tmp_path
    )
    parent, after = parent_and_children(store)
    assert parent.info.status == "FINISHED"
    assert len(before) == 2
    assert len(after) == 3
    assert all(len(runs) == 1 for runs in after.values())
    assert all(run.data.params["training.epochs"] == "1" for (run,) in after.values())
    losses = {name: run.data.metrics["val/loss"] for name, (run,) in after.items()}
    best = json.loads(parent.data.tags["sweep.best"])
    assert best["loss"] == min(losses.values())
    (rate,) = (override.split("=")[1] for override in best["overrides"])
    assert min(losses, key=losses.__getitem__).startswith(f"rate={rate}")
    assert "best of 2 trials: loss" in first.stderr
    assert "best of 3 trials: loss" in more.stderr


# Rejections


REJECTED = {
    "sweep seeds seed=0,-1": "seed must be from 0 to 4294967295. Received: -1",
    "sweep seeds optimizer=adamw,adamwww": (
        "optimizer must name one of the options of this group. Received: 'adamwww'"
    ),
    "sweep seeds +hydra.launcher.nonsense=1": (
        "hydra.launcher.nonsense must be a parameter of this launcher"
    ),
    "sweep seeds hydra.launcher.nodes=2": "hydra.launcher.nodes must be",
    "sweep seeds hydra.launcher.timeout_min=0": (
        "hydra.launcher.timeout_min must be at least 1"
    ),
    "sweep seeds hydra.launcher.timeout_min=soon": "hydra.launcher.timeout_min must be",
    "sweep search_learning_rate hydra.sweeper.at_once=0": (
        "hydra.sweeper.at_once must be at least 1"
    ),
    "sweep search_learning_rate hydra.sweeper.trials=some": (
        "hydra.sweeper.trials must be at least 1. Received: 'some'"
    ),
    "sweep sedes": "NAME must name a sweep. Received: 'sedes'",
    "sweep seeds --again never": "tracking.uri must be a store that exists",
    "train -m accumulation.factor=1,0": "accumulation.factor must be",
}


EXPERIMENT = """# @package _global_
defaults: [quick, _self_]
tracking: {{experiment: {name}}}
"""


@pytest.mark.slow
def test_jobs_whose_config_names_their_experiment_have_their_parent_there(tmp_path):
    """The runs were in another experiment than their parent, where none was found."""
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    for file, name in {"a": "tickets", "b": "tickets", "c": "other"}.items():
        (folder / f"{file}.yaml").write_text(EXPERIMENT.format(name=name))
    train = ("train", "-m", "training.epochs=1", "tracking.log_model=false")

    rejected = pipeline(*train, "experiment=a,c", cwd=tmp_path, status=2)
    rule = "tracking.experiment must be the same for all jobs of a sweep"
    assert rejected.stderr.splitlines()[-1] == (
        f"pipeline: {rule}. Received: 'other'. Choices: tickets."
    )
    assert not (tmp_path / "mlruns").exists()

    done = pipeline(*train, "experiment=a,b", cwd=tmp_path)
    assert "2 of 2 jobs finished" in done.stdout + done.stderr
    parent, *children = Store(tmp_path).runs("tickets")
    assert parent.data.tags["sweep.name"] == "multirun"
    assert len(children) == 2


@pytest.mark.slow
def test_one_wrong_job_refuses_the_sweep_and_leaves_nothing(tmp_path):
    results = one_process({line: line for line in REJECTED}, tmp_path)
    for line, result in results.items():
        assert result["status"] == 2, result
        assert REJECTED[line] in result["err"]
        assert len(result["err"].splitlines()) == 1
        assert result["changed"] == []


def test_a_password_in_a_config_file_is_rejected(tmp_path):
    """The files of a sweep would hold it."""
    own = tmp_path / "conf" / "tracking" / "mine.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("uri: http://me:Hunter77@127.0.0.1:9\n")
    done = pipeline(
        "train",
        "-m",
        "--config-dir",
        "conf",
        "tracking=mine",
        "seed=0,1",
        cwd=tmp_path,
        status=2,
    )
    assert "tracking.uri must reach a sweep as an override" in done.stderr
    assert "Hunter77" not in done.stderr
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [own]


# Launchers, sweep files, names


@pytest.mark.slow
def test_a_sweep_file_is_a_hydra_multirun_and_runs_in_one_process(tmp_path):
    """It runs in one process for a debugger."""
    name = "factor_at_fixed_effective_batch"
    files = ("--config-dir", str(ROOT / "sweeps"), "--config-name", name)
    pipeline(
        "train",
        "-m",
        *files,
        *TINY,
        "accumulation.factor=1,8",
        "hydra/launcher=basic",
        "hydra.sweep.dir=jobs",
        "hardware.precision=float64",
        cwd=tmp_path,
    )
    store = Store(tmp_path)
    parent, children = parent_and_children(store)
    assert parent.info.run_name == f"sweep {name}"
    assert parent.info.status == "FINISHED"
    losses = {}
    for name, (run,) in children.items():
        losses[name] = store.history(run, "train/loss")
    assert losses["factor=1"] == pytest.approx(losses["factor=8"], rel=1e-12)
    assert not list((tmp_path / "jobs").rglob("job.log"))


PLANNED = """
import json
from pipeline.sweep.launcher import completed_with
from pipeline.sweep.local import LocalLauncher

class Planned(LocalLauncher):
    # Plans as ever, and starts nothing.
    def launch(self, job_overrides, initial_job_idx):
        plan = self.plan(job_overrides, initial_job_idx)
        print(json.dumps(list(plan.jobs)))
        return [completed_with(1.0) for _ in plan.jobs]
"""
NAMES = {
    "does_it_pay": [
        "scaling=none factor=1 seed=0 batch=8",
        "scaling=sqrt factor=16 seed=2 batch=128",
    ],
    "factor_at_fixed_effective_batch": ["factor=1", "factor=16"],
    "factor_at_fixed_micro_batch": [
        "factor=1 seed=0 batch=16",
        "factor=16 seed=2 batch=256",
    ],
    "factor_with_linear_scaling": [
        "factor=1 seed=0 batch=16",
        "factor=16 seed=2 batch=256",
    ],
    "factor_with_sqrt_scaling": [
        "factor=1 seed=0 batch=16",
        "factor=16 seed=2 batch=256",
    ],
    "optimizer_by_factor": [
        "optimizer=momentum factor=1 batch=16",
        "optimizer=lion factor=16 batch=256",
    ],
    "rate_transfer": [
        "scaling=none batch=16 rate=0.001 seed=0",
        "scaling=sqrt batch=256 rate=0.032 seed=1",
    ],
    "seeds": ["seed=0", "seed=4"],
}

SWEEPS = sorted(file.stem for file in (ROOT / "sweeps").glob("*.yaml"))


@pytest.mark.parametrize("name", mostly_slow(SWEEPS, [], ["optimizer_by_factor"]))
def test_every_sweep_file_plans_the_jobs_of_its_header(tmp_path, name):
    (tmp_path / "hydra_plugins").mkdir()  # where alone Hydra takes plugins from
    (tmp_path / "hydra_plugins" / "planned.py").write_text(PLANNED)
    done = pipeline(
        "sweep",
        name,
        "hydra.launcher._target_=hydra_plugins.planned.Planned",
        cwd=tmp_path,
    )
    jobs = []
    for line in done.stdout.splitlines():
        jobs += json.loads(line)
    head = (ROOT / "sweeps" / f"{name}.yaml").read_text()
    assert head.startswith("# Question: ")
    runs = re.search(
        rf"# Run: +pipeline sweep {name} +"
        r"(\d+) runs, about \d+ s each on two CPU cores\n# Expect: ",
        head,
    )
    assert len(set(jobs)) == len(jobs) == int(runs[1])
    if name in NAMES:
        assert [jobs[0], jobs[-1]] == NAMES[name]


def test_jobs_are_named_by_what_differs():
    values = [
        {"accumulation.factor": factor, "optimizer.learning_rate": 0.1}
        for factor in (1, 8)
    ]
    assert job_names(values, [32, 256]) == [
        "factor=1 rate=0.1 batch=32",
        "factor=8 rate=0.1 batch=256",
    ]
    assert job_names([{}, {}], [32, 32], first=4) == ["job #4", "job #5"]


def test_a_key_of_the_users_own_is_not_named_like_one_that_reports_read():
    values = {
        "model.rate": 0.5,
        "dataset.seed": 1,
        "training.callbacks.plateau.factor": 0.3,
        "seed": 2,
    }
    names = job_names([values], [32])
    assert names == [
        "model.rate=0.5 dataset.seed=1 training.callbacks.plateau.factor=0.3 seed=2"
    ]
    # A report does not take a dropout rate for a learning rate, nor the seed of a
    # split for the seed of a repetition.
    job = JobResult(names[0])
    assert job.setting("rate") is None
    assert job.setting("factor") is None
    assert job.recipe == names[0].removesuffix(" seed=2")
