"""The same sweep on a real Slurm, with one controller and one node on 127.0.0.1.

It runs where Debian's packages `slurmctld`, `slurmd` and `slurm-client` are installed,
the user is root, and no Slurm runs yet: two on one machine disturb each other.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import programs
from tests.running import ROOT, Store, environment, pipeline, start
from tests.shared import place_store
from tests.sweep.test_sweep import (
    MINE,
    TINY,
    parent_and_children,
    processes_in,
    table,
    wait,
)

pytestmark = pytest.mark.slow

NEEDED = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "sinfo")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/none
CredType=cred/none
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
KillWait=20
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
PACKAGES = ("slurmctld", "slurmd", "slurm-client")
MODES = (
    "+training.callbacks.trouble="
    "{_target_:mine.Trouble,mode:none},{_target_:mine.Trouble,mode:kill}"
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Start Slurm; give the environment variables by which its commands find it."""
    programs.need(*NEEDED)
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    if os.geteuid() != 0:
        programs.give_up("Slurm's daemons want to be started by root", *PACKAGES)
    names = {process.info["name"] for process in psutil.process_iter(["name"])}
    if names & {"slurmctld", "slurmd"}:
        programs.give_up("a Slurm runs on this machine already", *PACKAGES)
    folder = tmp_path_factory.mktemp("slurm")
    host = socket.gethostname().split(".")[0]
    config = folder / "slurm.conf"
    controller, node = _free_ports(2)
    config.write_text(
        CONFIG.format(
            host=host,
            folder=folder,
            controller=controller,
            node=node,
            cpus=os.cpu_count(),
        ).lstrip()
    )
    environment = {"SLURM_CONF": str(config), "PATH": path}
    daemons = [
        subprocess.Popen(
            [name, "-D", "-f", str(config)],
            env={**os.environ, **environment},
            stdout=(folder / f"{name}.log").open("w"),
            stderr=subprocess.STDOUT,
        )
        for name in ("slurmctld", "slurmd")
    ]
    try:
        until = time.monotonic() + 60
        while "idle" not in _ask(environment, "sinfo", "--noheader", "--format=%T"):
            ended = [daemon for daemon in daemons if daemon.poll() is not None]
            if ended or time.monotonic() > until:
                ends = []
                for log in sorted(folder.glob("*.log")):
                    ends.append(log.read_text().strip().splitlines()[-1:])
                programs.give_up(
                    f"Slurm does not run on this machine, its logs end in {ends}",
                    *PACKAGES,
                )
            time.sleep(0.2)
        yield environment
    finally:
        _ask(environment, "scancel", "--user=root")
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(timeout=60)


def test_a_sweep_leaves_the_same_runs_on_slurm_as_on_this_machine(tmp_path, slurm):
    """One job finishes and one is killed.

    A cluster without a database does not tell submitit of that.
    """
    jobs_by_launcher = {}
    for launcher, variables in (("submitit_local", {}), ("submitit_slurm", slurm)):
        folder = tmp_path / launcher
        folder.mkdir()
        (folder / "mine.py").write_text(MINE)
        sweep = (
            "train",
            "-m",
            *TINY,
            "hardware.precision=float64",
            f"hydra/launcher={launcher}",
        )
        done = pipeline(*sweep, MODES, cwd=folder, status=1, **variables)
        store = Store(folder)
        parent, children = parent_and_children(store)
        assert parent.info.status == "FAILED"
        assert set(table(done.stderr).values()) == {"FINISHED", "KILLED"}, done.stderr
        jobs_by_launcher[launcher] = {
            name: (run, store.history(run, "train/loss"))
            for name, (run,) in children.items()
        }
        # Slurm ends what a job leaves behind a little later.
        wait(lambda folder=folder: processes_in(folder) == [], 30)
    local, cluster = jobs_by_launcher.values()
    assert set(local) == set(cluster)
    for name, (run, losses) in local.items():
        assert cluster[name][0].info.status == run.info.status
        assert cluster[name][0].data.tags["config.hash"] == run.data.tags["config.hash"]
        if run.info.status == "FINISHED":
            assert len(losses) == 12
            assert cluster[name][1] == pytest.approx(losses, rel=1e-12)
    assert _ask(slurm, "squeue", "--noheader") == ""


def test_ctrl_c_cancels_the_jobs_on_slurm(tmp_path, slurm):
    sweep = (
        "train",
        "-m",
        *TINY,
        "training.epochs=100000",
        "seed=0,1,2",
        "hydra/launcher=submitit_slurm",
    )
    process = start(
        *sweep,
        "hydra.launcher.cpus_per_task=2",
        "hydra.sweep.dir=jobs",
        cwd=tmp_path,
        **slurm,
    )

    def a_job_trains():
        journals = tmp_path.glob("jobs/*/journal.jsonl")
        return any(file.read_text().count("train/loss") > 20 for file in journals)

    wait(a_job_trains)
    os.killpg(process.pid, signal.SIGINT)
    printed = process.communicate(timeout=120)[1]
    assert process.returncode == 130, printed
    parent, children = parent_and_children(Store(tmp_path))
    assert parent.info.status == "KILLED"
    assert {run.info.status for (run,) in children.values()} == {"KILLED"}
    assert "NOT RUN" in printed
    time.sleep(1)
    assert _ask(slurm, "squeue", "--noheader") == ""
    wait(lambda: processes_in(tmp_path) == [], 30)


