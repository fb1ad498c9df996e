"""Two commands that run the rest of one sweep at once.

One of them is rejected, and each job trains once.
"""

from __future__ import annotations

import threading

import pytest
from omegaconf import OmegaConf

from pipeline.common.errors import ConfigError
from pipeline.sweep import liveness, opening
from tests.parameters import mostly_slow
from tests.shared import place_store

SECONDS = 2.0  # in which two see each other, with a store on this machine


@pytest.fixture
def config(tmp_path, monkeypatch):
    """The config of a command that reopens a sweep which has ended."""
    from pipeline.tracking.store import Store

    monkeypatch.setattr(opening, "CLAIM_SECONDS", SECONDS)
    place_store(tmp_path)
    store = Store(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    client = store.client()
    experiment = store.experiment("first name")
    tags = {"sweep.name": "multirun", "sweep.jobs": "[]"}
    run_id = client.create_run(experiment, tags=tags).info.run_id
    client.set_terminated(run_id, "KILLED")
    client.rename_experiment(experiment, "second name")
    return OmegaConf.create(
        {
            "tracking": {
                "uri": store.uri,
                "sweep": run_id,
                "confined": True,
                "experiment": "first name",
                "patience": 60,
            },
            "training": {"metrics": {}},
            "dataset": {},
            "trust": {"allow": []},
            "hydra": {
                "job": {"config_name": "config"},
                "overrides": {"hydra": [], "task": []},
                "sweeper": {},
                "sweep": {"dir": str(tmp_path / "jobs")},
            },
        }
    )


def reopened(config, count, pause):
    """Return what `count` commands get that begin a pause after one another."""
    answers = []

    def reopen():
        try:
            answers.append(opening.reopen(config, [], []))
        except ConfigError as error:
            answers.append(str(error))

    threads = [threading.Thread(target=reopen) for _ in range(count)]
    for thread in threads:
        thread.start()
        thread.join(pause)
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.parametrize(
    "pause",
    mostly_slow([0.0, 0.3, SECONDS, 3 * SECONDS], [0.0, SECONDS]),
)
def test_one_of_two_is_refused(config, pause):
    answers = reopened(config, 2, pause)
    refusals = [answer for answer in answers if isinstance(answer, str)]
    assert len(refusals) == 1, answers
    assert "SWEEP must" in refusals[0]


def test_one_alone_goes_on_in_the_renamed_experiment(config):
    (sweep,) = reopened(config, 1, 0.0)
    assert sweep.experiment == "second name"
    run = sweep.parent.client().get_run(sweep.parent.run_id)
    assert run.info.status == "RUNNING"
    assert liveness.ALIVE in run.data.tags
