"""Jobs on this machine: forked from a process that has TensorFlow, and yet processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from omegaconf import OmegaConf

from pipeline.sweep import local
from pipeline.sweep.job_call import Ending
from pipeline.sweep.launcher import Slot
from tests import jobs
from tests.running import TINY, Store, environment, pipeline, wait

ON_LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere each job imports TensorFlow itself"
)
MINE = """
import json, multiprocessing, os, signal, sys
import keras, psutil


class Noting(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        import pandas
        from keras.wrappers import SKLearnClassifier

        pandas.DataFrame({"a": [1]})
        SKLearnClassifier(lambda X, y: None)
        print("said")
        here = psutil.Process()
        noted = {
            "method": multiprocessing.get_start_method(),
            "parent": " ".join(here.parent().cmdline()),
            "alone": os.getsid(0) == here.pid,
            "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "interruptible": signal.getsignal(signal.SIGINT) == signal.default_int_handler,
            "stdin": os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev,
            "colour": os.environ.get("COLOUR"),
            "safe": os.environ.get("PYTHONSAFEPATH"),
            "path": sys.path,
            "PYTHONPATH": os.environ["PYTHONPATH"],
            "file": keras.__file__,
        }
        print("noted", json.dumps(noted), file=sys.stderr)
"""


# What a job is


def test_a_forked_job_trains_to_the_bits_of_a_run_by_hand(tmp_path):
    for way, more in {"hand": [], "forked": ["-m", "hydra.sweep.dir=jobs"]}.items():
        pipeline(
            "train", *TINY, "seed=1", f"tracking.experiment={way}", *more, cwd=tmp_path
        )
    store = Store(tmp_path)
    by_hand, forked = (
        store.histories(store.trained(way)[0], "train/", "val/")
        for way in ("hand", "forked")
    )
    assert forked == by_hand


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    """Two jobs: by hand, forked two at once, and as new processes; what each printed, and the store."""
    folder = tmp_path_factory.mktemp("ways")
    own = (
        folder / "own"
    )  # before this project on the path, and with a name that is also here
    (own / "benchmarks").mkdir(parents=True)
    (own / "benchmarks" / "__init__.py").write_text(MINE)
    path = os.pathsep.join([str(own), environment()["PYTHONPATH"]])
    noting = "+training.callbacks.noting={_target_: benchmarks.Noting}"
    printed = {}
    for seed in (1, 2):
        run = (*TINY, noting, f"seed={seed}", "tracking.experiment=hand")
        done = pipeline(
            "train", *run, cwd=folder, warm=seed > 1, PYTHONPATH=path
        )  # a forked one is none by hand
        printed["hand", seed] = done.stdout + done.stderr
    for way, more in {"forked": [], "new": ["+hydra.job.env_set.COLOUR=green"]}.items():
        more = [
            *more,
            f"tracking.experiment={way}",
            f"hydra.sweep.dir={way}",
            "hardware.parallel_jobs=2",
        ]
        pipeline(
            "train",
            "-m",
            *TINY,
            noting,
            "seed=1,2",
            *more,
            cwd=folder,
            warm=False,
            PYTHONPATH=path,
        )
        for number, seed in enumerate((1, 2)):
            printed[way, seed] = (folder / way / str(number) / "job.log").read_text()
    return printed, Store(folder)


def noted(printed: str) -> dict:
    (line,) = [line for line in printed.splitlines() if line.startswith("noted ")]
    return json.loads(line.removeprefix("noted "))


@pytest.mark.slow
@ON_LINUX
def test_a_job_is_forked_unless_a_variable_is_set_for_it(ways):
    printed, _ = ways
    for seed in (1, 2):
        assert "multiprocessing.forkserver" in noted(printed["forked", seed])["parent"]
        assert noted(printed["new", seed])["colour"] == "green"
        assert "multiprocessing.forkserver" not in noted(printed["new", seed])["parent"]


@pytest.mark.slow
def test_a_job_is_a_process_as_one_by_hand_is(ways):
    printed, _ = ways
    for seed in (1, 2):
        by_hand = noted(printed["hand", 1])
        assert by_hand["safe"] is None
        for way in ("forked", "new"):
            assert "said\n" in printed[way, seed]
            job = noted(printed[way, seed])
            assert job["alone"]
            assert job["stdin"]
            assert {key for key in job if job[key] != by_hand[key]} <= {
                "parent",
                "alone",
                "stdin",
                "colour",
            }


@pytest.mark.slow
def test_a_job_trains_to_the_same_bits(ways):
    _, store = ways
    hand = {
        run.data.params["seed"]: store.histories(run, "train/", "val/")
        for run in store.trained("hand")
    }
    assert set(hand) == {"1", "2"}
    assert hand["1"] != hand["2"]
    for way in ("forked", "new"):
        runs = {
            run.data.params["seed"]: store.histories(run, "train/", "val/")
            for run in store.trained(way)
        }
        assert runs == hand, way


@pytest.mark.slow
def test_a_run_says_how_it_was_started(ways):
    _, store = ways
    for way in ("hand", "forked", "new"):
        for run in store.trained(way):
            name = run.data.tags["mlflow.source.name"]
            assert name.startswith("pipeline model=mlp training.epochs=1 ")
            assert f"seed={run.data.params['seed']}" in name


# The user's folder


INSTALLED = """
import sys
from pipeline.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.mark.parametrize(
    ("file", "more"),
    [
        ("pipeline.py", None),
        pytest.param("pipeline.py", (), marks=pytest.mark.soak),
        pytest.param(
            "pipeline/__init__.py", ("+hydra.job.env_set.A=b",), marks=pytest.mark.soak
        ),
    ],
)
def test_files_of_the_users_folder_are_not_taken_for_libraries(tmp_path, file, more):
    """By the installed command: with `python -m pipeline` Python itself takes the user's file."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pipeline").write_text(INSTALLED)  # as pip writes it
    folder = tmp_path / "mine"
    for name in (file, "random.py", "socket.py", "numpy.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("raise RuntimeError('this is the file of the user')")
    alone, sweep = ["train", *TINY], ["train", "-m", *TINY, "seed=0,1", *(more or ())]
    for arguments in (
        [["train", "--cfg", "job"]]
        if more is None
        else [alone, sweep]
        if more
        else [sweep]
    ):
        command = [sys.executable, str(tmp_path / "bin" / "pipeline"), *arguments]
        done = subprocess.run(
            command, cwd=folder, env=environment(), capture_output=True, text=True
        )
        logs = [log.read_text() for log in folder.rglob("job.log")]
        assert done.returncode == 0, (done.stderr, logs)
        assert "file of the user" not in "".join([done.stderr, *logs])
    if more is None:
        return
    assert [run.info.status for run in Store(folder).trained()] == ["FINISHED"] * (
        3 if more else 2
    )


# How a job ends


METHODS = [
    "spawn",
    *(
        [pytest.param("forkserver", marks=pytest.mark.slow)]
        if sys.platform == "linux"
        else []
    ),
]


def started(
    folder, function, *arguments, limit=1, methods=("spawn",)
) -> local.LocalJob:
    job = local.LocalJob(
        jobs.Call(function, arguments), [], folder / "job.log", limit, list(methods)
    )
    job.start()
    return job


def ended(job):
    wait(lambda: job.ending() is not None)
    return job.ending()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_one_that_raises_exits_or_dies_says_so(tmp_path, method):
    said = {}
    for function in (jobs.raising, jobs.exiting, jobs.dying):
        ending = ended(
            started(tmp_path / function.__name__, function, methods=[method])
        )
        said[function] = ending.how, ending.reason
        assert ending.loss == float("inf")
    assert said[jobs.raising] == ("failed", "ValueError: the job is cursed")
    assert said[jobs.exiting] == ("ended with status 7", "ended with status 7")
    assert said[jobs.dying] == ("killed by SIGKILL", "killed by SIGKILL: so long")
    assert "Traceback" in (tmp_path / "raising" / "job.log").read_text()


@pytest.mark.parametrize("method", METHODS)
def test_a_job_calls_what_is_registered_for_its_end(tmp_path, method):
    ended(started(tmp_path, jobs.registered, tmp_path / "file", methods=[method]))
    assert (tmp_path / "file").read_text() == "at exit"


@pytest.mark.parametrize(
    "function", [jobs.lasting, pytest.param(jobs.stubborn, marks=pytest.mark.slow)]
)
def test_one_that_takes_too_long_is_ended(tmp_path, function, monkeypatch):
    monkeypatch.setattr(local, "GRACE", 1.0)
    job = started(tmp_path, function, tmp_path / "pid", limit=1)
    wait(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    assert job.ending() is None
    job.deadline = time.monotonic()
    assert ended(job).how == "killed at its time limit of 1 min"
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_one_whose_sweep_goes_away_before_it_is_told_what_to_do_ends(tmp_path):
    script = (
        "import os, signal, cloudpickle; from pathlib import Path; from pipeline.sweep import local\n"
        "from tests import jobs\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which a shell's background job ignores
        "cloudpickle.dumps = lambda call: os.kill(os.getpid(), signal.SIGINT)\n"
        "job = local.LocalJob(jobs.Call(jobs.lasting, (Path('pid'),)), [], Path('job.log'), 1, ['spawn'])\n"
        "try:\n"
        "    job.start()\n"
        "except KeyboardInterrupt:\n"
        "    while job.ending() is None: pass\n"
        "    print(job.ending().how)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == ("ended with status 0\n", 0), done.stderr
    assert not (tmp_path / "pid").exists()


@pytest.mark.slow
@ON_LINUX
def test_a_job_outlives_the_process_that_it_is_forked_from(tmp_path):
    job = started(tmp_path, jobs.finishing, tmp_path / "pid", methods=["forkserver"])
    wait(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    psutil.Process(int((tmp_path / "pid").read_text())).parent().kill()
    assert ended(job).loss == 3.0
    assert (
        ended(started(tmp_path, jobs.pid, methods=["forkserver"])).how == "finished"
    )  # from another one


@pytest.mark.slow
@ON_LINUX
def test_a_process_that_has_opened_a_device_is_not_forked(tmp_path):
    """As a library would that starts CUDA when it is imported: no fork of such a process can use the GPU."""
    (tmp_path / "opening.py").write_text(
        "import os; from pipeline.sweep import gpus\n"
        f"gpus.DEVICES = ({str(tmp_path / 'device')!r},)\n"
        f"device = open({str(tmp_path / 'device0')!r}, 'w')\n"
        "import pipeline.sweep.warm"
    )
    script = (
        "import multiprocessing, os; from pathlib import Path; from pipeline.sweep import local\n"
        "from tests import jobs\n"
        "multiprocessing.get_context('forkserver').set_forkserver_preload(['opening'])\n"
        "methods = ['forkserver', 'spawn']\n"
        "job = local.LocalJob(jobs.Call(jobs.parent), [], Path('job.log'), 1, methods)\n"
        "job.start()\n"
        "while job.ending() is None: pass\n"
        "print(job.ending().loss == os.getpid(), methods)"
    )
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    command = [sys.executable, "-c", script]
    variables = environment(PYTHONPATH=path)
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "True ['spawn']\n", done.stderr
    assert "has opened a device: each job imports it for itself" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_job_ends_with_its_sweep_also_if_that_is_killed(tmp_path, method):
    script = (
        "import os, signal; from pathlib import Path; from pipeline.sweep import local\n"
        "from tests import jobs; import time\n"
        f"job = local.LocalJob(jobs.Call(jobs.lasting, (Path('pid'),)), [], Path('job.log'), 1, [{method!r}])\n"
        "job.start()\n"
        "while not (Path('pid').exists() and Path('pid').read_text()): time.sleep(0.05)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment(), timeout=60
    )
    wait(lambda: not psutil.pid_exists(int((tmp_path / "pid").read_text())), 10)


def test_an_interrupted_job_may_wait_for_its_store(monkeypatch):
    """For as long as its run's patience allows; then it is killed."""
    launcher, now = local.LocalLauncher(1), [0.0]
    launcher.config = OmegaConf.create({"tracking": {"patience": 300}})
    monkeypatch.setattr("pipeline.sweep.launcher.time.monotonic", lambda: now[0])
    monkeypatch.setattr(
        launcher, "_ask_to_end", lambda running, late: asked.append((now[0], late))
    )
    asked: list[tuple[float, bool]] = []

    class Waiting:
        def ending(self):
            now[0] += 100
            return Ending("killed") if asked[-1][1] else None

    monkeypatch.setattr(launcher, "_wait", lambda: None)
    launcher.sweep = SimpleNamespace(ended={}, lost={})
    launcher._stop([Slot([], job=Waiting())])
    assert [at for at, late in asked if late] == [400]
