"""A run that is killed again and again ends with the result of an undisturbed run.

It may be killed anywhere. `make test-all` kills about 3 times, `make soak` 200 times;
the table at the end of the session says where, see tests/killing.py.
"""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from pipeline.tracking.journal_file import JOURNAL_NAME, has_begun
from tests.checkpoints.left import metrics_in, weights_in
from tests.killing import CALLS, MOMENT, Plan
from tests.running import Store, pipeline, start, wait
from tests.shared import note, place_store

UPDATES = 12
KILLS = 4  # of one run, at most
SEEDS = 85
RUN = (
    "model=mlp",
    "model.hidden=[16]",
    "model.dropout=0.2",
    "optimizer=momentum",
    "hardware.deterministic=true",
    f"training.updates={UPDATES}",
    "training.checkpoint_every=3",
    "training.evaluate_every=4",
    "training.evaluate_at_start=true",
    "dataset.validations={late: {split: 'validation[50%:]', every: 5}}",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
    "tracking.patience=30",
    "hydra.run.dir=run",
)
AUTO = ("train", *RUN, "training.resume=auto")
# A user's run has several threads; those of other tests have one.
THREADS = {
    "TF_NUM_INTRAOP_THREADS": "2",
    "TF_NUM_INTEROP_THREADS": "2",
    "OMP_NUM_THREADS": "2",
}


@dataclass(frozen=True)
class Left:
    """What a run leaves that no disturbance may change."""

    status: str
    metrics: dict[str, dict[int, float]]
    weights: dict[str, bytes]
    params: dict[str, str]
    tags: dict[str, str | None]
    inputs: list[tuple[str, str]]
    files: set[str]


class Undisturbed:
    """Makes an undisturbed run for each number of replicas, once."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._left_by_replicas: dict[int, Left] = {}

    def __call__(self, replicas: int) -> Left:
        if replicas not in self._left_by_replicas:
            folder = self._folder / str(replicas)
            folder.mkdir()
            pipeline(*AUTO, f"hardware.replicas={replicas}", cwd=folder, **THREADS)
            self._left_by_replicas[replicas] = left_in(folder)
        return self._left_by_replicas[replicas]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


MARKS = [pytest.mark.slow] + [pytest.mark.soak] * (SEEDS - 1)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=mark) for seed, mark in enumerate(MARKS)]
)
def test_a_run_that_is_killed_goes_on_to_the_same_result(tmp_path, undisturbed, seed):
    chance = random.Random(seed)
    replicas = 1 + seed % 2
    place_store(tmp_path)
    plans = []
    processes = []
    while len(plans) < KILLS and not finished(tmp_path):
        plan = next_plan(chance, tmp_path, len(plans))
        command = next_command(chance, tmp_path, plan.who, replicas)
        process = start(
            *command, cwd=tmp_path, warm=True, **plan.environment(), **THREADS
        )
        plans.append(plan)
        name = f"{plan}: {' '.join(command[:2])}"
        processes.append((name, process))
        # The next command has to get on with what this one leaves behind: that is not
        # waited for.
        status = process.wait(240)
        print(name, status)
        expected = expected_statuses(plan)
        assert status in expected, process.communicate(timeout=60)

    pipeline(*AUTO, f"hardware.replicas={replicas}", cwd=tmp_path, **THREADS)
    synced = pipeline("sync", "run", cwd=tmp_path)
    assert synced.stderr.startswith("run: 0 points sent to the store; run ")
    for name, process in processes:
        _, err = process.communicate(timeout=60)
        assert "Traceback" not in err, name
    assert left_in(tmp_path) == undisturbed(replicas)
    wait(lambda: not any(is_in(each, tmp_path) for each in psutil.process_iter()), 30)
    note(*(plan.kind for plan in plans if plan.killed))


def next_plan(chance: random.Random, folder: Path, number: int) -> Plan:
    """Return kill `number` of the run in `folder`, and make the folder of its notes."""
    is_last = number == KILLS - 1
    if is_last:
        who = chance.choice(["shipper", "trainer"])
    else:
        who = chance.choice(["shipper", "trainer", "trainer", "sync"])
    if not has_begun(folder / "run" / JOURNAL_NAME):
        who = "trainer"
    notes = folder / f"kill {number}"
    notes.mkdir()

    # Only the first process of a run creates it in the store.
    never = "client.update_run"
    if Store(folder).runs():
        never = "client.create_run"
    calls = [call for call in (*CALLS[who], MOMENT) if call != never]
    call = chance.choice(calls)
    places = folder.glob("run/checkpoints/[0-9]*")
    done = max((int(place.name) for place in places), default=0)
    calls_left = CALLS[who][call] * (UPDATES - done) // UPDATES

    both = who == "shipper" and not is_last
    if who == "trainer":
        both = chance.random() < 0.5
    return Plan(
        folder=str(notes),
        who=who,
        call=call,
        count=chance.randint(1, max(calls_left, 1)),
        after=chance.random() < 0.5,
        both=both,
    )


def next_command(
    chance: random.Random, folder: Path, who: str, replicas: int
) -> tuple[str, ...]:
    """Return a command that has the process `who` of the run in `folder`.

    It is `pipeline sync`, or one that goes on with the run: the same command again, or
    `pipeline resume` where there is a checkpoint.
    """
    if who == "sync":
        return ("sync", "run")
    if chance.random() < 0.4 and list(folder.glob("run/checkpoints/[0-9]*")):
        return ("resume", "run")
    return (*AUTO, f"hardware.replicas={replicas}")


def expected_statuses(plan: Plan) -> list[int]:
    """Return the exit statuses that a command may have under a plan."""
    command_is_killed = plan.who != "shipper" or plan.both
    if not (plan.killed and command_is_killed):
        return [0]
    if plan.who == "shipper":
        # A shipper that is killed may outlive its trainer by a moment.
        return [-signal.SIGKILL, 0]
    return [-signal.SIGKILL]


def finished(folder: Path) -> bool:
    journal = folder / "run" / JOURNAL_NAME
    return journal.exists() and '"end":"FINISHED"' in journal.read_text()


def left_in(folder: Path, checkpoint_of: int = UPDATES) -> Left:
    """Return what the only run in `folder` has left."""
    store = Store(folder)
    run = store.run()
    params = {}
    for key, value in run.data.params.items():
        if not key.startswith("hydra"):
            params[key] = value
    tags = ("failure", "not_shipped", "model.not_logged", "config.hash")
    datasets = [used.dataset for used in run.inputs.dataset_inputs]
    artifacts = store.client.list_artifacts(run.info.run_id)
    # These two are of the process.
    files = {file.path for file in artifacts} - {"segments.json", "git.diff"}
    return Left(
        status=run.info.status,
        metrics=metrics_in(folder),
        weights=weights_in(folder, checkpoint_of),
        params=params,
        tags={key: run.data.tags.get(key) for key in tags},
        inputs=sorted((dataset.name, dataset.digest) for dataset in datasets),
        files=files,
    )


def is_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder)
    except psutil.Error:
        return False
