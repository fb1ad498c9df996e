"""Jobs that are forked from a process which has TensorFlow are jobs of submitit as any other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import submitit

from pipeline import forkserver
from tests import jobs
from tests.running import TINY, Store, environment, pipeline, wait

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each job imports TensorFlow itself")

MODULE = "pipeline.forked_job"


@pytest.fixture(scope="module")
def server():
    with forkserver.serving(MODULE) as server:
        yield server


def submitted(server, folder: Path, function, *arguments, minutes: float = 5.0) -> submitit.Job:
    from pipeline import forked_job

    executor = forked_job.Executor(str(folder / "%j"), server)
    executor.update_parameters(timeout_min=minutes)
    return executor.submit(function, *arguments)


def result(job):
    wait(job.paths.result_pickle.exists)
    return submitit.core.utils.pickle_load(job.paths.result_pickle)


def test_a_job_is_forked_where_the_sweep_was_with_its_logs_and_nothing_of_the_server(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLOUR", "green")
    job = submitted(server, tmp_path, jobs.who)
    outcome, (folder, colour, stdin, loaded, ancestors, blocked, waits) = result(job)
    assert outcome == "success"
    assert (folder, colour, stdin) == (str(tmp_path), "green", "")
    assert loaded == ["tensorflow"]
    assert ancestors[:2] == [int(job.job_id), server.process.pid]
    assert blocked == set()
    assert waits
    wait(job.done)
    assert "said\n" in job.stdout()
    assert "complained\n" in job.stderr()


def test_tensorflow_computes_in_many_of_them_at_once(server, tmp_path):
    many = [submitted(server, tmp_path, jobs.computed) for _ in range(8)]
    assert [result(job) for job in many] == [("success", 64.0**3)] * 8


def test_one_that_raises_or_dies_says_so(server, tmp_path):
    cursed, dead = submitted(server, tmp_path, jobs.raising), submitted(server, tmp_path, jobs.dying)
    outcome, trace = result(cursed)
    assert outcome == "error"
    assert trace.rstrip().endswith("ValueError: the job is cursed")
    wait(dead.done)
    assert not dead.paths.result_pickle.exists()


def test_one_that_takes_too_long_is_ended(server, tmp_path):
    job = submitted(server, tmp_path, jobs.lasting, tmp_path, minutes=5 / 60)
    wait((tmp_path / "begun").exists)
    (process,) = psutil.Process(int(job.job_id)).children()
    wait(job.done)
    assert not process.is_running()
    assert server.process.poll() is None


def test_what_a_server_forks_outlives_it_and_without_one_submitit_starts_the_job(tmp_path):
    with forkserver.serving(MODULE) as server:
        before = submitted(server, tmp_path, jobs.lasting, tmp_path)
        wait((tmp_path / "begun").exists)
        server.process.kill()
        server.process.wait()
        assert not before.done()
        _, (*_, ancestors, _, _) = result(submitted(server, tmp_path, jobs.who))
        assert ancestors[1] == os.getpid()
    psutil.Process(int(before.job_id)).children()[0].kill()
    wait(before.done)


def test_a_server_that_hangs_runs_nothing_late(tmp_path):
    with forkserver.serving(MODULE) as server:
        assert result(submitted(server, tmp_path, jobs.computed))[0] == "success"  # it can fork by now
        process = psutil.Process(server.process.pid)
        wait(lambda: not process.children())
        process.suspend()
        job = submitted(server, tmp_path, jobs.noted, tmp_path / "file")
        assert result(job)[0] == "success"
        process.resume()
        time.sleep(0.5)
        wait(lambda: not process.children())
    assert (tmp_path / "file").read_text() == "once\n"


def test_a_job_whose_controller_dies_before_it_begins_is_started_by_submitit(server, tmp_path, monkeypatch):
    forks = server.fork

    def fork(environment):
        forked = forks(environment)
        os.kill(forked.pid, signal.SIGKILL)
        wait(lambda: forked.poll() is not None)
        return forked

    monkeypatch.setattr(server, "fork", fork)
    job = submitted(server, tmp_path, jobs.noted, tmp_path / "file")
    assert result(job)[0] == "success"
    assert (tmp_path / "file").read_text() == "once\n"


def test_a_process_that_can_open_no_pipe_leaves_none_open(tmp_path):
    script = (
        "import os, resource\n"
        "from pipeline import forkserver\n"
        "before = os.listdir('/proc/self/fd')\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "for limit in range(3, 12):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))\n"
        "    try:\n"
        "        forkserver.Forked('/nowhere', {})\n"
        "    except OSError:\n"
        "        pass\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "assert os.listdir('/proc/self/fd') == before"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_server_that_opens_a_device_forks_nothing(tmp_path):
    """As a library would that starts CUDA when it is imported: no fork of such a process can use the GPU."""
    script = (
        "import sys; from pipeline import forked_job\n"
        "forked_job.DEVICES = (sys.argv[1],)\n"
        "device = open(sys.argv[1] + '0', 'w')\n"
        "forked_job.prepare()"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "device")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "has opened a device: each job imports it for itself" in done.stderr.splitlines()[-1]


def test_a_server_whose_import_fails_is_not_waited_for(tmp_path, capfd):
    with forkserver.serving("pipeline.nowhere") as server:
        assert server.fork({}) is None
    assert "No module named 'pipeline.nowhere'" in capfd.readouterr().err


def test_many_jobs_leave_no_pipe_open(server, tmp_path):
    assert result(submitted(server, tmp_path, jobs.computed))[0] == "success"
    before = psutil.Process().num_fds()
    for _ in range(10):
        wait(submitted(server, tmp_path, os.getpid).done)
    server.fork({**os.environ}).stdin.close()
    assert psutil.Process().num_fds() <= before + 2
    assert len(server.forked) <= 2


MINE = """
import os, sys, keras, psutil


