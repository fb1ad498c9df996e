"""A run that was resumed with another horizon is repeated with the last one, or not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.common.errors import ConfigError
from pipeline.rerun import last_horizon
from pipeline.rerun.recorded_run import RecordedRun
from pipeline.rerun.request import Request
from pipeline.tracking import horizons
from tests.running import Store, one_process, pipeline
from tests.shared import place_store

FIRST = {"after": 0, "horizon": "training.epochs=600", "updates": 7200}
LAST = {"after": 399, "horizon": "training.epochs=70", "updates": 840}
CONSTANT = {"schedule": {"learning_rate": 0.1}}
COSINE = {"schedule": {"decay_steps": "rest"}}
OLDER_COSINE = {"schedule": {"decay_steps": "95%"}}


def requested(config, tags, *overrides, status="FINISHED"):
    """Return the overrides with which a run with these tags is repeated."""
    info = SimpleNamespace(run_id="ab12", status=status)
    data = SimpleNamespace(tags=tags, params={"derived.updates": "7200"})
    run = SimpleNamespace(info=info, data=data)
    recorded = RecordedRun(run, config, {}, {}, {})
    request = Request("ab12", False, False, ["mine"], None, None, [*overrides])
    return last_horizon.requested(recorded, request).overrides


def tags_of(*entries):
    return {horizons.TAG: json.dumps(entries)}


def test_the_last_horizon_is_taken_where_only_the_length_depends_on_it():
    both = tags_of(FIRST, LAST)
    assert requested(CONSTANT, both, "seed=1") == ["seed=1", "training.epochs=70"]
    for cosine in (COSINE, OLDER_COSINE):
        assert requested(cosine, tags_of(LAST)) == ["training.epochs=70"]
    # The user decides.
    assert requested(COSINE, both, "training.updates=9") == ["training.updates=9"]
    assert requested(COSINE, {}) == []


def test_a_run_whose_rates_had_two_horizons_is_not_repeated():
    with pytest.raises(ConfigError) as error:
        requested(COSINE, tags_of(FIRST, LAST), "tracking.uri=sqlite:///a.db")
    assert str(error.value).endswith(
        "had training.epochs=600 and, after update 399, training.epochs=70; to train "
        "with only the last one: pipeline rerun ab12 --allow=mine "
        "tracking.uri=sqlite:///a.db training.epochs=70."
    )


def test_a_horizon_that_an_older_version_has_not_recorded_is_noticed():
    tags = {"segments": "2", "updates": "840"}
    with pytest.raises(ConfigError) as error:
        requested(CONSTANT, tags)
    assert "a horizon of 7200 updates, and ended after 840" in str(error.value)
    assert "rerun ab12 --allow=mine training.updates=840." in str(error.value)
    assert requested(CONSTANT, tags | {"updates": "7200"}) == []
    assert requested(CONSTANT, tags | {"stopped_by": "a callback"}) == []
    assert requested(CONSTANT, tags, status="KILLED") == []


@pytest.mark.slow
def test_a_run_with_another_horizon_is_resumed_reported_and_repeated(tmp_path: Path):
    place_store(tmp_path)
    quiet = "tracking.log_model=false tracking.system_metrics=false"
    config = f"model=mlp schedule=constant training.epochs=1 {quiet} hydra.run.dir=run"
    answers = one_process(
        {
            "train": f"train {config} hardware.deterministic=true",
            "longer": "resume run training.updates=15",
            # Without a horizon, it is still the last one.
            "again": "resume run",
            "report": "report run",
        },
        tmp_path,
    )
    statuses = {name: answer["status"] for name, answer in answers.items()}
    assert statuses == {"train": 0, "longer": 0, "again": 2, "report": 0}
    assert "has finished" in answers["again"]["err"]
    segments = json.loads((tmp_path / "run" / "segments.json").read_text())
    assert [segment["updates"] for segment in segments] == [12, 15]
    (page,) = tmp_path.glob("outputs/report-*.html")
    text = page.read_text()
    assert "training.epochs=1 and, after update 12, training.updates=15" in text
    assert "epochs=1→updates=15" in text

    run_id = Store(tmp_path).run().info.run_id
    rerun = pipeline("rerun", run_id, cwd=tmp_path)
    assert "was resumed with training.updates=15, which the rerun uses" in rerun.stderr
    assert "bit-equal" in rerun.stderr
