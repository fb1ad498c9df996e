"""Builds the Keras optimizer of a config, with its learning-rate schedule.

schedule group ─ lengths in updates ─► schedule ─ × stage ─ × scaling rule ─► rate
optimizer group, rate ─► optimizer ─ scaling rule ─► its other arguments
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops
from omegaconf import DictConfig, ListConfig, OmegaConf

from pipeline.common.errors import ConfigError, as_config_error
from pipeline.components import excluded_variables, scaling, stage_rates
from pipeline.config.plan import ENDLESS, Plan
from pipeline.config.resolve import RunSpec
from pipeline.config.schema import Rule
from pipeline.config.sizes import REST
from pipeline.trust import instantiate

# The minimum of each length in a schedule, in updates. A warm-up must also be no longer
# than the horizon.
_LEAST = {
    "warmup": 0,
    "warmup_steps": 0,
    "decay_steps": 1,
    "first_decay_steps": 1,
    "total_steps": 1,
}
_DECAY = "decay_steps"
# Parameters of schedules that are learning rates.
_RATES = {
    "end_learning_rate",
    "initial_learning_rate",
    "learning_rate",
    "values",
    "warmup_target",
}


def build(
    spec: RunSpec, updates: int, plan: Plan | None = None
) -> tuple[keras.optimizers.Optimizer, str]:
    """Return the optimizer of a run, and one line about the changes by `scaling`.

    The line is empty if `scaling` changes nothing.

    Args:
        spec: the spec of the run.
        updates: number of updates in the whole run.
        plan: the plan of the run, whose stages the learning rate may follow, or None if
            a user's loader makes the batches.

    Raises:
        ConfigError: a target or an argument is wrong.
    """
    scale = spec.config.scaling
    batch = spec.batching.effective_batch_size
    scaling.check(scale)
    stage_rates.check(spec)

    # With `sde`, the length of a warm-up is given in updates of the reference batch.
    reference = 1.0
    if scale.rule == Rule.sde:
        reference = scale.reference_batch_size / batch
    horizon = updates
    if plan is not None and stage_rates.counts_examples(spec):
        horizon = stage_rates.horizon(spec, plan)
    schedule = build_schedule(spec.node("schedule"), horizon, reference)
    stage_changes: list[str] = []
    if plan is not None:
        staged = stage_rates.follow_stages(spec, plan, schedule)
        schedule = staged.schedule
        stage_changes = staged.changes
    factor = scaling.rate_factor(scale, batch)
    if scale.rule != Rule.none:
        schedule = _scaled(schedule, spec, factor, updates, reference)

    optimizer = _instantiated(spec.node("optimizer"), schedule)
    changes = scaling.rescale(_inner(optimizer), scale, batch)
    changes = [*stage_changes, *changes]
    if factor != 1 or stage_changes:
        changes = [f"learning rate × {factor:g}", *changes]
    line = ""
    if changes:
        line = f"scaling.rule={scale.rule.name}: {', '.join(changes)}"

    has_loss_scale = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if spec.config.hardware.precision.name == "mixed_float16" and not has_loss_scale:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer, line


def build_variables(
    optimizer: keras.optimizers.Optimizer,
    spec: RunSpec,
    variables: Sequence[keras.Variable],
) -> None:
    """Create the optimizer's variables, without weight decay where the config says so.

    Args:
        optimizer: the optimizer, not built.
        spec: the spec of the run.
        variables: the trainable variables of the model.

    Raises:
        ConfigError: `optimizer.exclude_from_decay` does not fit the optimizer or the
            model, or Muon's `exclude_layers` does not fit the model.
    """
    patterns = spec.resolved["optimizer"].get(excluded_variables.FROM_DECAY, ())
    inner = _inner(optimizer)
    excluded_variables.exclude_from_decay(inner, patterns, variables)
    excluded_variables.check_layers_without_muon(inner, variables)
    optimizer.build(variables)


def build_schedule(node: DictConfig, updates: int, reference: float = 1.0) -> Any:
    """Return the schedule of the `schedule` group: a Keras schedule, or a constant.

    Args:
        node: the `schedule` group of the config.
        updates: the horizon in updates; a length such as `5%` is a share of it, and a
            decay of `rest` has all of it after the warm-up.
        reference: factor by which the length of a warm-up is multiplied.

    Raises:
        ConfigError: a length or the target is invalid, or the boundaries do not rise.
    """
    container = OmegaConf.to_container(node, resolve=True)
    in_updates = _in_updates(container, updates, "schedule", reference)
    if in_updates.get(_DECAY) == REST:
        in_updates[_DECAY] = _rest(in_updates.get("warmup_steps"), updates)
    lengths = OmegaConf.create(in_updates)
    assert isinstance(lengths, DictConfig)
    lengths.pop("clock", None)
    if isinstance(node.get("boundaries"), ListConfig):
        boundaries = list(lengths.boundaries)
        if boundaries != sorted(boundaries):
            raise ConfigError("schedule.boundaries", "must rise", list(node.boundaries))
    for name in _RATES & lengths.keys():
        lengths[name] = _as_float(lengths[name])
    schedule = instantiate.build(lengths, "schedule")
    kinds = keras.optimizers.schedules.LearningRateSchedule | float | int
    if not isinstance(schedule, kinds):
        rule = "must name a Keras schedule or give a number"
        raise ConfigError("schedule._target_", rule, node.get("_target_"))
    return schedule


def check(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    """Check that the optimizer can apply a gradient, by tracing one application.

    Keras checks most arguments of an optimizer only at that time. No variable is
    changed.

    Args:
        optimizer: the optimizer, built.
        variables: the trainable variables. A gradient of the first one is applied.

    Raises:
        ConfigError: the optimizer cannot apply a gradient, or the first learning rate
            is negative or not finite.
    """
    inner = _inner(optimizer)
    variable = variables[0]
    with as_config_error(
        "optimizer", "must be able to apply a gradient", type(inner).__name__
    ):
        rate = _first_rate(inner)
        apply = tf.function(
            lambda gradient: optimizer.apply([gradient], [variable]), autograph=False
        )
        apply.get_concrete_function(tf.TensorSpec(variable.shape, variable.dtype))
    if not 0 <= rate < float("inf"):
        rule = "must start at a learning rate that is finite and not negative"
        raise ConfigError("schedule", rule, rate)


def constant(learning_rate: float) -> float:
    """Return a constant learning rate, which callbacks may change."""
    return learning_rate


@keras.saving.register_keras_serializable("pipeline")
class InverseSquareRoot(keras.optimizers.schedules.LearningRateSchedule):
    """rate · min(u/w, √(w/u)) for u = completed updates + 1 and a warm-up of w updates.

    Vaswani et al. 2017 (arXiv:1706.03762), equation 3.

    Args:
        learning_rate: the peak, reached when the warm-up ends.
        warmup_steps: updates of linear warm-up, at least 1.

    Raises:
        ValueError: `warmup_steps` is below 1.
    """

    def __init__(self, learning_rate: float, warmup_steps: int):
        if warmup_steps < 1:
            raise ValueError(
                f"warmup_steps must be at least 1. Received: {warmup_steps}"
            )
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps

    def __call__(self, step: Any) -> Any:
        rate = ops.convert_to_tensor(self.learning_rate)
        update = ops.cast(step, rate.dtype) + 1
        warmup = ops.cast(self.warmup_steps, rate.dtype)
        return rate * ops.minimum(update / warmup, ops.sqrt(warmup / update))

    def get_config(self) -> dict[str, Any]:
        return {"learning_rate": self.learning_rate, "warmup_steps": self.warmup_steps}


@keras.saving.register_keras_serializable("pipeline")
class WarmupStableDecay(keras.optimizers.schedules.LearningRateSchedule):
    """rate · max(0, min(1, (u + 1)/w, (t − u)/d)) for u completed updates.

    The rate rises over w updates, is stable, and falls over the last d of t updates. The
    update before t is the last one that changes anything, with 1/d of the stable rate.

    Warm-up, stable, decay (WSD): Hu et al. 2024 (arXiv:2404.06395, section 4). A linear
    decay over a fifth of the updates: Hägele et al. 2024 (arXiv:2405.18392, section 3).

    Args:
        learning_rate: the rate between the warm-up and the decay.
        warmup_steps: w, in updates; 0 if there is no warm-up.
        decay_steps: d, in updates, at least 1.
        total_steps: t, the number of updates after which the rate is zero, at least 1.

    Raises:
        ValueError: a number of updates is out of its range.
    """

    def __init__(
        self,
        learning_rate: float,
        warmup_steps: int,
        decay_steps: int,
        total_steps: int,
    ):
        if warmup_steps < 0:
            rule = "warmup_steps must be at least 0"
            raise ValueError(f"{rule}. Received: {warmup_steps}")
        if decay_steps < 1 or total_steps < 1:
            rule = "decay_steps and total_steps must be at least 1"
            raise ValueError(f"{rule}. Received: {decay_steps} and {total_steps}")
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.decay_steps = decay_steps
        self.total_steps = total_steps

    def __call__(self, step: Any) -> Any:
        rate = ops.convert_to_tensor(self.learning_rate, keras.config.floatx())
        done = ops.cast(step, rate.dtype)
        warmup = ops.cast(max(1, self.warmup_steps), rate.dtype)
        decay = ops.cast(self.decay_steps, rate.dtype)
        total = ops.cast(self.total_steps, rate.dtype)
        share = ops.minimum((done + 1) / warmup, (total - done) / decay)
        return rate * ops.clip(share, 0, 1)

    def get_config(self) -> dict[str, Any]:
        return {
            "learning_rate": self.learning_rate,
            "warmup_steps": self.warmup_steps,
            "decay_steps": self.decay_steps,
            "total_steps": self.total_steps,
        }


def _inner(optimizer: Any) -> Any:
    """Return the optimizer inside a `LossScaleOptimizer`, or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _scaled(
    schedule: Any, spec: RunSpec, factor: float, updates: int, reference: float
) -> Any:
    """Return the schedule multiplied by `factor`, which `scaling.warmup` phases in.

    Args:
        schedule: a Keras schedule, or a number.
        spec: the spec of the run.
        factor: the factor of the learning rate; see `scaling.rate_factor`.
        updates: number of updates in the run.
        reference: factor by which the length of a warm-up is multiplied.

    Raises:
        ConfigError: `scaling.warmup` is not a length.
    """
    scale = spec.config.scaling
    warmup = _in_updates(scale.warmup, updates, "scaling.warmup", reference)
    if not isinstance(warmup, int):
        rule = "must be a number of updates, or a share of the horizon such as 5%"
        raise ConfigError("scaling.warmup", rule, warmup)
    # Return a constant rate as it is, so that callbacks can still set it.
    if factor == 1 and scale.rule not in (Rule.linear, Rule.sqrt):
        return schedule
    return scaling.Scaled(schedule, factor, warmup)


