"""`--again`: what is taken of a sweep's record, and what is closed first.

Processes that are gone may have left runs RUNNING.
"""

from __future__ import annotations

import json
import re
import threading
import time

import pytest
from omegaconf import OmegaConf

from pipeline.cli import train
from pipeline.common.errors import ConfigError
from pipeline.config import compose
from pipeline.sweep import again, liveness, opening
from pipeline.sweep.liveness import ALIVE, SILENCE_LIMIT
from pipeline.tracking import journal_file
from pipeline.tracking.foreign_store import MULTIRUN
from pipeline.tracking.journal_file import JOURNAL_NAME
from tests import synthetic
from tests.running import Store, pipeline, wait
from tests.sweep.test_sweep import PLANNED
from tests.synthetic import PlantedSweep

OWN = {"dataset": {"data_dir": None}, "trust": {"allow": ["tests"]}}
PLAN = "hydra.launcher._target_=hydra_plugins.planned.Planned"


def replay(*recorded: str, command_line: tuple[str, ...] = ()) -> list[str]:
    tags = {"sweep.overrides": json.dumps(recorded)}
    return again.trusted_overrides(tags, command_line, OmegaConf.create(OWN))


HARMLESS = [
    "training.epochs=1",
    "start.run='deadbeef@40'",
    "start.run='12345678@10','12345678@20'",
    "model=mlp",
    "+experiment=quick",
    "~training.metrics.accuracy",
    "model.hidden=[64,32]",
    "optimizer=adamw,lion",
    "accumulation.factor=choice(1,4)",
    "optimizer.learning_rate=tag(log, interval(1e-4, 1e-1))",
    "model._target_=tests.synthetic.store",
    "+training.callbacks.stop={_target_: keras.callbacks.EarlyStopping, patience: 2}",
    "hydra/launcher=submitit_slurm",
    "hydra.launcher.partition=gpu-long",
    "hydra.launcher.timeout_min=600",
    "hydra.sweeper.trials=50",
    "hydra.sweeper.params.seed=0",
    "hydra.sweeper.params.optimizer.learning_rate='0.1,0.2'",
]


def test_the_command_repeats_what_the_record_lacks_or_does_not_vouch_for():
    config = OmegaConf.create(OWN)
    place = ["tracking.uri=sqlite:///a.db", "hydra.sweep.dir=jobs"]
    assert again.to_repeat(["model=mlp", *place, "seed=0,1"], config) == place
    untrusted = ["seed=0,1", "dataset.data_dir=/data", "tracking.uri=sqlite:///a.db"]
    assert again.to_repeat(untrusted, config) == untrusted


def test_a_multirun_has_the_command_of_the_list_of_runs(tmp_path):
    command = ["sweep", "multirun", "--again", "ab12"]
    first = ["-m", "model=mlp", "seed=0,1", "hydra.sweep.dir=jobs"]
    assert train._command_of_multirun(first, "ab12") == command
    # The record has the overrides of the command that began the sweep.
    later = [*first, "tracking.sweep=ab12"]
    assert train._command_of_multirun(later, "ab12") == [*command, *first[1:3]]
    default = ["-m", "--config-name", "config", "seed=0,1"]
    assert train._command_of_multirun(default, "ab12") == command
    # A config of a folder of one's own; `seeds` is a sweep file.
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\n")
    folder = ["--config-dir", str(tmp_path)]
    named = [
        "-m",
        "--config-name=mine",
        *folder,
        "seed=0,1",
        "tracking.uri=sqlite:///x",
    ]
    again_named = ["sweep", "mine", "--again", "ab12", *folder, named[-1]]
    assert train._command_of_multirun(named, "ab12") == again_named
    of_file = ["-m", "--config-name", "seeds", "seed=0,1"]
    again_of_file = ["train", *of_file, "tracking.sweep=ab12"]
    assert train._command_of_multirun(of_file, "ab12") == again_of_file


