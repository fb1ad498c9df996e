"""Computes the learning rate if the effective batch size changes in stages.

    updates ─ clock ─► updates, or examples seen ─ schedule ─► rate ─ × factor ─► rate

The factor of a stage is the scaling rule's factor for the effective batch size of that
stage, divided by its factor for the first stage.
"""

from dataclasses import dataclass
from typing import Any, Self

import keras
import tensorflow as tf

from pipeline.common.errors import ConfigError
from pipeline.components import scaling
from pipeline.config import sizes
from pipeline.config.plan import Plan
from pipeline.config.resolve import RunSpec
from pipeline.config.schema import Rule
from pipeline.config.stages import SCHEDULE

# The rules that change only the learning rate. Only the rate can change between stages.
_OF_THE_RATE_ALONE = ("none", "linear", "sqrt", "surge")


@dataclass(frozen=True)
class StagedSchedule:
    """A learning-rate schedule that follows the stages of the effective batch."""

    schedule: Any  # a Keras schedule, or a number
    changes: list[str]  # a phrase for each later stage, if a scaling rule is set


def check(spec: RunSpec) -> None:
    """Raise a ConfigError if the scaling rule changes more than the learning rate.

    Only the rate can change between the stages of a batch-size schedule. Without a
    schedule, every rule is accepted.
    """
    scale = spec.config.scaling
    if spec.config.accumulation.batch_schedule is None or scale.rule == Rule.none:
        return
    why = f"with {SCHEDULE}, which only the learning rate can follow"
    if scale.rule.name not in _OF_THE_RATE_ALONE:
        raise ConfigError(
            "scaling.rule",
            f"must not change β or the weight decay {why}",
            scale.rule.name,
            _OF_THE_RATE_ALONE,
        )
    if scale.ema and spec.resolved["optimizer"].get("use_ema"):
        raise ConfigError("scaling.ema", f"must be false {why}", True)


def counts_examples(spec: RunSpec) -> bool:
    """Return whether `schedule.clock` is `examples`.

    The schedule is then a function of the examples seen, divided by the effective
    batch size of the first stage, and not of the number of updates.
    """
    return bool(spec.resolved["schedule"].get("clock") == "examples")


def horizon(spec: RunSpec, plan: Plan) -> int:
    """Return the horizon in effective batches of the first stage's size, rounded up."""
    unit, length = spec.horizon
    if unit == "updates":
        examples = plan.examples_seen(length)
    elif unit == "epochs":
        examples = length * plan.examples
    else:
        examples = length
    return sizes.ceil_div(examples, spec.batching.effective_batch_size)


def follow_stages(spec: RunSpec, plan: Plan, schedule: Any) -> StagedSchedule:
    """Return `schedule` with the clock of the config and the factor of each stage.

    If neither changes anything, the result has `schedule` itself, so that callbacks can
    still set a constant rate.
    """
    scale = spec.config.scaling
    first_factor = scaling.rate_factor(scale, plan.all_stages[0].size)
    factors = []
    for stage in plan.all_stages:
        factors.append(scaling.rate_factor(scale, stage.size) / first_factor)

    examples_in_epoch = None
    if counts_examples(spec) and callable(schedule):
        examples_in_epoch = plan.examples
    if examples_in_epoch is None and set(factors) == {1.0}:
        return StagedSchedule(schedule, [])

    stages = []
    for stage in plan.all_stages:
        stages.append(
            [stage.after, stage.size, stage.epoch, stage.first, stage.in_epoch]
        )
    changes = []
    if scale.rule != Rule.none:
        for after, size in plan.changes[1:]:
            factor = scaling.rate_factor(scale, size)
            changes.append(f"× {factor:g} after update {after}")
    return StagedSchedule(
        StageRates(schedule, stages, factors, examples_in_epoch), changes
    )


@keras.saving.register_keras_serializable("pipeline")
class StageRates(scaling.DerivedSchedule):
    """schedule(clock) × the factor of the stage.

    Args:
        schedule: a function of the clock, or a number.
        stages: a list per stage: [updates before the stage, effective batch size, epoch
            in which the stage begins, examples of that epoch before the stage, updates
            per epoch].
        factors: a factor per stage.
        examples: number of examples per epoch if the clock is the examples seen ÷ the
            first effective batch size, or None if the clock is the number of updates.
    """

    def __init__(
        self, schedule: Any, stages: Any, factors: Any, examples: int | None = None
    ):
        self.schedule = schedule
        self.stages = stages
        self.factors = factors
        self.examples = examples

    def __call__(self, step: Any) -> Any:
        updates = tf.cast(step, tf.int64)
        stages = tf.constant(self.stages, tf.int64)
        begun = tf.cast(updates >= stages[:, 0], tf.int64)
        number = tf.reduce_sum(begun) - 1  # index of the stage, counted from 0

        clock = step
        if self.examples is not None:
            seen = self._examples_seen(updates, stages[number])
            first_size = self.stages[0][1]
            clock = tf.cast(seen, tf.float64) / first_size

        rate = self.rate(clock)
        return rate * tf.constant(self.factors, rate.dtype)[number]

    def _examples_seen(self, updates: tf.Tensor, stage: tf.Tensor) -> tf.Tensor:
        """Return the examples seen after `updates`; see `Plan.examples_seen`.

        `stage` is the row of `stages` for the next update.
        """
        after, size, epoch, first, in_epoch = tf.unstack(stage)
        epochs = epoch + (updates - after) // in_epoch
        updates_of_epoch = (updates - after) % in_epoch
        return epochs * self.examples + first + updates_of_epoch * size

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "stages": self.stages,
            "factors": self.factors,
            "examples": self.examples,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        # Drop the argument of a feature that was removed after version 0.1.0, unless a
        # saved model used the feature: the constructor then raises a TypeError.
        if "peak" in config and config["peak"] is None:
            config = {name: value for name, value in config.items() if name != "peak"}
        return super().from_config(config)
