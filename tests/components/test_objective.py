"""A loss of the config is what its target says."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf
from omegaconf import OmegaConf

from pipeline.accumulation.internals import couples_examples
from pipeline.components import objective, objective_checks


def built(loss, metrics):
    config = {
        "loss": {"_target_": loss, "_partial_": True},
        "loss_weights": None,
        "added_losses": "mean",
        "loss_over": "example",
        "metrics": metrics,
        "weighted_metrics": {},
        "callbacks": {},
        "shown": {},
    }
    return objective.build(OmegaConf.create(config))


@pytest.mark.parametrize(
    ("name", "couples"), [("circle", True), ("mean_squared_error", False)]
)
def test_a_function_of_several_examples_at_once_is_known_as_one(name, couples):
    objectives = built(f"keras.losses.{name}", {})
    assert couples_examples(objectives.training.loss) is couples


def test_a_function_for_a_metric_is_the_mean_of_its_values():
    function = {"_target_": "keras.metrics.mean_absolute_error", "_partial_": True}
    objectives = built("keras.losses.mean_squared_error", {"own": function})
    (metric,) = objectives.training.metrics
    assert metric.name == "own"
    metric.update_state(tf.zeros((2, 1)), tf.constant([[1.0], [4.0]]))
    metric.update_state(tf.zeros((1, 1)), tf.constant([[-4.0]]))
    assert float(metric.result()) == 3.0


def test_a_first_batch_of_which_the_loss_ignores_all_labels_is_legal():
    """As a mask of a segmentation may be: nothing in it has a class."""
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=255)
    ignored = tf.fill((2, 4, 4), 255)
    objective_checks._check_labels(loss, ignored, 3, 3)
    with pytest.raises(ValueError, match="label 9 is outside the 3 outputs"):
        objective_checks._check_labels(loss, tf.fill((2, 4, 4), 9), 3, 3)