def test_the_name_of_a_config_is_no_name_of_a_sweep_to_begin(tmp_path, monkeypatch):
    """A config in `conf` is found, though the folder has no groups."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text("defaults: [config, _self_]\n")
    (tmp_path / "other.yaml").write_text("defaults: [config, _self_]\n")
    monkeypatch.chdir(tmp_path)
    begins = r"`pipeline train -m --config-name mine` sweeps that config\)\. Received: 'mine'"
    with pytest.raises(ConfigError, match=begins):
        train.sweep(["mine", "seed=0,1"])
    with pytest.raises(
        ConfigError, match=r"`pipeline train -m` runs a sweep without a file"
    ):
        train.sweep([MULTIRUN])
    composed = compose.composed(["--config-name", "mine", "seed=7"])
    assert composed.seed == 7
    not_searched = r"\(\./other\.yaml is not searched\)\. .* Choices: config, mine"
    with pytest.raises(ConfigError, match=not_searched):
        compose.composed(["--config-name", "other"])


def test_another_name_than_that_of_the_sweep_is_answered_with_it(tmp_path, monkeypatch):
    store = synthetic.store(tmp_path)
    sweep = PlantedSweep(store, ["seed=0"], ["seed"], name="seeds")
    sweep.end()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"Received: 'multirun'\. Choices: seeds"):
        train.sweep([MULTIRUN, "--again", sweep.run_id])


def test_what_can_name_no_code_no_folder_and_no_host_is_taken():
    assert replay(*HARMLESS) == HARMLESS
    assert replay("tracking=server", "+tracking={uri: 'http://evil'}", "seed=1") == [
        "seed=1"
    ]


def test_a_repeated_override_keeps_its_place_in_the_names_of_jobs():
    recorded = ["dataset.data_dir=/a,/b", "seed=0,1", "model=mlp"]
    tags = {"sweep.overrides": json.dumps(recorded)}
    command_line = ["training.epochs=1", recorded[0]]
    trusted = again.trusted_overrides(tags, command_line, OmegaConf.create(OWN))
    ordered = again.in_recorded_order(tags, trusted, command_line)
    assert ordered == [*recorded, "training.epochs=1"]


def test_the_record_has_the_last_override_of_a_key_in_the_place_of_the_first():
    recorded = ["model=mlp", "seed=0,1", "trust.allow=[mine]"]
    tags = {"sweep.overrides": json.dumps(recorded)}
    given = [*recorded[:2], "seed=0,1,2", "training.epochs=2", "trust.allow=[mine,x]"]
    given += ["tracking.sweep=ab12", "tracking.confined=true"]
    assert again.updated_record(tags, given) == [
        "model=mlp",
        "seed=0,1,2",
        "trust.allow=[mine]",
        "training.epochs=2",
    ]


def test_parameters_of_slurm_are_left_out_where_the_rest_runs_on_this_machine():
    recorded = [
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.partition=gpu",
        "hydra.launcher.timeout_min=600",
    ]
    command_line = ("hydra/launcher=local",)
    assert replay(*recorded, command_line=command_line) == [
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.timeout_min=600",
    ]
    assert replay("hydra/launcher=submitit_local", "hydra.launcher.mem_gb=8") == [
        "hydra/launcher=submitit_local"
    ]
    assert replay(*recorded, command_line=("hydra/launcher=basic",)) == [
        "hydra/launcher=submitit_slurm"
    ]


HOSTILE = [
    "start.run=elsewhere/run@40",
    "start.run='deadbeef','/run'",
    "start={run: /run}",
    "+hydra.callbacks.evil={_target_: mlflow.utils.process._exec_cmd, cmd: [touch, PWNED]}",
    "hydra.callbacks.evil._target_=os.system",
    "hydra/launcher=evil",
    "+hydra/callbacks=evil",
    "hydra.launcher._target_=mine.Launcher",
    "hydra.launcher.setup=[touch PWNED]",
    "hydra.launcher.submitit_folder=/tmp",
    "hydra.launcher.partition='main\n#SBATCH --wrap=evil'",
    "hydra.sweeper._target_=os.system",
    "hydra.sweeper.params.model._target_=os.system",
    "hydra.sweeper.params.hydra.callbacks.evil._target_=os.system",
    "hydra.searchpath=[file:///tmp/evil]",
    "model._target_=os.system",
    "model._target_=mlp,os.system",
    "model={_target_: subprocess.Popen, args: [touch, PWNED]}",
    "+model.layers=[{inner: {_target_: builtins.eval}}]",
    "trust.allow=[os]",
    "+trust.allow=[os]",
    "model.name=${oc.env:HOME}",
    "dataset.data_dir=/etc",
    "+training.callbacks.log={_target_: keras.callbacks.CSVLogger, filename: /root/.profile}",
    "+training.callbacks.log={_target_: keras.callbacks.RemoteMonitor}",
    "model@hydra.callbacks.x=mlp",
    "+defaults=[evil]",
    "--config-dir=/tmp/evil",
    "-cd",
    "/hydra/launcher=basic",
    "tracking.token=***",
    "hardware.open_ports=true",
    "hardware={open_ports: true}",
    "hardware={secret_file: x}",
    "hardware=multi_worker",
    "hardware=default,multi_worker",
    "tracking.uri=http://evil.example",
    "tracking.sweep=x",
    "tracking.confined=false",
    "dataset.name='huggingface:glue'",
    "dataset.name=mnist,cifar10",
    "dataset.download=true",
    "~dataset.download",
    "dataset.validations.late.name=mnist",
    "+dataset.validations={late: {download: true}}",
    "+dataset.validations={late: {_target_: evil.data}}",
    "+dataset={_target_: pipeline.dataset.from_tfds, name: mnist}",
    "training.callbacks.rows.filename=other.csv",
    "training.callbacks.rows.filename=a.csv,b.csv",
    "training={callbacks: {rows: {filename: other.csv}}}",
    "training={callbacks: {rows: {filename: a.csv}}},{callbacks: {}}",
    "+training.callbacks.log={_target_: keras.callbacks.CSVLogger, filename: rows.csv}",
    "dataset={name: mnist}",
    "dataset={download: true}",
    "seed=range(0,1000000000)",
    "model=glob(*)",
    "not an override",
    "",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_what_could_must_be_given_again(text):
    rule = "a recorded override must be given again on the command line"
    with pytest.raises(ConfigError, match=rule):
        replay("training.epochs=1", text)
    repeated = replay("training.epochs=1", text, command_line=(text,))
    assert repeated == ["training.epochs=1"]


@pytest.mark.parametrize(
    "text",
    [
        "seed=shuffle(range(0,100000000000))",  # Hydra makes a list of it
        f"seed={'9' * 5000}",
        pytest.param(f"x={'[' * 1500}{']' * 1500}", marks=pytest.mark.slow),
        f"{'hydra.sweeper.params.' * 3}seed=1",
    ],
    ids=["range", "digits", "deep", "nested"],
)
def test_what_takes_all_memory_to_read_is_refused(text):
    with pytest.raises(ConfigError, match="a recorded override must be given again"):
        replay(text)


def test_a_hostile_record_runs_nothing(tmp_path):
    store = synthetic.store(tmp_path)
    made = PlantedSweep(store, ["seed=0"], name="seeds")
    evil = [text for text in HOSTILE if "evil" in text]
    made.tag(made.run_id, **{"sweep.overrides": json.dumps(evil[:1])})
    made.end("FAILED")
    done = pipeline("sweep", "seeds", "--again", made.run_id, cwd=tmp_path, status=2)
    assert "hydra.callbacks.evil must come from your own config" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mlruns"]


def test_where_the_first_call_worked_is_not_recorded():
    places = [
        "tracking.uri=http://me:pass@h",
        "hydra.sweep.dir=jobs",
        "hydra.mode=MULTIRUN",
        "hydra.searchpath=[x]",
    ]
    assert again.recordable([*places, "seed=1", "hydra.sweeper.trials=3"]) == [
        "seed=1",
        "hydra.sweeper.trials=3",
    ]


# What runs again


SCRIPTED = """
from types import SimpleNamespace
from pipeline.sweep.ending import Ending, Outcome
from pipeline.sweep.local import LocalLauncher

