"""Config → Keras optimizer, its schedule counted in updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops
from omegaconf import DictConfig, ListConfig, OmegaConf

from pipeline.common.errors import ConfigError, refused
from pipeline.config.resolve import RunSpec
from pipeline.config.schema import Rule, ScalingConfig
from pipeline.config.stream_plan import ENDLESS
from pipeline.trust import instantiate

# The least number of updates of each length in a schedule; a warm-up also ends within the horizon.
_LEAST = {"warmup": 0, "warmup_steps": 0, "decay_steps": 1, "first_decay_steps": 1}


def build(spec: RunSpec, updates: int) -> keras.optimizers.Optimizer:
    """Return the optimizer of a run of so many `updates`; raise a `ConfigError` for a wrong target or argument."""
    node, schedule = spec.node("optimizer"), build_schedule(spec.node("schedule"), updates)
    schedule = scaled(schedule, spec.config.scaling, spec.batching.effective_batch_size, updates)
    with tf.device("CPU:0"):  # its counter: the schedule, on the host, would wait for a GPU's
        optimizer = instantiate.build(node, "optimizer", learning_rate=schedule)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError("optimizer._target_", "must name a keras.optimizers.Optimizer", node.get("_target_"))
    if optimizer.gradient_accumulation_steps:
        rule = "must be left out: the pipeline accumulates; set accumulation.factor"
        raise ConfigError("optimizer.gradient_accumulation_steps", rule, optimizer.gradient_accumulation_steps)
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if spec.config.hardware.precision.name != "mixed_float16" or scales:
        return optimizer
    return keras.optimizers.LossScaleOptimizer(optimizer)


def build_schedule(node: DictConfig, updates: int) -> Any:
    """Return the schedule of the `schedule` group, or a constant; `5%` stands for that share of the `updates`."""
    lengths = OmegaConf.create(_in_updates(OmegaConf.to_container(node, resolve=True), updates, "schedule"))
    assert isinstance(lengths, DictConfig)
    if isinstance(node.get("boundaries"), ListConfig) and list(lengths.boundaries) != sorted(lengths.boundaries):
        raise ConfigError("schedule.boundaries", "must rise", list(node.boundaries))
    schedule = instantiate.build(lengths, "schedule")
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule | float | int):
        raise ConfigError("schedule._target_", "must name a Keras schedule or give a number", node.get("_target_"))
    return schedule


def check(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Trace the apply of one gradient, which changes nothing: only then Keras checks most arguments."""
    named, variable = getattr(optimizer, "inner_optimizer", optimizer), variables[0]
    with refused("optimizer", "must be able to apply a gradient", type(named).__name__):
        computed = tf.function(lambda: ops.convert_to_tensor(named.learning_rate), autograph=False)
        operations = computed.get_concrete_function().graph.get_operations()
        # A rate with state, which computing it would move, is not looked at.
        rate = 0.0 if any("Assign" in each.type for each in operations) else float(computed())
        apply = tf.function(lambda gradient: optimizer.apply([gradient], [variable]), autograph=False)
        apply.get_concrete_function(tf.TensorSpec(variable.shape, variable.dtype))
    if not 0 <= rate < float("inf"):
        raise ConfigError("schedule", "must start at a learning rate that is finite and not negative", rate)


def scaled(schedule: Any, scaling: ScalingConfig, effective_batch_size: int, updates: int) -> Any:
    """Return `schedule` with its rates multiplied, for r = effective batch / `scaling.reference_batch_size`, by

    none    1
    linear  r, which keeps the step an example takes: Krizhevsky 2014 (arXiv:1404.5997, section 5);
            Goyal et al. 2017 (arXiv:1706.02677, section 2.1)
    sqrt    √r, which keeps the variance of an update: Krizhevsky 2014; Hoffer et al. 2017 (arXiv:1705.08741)
    """
    if scaling.rule == Rule.none:
        return schedule
    ratio = effective_batch_size / scaling.reference_batch_size
    factor = math.sqrt(ratio) if scaling.rule == Rule.sqrt else ratio
    warmup = _in_updates(scaling.warmup, updates, "scaling.warmup")
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
        raise ConfigError("scaling.warmup", "must be a number of updates, or a share of the horizon such as 5%", warmup)
    return Scaled(schedule, factor, warmup)