class Noting(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        print("command", *psutil.Process().cmdline(), "variable", os.environ.get("COLOUR"), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    """Both jobs of a sweep: by hand, forked two at once, and three times not forked."""
    folder = tmp_path_factory.mktemp("ways")
    own = folder / "own"  # before this project on the path, and with a name that is also here
    (own / "benchmarks").mkdir(parents=True)
    (own / "benchmarks" / "__init__.py").write_text(MINE)
    path = os.pathsep.join([str(own), environment()["PYTHONPATH"]])
    noting = "+training.callbacks.noting={_target_: benchmarks.Noting}"
    printed = {}
    for seed in (1, 2):
        done = pipeline("train", *TINY, noting, f"seed={seed}", "tracking.experiment=hand", cwd=folder, PYTHONPATH=path)
        printed["hand", seed] = done.stderr
    more_of = {
        "forked": [],
        "set": ["+hydra.job.env_set.COLOUR=green"],
        "setup": ["+hydra.launcher.setup=['export COLOUR=red']"],
        "off": ["hydra.launcher.fork=false"],
    }
    for way, more in more_of.items():
        more = [*more, f"tracking.experiment={way}", f"hydra.sweep.dir={way}", "hardware.parallel_jobs=2"]
        pipeline("train", "-m", *TINY, noting, "seed=1,2", *more, cwd=folder, PYTHONPATH=path)
        for number, seed in enumerate((1, 2)):
            (log,) = (folder / way / ".submitit" / str(number)).glob("*/*_log.err")
            printed[way, seed] = log.read_text()
    return printed, Store(folder)


def test_a_sweep_forks_its_jobs_unless_a_variable_is_set_for_them(ways):
    printed, _ = ways
    for seed in (1, 2):
        assert "pipeline.forkserver" in printed["forked", seed]
        assert "submitit.core._submit" in printed["set", seed]
        assert "variable green" in printed["set", seed]
        assert "variable red" in printed["setup", seed]
        assert "submitit.core._submit" in printed["off", seed]


def test_a_forked_job_trains_to_the_same_bits(ways):
    _, store = ways
    hand = {run.data.params["seed"]: store.histories(run, "train/", "val/") for run in store.trained("hand")}
    assert set(hand) == {"1", "2"}
    assert hand["1"] != hand["2"]
    for way in ("forked", "set", "setup", "off"):
        runs = {run.data.params["seed"]: store.histories(run, "train/", "val/") for run in store.trained(way)}
        assert runs == hand, way


def test_a_run_says_how_it_was_started(ways):
    _, store = ways
    for way in ("hand", "forked", "set"):
        for run in store.trained(way):
            name = run.data.tags["mlflow.source.name"]
            assert name.startswith("pipeline model=mlp training.epochs=1 ")
            assert f"seed={run.data.params['seed']}" in name
