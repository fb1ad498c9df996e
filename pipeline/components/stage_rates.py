"""The learning rate of a run whose effective batch changes: its clock, its factor by stage, and `seesaw`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from pipeline.common.errors import ConfigError
from pipeline.components import scaling
from pipeline.config.resolve import RunSpec
from pipeline.config.schema import Rule
from pipeline.config.sizes import Plan
from pipeline.config.stages import CLOCK, SCHEDULE, SEESAW, Asked

_FOLLOW = (Rule.none, Rule.linear, Rule.sqrt, Rule.surge)  # rules that change the rate alone
GRID = 1024  # places at which a schedule is looked at; between two of them it is taken to rise or to fall
CLOSE = 1e-6  # relative: rates in float32 that are nearer count as equal


def check(spec: RunSpec) -> None:
    """Refuse a `scaling` that would change more than the rate where a stage begins."""
    scale, accumulation = spec.config.scaling, spec.config.accumulation
    if accumulation.schedule is None or not accumulation.scale_rate:
        return
    fixed = f"with {SCHEDULE}, unless accumulation.scale_rate=false: an optimizer has one"
    if scale.rule not in _FOLLOW:
        choices = [rule.name for rule in _FOLLOW]
        raise ConfigError("scaling.rule", f"must change the rate alone {fixed} β and weight decay", scale.rule, choices)
    if scale.ema and scale.rule != Rule.none and spec.resolved["optimizer"].get("use_ema"):
        raise ConfigError("scaling.ema", f"must be false {fixed} momentum", True)


def rates(spec: RunSpec, plan: Plan, schedule: Any, horizon: int) -> Any:
    """Return the schedule as a run with this plan uses it, its factor for the first stage left out."""
    scale, first = spec.config.scaling, plan.all_stages[0].size
    seesaw = spec.config.accumulation.schedule == SEESAW
    by_root = [math.sqrt(stage.size / first) for stage in plan.all_stages]
    factors = by_root if seesaw else [1.0] * len(by_root)
    if not seesaw and spec.config.accumulation.scale_rate:
        at = scaling.rate_factor(scale, first)
        factors = [scaling.rate_factor(scale, stage.size) / at for stage in plan.all_stages]
    in_examples = in_reference_updates(spec) and isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule)
    if not in_examples and set(factors) == {1.0}:
        return schedule
    peak = (*Falling(schedule, horizon).peak,) if seesaw else None
    begins = [[s.after, s.size, s.begin.epoch, s.begin.first] for s in plan.all_stages]
    return StageRates(schedule, begins, factors, plan.examples if in_examples else None, peak)


def said(spec: RunSpec, plan: Plan) -> list[str]:
    """Return what the stages change of the rate, in words, for each that does."""
    scale, later = spec.config.scaling, [stage for stage in plan.stages[1:] if stage.after < plan.updates]
    seesaw = spec.config.accumulation.schedule == SEESAW
    if seesaw or scale.rule == Rule.none or not spec.config.accumulation.scale_rate:
        return []
    return [f"× {scaling.rate_factor(scale, stage.size):g} after update {stage.after}" for stage in later]


def reference_horizon(spec: RunSpec, examples: int, plan: Plan | None = None) -> int:
    """Return the horizon in updates of the first effective batch, of so many `examples` in an epoch."""
    unit, length = spec.horizon
    in_unit = {"epochs": examples, "examples": 1}
    total = length * in_unit[unit] if plan is None or unit in in_unit else plan.examples_seen(length)
    return -(-total // spec.batching.effective_batch_size)


def in_reference_updates(spec: RunSpec) -> bool:
    """Return whether the schedule counts updates of the first effective batch, by the examples seen."""
    group, _, key = CLOCK.partition(".")
    return bool(spec.resolved[group].get(key) == "examples")


class Falling:
    """A learning-rate schedule that has its peak early and then falls, over `horizon` updates.

    Raises:
        ConfigError: it does not fall to half of its peak, or rises again.
    """

    def __init__(self, schedule: Any, horizon: int):
        self._horizon, refused = horizon, f"with {SCHEDULE}={SEESAW}"
        if not callable(schedule):
            raise ConfigError("schedule", f"must fall to half of its peak {refused}", schedule)
        self._rates = tf.function(
            lambda at: tf.map_fn(lambda x: tf.cast(schedule(x), tf.float64), at, fn_output_signature=tf.float64),
            input_signature=[tf.TensorSpec([None], tf.int64)],
            autograph=False,
        )
        grid = np.unique(np.linspace(0, horizon, GRID + 1).astype(np.int64))
        top = int(np.argmax(self._at(grid)))
        near = np.arange(grid[max(0, top - 1)], grid[min(len(grid) - 1, top + 1)] + 1)  # the peak lies between
        found = self._at(near)
        self.peak = int(near[np.argmax(found)]), float(found.max())  # where it is, and the rate
        after = self._at(np.array([self.peak[0], *grid[grid > self.peak[0]]]))
        if np.any(np.diff(after) > CLOSE * self.peak[1]):
            raise ConfigError("schedule", f"must not rise again after its peak {refused}", self.peak[1])
        if after[-1] > self.peak[1] / 2 * (1 + CLOSE):
            raise ConfigError("schedule", f"must fall to half of its peak {refused}", f"{self.peak[1]:g}")

    def stages(self, size: int, most: int) -> list[Asked]:
        """Return the stages by which `size` doubles, up to `most`, with each halving of the rate."""
        found = [(0, size)]
        while 2 * size <= most:
            size *= 2
            low, high = self.peak[0], self._horizon  # the rate is above the wanted one at `low`
            wanted = self.peak[1] * found[0][1] / size * (1 + CLOSE)
            if self._at(np.array([high]))[0] > wanted:
                break
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._at(np.array([middle]))[0] > wanted else (low, middle)
            # The last stage begins up to one update of the stage before it late, and might have no update.
            if len(found) > 1 and (high - found[-1][0]) * found[0][1] < found[-2][1]:
                found.pop()
            if high < self._horizon:
                found.append((high, size))
        return [Asked("examples", at * found[0][1], batch) for at, batch in found]

    def _at(self, steps: np.ndarray) -> np.ndarray:
        rates: np.ndarray = self._rates(steps.astype(np.int64)).numpy()
        return rates


@keras.saving.register_keras_serializable("pipeline")
class StageRates(keras.optimizers.schedules.LearningRateSchedule):
    """schedule(clock) × the factor of the stage, which begins where its effective batch does.

    Args:
        schedule: a schedule, or a number.
        begins: of each stage [updates before it, effective batch size, epoch, examples of the epoch before it].
        factors: of each stage.
        examples: in an epoch, where the clock is examples seen ÷ the first effective batch size; None: updates.
        peak: of `seesaw`: where the schedule has its peak, and the rate. From there on the rate is the peak ÷ the
            factor of the stage; in the last stage it is the schedule × the factor, which begins alike.
    """

    def __init__(
        self,
        schedule: Any,
        begins: Sequence[Sequence[int]],
        factors: Sequence[float],
        examples: int | None = None,
        peak: Sequence[float] | None = None,
    ):
        self.schedule, self.begins, self.factors = schedule, [list(begin) for begin in begins], list(factors)
        self.examples, self.peak = examples, peak

    def __call__(self, step: Any) -> Any:
        done = ops.cast(step, "int64")
        stage = ops.sum(ops.cast(done >= self._constant([begin[0] for begin in self.begins]), "int64")) - 1
        clock = step if self.examples is None else self._updates_of_the_first_size(done, stage)
        rate = ops.convert_to_tensor(self.schedule(clock) if callable(self.schedule) else self.schedule)
        factor = ops.take(ops.convert_to_tensor(self.factors, rate.dtype), stage)
        if self.peak is None:
            return rate * factor
        held = ops.logical_and(clock >= self.peak[0], stage < len(self.begins) - 1)
        return ops.where(held, ops.cast(self.peak[1], rate.dtype) / factor, rate * factor)

    def _updates_of_the_first_size(self, done: Any, stage: Any) -> Any:
        after, size, epoch, first = (ops.take(self._constant(part), stage) for part in zip(*self.begins, strict=True))
        here, examples = done - after, self._constant(self.examples)
        head, per_epoch = -(-(examples - first) // size), -(-examples // size)
        rest = here - head  # updates since the epoch in which the stage begins
        later = (epoch + 1 + rest // per_epoch) * examples + rest % per_epoch * size
        seen = ops.where(rest < 0, epoch * examples + first + here * size, later)
        return ops.cast(seen, "float64") / self.begins[0][1]

    def _constant(self, values: Any) -> Any:
        return ops.convert_to_tensor(values, "int64")

    def get_config(self) -> dict[str, Any]:
        schedule = keras.saving.serialize_keras_object(self.schedule)
        rest = {"begins": self.begins, "factors": self.factors, "examples": self.examples, "peak": self.peak}
        return {"schedule": schedule, **rest}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> StageRates:
        return cls(**{**config, "schedule": keras.saving.deserialize_keras_object(config["schedule"])})