def constant(learning_rate: float) -> float:
    """Return the same learning rate for every update; callbacks may still set it."""
    return learning_rate


@keras.saving.register_keras_serializable("pipeline")
class Scaled(keras.optimizers.schedules.LearningRateSchedule):
    """schedule(u) · (1 + (factor − 1) · min(1, (u + 1)/warmup)): Goyal et al. 2017, section 2.2, gradual warm-up.

    It starts at the rate of the reference batch and rises to the scaled one. A factor below 1 has nothing to rise to:
    it applies from the first update on. `schedule` may be a number; a `warmup` of 0 updates scales from the first one.
    """

    def __init__(self, schedule: Any, factor: float, warmup: int):
        self.schedule, self.factor, self.warmup = schedule, factor, warmup

    def __call__(self, step: Any) -> Any:
        rate = ops.convert_to_tensor(self.schedule(step) if callable(self.schedule) else self.schedule)
        if not self.warmup or self.factor <= 1:
            return rate * self.factor
        share = ops.minimum(1.0, (ops.cast(step, rate.dtype) + 1) / self.warmup)
        return rate * (1 + (self.factor - 1) * ops.cast(share, rate.dtype))

    def get_config(self) -> dict[str, Any]:
        schedule = keras.saving.serialize_keras_object(self.schedule)
        return {"schedule": schedule, "factor": self.factor, "warmup": self.warmup}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Scaled:
        return cls(**{**config, "schedule": keras.saving.deserialize_keras_object(config["schedule"])})


@keras.saving.register_keras_serializable("pipeline")
class InverseSquareRoot(keras.optimizers.schedules.LearningRateSchedule):
    """rate · min(u/w, √(w/u)), u = completed updates + 1, w = warm-up (Vaswani et al. 2017, equation 3).

    Args:
        learning_rate: the peak, reached when the warm-up ends.
        warmup_steps: updates of linear warm-up, at least 1.
    """

    def __init__(self, learning_rate: float, warmup_steps: int):
        if warmup_steps < 1:
            raise ValueError(f"warmup_steps must be at least 1. Received: {warmup_steps}")
        self.learning_rate, self.warmup_steps = learning_rate, warmup_steps

    def __call__(self, step: Any) -> Any:
        rate = ops.convert_to_tensor(self.learning_rate)
        update = ops.cast(step, rate.dtype) + 1
        warmup = ops.cast(self.warmup_steps, rate.dtype)
        return rate * ops.minimum(update / warmup, ops.sqrt(warmup / update))

    def get_config(self) -> dict[str, Any]:
        return {"learning_rate": self.learning_rate, "warmup_steps": self.warmup_steps}


def _in_updates(value: Any, updates: int, key: str) -> Any:
    if isinstance(value, dict):
        return {name: _in_updates(entry, updates, f"{key}.{name}") for name, entry in value.items()}
    if isinstance(value, list):
        return [_in_updates(entry, updates, f"{key}[{index}]") for index, entry in enumerate(value)]
    if isinstance(value, str) and value.endswith("%"):
        try:
            share = float(value[:-1]) / 100
        except ValueError:
            raise ConfigError(key, "must be a share of the horizon such as 5%", value) from None
        if updates == ENDLESS:
            rule = "must be a number of updates where no epoch has a known length, or training.updates be set"
            raise ConfigError(key, rule, value)
        if not 0 <= share <= 1:
            raise ConfigError(key, "must be from 0% to 100%", value)
        return max(1, round(share * updates))
    name = key.rpartition(".")[2]
    if isinstance(value, int | float) and name in _LEAST:  # Keras would accept any
        warms_up = name.startswith("warmup")
        whole = not isinstance(value, bool) and value % 1 == 0
        if not whole or value < _LEAST[name] or (warms_up and value > updates):
            most = f" to the horizon's {updates}" if warms_up else " on"
            raise ConfigError(key, f"must be a whole number of updates from {_LEAST[name]}{most}", value)
    return value
