"""The metrics that an update returns or that are derived from it, one entry for each.

A new metric of an update is computed in `pipeline.accumulation` and has its entry here.
"""

import posixpath
import re
from typing import NamedTuple

_NAME = re.compile(r"[\w.\-/: ]{1,250}")
NAME_RULE = (
    "letters, digits and _.-/: up to 250 of them, "
    "as a path without empty or dotted parts"
)


def is_name(name: str) -> bool:
    """Return whether MLflow accepts a name of a metric or a param, which is a path."""
    return (
        bool(_NAME.fullmatch(name))
        and posixpath.normpath(name) == name
        and not name.startswith(("/", ".."))
    )


class UpdateMetric(NamedTuple):
    """How a metric of an update is treated.

    Attributes:
        counted: whether it counts examples, steps or epochs, so that two runs agree on
            it exactly.
        of_the_cut: whether its value depends on how a batch is cut into micro-batches.
        rounding: by how many times the rounding of a loss it may differ between two
            runs.
        share: whether it may be a share of the examples, which changes by whole
            examples.
    """

    counted: bool = False
    of_the_cut: bool = False
    rounding: float = 1.0
    share: bool = False


# Rounding may switch a ReLU or a pooling to another input: the gradient's norm then
# changed by 2e-5 within one update, while the loss did not change.
_OF_THE_GRADIENT = 30.0
NOISE_SCALE = "gradient_noise_scale"
UPDATE_METRICS = {
    "loss": UpdateMetric(),
    "learning_rate": UpdateMetric(),
    "gradient_norm": UpdateMetric(rounding=_OF_THE_GRADIENT),
    # An update's own estimate of the squared norm, which no run logs as it is.
    "gradient_square": UpdateMetric(of_the_cut=True),
    **dict.fromkeys(
        ("gradient_variance", "gradient_squared_norm", NOISE_SCALE),
        UpdateMetric(of_the_cut=True, rounding=_OF_THE_GRADIENT),
    ),
    **dict.fromkeys(
        ("skipped_updates", "effective_batch_size", "examples_seen", "epoch"),
        UpdateMetric(counted=True),
    ),
    **dict.fromkeys(
        ("micro_steps", "accumulation_factor"),
        UpdateMetric(counted=True, of_the_cut=True),
    ),
}
USERS = UpdateMetric(share=True)  # for a metric with any other name


def treatment_of(metric: str) -> UpdateMetric:
    """Return how `metric`, with or without its split as in `train/loss`, is treated."""
    name = metric.split("/")[-1]
    if name in UPDATE_METRICS:
        return UPDATE_METRICS[name]
    if name.endswith("_loss"):  # the loss of an output
        return UPDATE_METRICS["loss"]
    return USERS


def changed_since(schema: int) -> list[str]:
    """Return the metrics that later code computes otherwise than records of a schema."""
    # Its average reached back over about 95 updates, also where |G|² fell faster.
    return [f"train/{NOISE_SCALE}"] if schema < 3 else []
