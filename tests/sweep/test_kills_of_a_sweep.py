"""A sweep whose own process is killed anywhere.

Jobs that run go on, and the rest runs with `--again`.
"""

from __future__ import annotations

import random
import signal

import psutil
import pytest

from pipeline.sweep.liveness import ALIVE
from tests.checkpoints.test_kills import RUN, is_in
from tests.killing import CALLS, Plan
from tests.running import Store, pipeline, start, wait
from tests.shared import note, place_store

FACTORS = ("2", "4", "8")
SWEEP = (
    "train",
    "-m",
    *RUN[:-1],
    f"accumulation.factor={','.join(FACTORS)}",
    "hardware.parallel_jobs=2",
)

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    pipeline(*SWEEP, "hydra.sweep.dir=swept", cwd=folder)
    return left_in(folder)


@pytest.mark.parametrize("seed", range(8))
def test_a_sweep_whose_parent_is_killed(tmp_path, undisturbed, seed):
    chance = random.Random(seed)
    place_store(tmp_path)
    (tmp_path / "kill").mkdir()
    call = chance.choice(list(CALLS["parent"]))
    count = chance.randint(1, CALLS["parent"][call])
    plan = Plan(
        str(tmp_path / "kill"), "parent", call, count, chance.random() < 0.5, both=False
    )
    process = start(
        *SWEEP, "hydra.sweep.dir=swept", cwd=tmp_path, warm=True, **plan.environment()
    )
    status = process.wait(300)
    print(plan, status)
    expected = -signal.SIGKILL if plan.killed else 0
    assert status == expected
    printed = process.communicate(timeout=300)[1]  # also by the jobs that go on
    assert "Traceback" not in printed
    wait(lambda: not any(is_in(other, tmp_path) for other in psutil.process_iter()))
    again = []
    for parent in parents(tmp_path):
        again = [f"tracking.sweep={parent.info.run_id}"]
        # Two minutes later nothing is heard of it any more.
        Store(tmp_path).client.set_tag(parent.info.run_id, ALIVE, "0")
    if plan.killed:
        pipeline(*SWEEP, *again, "hydra.sweep.dir=again", cwd=tmp_path)
        note(plan.kind)
    assert left_in(tmp_path) == undisturbed


def parents(folder):
    return [run for run in Store(folder).runs() if "sweep.name" in run.data.tags]


def left_in(folder):
    """Return the metrics of each job; the sweep and its jobs have to be finished."""
    store = Store(folder)
    assert [run.info.status for run in parents(folder)] == ["FINISHED"]
    jobs = store.trained()
    assert [run.info.status for run in jobs] == ["FINISHED"] * len(FACTORS)
    return {run.data.tags["sweep.job"]: store.histories(run) for run in jobs}