def _instantiated(node: DictConfig, rate: Any) -> keras.optimizers.Optimizer:
    """Return the optimizer of the `optimizer` group, with the learning rate `rate`.

    Raises:
        ConfigError: the target is not an optimizer, or would accumulate gradients.
    """
    if callable(rate) and keras.config.floatx() == "float64":
        rate = scaling.InFloatx(rate)
    arguments = node.copy()
    arguments.pop(excluded_variables.FROM_DECAY, None)
    # Place the update counter on the CPU: the schedule reads the counter on the host,
    # and would otherwise wait for the GPU.
    with tf.device("CPU:0"):
        optimizer = instantiate.build(arguments, "optimizer", learning_rate=rate)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        rule = "must name a keras.optimizers.Optimizer"
        raise ConfigError("optimizer._target_", rule, node.get("_target_"))
    steps = optimizer.gradient_accumulation_steps
    if steps:
        rule = "must be left out: the pipeline accumulates; set accumulation.factor"
        raise ConfigError("optimizer.gradient_accumulation_steps", rule, steps)
    return optimizer


def _first_rate(optimizer: Any) -> float:
    """Return the learning rate of the first update.

    Return 0 for a schedule that assigns variables, as computing its rate would change
    them.
    """
    computed = tf.function(
        lambda: ops.convert_to_tensor(optimizer.learning_rate), autograph=False
    )
    operations = computed.get_concrete_function().graph.get_operations()
    if any("Assign" in operation.type for operation in operations):
        return 0.0
    return float(computed())


