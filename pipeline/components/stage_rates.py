"""The learning rate of a run whose effective batch changes: its clock, its factor by stage, and `seesaw`."""

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipeline.common.errors import ConfigError
from pipeline.components import scaling
from pipeline.config.plan import Plan
from pipeline.config.resolve import RunSpec
from pipeline.config.schema import Rule
from pipeline.config.stages import CLOCK, SCHEDULE, SEESAW, Asked

GRID = (
    2**14
)  # places at which a schedule is looked at; every update of a run of so many
CLOSE = 1e-6  # relative: rates in float32 that are nearer count as equal


def check(spec: RunSpec) -> None:
    """Refuse a `scaling` that would change more than the rate where a stage begins."""
    scale, asked, choices = (
        spec.config.scaling,
        spec.config.accumulation,
        ("none", "linear", "sqrt", "surge"),
    )
    if asked.batch_schedule is None or not asked.scale_rate or scale.rule == Rule.none:
        return
    rule = f"with {SCHEDULE}, which the rate alone can follow; or set accumulation.scale_rate=false"
    if scale.rule.name not in choices:
        raise ConfigError(
            "scaling.rule",
            f"must not change β or the weight decay {rule}",
            scale.rule.name,
            choices,
        )
    if scale.ema and spec.resolved["optimizer"].get("use_ema"):
        raise ConfigError("scaling.ema", f"must be false {rule}", True)


def in_examples(spec: RunSpec) -> bool:
    """Return whether the schedule counts updates of the first effective batch, by the examples seen."""
    return bool(spec.resolved["schedule"].get(CLOCK.partition(".")[2]) == "examples")


def horizon(spec: RunSpec, examples: int, plan: Plan | None = None) -> int:
    """Return the horizon in updates of the first effective batch, of so many `examples` in an epoch."""
    unit, length = spec.horizon
    total = (
        plan.examples_seen(length)
        if plan and unit == "updates"
        else length * (examples if unit == "epochs" else 1)
    )
    return -(-total // spec.batching.effective_batch_size)


def rates(
    spec: RunSpec, plan: Plan, schedule: Any, updates: int
) -> tuple[Any, list[str]]:
    """Return the schedule, over `updates` of its clock, by the stages relative to the first one; and that in words."""
    scale, asked, sizes = (
        spec.config.scaling,
        spec.config.accumulation,
        [stage.size for stage in plan.all_stages],
    )
    scaled, by_root = (
        [scaling.rate_factor(scale, size) for size in sizes],
        asked.batch_schedule == SEESAW,
    )
    factors = [factor / scaled[0] if asked.scale_rate else 1.0 for factor in scaled]
    factors = [math.sqrt(size / sizes[0]) for size in sizes] if by_root else factors
    by_examples = in_examples(spec) and callable(schedule)
    if not by_examples and set(factors) == {1.0}:
        return schedule, []
    stages = [[s.after, s.size, s.epoch, s.first, s.in_epoch] for s in plan.all_stages]
    peak = (
        [float(found[0]) for found in falling(schedule, updates)] if by_root else None
    )
    made = StageRates(
        schedule, stages, factors, plan.examples if by_examples else None, peak
    )
    told = (
        plan.changes[1:]
        if asked.scale_rate and scale.rule != Rule.none and not by_root
        else []
    )
    return made, [
        f"× {scaling.rate_factor(scale, size):g} after update {after}"
        for after, size in told
    ]


def falling(schedule: Any, updates: int) -> tuple[np.ndarray, np.ndarray]:
    """Return places of a schedule from its peak on, in `updates`, and the rates there; refuse one that rises again."""
    rate = lambda step: tf.cast(  # noqa: E731
        schedule(step) if callable(schedule) else schedule, tf.float64
    )
    signature = [tf.TensorSpec([None], tf.int64)]
    at = tf.function(
        lambda x: tf.map_fn(rate, x, fn_output_signature=tf.float64),
        signature,
        autograph=False,
    )
    grid = np.unique(np.linspace(0, updates, min(updates, GRID) + 1).astype(np.int64))
    top = max(1, int(np.argmax(at(grid))))
    near = np.arange(
        grid[top - 1], grid[min(top + 1, len(grid) - 1)] + 1
    )  # the peak lies between
    peak = near[np.argmax(at(near))]
    places = np.array([peak, *grid[grid > peak]])
    rates = at(places).numpy()
    if np.any(np.diff(rates) > CLOSE * rates[0]) or rates[-1] > rates[0] * (
        0.5 + CLOSE
    ):
        rule = (
            f"must fall to half of its peak, and rise no more, with {SCHEDULE}={SEESAW}"
        )
        raise ConfigError("schedule", rule, f"from {rates[0]:g} to {rates[-1]:g}")
    return places, rates


def seesaw(schedule: Any, updates: int, size: int, most: int) -> list[Asked]:
    """Return the stages by which `size` doubles, up to `most`, with each halving of the schedule's rate."""
    found, first, (places, rates) = [(0, size)], size, falling(schedule, updates)
    while 2 * size <= most:
        size *= 2
        at = int(places[np.argmax(rates <= rates[0] * first / size * (1 + CLOSE))])
        if at in (places[0], updates):  # it falls no further before the end
            break
        # The last stage begins up to one update of the stage before it late, and might have no update.
        if len(found) > 1 and (at - found[-1][0]) * first < found[-2][1]:
            found.pop()
        found.append((at, size))
    return [Asked("examples", at * first, size) for at, size in found]


@keras.saving.register_keras_serializable("pipeline")
class StageRates(scaling.DerivedSchedule):
    """schedule(clock) × the factor of the stage, which begins where its effective batch does.

    Each of `stages` is [updates before it, its effective batch size, epoch, examples of the epoch before it, updates in
    an epoch]. With `examples`, those in an epoch, the clock is examples seen ÷ the first size, else updates. `peak` is
    for `seesaw`: where the schedule has its peak, and the rate. From there on the rate is the peak ÷ the factor; with
    the last size it is the schedule × the factor, which begins alike.
    """

    def __init__(
        self,
        schedule: Any,
        stages: Any,
        factors: Any,
        examples: int | None = None,
        peak: Any = None,
    ):
        self.schedule, self.stages, self.factors, self.examples, self.peak = (
            schedule,
            stages,
            factors,
            examples,
            peak,
        )

    def __call__(self, step: Any) -> Any:
        done, stages = tf.cast(step, tf.int64), tf.constant(self.stages, tf.int64)
        number = tf.reduce_sum(tf.cast(done >= stages[:, 0], tf.int64)) - 1
        after, size, epoch, first, in_epoch = tf.unstack(stages[number])
        clock = step
        if self.examples is not None:  # as `Plan.examples_seen`
            seen = (
                (epoch + (done - after) // in_epoch) * self.examples
                + first
                + (done - after) % in_epoch * size
            )
            clock = tf.cast(seen, tf.float64) / self.stages[0][1]
        rate = self.rate(clock)
        factor = tf.constant(self.factors, rate.dtype)[number]
        if self.peak is None:
            return rate * factor
        held = (clock >= self.peak[0]) & (size < self.stages[-1][1])
        return tf.where(held, tf.cast(self.peak[1], rate.dtype) / factor, rate * factor)
