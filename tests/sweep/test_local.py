"""Jobs on this machine: forked from a process that has TensorFlow.

And yet they are processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from pipeline.sweep import local
from pipeline.sweep.ending import INTERRUPTED, Ending, JobEndings, Outcome
from pipeline.sweep.job_batch import JobBatch, Slot, StartedJob
from tests import jobs
from tests.run.fitted import fit
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
            "interrupt": signal.getsignal(signal.SIGINT) == signal.default_int_handler,
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


def test_a_forked_job_trains_to_the_bits_of_a_run_by_hand(tmp_path, precision):
    """The run by hand trains in this process."""
    run = (*TINY, "training.epochs=null", "training.updates=3", "seed=1")
    pipeline("train", "-m", *run, "hydra.sweep.dir=jobs", cwd=tmp_path)
    store = Store(tmp_path)
    (job,) = store.trained()
    forked = store.histories(job)
    by_hand = fit(tmp_path, *run).rows
    for kind, rows in (("train", by_hand.updates), ("val", by_hand.validations)):
        for update, row in rows:
            for name, value in row.items():
                assert forked[f"{kind}/{name}"][update] == value, (update, name)
    assert [update for update, _ in by_hand.updates] == [1, 2, 3]
    assert [update for update, _ in by_hand.validations] == [3]


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    """Run two jobs by hand, forked two at once, and as new processes.

    Returns what each printed, and the store.
    """
    folder = tmp_path_factory.mktemp("ways")
    # It is before this project on the path, and has a name that is also here.
    own = folder / "own"
    (own / "benchmarks").mkdir(parents=True)
    (own / "benchmarks" / "__init__.py").write_text(MINE)
    path = os.pathsep.join([str(own), environment()["PYTHONPATH"]])
    noting = "+training.callbacks.noting={_target_: benchmarks.Noting}"
    printed = {}
    for seed in (1, 2):
        run = (*TINY, noting, f"seed={seed}", "tracking.experiment=hand")
        # A warm one is forked, and so is none by hand.
        done = pipeline("train", *run, cwd=folder, warm=seed > 1, PYTHONPATH=path)
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
            other = {key for key in job if job[key] != by_hand[key]}
            assert other <= {"parent", "alone", "stdin", "colour"}


@pytest.mark.slow
def test_a_job_trains_to_the_same_bits(ways):
    _, store = ways

    def curves_by_seed(way):
        curves = {}
        for run in store.trained(way):
            seed = run.data.params["seed"]
            curves[seed] = store.histories(run, "train/", "val/")
        return curves

    by_hand = curves_by_seed("hand")
    assert set(by_hand) == {"1", "2"}
    assert by_hand["1"] != by_hand["2"]
    for way in ("forked", "new"):
        assert curves_by_seed(way) == by_hand, way


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


SHOW = ["train", "--cfg", "job"]
ALONE = ["train", *TINY]
SWEEP = ["train", "-m", *TINY, "seed=0,1"]


@pytest.mark.parametrize(
    ("file", "commands", "runs"),
    [
        pytest.param("pipeline.py", [SHOW], 0, id="file, shown"),
        pytest.param(
            "pipeline.py", [SWEEP], 2, marks=pytest.mark.soak, id="file, swept"
        ),
        pytest.param(
            "pipeline/__init__.py",
            [ALONE, [*SWEEP, "+hydra.job.env_set.A=b"]],
            3,
            marks=pytest.mark.soak,
            id="folder, alone and swept",
        ),
    ],
)
def test_files_of_the_users_folder_are_not_taken_for_libraries(
    tmp_path, file, commands, runs
):
    """The command is the installed one.

    With `python -m pipeline`, Python itself takes the user's file.
    """
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pipeline").write_text(INSTALLED)  # as pip writes it
    folder = tmp_path / "mine"
    for name in (file, "random.py", "socket.py", "numpy.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("raise RuntimeError('this is the file of the user')")
    for arguments in commands:
        command = [sys.executable, str(tmp_path / "bin" / "pipeline"), *arguments]
        done = subprocess.run(
            command, cwd=folder, env=environment(), capture_output=True, text=True
        )
        logs = [log.read_text() for log in folder.rglob("job.log")]
        assert done.returncode == 0, (done.stderr, logs)
        assert "file of the user" not in "".join([done.stderr, *logs])
    if runs:
        statuses = [run.info.status for run in Store(folder).trained()]
        assert statuses == ["FINISHED"] * runs


# How a job ends


METHODS = ["spawn"]
if sys.platform == "linux":
    METHODS.append(pytest.param("forkserver", marks=pytest.mark.slow))


def started(
    folder, function, *arguments, limit=1, methods=("spawn",)
) -> local.LocalJob:
    task = jobs.Task(function, arguments)
    job = local.LocalJob(task, [], folder / "job.log", limit, list(methods))
    job.start()
    return job


def ended(job):
    wait(lambda: job.poll() is not None)
    return job.poll()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_one_that_raises_exits_or_dies_says_so(tmp_path, method):
    endings = {}
    for function in (jobs.raising, jobs.exiting, jobs.dying):
        folder = tmp_path / function.__name__
        ending = ended(started(folder, function, methods=[method]))
        endings[function] = (ending.outcome, str(ending), ending.reason)
        assert ending.loss == float("inf")
    assert endings[jobs.raising] == (
        Outcome.FAILED,
        "failed",
        "ValueError: the job is cursed",
    )
    assert endings[jobs.exiting] == (
        Outcome.NO_RESULT,
        "ended with status 7",
        "ended with status 7",
    )
    assert endings[jobs.dying] == (
        Outcome.NO_RESULT,
        "killed by SIGKILL",
        "killed by SIGKILL: so long",
    )
    assert "Traceback" in (tmp_path / "raising" / "job.log").read_text()


@pytest.mark.parametrize("method", METHODS)
def test_a_job_calls_what_is_registered_for_its_end(tmp_path, method):
    ended(started(tmp_path, jobs.registered, tmp_path / "file", methods=[method]))
    assert (tmp_path / "file").read_text() == "at exit"


@pytest.mark.parametrize(
    "function", [jobs.lasting, pytest.param(jobs.stubborn, marks=pytest.mark.slow)]
)
def test_one_that_takes_too_long_is_ended(tmp_path, function, monkeypatch):
    monkeypatch.setattr(local, "INTERRUPTION_GRACE", 1.0)
    job = started(tmp_path, function, tmp_path / "pid", limit=1)
    wait(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    assert job.poll() is None
    job.deadline = time.monotonic()
    assert str(ended(job)) == "killed at its time limit of 1 min"
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_one_whose_sweep_goes_away_before_it_is_told_what_to_do_ends(tmp_path):
    script = (
        "import os, signal, cloudpickle; from pathlib import Path\n"
        "from pipeline.sweep import local; from tests import jobs\n"
        # A shell's background job ignores this signal.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "cloudpickle.dumps = lambda task: os.kill(os.getpid(), signal.SIGINT)\n"
        "task = jobs.Task(jobs.lasting, (Path('pid'),))\n"
        "job = local.LocalJob(task, [], Path('job.log'), 1, ['spawn'])\n"
        "try:\n"
        "    job.start()\n"
        "except KeyboardInterrupt:\n"
        "    while job.poll() is None: pass\n"
        "    print(job.poll())"
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
    forked_from_another = started(tmp_path, jobs.pid, methods=["forkserver"])
    assert ended(forked_from_another).outcome == Outcome.FINISHED


@pytest.mark.slow
@ON_LINUX
def test_a_process_that_has_opened_a_device_is_not_forked(tmp_path):
    """A library that starts CUDA when it is imported would open one.

    No fork of such a process can use the GPU.
    """
    (tmp_path / "opening.py").write_text(
        "import os; from pipeline.sweep import gpus\n"
        f"gpus.DEVICES = ({str(tmp_path / 'device')!r},)\n"
        f"device = open({str(tmp_path / 'device0')!r}, 'w')\n"
        "import pipeline.sweep.warm"
    )
    script = (
        "import multiprocessing, os; from pathlib import Path\n"
        "from pipeline.sweep import local; from tests import jobs\n"
        "context = multiprocessing.get_context('forkserver')\n"
        "context.set_forkserver_preload(['opening'])\n"
        "methods = ['forkserver', 'spawn']\n"
        "task = jobs.Task(jobs.parent)\n"
        "job = local.LocalJob(task, [], Path('job.log'), 1, methods)\n"
        "job.start()\n"
        "while job.poll() is None: pass\n"
        "print(job.poll().loss == os.getpid(), methods)"
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
    assert "has opened a device, so each job imports TensorFlow itself" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_job_ends_with_its_sweep_also_if_that_is_killed(tmp_path, method):
    script = (
        "import os, signal, time; from pathlib import Path\n"
        "from pipeline.sweep import local; from tests import jobs\n"
        "pid = Path('pid')\n"
        "task = jobs.Task(jobs.lasting, (pid,))\n"
        f"job = local.LocalJob(task, [], Path('job.log'), 1, [{method!r}])\n"
        "job.start()\n"
        "while not (pid.exists() and pid.read_text()): time.sleep(0.05)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment(), timeout=60
    )
    wait(lambda: not psutil.pid_exists(int((tmp_path / "pid").read_text())), 10)


def test_an_interrupted_sweep_ends_its_jobs_and_starts_no_other(tmp_path, capsys):
    pids = tmp_path / "pids"
    pids.mkdir()

    class Interrupted:
        """Starts processes, and raises what Ctrl-C does once two of them work."""

        interval = 0.05
        interrupted = False

        def job(self, task, gpus):
            return local.LocalJob(task, gpus, tmp_path / "job.log", 1, ["spawn"])

        def poll(self):
            works = [file.read_text() != "" for file in pids.iterdir()]
            if works == [True, True] and not self.interrupted:
                self.interrupted = True
                raise KeyboardInterrupt

        def stop(self, running, *, kill):
            assert not kill
            for job in running:
                job.interrupt()

    tasks = {}
    for number in range(3):
        tasks[f"job {number}"] = jobs.Task(jobs.lasting, (pids / str(number),))
    endings = JobEndings()
    batch = JobBatch(Interrupted(), [Slot([]), Slot([])], endings, False, patience=60)
    with pytest.raises(KeyboardInterrupt):
        batch.run(tasks)
    causes = {name: ending.cause for name, ending in endings.by_name.items()}
    assert causes == {"job 0": INTERRUPTED, "job 1": INTERRUPTED}
    for file in pids.iterdir():
        assert not psutil.pid_exists(int(file.read_text()))
    assert "job 2" not in capsys.readouterr().err


def test_an_interrupted_job_may_wait_for_its_store(monkeypatch):
    """It may wait for as long as its run's patience allows; then it is killed."""
    now = [0.0]
    requests: list[tuple[float, bool]] = []  # when, and whether to kill

    class Waiting:
        """A job that only ends when it is killed, and its backend."""

        interval = 0.0

        def stop(self, running, *, kill):
            requests.append((now[0], kill))

        def poll(self):
            now[0] += 50  # once for the backend, and once for the job
            _, kill = requests[-1]
            return Ending(Outcome.NO_RESULT, cause="killed") if kill else None

    monkeypatch.setattr("pipeline.sweep.job_batch.time.monotonic", lambda: now[0])
    waiting = Waiting()
    slots = [Slot([], StartedJob("waiting", waiting, 0.0))]
    batch = JobBatch(waiting, slots, JobEndings(), False, patience=300)
    batch.stop()
    assert [seconds for seconds, kill in requests if kill] == [400]
