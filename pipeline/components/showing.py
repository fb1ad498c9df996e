"""Plans what is shown at evaluations: `tracking.show` and `training.shown`."""

from collections.abc import Mapping
from typing import Any

from pipeline.common.errors import ConfigError
from pipeline.components.objective import RunObjective
from pipeline.config.resolve import RunSpec
from pipeline.dataset.splits import Data
from pipeline.shown import plan


def make_plan(
    spec: RunSpec,
    data: Data,
    objective: RunObjective,
    y: Any,
    outputs: Mapping[str, Any],
) -> plan.ShownPlan | None:
    """Return what is shown at evaluations, or None if the config shows nothing.

    Args:
        spec: the spec of the run.
        data: the loaded dataset.
        objective: the objective of the run.
        y: the labels of a few examples.
        outputs: the model's outputs for these examples, by name.

    Raises:
        ConfigError: the dataset has no validation split.
    """
    settings = plan.settings_of(spec.config.tracking.show)
    if settings == plan.NOTHING and not objective.shown:
        return None
    if data.validation is None:
        key = "tracking.show"
        received: Any = spec.config.tracking.show
        if settings == plan.NOTHING:
            key = "training.shown"
            received = list(objective.shown)
        rule = "must be left out: the dataset has no validation split"
        raise ConfigError(key, rule, received)

    padding = None
    if spec.dataset.get("pad") is not None:
        padding = spec.dataset.pad["value"]
    shown_input = plan.input_to_show(data.train.element_spec[0], padding, data.decode)
    return plan.make_plan(settings, objective.evaluation, y, outputs, shown_input)