def _in_updates(value: Any, updates: int, key: str, reference: float = 1.0) -> Any:
    """Return a config value with each length in it converted to updates.

    A length is a string such as `5%`, a share of the horizon, or a number whose key is
    in `_LEAST`. Other values are not changed.

    Args:
        value: a value, or a dict or list of values.
        updates: the horizon in updates.
        key: the config key of the value.
        reference: factor by which the length of a warm-up is multiplied.
    """
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
        return _share_in_updates(value, updates, key)
    name = key.rpartition(".")[2]
    if isinstance(value, int | float) and name in _LEAST:
        return _checked_length(value, updates, key, reference)
    return value


def _as_float(rate: Any) -> Any:
    """Return a learning rate, or a list of rates, with integers as floats.

    Keras rejects integers as learning rates.
    """
    if isinstance(rate, ListConfig):
        return [_as_float(value) for value in rate]
    if isinstance(rate, int) and not isinstance(rate, bool):
        return float(rate)
    return rate


def _share_in_updates(text: str, updates: int, key: str) -> int:
    """Return the number of updates, at least 1, in a share of the horizon like `5%`.

    Raises:
        ConfigError: the text is not a share from 0% to 100%, or the horizon is unknown.
    """
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        rule = "must be a share of the horizon such as 5%"
        raise ConfigError(key, rule, text) from None
    _check_horizon(updates, key, text)
    if not 0 <= share <= 1:
        raise ConfigError(key, "must be from 0% to 100%", text)
    return max(1, round(share * updates))


