"""A run that is killed anywhere, again and again, goes on to the result of the run that nobody disturbed.

`make test-all` kills about 3 times, `make soak` 200 times; the table at the end says where: see
tests/killing.py.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import psutil
import pytest

from pipeline.checkpoints import files as checkpoint
from pipeline.checkpoints import snapshot
from pipeline.tracking.journal_file import NAME, has_begun
from tests.killing import CALLS, MOMENT, Plan
from tests.running import Store, pipeline, start, wait
from tests.shared import note, place_store

UPDATES = 12
KILLS = 4  # of one run, at most
SEEDS = 85
RUN = (
    *(
        "model=mlp",
        "model.hidden=[16]",
        "model.dropout=0.2",
        "optimizer=momentum",
        "hardware.deterministic=true",
    ),
    *(
        f"training.updates={UPDATES}",
        "training.checkpoint_every=3",
        "training.evaluate_every=4",
    ),
    *(
        "tracking.log_model=false",
        "tracking.system_metrics=false",
        "tracking.patience=30",
        "hydra.run.dir=run",
    ),
)
AUTO = ("train", *RUN, "training.resume=auto")
# As a user has them; other tests have one.
THREADS = dict.fromkeys(
    ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"), "2"
)


class Undisturbed:
    """What runs that nobody disturbed have left, by their number of replicas; each is made once."""

    def __init__(self, folder: Path):
        self._folder, self._made = folder, dict[int, tuple]()

    def __call__(self, replicas: int) -> tuple:
        if replicas not in self._made:
            folder = self._folder / str(replicas)
            folder.mkdir()
            pipeline(*AUTO, f"hardware.replicas={replicas}", cwd=folder, **THREADS)
            self._made[replicas] = left_in(folder)
        return self._made[replicas]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


MARKS = [pytest.mark.slow] + [pytest.mark.soak] * (SEEDS - 1)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=mark) for seed, mark in enumerate(MARKS)]
)
def test_a_run_that_is_killed_goes_on_to_the_same_result(tmp_path, undisturbed, seed):
    chance = random.Random(seed)
    replicas = f"hardware.replicas={1 + seed % 2}"
    place_store(tmp_path)
    said, plans = [], []
    while len(plans) < KILLS and not finished(tmp_path):
        last = len(plans) == KILLS - 1
        who = chance.choice(
            ["shipper", "trainer"]
            if last
            else ["shipper", "trainer", "trainer", "sync"]
        )
        who = who if has_begun(tmp_path / "run" / NAME) else "trainer"
        plan = planned(
            chance,
            tmp_path / f"kill {len(plans)}",
            who,
            both=who == "shipper" and not last,
        )
        again = (
            going_on(chance, tmp_path, replicas) if who != "sync" else ("sync", "run")
        )
        process = start(
            *again, cwd=tmp_path, warm=True, **plan.environment(), **THREADS
        )
        plans.append(plan)
        said.append((f"{plan}: {' '.join(again[:2])}", process))
        status = process.wait(
            240
        )  # not for what it leaves behind, which the next command has to get on with
        print(said[-1][0], status)
        killed = plan.killed and (who != "shipper" or plan.both)
        # A shipper that is killed may outlive its trainer by a moment.
        expected = ([-signal.SIGKILL] if killed else [0]) + [0] * (who == "shipper")
        assert status in expected, process.communicate(timeout=60)
    pipeline(*AUTO, replicas, cwd=tmp_path, **THREADS)
    assert pipeline("sync", "run", cwd=tmp_path).stderr.startswith(
        "run: 0 points were missing; run "
    )
    for what, process in said:
        assert "Traceback" not in process.communicate(timeout=60)[1], what
    assert left_in(tmp_path) == undisturbed(1 + seed % 2)
    wait(
        lambda: not [each for each in psutil.process_iter() if is_in(each, tmp_path)],
        30,
    )
    note(*(plan.kind for plan in plans if plan.killed))


def planned(chance: random.Random, folder: Path, who: str, *, both: bool) -> Plan:
    """Return where to kill `who` in what is left of the run in the folder beside `folder`."""
    folder.mkdir()
    done = max(
        (int(place.name) for place in folder.parent.glob("run/checkpoints/[0-9]*")),
        default=0,
    )
    never = (
        ["client.create_run"] if Store(folder.parent).runs() else ["client.update_run"]
    )
    call = chance.choice([call for call in (*CALLS[who], MOMENT) if call not in never])
    most = CALLS[who][call] * (UPDATES - done) // UPDATES
    both = both or (who == "trainer" and chance.random() < 0.5)
    return Plan(
        str(folder),
        who,
        call,
        chance.randint(1, max(most, 1)),
        chance.random() < 0.5,
        both,
    )


def finished(folder: Path) -> bool:
    journal = folder / "run" / NAME
    return journal.exists() and '"end":"FINISHED"' in journal.read_text()


def going_on(chance: random.Random, folder: Path, replicas: str) -> tuple[str, ...]:
    """Return what goes on with the run: the same command again, or `pipeline resume` where there is a checkpoint."""
    if chance.random() < 0.4 and list(folder.glob("run/checkpoints/[0-9]*")):
        return ("resume", "run")
    return (*AUTO, replicas)


def left_in(folder: Path, checkpoint_of: int = UPDATES) -> tuple:
    """Return all that a run leaves which no disturbance may change."""
    store = Store(folder)
    run = store.run()  # one
    metrics = {
        key: store.history(run, key)
        for key in run.data.metrics
        if not key.startswith("perf/")
    }
    last = checkpoint.at(folder / "run" / "checkpoints", checkpoint_of)
    weights = {
        name: array.tobytes()
        for name, array in snapshot.read(last.folder, last.meta).arrays.items()
    }
    params = {
        key: value
        for key, value in run.data.params.items()
        if not key.startswith("hydra")
    }
    tags = {
        key: run.data.tags.get(key)
        for key in ("failure", "not_shipped", "model.not_logged", "config.hash")
    }
    inputs = sorted(
        (each.dataset.name, each.dataset.digest) for each in run.inputs.dataset_inputs
    )
    files = {file.path for file in store.client.list_artifacts(run.info.run_id)} - {
        "segments.json",
        "git.diff",
    }
    return run.info.status, metrics, weights, params, tags, inputs, files


def is_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder)
    except psutil.Error:
        return False
