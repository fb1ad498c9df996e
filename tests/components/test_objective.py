"""A loss of the config is what its target says."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from pipeline.accumulation.internals import couples_examples
from pipeline.components import objective


@pytest.mark.parametrize(
    ("name", "couples"), [("circle", True), ("mean_squared_error", False)]
)
def test_a_function_of_several_examples_at_once_is_known_as_one(name, couples):
    config = {
        "loss": {"_target_": f"keras.losses.{name}", "_partial_": True},
        "loss_weights": None,
        "added_losses": "mean",
        "loss_over": "example",
        "metrics": {},
        "weighted_metrics": {},
        "callbacks": {},
    }
    objectives = objective.build(OmegaConf.create(config))
    assert couples_examples(objectives.training.loss) is couples
