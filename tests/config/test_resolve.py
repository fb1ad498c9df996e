"""What a composed config is resolved to."""

from __future__ import annotations

import pytest

from pipeline.config import plain
from pipeline.config.resolve import RunSpec
from pipeline.config.sizes import Horizon
from tests import composing
from tests.parameters import mostly_slow


def resolved(*overrides: str) -> RunSpec:
    return composing.spec_of(overrides)


# --- overrides that are mappings ---


def test_a_horizon_in_a_mapping_outranks_the_default():
    spec = resolved("training={updates: 100}")
    assert spec.horizon == Horizon("updates", 100)
    assert spec.config.training.epochs is None


@pytest.mark.parametrize("micro", [16, "auto"])
def test_a_size_in_a_mapping_outranks_the_defaults(micro):
    spec = resolved(f"accumulation={{micro_batch_size: {micro}}}")
    assert spec.batching == resolved(f"accumulation.micro_batch_size={micro}").batching
    assert spec.config.accumulation.factor is None


# --- values ---


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("training.evaluate_every", "20", 20),
        ("training.checkpoint_every", "20", 20),
        ("accumulation.micro_batch_size", "16", 16),
        ("hardware.gpu", "0", 0),
        ("scaling.warmup", "5", 5),
        ("hardware.tf32", "false", False),
        ("hardware.open_ports", "true", True),
        ("accumulation.same_noise", "auto", "auto"),
        ("tracking.run_name", "007", "007"),
    ],
)
def test_a_value_of_the_environment_is_a_count_or_a_flag(key, text, value, monkeypatch):
    monkeypatch.setenv("VALUE", text)
    spec = resolved(f"{key}=${{oc.env:VALUE}}")
    assert plain.value_at(spec.resolved, key) == value
    assert type(plain.value_at(spec.resolved, key)) is type(value)


@pytest.mark.parametrize(
    "uri",
    mostly_slow(
        [
            "HTTP://host:5000",
            "http://[::1]:5000",
            "https://me:pw@host/path",
            "postgresql:///runs",
            "mysql+pymysql://me@host/runs",
        ],
        ["http://[::1]:5000", "mysql+pymysql://me@host/runs"],
    ),
)
def test_a_store_of_a_known_scheme_is_accepted(uri):
    spec = resolved(f"tracking.uri='{uri}'")
    assert spec.config.tracking.uri == uri


# --- the spec of another worker ---


def test_a_worker_keeps_its_own_values_and_adopts_the_others():
    own = (
        "+tracking.tags={team.name: x, team: y}",
        "hardware.profile={start: 2, updates: 1}",
        "dataset.data_dir=/here",
        "seed=1",
    )
    chief = resolved("seed=7", "model=mlp", "+tracking.tags.of=chief")
    adopted = resolved(*own).adopting(chief.shared_text())
    assert adopted.config.tracking.tags == {"team.name": "x", "team": "y"}
    assert adopted.resolved["hardware"]["profile"] == {"start": 2, "updates": 1}
    assert adopted.resolved["dataset"]["data_dir"] == "/here"
    assert adopted.config.seed == 7
    assert adopted.resolved["model"] == chief.resolved["model"]