ENDINGS = [
    Ending(Outcome.FAILED, reason="ValueError: the job is cursed"),
    Ending(Outcome.NO_RESULT, cause="killed by SIGKILL"),
    Ending(Outcome.FINISHED, 1.0),
]

class Scripted(LocalLauncher):
    # Its jobs print their overrides, start no process, and end badly at first.
    interval = 0.0

    def _slots(self, hardware_of_jobs):
        return [[], []]

    def _prepare(self):
        pass

    def _backend(self, sweep, hardware_of_jobs):
        self.endings = iter(ENDINGS)
        return self

    def poll(self):
        pass

    def job(self, task, gpus):
        print(task.overrides)
        if "seed=3" in task.overrides:
            raise OSError("no such job")
        ending = next(self.endings)
        return SimpleNamespace(start=lambda: None, poll=lambda: ending)
"""


def test_what_is_missing_runs_and_no_failure_stops_another(tmp_path):
    (tmp_path / "hydra_plugins").mkdir()  # where alone Hydra takes plugins from
    (tmp_path / "hydra_plugins" / "scripted.py").write_text(SCRIPTED)
    names = [f"seed={seed}" for seed in range(5)]
    made = PlantedSweep(synthetic.store(tmp_path), names, ["seed"], name="seeds")
    runs = []
    for name, status in zip(names, ["FINISHED", "FAILED", "KILLED"], strict=False):
        runs.append(made.job(name, {"train/loss": [2, 1]}, status=status))
    made.end("FAILED")
    # One that was killed goes on in its run; one that has failed is run anew.
    for number, run_id in enumerate(runs):
        (tmp_path / str(number)).mkdir()
        writer = journal_file.create(tmp_path / str(number) / JOURNAL_NAME)
        tags = {"journal": run_id}
        start = {"format": 1, "store": made.store.uri, "tags": tags}
        writer.write({"start": start})
        writer.write({"run": {"run_id": run_id, "experiment_id": made.experiment_id}})
        writer.close()

    launcher = "hydra.launcher._target_=hydra_plugins.scripted.Scripted"
    command = ("sweep", "seeds", "--again", made.run_id, launcher)
    done = pipeline(*command, cwd=tmp_path, status=1)
    assert re.findall(r"^  (seed=\d): (.+)", done.stderr, re.MULTILINE) == [
        ("seed=1", "started"),
        ("seed=2", "started"),
        ("seed=1", "failed after 0 s"),
        ("seed=2", "killed by SIGKILL after 0 s"),
        ("seed=3", "started"),
        ("seed=3", "failed after 0 s"),
        ("seed=4", "started"),
        ("seed=4", "finished after 0 s"),
    ]
    assert "4 of 5 jobs to run" in done.stderr
    resumed = []
    for line in done.stdout.splitlines():
        if "'training.resume=auto'" in line:
            resumed.append(line)
    (line,) = resumed
    assert "'seed=2'" in line
    assert f"hydra.sweep.dir='{tmp_path}/2'" in line
    assert made.client.get_run(made.run_id).info.status == "FAILED"


ADDED = """
from types import SimpleNamespace
from pathlib import Path
from pipeline.common.signals import Terminated
from pipeline.sweep.ending import Ending, Outcome
from pipeline.sweep.local import LocalLauncher