def _rest(warmup: Any, updates: int) -> int:
    """Return the number of updates, at least 1, that a warm-up leaves of the horizon.

    Raises:
        ConfigError: the horizon is unknown.
    """
    _check_horizon(updates, f"schedule.{_DECAY}", REST)
    if not isinstance(warmup, int | float):  # there is none, or Keras rejects it
        warmup = 0
    return max(1, updates - int(warmup))


def _check_horizon(updates: int, key: str, text: str) -> None:
    """Raise a `ConfigError` if the horizon, on which a length depends, is unknown."""
    if updates == ENDLESS:
        rule = (
            "must be a number of updates if the length of an epoch is not known, or "
            "training.updates must be set"
        )
        raise ConfigError(key, rule, text)


def _checked_length(value: Any, updates: int, key: str, reference: float) -> Any:
    """Check a length in updates; return it, with a warm-up multiplied by `reference`.

    The check is needed because Keras does not check lengths.
    """
    name = key.rpartition(".")[2]
    warms_up = name.startswith("warmup")
    is_integer = not isinstance(value, bool) and value % 1 == 0
    if is_integer and warms_up and value > 0 and reference != 1:
        value = max(1, round(value * reference))
    if not is_integer or value < _LEAST[name] or (warms_up and value > updates):
        most = f" to the horizon's {updates}" if warms_up else " on"
        rule = f"must be a whole number of updates from {_LEAST[name]}{most}"
        raise ConfigError(key, rule, value)
    return value
