"""Config → Keras optimizer, its schedule counted in updates."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops
from omegaconf import DictConfig, ListConfig, OmegaConf

from pipeline.common.errors import ConfigError, refused
from pipeline.components import adascale, scaling, stage_rates
from pipeline.config.plan import ENDLESS, Plan
from pipeline.config.resolve import RunSpec
from pipeline.config.schema import Rule
from pipeline.config.stages import SEESAW, SEESAW_MAX, Asked, asked
from pipeline.trust import instantiate

# The least number of updates of each length in a schedule; a warm-up also ends within the horizon.
_LEAST = {"warmup": 0, "warmup_steps": 0, "decay_steps": 1, "first_decay_steps": 1}


def build(
    spec: RunSpec, updates: int, plan: Plan | None = None
) -> tuple[keras.optimizers.Optimizer, str]:
    """Return the optimizer of a run of so many `updates`, and a line that says what `scaling` changed, if anything.

    The learning rate follows the stages of a `plan`. A wrong target or argument is a `ConfigError`.
    """
    scale, batch = spec.config.scaling, spec.batching.effective_batch_size
    scaling.check(scale)
    stage_rates.check(spec)
    # An update of the reference batch is this share of one, as a warm-up counts them.
    reference = scale.reference_batch_size / batch if scale.rule == Rule.sde else 1.0
    horizon, later = updates, list[str]()
    if plan is not None and stage_rates.in_examples(spec):
        horizon = stage_rates.horizon(spec, plan.examples, plan)
    node, schedule = (
        spec.node("optimizer"),
        build_schedule(spec.node("schedule"), horizon, reference),
    )
    if plan is not None:
        schedule, later = stage_rates.rates(spec, plan, schedule, horizon)
    factor = scaling.rate_factor(scale, batch)
    if scale.rule != Rule.none:
        warmup = _in_updates(scale.warmup, updates, "scaling.warmup", reference)
        if not isinstance(warmup, int):
            rule = "must be a number of updates, or a share of the horizon such as 5%"
            raise ConfigError("scaling.warmup", rule, warmup)
        if factor != 1 or scale.rule in (
            Rule.linear,
            Rule.sqrt,
        ):  # else callbacks may still set the rate
            schedule = scaling.Scaled(schedule, factor, warmup)
    if scale.rule == Rule.adascale:
        adascale.check(spec)
        schedule = adascale.Gain(schedule, batch, scale.reference_batch_size)
    with tf.device(
        "CPU:0"
    ):  # its counter: the schedule, on the host, would wait for a GPU's
        optimizer = instantiate.build(node, "optimizer", learning_rate=schedule)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            "optimizer._target_",
            "must name a keras.optimizers.Optimizer",
            node.get("_target_"),
        )
    if optimizer.gradient_accumulation_steps:
        rule = "must be left out: the pipeline accumulates; set accumulation.factor"
        raise ConfigError(
            "optimizer.gradient_accumulation_steps",
            rule,
            optimizer.gradient_accumulation_steps,
        )
    named = getattr(optimizer, "inner_optimizer", optimizer)
    changed = scaling.rescale(named, scale, batch)
    if isinstance(schedule, adascale.Gain):
        changed = [schedule.attach(named), *changed]
    changes = [
        *([f"learning rate × {factor:g}"] if factor != 1 or later else []),
        *later,
        *changed,
    ]
    said = f"scaling.rule={scale.rule.name}: {', '.join(changes)}" if changes else ""
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if spec.config.hardware.precision.name != "mixed_float16" or scales:
        return optimizer, said
    return keras.optimizers.LossScaleOptimizer(optimizer), said


def stages(spec: RunSpec, examples: int) -> list[Asked]:
    """Return the stages of the effective batch; those of `seesaw` follow from the schedule and the `examples`."""
    schedule = spec.config.accumulation.batch_schedule
    if schedule != SEESAW:
        return asked(schedule)
    most, horizon = (
        spec.largest.effective_batch_size,
        stage_rates.horizon(spec, examples),
    )
    if most > examples:
        raise ConfigError(
            SEESAW_MAX,
            f"must be at most the {examples} examples of the training split",
            most,
        )
    schedule = build_schedule(spec.node("schedule"), horizon)
    return stage_rates.seesaw(
        schedule, horizon, spec.batching.effective_batch_size, most
    )


def build_schedule(node: DictConfig, updates: int, reference: float = 1.0) -> Any:
    """Return the schedule of the `schedule` group, or a constant; `5%` stands for that share of the `updates`.

    A warm-up by a number counts updates of which each is `reference` of one.
    """
    lengths = OmegaConf.create(
        _in_updates(
            OmegaConf.to_container(node, resolve=True), updates, "schedule", reference
        )
    )
    assert isinstance(lengths, DictConfig)
    lengths.pop("clock", None)
    if isinstance(node.get("boundaries"), ListConfig) and list(
        lengths.boundaries
    ) != sorted(lengths.boundaries):
        raise ConfigError("schedule.boundaries", "must rise", list(node.boundaries))
    schedule = instantiate.build(lengths, "schedule")
    if not isinstance(
        schedule, keras.optimizers.schedules.LearningRateSchedule | float | int
    ):
        raise ConfigError(
            "schedule._target_",
            "must name a Keras schedule or give a number",
            node.get("_target_"),
        )
    return schedule


def check(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    """Trace the apply of one gradient, which changes nothing: only then Keras checks most arguments."""
    named, variable = getattr(optimizer, "inner_optimizer", optimizer), variables[0]
    with refused("optimizer", "must be able to apply a gradient", type(named).__name__):
        computed = tf.function(
            lambda: ops.convert_to_tensor(named.learning_rate), autograph=False
        )
        operations = computed.get_concrete_function().graph.get_operations()
        # A rate with state, which computing it would move, is not looked at.
        rate = (
            0.0
            if any("Assign" in each.type for each in operations)
            else float(computed())
        )
        apply = tf.function(
            lambda gradient: optimizer.apply([gradient], [variable]), autograph=False
        )
        apply.get_concrete_function(tf.TensorSpec(variable.shape, variable.dtype))
    if not 0 <= rate < float("inf"):
        raise ConfigError(
            "schedule",
            "must start at a learning rate that is finite and not negative",
            rate,
        )


def constant(learning_rate: float) -> float:
    """Return the same learning rate for every update; callbacks may still set it."""
    return learning_rate


@keras.saving.register_keras_serializable("pipeline")
class InverseSquareRoot(keras.optimizers.schedules.LearningRateSchedule):
    """rate · min(u/w, √(w/u)), u = completed updates + 1, w = warm-up (Vaswani et al. 2017, equation 3).

    Args:
        learning_rate: the peak, reached when the warm-up ends.
        warmup_steps: updates of linear warm-up, at least 1.
    """

    def __init__(self, learning_rate: float, warmup_steps: int):
        if warmup_steps < 1:
            raise ValueError(
                f"warmup_steps must be at least 1. Received: {warmup_steps}"
            )
        self.learning_rate, self.warmup_steps = learning_rate, warmup_steps

    def __call__(self, step: Any) -> Any:
        rate = ops.convert_to_tensor(self.learning_rate)
        update = ops.cast(step, rate.dtype) + 1
        warmup = ops.cast(self.warmup_steps, rate.dtype)
        return rate * ops.minimum(update / warmup, ops.sqrt(warmup / update))

    def get_config(self) -> dict[str, Any]:
        return {"learning_rate": self.learning_rate, "warmup_steps": self.warmup_steps}


def _in_updates(value: Any, updates: int, key: str, reference: float = 1.0) -> Any:
    if isinstance(value, dict):
        return {
            name: _in_updates(entry, updates, f"{key}.{name}", reference)
            for name, entry in value.items()
        }
    if isinstance(value, list):
        return [
            _in_updates(entry, updates, f"{key}[{index}]", reference)
            for index, entry in enumerate(value)
        ]
    if isinstance(value, str) and value.endswith("%"):
        try:
            share = float(value[:-1]) / 100
        except ValueError:
            raise ConfigError(
                key, "must be a share of the horizon such as 5%", value
            ) from None
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
        if whole and warms_up and value > 0 and reference != 1:
            value = max(1, round(value * reference))
        if not whole or value < _LEAST[name] or (warms_up and value > updates):
            most = f" to the horizon's {updates}" if warms_up else " on"
            raise ConfigError(
                key,
                f"must be a whole number of updates from {_LEAST[name]}{most}",
                value,
            )
    return value