class Added(LocalLauncher):
    # Its jobs are interrupted, until a file `healed` is there; they start no process.
    interval = 0.0

    def _slots(self, hardware_of_jobs):
        return [[]]

    def _prepare(self):
        pass

    def _backend(self, sweep, hardware_of_jobs):
        return self

    def poll(self):
        pass

    def stop(self, running, *, kill):
        pass

    def job(self, task, gpus):
        if not Path("healed").exists():
            raise Terminated("SIGTERM")
        ending = Ending(Outcome.FINISHED, 1.0)
        return SimpleNamespace(start=lambda: None, poll=lambda: ending)
"""


@pytest.mark.slow
def test_the_short_command_continues_what_was_added_and_then_changes_nothing(tmp_path):
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "added.py").write_text(ADDED)
    made = PlantedSweep(
        synthetic.store(tmp_path), ["seed=0", "seed=1"], ["seed"], "seeds"
    )
    made.tag(made.run_id, **{"sweep.overrides": json.dumps(["seed=0,1"])})
    for name in ("seed=0", "seed=1"):
        made.job(name, {"train/loss": [2, 1]})
    made.end()
    launcher = "hydra.launcher._target_=hydra_plugins.added.Added"
    command = ("sweep", "seeds", "--again", made.run_id, launcher)

    def status() -> str:
        return made.client.get_run(made.run_id).info.status

    stopped = pipeline(*command, "seed=0,1,2", cwd=tmp_path, status=143)
    assert "1 of 3 jobs to run" in stopped.stderr
    assert status() == "KILLED"
    # Without the seeds: what `pipeline runs` prints.
    (tmp_path / "healed").touch()
    continued = pipeline(*command, cwd=tmp_path, status=1)  # its job leaves no run
    assert "1 of 3 jobs to run" in continued.stderr
    assert "  seed=2: finished after 0 s" in continued.stderr
    made.job("seed=2", {"train/loss": [2, 1]})
    nothing = pipeline(*command, cwd=tmp_path)
    assert "0 of 3 jobs to run" in nothing.stderr
    assert status() == "FINISHED"

    # Other jobs are recorded only once no job of the record is unfinished.
    made.job("seed=1", {"train/loss": [2, 1]}, status="FAILED")
    made.end("KILLED")
    other = pipeline(*command, "seed=0,2", cwd=tmp_path, status=1)
    assert "0 of 2 jobs to run" in other.stderr
    assert other.stderr.count("these overrides do not plan: seed=1;") == 2
    assert "run what is missing with" not in other.stderr
    assert status() == "KILLED"
    recorded = made.client.get_run(made.run_id).data.tags["sweep.overrides"]
    assert "seed=0,1,2" in json.loads(recorded)


# Whether it still runs


@pytest.fixture
def left(tmp_path):
    """Make a sweep whose parent and second job are RUNNING.

    The function takes the time of the last sign of life of each.
    """

    def make(parent: float, job: float) -> tuple[PlantedSweep, str]:
        made = PlantedSweep(
            synthetic.store(tmp_path), ["seed=0", "seed=1"], ["seed"], "seeds"
        )
        made.tag(made.run_id, **{ALIVE: str(int(1000 * parent))})
        made.job("seed=0", {"train/loss": [2, 1]})
        made.clock = int(1000 * job)
        return made, made.job("seed=1", {"train/loss": [2, 1]}, status="RUNNING")

    return make


@pytest.mark.parametrize("which", ["parent", "job"])
def test_a_sweep_that_still_runs_is_left_alone(left, which):
    now = time.time()
    alive = {"parent": now - 10 * SILENCE_LIMIT, "job": now - 10 * SILENCE_LIMIT}
    alive[which] = now
    made, run = left(**alive)
    parent = made.client.get_run(made.run_id)
    with pytest.raises(ConfigError, match=r"^SWEEP must have ended"):
        opening.close_dead_jobs(
            made.client, parent, {"seed=1": made.client.get_run(run)}
        )
    assert made.client.get_run(run).info.status == "RUNNING"


@pytest.mark.slow
def test_the_command_leaves_a_sweep_that_still_runs_alone(tmp_path, left):
    now = time.time()
    made, run = left(parent=now - 10 * SILENCE_LIMIT, job=now)
    done = pipeline("sweep", "seeds", "--again", made.run_id, cwd=tmp_path, status=2)
    assert "SWEEP must have ended" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    for run_id in (run, made.run_id):
        assert made.client.get_run(run_id).info.status == "RUNNING"


def test_what_a_dead_sweep_left_running_is_closed(left):
    made, run = left(time.time() - SILENCE_LIMIT - 1, time.time() - SILENCE_LIMIT - 1)
    parent = made.client.get_run(made.run_id)
    opening.close_dead_jobs(made.client, parent, {"seed=1": made.client.get_run(run)})
    assert made.client.get_run(run).info.status == "KILLED"
    assert "without a message" in made.client.get_run(run).data.tags["failure"]


def test_a_sweep_gives_signs_of_life_until_it_ends(tmp_path):
    made = PlantedSweep(synthetic.store(tmp_path), ["seed=0"])
    closed = threading.Event()
    threading.Thread(
        target=liveness.write_heartbeats, args=[made.planned, closed], daemon=True
    ).start()
    wait(lambda: ALIVE in made.client.get_run(made.run_id).data.tags, 30)
    closed.set()
    assert int(made.client.get_run(made.run_id).data.tags[ALIVE]) == pytest.approx(
        1000 * time.time(), abs=30_000
    )


# A sweep without a file


@pytest.mark.slow
def test_a_sweep_without_a_file_gets_further_seeds_and_no_job_twice(tmp_path):
    command = ["train", "-m", "experiment=quick", "training.epochs=1", "seed=3,4"]
    pipeline(*command, "tracking.log_model=false", cwd=tmp_path)
    (parent,) = [run for run in Store(tmp_path).runs() if "sweep.name" in run.data.tags]
    again_arguments = ["sweep", MULTIRUN, "--again", parent.info.run_id]
    pipeline(*again_arguments, "seed=3,4,5", cwd=tmp_path)

    jobs = {}
    for run in Store(tmp_path).trained():
        assert run.data.tags["sweep.job"] not in jobs
        jobs[run.data.tags["sweep.job"]] = run
    assert jobs.keys() == {"seed=3", "seed=4", "seed=5"}
    for run in jobs.values():
        assert run.info.status == "FINISHED"
        assert run.data.params["training.epochs"] == "1"

    # It is no name of a sweep to begin.
    refused = pipeline("sweep", "multirun", cwd=tmp_path, status=2)
    assert "NAME must name a sweep" in refused.stderr


@pytest.mark.slow
def test_a_sweep_of_a_named_config_and_one_of_a_file_have_short_commands(tmp_path):
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "wide.yaml").write_text(
        "_target_: pipeline.model.mlp\nhidden: [8]\n"
    )
    (tmp_path / "conf" / "mine.yaml").write_text(
        "defaults: [config, _self_, {override model: wide}]\ntraining: {epochs: 1}\n"
    )
    common = ["tracking.log_model=false", "tracking.system_metrics=false"]
    # Both end with status 1, as the loss of the second job is not finite.
    rates = "optimizer.learning_rate=0.1,1e30"
    named = ["train", "-m", "--config-name", "mine", *common, rates]
    of_file = ["sweep", "seeds", "model=wide", "training.epochs=1", *common, rates]
    of_file += ["hydra.sweeper.params.seed=0"]
    for name, command in (("mine", named), ("seeds", of_file)):
        printed = pipeline(*command, cwd=tmp_path, status=1).stderr
        parents = [
            run
            for run in Store(tmp_path).runs()
            if run.data.tags.get("sweep.name") == name
        ]
        again_command = f"pipeline sweep {name} --again {parents[0].info.run_id}"
        assert printed.count(f"run what is missing with: {again_command}\n") == 1
        listed = pipeline("runs", cwd=tmp_path).stdout
        assert f"    {again_command}\n" in listed
        # It does not repeat the job that has finished.
        verb, *arguments = again_command.split(" ")[1:]
        rest = pipeline(verb, *arguments, cwd=tmp_path, status=1).stderr
        assert "1 of 2 jobs finished" in rest


# Configs of one's own


@pytest.mark.slow
def test_a_sweep_of_the_package_with_a_model_of_ones_own(tmp_path):
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "planned.py").write_text(PLANNED)
    (tmp_path / "my_conf" / "model").mkdir(parents=True)
    (tmp_path / "my_conf" / "model" / "tiny.yaml").write_text("_target_: mine.tiny\n")
    done = pipeline(
        "sweep",
        "seeds",
        PLAN,
        "--config-dir",
        "my_conf",
        "model=tiny,mlp",
        cwd=tmp_path,
    )
    assert len(json.loads(done.stdout)) == 10
    assert json.loads(done.stdout)[0] == "seed=0 model=tiny"


@pytest.mark.slow
def test_a_sweep_of_ones_own_may_build_on_one_of_the_package(tmp_path):
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "planned.py").write_text(PLANNED)
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "mine.yaml").write_text(
        "defaults: [seeds, _self_]\nhydra: {sweeper: {params: {seed: '7,8'}}}\n"
    )
    done = pipeline("sweep", "mine", PLAN, cwd=tmp_path)
    assert json.loads(done.stdout) == ["seed=7", "seed=8"]
