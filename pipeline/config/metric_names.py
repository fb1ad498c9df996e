"""A table of the metrics that an update returns, and of those derived from them.

To add a metric, compute it in `pipeline.accumulation` and add an entry here.
"""

import posixpath
import re
from typing import NamedTuple

_NAME = re.compile(r"[\w.\-/: ]{1,250}")
NAME_RULE = (
    "up to 250 letters, digits, blanks and any of :_.-/ with no path part that is "
    "empty, . or .."
)


def is_name(name: str) -> bool:
    """Return whether MLflow accepts `name` for a metric or a param.

    MLflow treats such a name as a path.
    """
    return (
        bool(_NAME.fullmatch(name))
        and posixpath.normpath(name) == name
        and name != "."
        and not name.startswith(("/", ".."))
    )


class UpdateMetric(NamedTuple):
    """The properties of an update's metric that matter when two runs are compared.

    Attributes:
        counted: whether the metric counts examples, steps or epochs. Two runs must then
            agree on it exactly.
        of_the_cut: whether the value depends on how a batch is cut into micro-batches.
        rounding: the allowed difference between two runs, as a multiple of the
            difference allowed for a loss.
        share: whether the value may be a fraction of the examples, such as an accuracy,
            which changes in steps of one example.
    """

    counted: bool = False
    of_the_cut: bool = False
    rounding: float = 1.0
    share: bool = False


# `UpdateMetric.rounding` for metrics of the gradient. Rounding may turn a ReLU on or
# off, or make max-pooling select another input. In one measurement, this changed the
# gradient norm by 2e-5 within one update, while the loss did not change.
_OF_THE_GRADIENT = 30.0
NOISE_SCALE = "gradient_noise_scale"
UPDATE_METRICS = {
    "loss": UpdateMetric(),
    "learning_rate": UpdateMetric(),
    "gradient_norm": UpdateMetric(rounding=_OF_THE_GRADIENT),
    # The estimate of the squared gradient norm from one update. Only an average of
    # these estimates is logged.
    "gradient_square": UpdateMetric(of_the_cut=True),
    **dict.fromkeys(
        ("gradient_variance", "gradient_squared_norm", NOISE_SCALE),
        UpdateMetric(of_the_cut=True, rounding=_OF_THE_GRADIENT),
    ),
    **dict.fromkeys(
        (
            "skipped_updates",
            "effective_batch_size",
            "examples_seen",
            "epoch",
            "tokens",
            "tokens_seen",
        ),
        UpdateMetric(counted=True),
    ),
    **dict.fromkeys(
        # The positions of an update, padding included, are not logged: see
        # `perf/padding_share`.
        ("micro_steps", "accumulation_factor", "positions"),
        UpdateMetric(counted=True, of_the_cut=True),
    ),
}
USERS = UpdateMetric(share=True)  # for a metric with any other name


def treatment_of(metric: str) -> UpdateMetric:
    """Return the properties of a metric, named with or without its split."""
    name = metric.split("/")[-1]
    if name in UPDATE_METRICS:
        return UPDATE_METRICS[name]
    if is_loss(name):
        return UPDATE_METRICS["loss"]
    return USERS


def is_loss(metric: str) -> bool:
    """Return whether a metric, named with or without its split, counts as a loss.

    The loss of an output is called `<output>_loss`. So any metric whose name ends in
    `_loss` counts as one.
    """
    name = metric.split("/")[-1]
    return name == "loss" or name.endswith("_loss")


def changed_since(schema: int) -> list[str]:
    """Return the metrics whose computation has changed since this schema version."""
    # Before schema 3, the gradient noise scale was averaged over about 95 updates, even
    # if the squared gradient norm |G|² fell within fewer updates.
    return [f"train/{NOISE_SCALE}"] if schema < 3 else []