def test_a_job_that_slurm_takes_away_is_requeued_and_goes_on(tmp_path, slurm):
    """Submitit gets the warning of a time limit or of a more important job."""
    (tmp_path / "mine.py").write_text(MINE)
    # The job has minutes left when the signal comes, however long that takes.
    slow = "+training.callbacks.trouble={_target_: mine.Trouble, mode: slow}"
    sweep = (
        "train",
        "-m",
        *TINY[1:],
        "training.epochs=60",
        "seed=0",
        "hydra/launcher=submitit_slurm",
        slow,
    )
    process = start(*sweep, "hydra.sweep.dir=jobs", cwd=tmp_path, **slurm)
    journal = tmp_path / "jobs" / "0" / "journal.jsonl"
    wait(lambda: journal.exists() and journal.read_text().count("train/loss") > 5)
    (job,) = _ask(slurm, "squeue", "--noheader", "--format=%i").split()
    _ask(slurm, "scancel", "--signal=USR2", job)
    wait(lambda: '"end":"KILLED"' in journal.read_text())
    (tmp_path / "healed").touch()
    wait(lambda: _ask(slurm, "squeue", "--noheader", "--format=%t").strip() == "PD")
    # Slurm holds a requeued job for minutes, since a node rejects one that is started
    # in the second in which it was taken away.
    _ask(slurm, "scontrol", "update", f"JobId={job}", "StartTime=now+3")
    printed = process.communicate(timeout=500)[1]
    assert process.returncode == 0, printed
    store = Store(tmp_path)
    (run,) = store.trained()
    assert (run.info.status, run.data.tags["segments"]) == ("FINISHED", "2")
    assert list(store.history(run, "train/loss")) == list(range(1, 60 * 12 + 1))


@pytest.mark.soak
def test_the_batch_script_of_the_examples(tmp_path, slurm):
    """One run goes to its end; another one gets SIGTERM, and is closed in order.

    Slurm sends SIGTERM before the time limit.
    """
    script = str(ROOT / "examples" / "slurm" / "train.sbatch")
    path = os.pathsep.join([str(Path(sys.executable).parent), slurm["PATH"]])
    # The machine may have no more than one.
    sbatch = ["sbatch", "--parsable", "--cpus-per-task=1"]
    with_path = environment(**{**slurm, "PATH": path})

    def submit(*arguments: str) -> str:
        command = [*sbatch, *arguments]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=with_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    submit("--wait", script, *TINY)
    store = Store(tmp_path)
    assert store.run().info.status == "FINISHED"
    job = submit(script, *TINY, "training.epochs=100000", "hydra.run.dir=long").strip()
    journal = tmp_path / "long" / "journal.jsonl"
    wait(lambda: journal.exists() and journal.read_text().count("train/loss") > 20)
    _ask(slurm, "scancel", "--batch", "--signal=TERM", job)
    wait(lambda: [run.info.status for run in store.runs()] == ["FINISHED", "KILLED"])
    wait(lambda: _ask(slurm, "squeue", "--noheader") == "", 60)


def test_the_tasks_of_a_job_are_the_workers_of_one_run(tmp_path, slurm):
    """They are started by `srun`, and as a job of a sweep; the curve is the same."""
    run = (
        *TINY,
        "hardware.precision=float64",
        "training.updates=15",
        "accumulation.effective_batch_size=359",
    )
    curves = {}
    for how in ("alone", "srun", "sweep"):
        folder = tmp_path / how
        folder.mkdir()
        if how == "alone":
            pipeline("train", *run, "training.epochs=null", cwd=folder)
        elif how == "srun":
            place_store(folder)
            command = [
                "srun",
                "--ntasks=2",
                "--overcommit",
                sys.executable,
                "-m",
                "pipeline",
                "train",
                *run,
            ]
            more = [
                "training.epochs=null",
                "hardware=multi_worker",
                "hydra.run.dir=run",
            ]
            done = subprocess.run(
                [*command, *more],
                cwd=folder,
                env=environment(**slurm),
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            assert done.stderr.count("open it with: pipeline ui") == 1
        else:
            of_job = (
                "hydra/launcher=submitit_slurm",
                "hydra.launcher.tasks_per_node=2",
                "hydra.launcher.cpus_per_task=1",
            )
            more = (
                "training.epochs=null",
                "hardware=multi_worker",
                "hardware.workers=2",
            )
            pipeline("train", "-m", *run, *more, *of_job, cwd=folder, **slurm)
        store = Store(folder)
        (trained,) = store.trained()
        assert trained.info.status == "FINISHED"
        replicas = "1" if how == "alone" else "2"
        assert trained.data.params["derived.replicas"] == replicas
        curves[how] = store.history(trained, "train/loss")
        assert len(curves[how]) == 15
        assert curves[how] == pytest.approx(curves["alone"], rel=1e-12)
    wait(lambda: _ask(slurm, "squeue", "--noheader") == "", 60)


def _ask(environment: dict[str, str], *command: str) -> str:
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True
    ).stdout


def _free_ports(count: int) -> list[int]:
    with_sockets = [socket.socket() for _ in range(count)]
    for opened in with_sockets:
        opened.bind(("127.0.0.1", 0))
    ports = [opened.getsockname()[1] for opened in with_sockets]
    for opened in with_sockets:
        opened.close()
    return ports
