"""What a composed config is resolved to."""

from __future__ import annotations

import pytest

from pipeline.config import compose
from pipeline.config.resolve import RunSpec, resolve
from pipeline.config.sizes import Horizon


def resolved(*overrides: str) -> RunSpec:
    return resolve(compose.composed(overrides), overrides, {})


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
