"""Scaling rules, which adapt the arguments of an optimizer to the effective batch size.

κ is the effective batch size divided by `scaling.reference_batch_size`.
"""

import math
from typing import Any, Self

import keras
from keras import ops

from pipeline.common.errors import ConfigError
from pipeline.config.schema import Rule, ScalingConfig

# The optimizers that a rule was derived for. Rules not listed here apply to all
# optimizers, except that `timescale` requires weight decay.
_OPTIMIZERS = {
    Rule.sde: ("Adam", "AdamW", "RMSprop"),
    Rule.half_life: ("Adam", "AdamW"),
    Rule.surge: ("Adam", "AdamW", "Nadam", "Lion"),
}


def rate_factor(scaling: ScalingConfig, effective_batch_size: int) -> float:
    """Return the factor by which the rule multiplies every learning rate.

    κ is the effective batch size B divided by B_ref, `scaling.reference_batch_size`.

    - `none`: 1.
    - `linear`: κ, which keeps the step per example: Krizhevsky 2014
      (arXiv:1404.5997, section 5); Goyal et al. 2017 (arXiv:1706.02677, section 2.1).
    - `sqrt`: √κ, which keeps the variance of an update: Krizhevsky 2014; Hoffer et al.
      2017 (arXiv:1705.08741).
    - `sde`: √κ, besides the changes by `rescale`: Malladi et al. 2022
      (arXiv:2205.10287).
    - `half_life`: 1, or √κ if `scaling.rate` is sqrt: Marek et al. 2025
      (arXiv:2507.07101).
    - `timescale`: 1, or √κ if `scaling.rate` is sqrt: Bergsma et al. 2025
      (arXiv:2505.13738).
    - `surge`: f(B) / f(B_ref) with f(B) = 2 / (√(B_n/B) + √(B/B_n)), which has its peak
      at B_n, `scaling.peak_batch_size`, and falls beyond it: Li et al. 2024
      (arXiv:2405.14578, equation 13). B_n is not the gradient noise scale.
    """
    reference = scaling.reference_batch_size
    kappa = effective_batch_size / reference
    if scaling.rule == Rule.linear:
        return kappa
    if scaling.rule == Rule.surge:
        peak = scaling.peak_batch_size or 1  # `check` requires it
        return _surge(reference / peak) / _surge(effective_batch_size / peak)
    if scaling.rule in (Rule.sqrt, Rule.sde) or scaling.rate == "sqrt":
        return math.sqrt(kappa)
    return 1.0


def check(scaling: ScalingConfig) -> None:
    """Raise a ConfigError if a key of the rule is missing, or an unused one is set."""
    rule = scaling.rule.name
    peak = scaling.peak_batch_size
    if rule == "surge" and peak is None:
        message = "must be a number of examples for scaling.rule=surge"
        raise ConfigError("scaling.peak_batch_size", message, peak)
    if rule != "surge" and peak is not None:
        message = f"is used only by scaling.rule=surge, not by {rule}: set it to null"
        raise ConfigError("scaling.peak_batch_size", message, peak)
    if scaling.rate is not None and rule not in ("half_life", "timescale"):
        message = (
            f"is used only by scaling.rule=half_life and timescale, not by {rule}: set "
            "it to null"
        )
        raise ConfigError("scaling.rate", message, scaling.rate)


def rescale(
    optimizer: Any, scaling: ScalingConfig, effective_batch_size: int
) -> list[str]:
    """Set the optimizer arguments, other than the learning rate, that the rule changes.

    κ is the effective batch size divided by `scaling.reference_batch_size`.

    - `sde`: β → 1 − κ(1 − β), ε → ε/√κ (RMSprop: ε/κ, since Keras adds ε under the
      root), and decoupled weight decay × √κ: Malladi et al. 2022 (arXiv:2205.10287).
    - `half_life`: β₂ → β₂^κ. This keeps the half-life of the second moment, counted in
      examples: Marek et al. 2025 (arXiv:2507.07101).
    - `timescale`: weight decay λ × κ, or × √κ if the learning rate η is × √κ. This
      keeps B/(ηλD) for batches of B out of D examples: Wang and Aitchison 2024
      (arXiv:2405.13698). Muon has two weight decays.
    - any rule but `none`, with `scaling.ema`: the momentum of weight averaging ρ → ρ^κ,
      if the optimizer averages weights: Busbridge et al. 2023 (arXiv:2307.13813).

    Returns:
        The changes, each a string such as `rho 0.9 → 0.6`.

    Raises:
        ConfigError: the rule does not apply to this optimizer, or κ is too large for
            its arguments.
    """
    rule = scaling.rule
    kappa = effective_batch_size / scaling.reference_batch_size
    _check_optimizer(optimizer, rule)

    arguments: dict[str, float] = {}
    if rule == Rule.timescale:
        arguments = _timescale(optimizer, scaling, kappa)
    elif rule == Rule.half_life:
        arguments = {"beta_2": optimizer.beta_2**kappa}
    elif rule == Rule.sde:
        arguments = _sde(optimizer, kappa)
    if scaling.ema and rule != Rule.none and optimizer.use_ema:
        arguments["ema_momentum"] = optimizer.ema_momentum**kappa

    changes = []
    for name, value in arguments.items():
        before = getattr(optimizer, name)
        if value != before:
            changes.append(f"{name} {before:g} → {value:g}")
        setattr(optimizer, name, value)
    return changes


class DerivedSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A learning-rate schedule that is computed from another schedule.

    Attributes:
        schedule: the other schedule, or a number.
    """

    schedule: Any

    def rate(self, step: Any) -> Any:
        """Return the learning rate of the other schedule at `step`."""
        rate = self.schedule
        if callable(rate):
            rate = rate(step)
        return ops.convert_to_tensor(rate)

    def get_config(self) -> dict[str, Any]:
        return {"schedule": keras.saving.serialize_keras_object(self.schedule)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        schedule = keras.saving.deserialize_keras_object(config["schedule"])
        return cls(**{**config, "schedule": schedule})


@keras.saving.register_keras_serializable("pipeline")
class InFloatx(DerivedSchedule):
    """The rate of another schedule in Keras' floatx, the precision of the weights.

    Keras' own schedules are computed in float32. Its optimizers cast the rate, except
    for Muon, which fails in float64.

    Args:
        schedule: the other schedule.
    """

    def __init__(self, schedule: Any):
        self.schedule = schedule

    def __call__(self, step: Any) -> Any:
        return ops.cast(self.rate(step), keras.config.floatx())


@keras.saving.register_keras_serializable("pipeline")
class Scaled(DerivedSchedule):
    """schedule(u) · (1 + (factor − 1) · min(1, (u + 1)/warmup)) for update u.

    This is the gradual warm-up of Goyal et al. 2017 (arXiv:1706.02677, section 2.2):
    the rate rises from that of the reference batch to the scaled one. A factor of at
    most 1 has no warm-up: it applies in full from the first update on.

    Args:
        schedule: the schedule to scale, or a number.
        factor: factor of the learning rate after the warm-up.
        warmup: length of the warm-up in updates; 0 if there is no warm-up.
    """

    def __init__(self, schedule: Any, factor: float, warmup: int):
        self.schedule = schedule
        self.factor = factor
        self.warmup = warmup

    def __call__(self, step: Any) -> Any:
        rate = self.rate(step)
        if not self.warmup or self.factor <= 1:
            return rate * self.factor
        share = ops.minimum(1.0, (ops.cast(step, rate.dtype) + 1) / self.warmup)
        return rate * (1 + (self.factor - 1) * ops.cast(share, rate.dtype))

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "factor": self.factor,
            "warmup": self.warmup,
        }


def _surge(batch: float) -> float:
    """Return 2 / f(B), where f is that of the rule `surge` (see `rate_factor`).

    `batch` is B/B_n, the batch size in units of `scaling.peak_batch_size`.
    """
    return math.sqrt(batch) + 1 / math.sqrt(batch)


def _check_optimizer(optimizer: Any, rule: Rule) -> None:
    name = type(optimizer).__name__
    optimizers = _OPTIMIZERS.get(rule)
    if optimizers is None or name in optimizers:
        return
    message = f"must fit the optimizer: {rule.name} is for {', '.join(optimizers)}"
    if rule == Rule.sde:
        message += "; for SGD, the rule is linear"
    raise ConfigError("scaling.rule", message, f"{rule.name} for {name}")


def weight_decays(optimizer: Any) -> dict[str, float]:
    """Return the optimizer's arguments that are weight decays, by name.

    Muon has a second one for the variables that take Adam's step. The result is empty
    for an optimizer that does not decay weights.
    """
    decays = {}
    for name in ("weight_decay", "adam_weight_decay"):
        decay = getattr(optimizer, name, None)
        if isinstance(decay, int | float):
            decays[name] = decay
    return decays


def _timescale(
    optimizer: Any, scaling: ScalingConfig, kappa: float
) -> dict[str, float]:
    """Return the arguments that the rule `timescale` changes; see `rescale`.

    Raises:
        ConfigError: the optimizer has no weight decay.
    """
    decays = weight_decays(optimizer)
    if not decays:
        message = "must be a number for scaling.rule=timescale"
        raise ConfigError("optimizer.weight_decay", message, None)
    factor = math.sqrt(kappa) if scaling.rate == "sqrt" else kappa
    return {name: decay * factor for name, decay in decays.items()}


def _sde(optimizer: Any, kappa: float) -> dict[str, float]:
    """Return the arguments that the rule `sde` changes; see `rescale`.

    Raises:
        ConfigError: RMSprop has momentum or is centered, or κ is too large for a β.
    """
    is_rmsprop = type(optimizer).__name__ == "RMSprop"
    if is_rmsprop and (optimizer.momentum or optimizer.centered):
        message = "must not be sde for RMSprop with momentum or centered=true"
        raise ConfigError("scaling.rule", message, "sde")

    root = math.sqrt(kappa)
    betas = ["beta_1", "beta_2"]
    epsilon = optimizer.epsilon / root
    if is_rmsprop:
        betas = ["rho"]
        epsilon = optimizer.epsilon / kappa  # Keras adds ε under the root.

    arguments = {}
    for name in betas:
        before = getattr(optimizer, name)
        arguments[name] = 1 - kappa * (1 - before)
        if arguments[name] < 0:
            message = (
                f"must be at least {1 - 1 / kappa:g} for scaling.rule=sde "
                f"at κ = {kappa:g}, so that κ(1 − β) ≤ 1"
            )
            raise ConfigError(f"optimizer.{name}", message, before)

    arguments["epsilon"] = epsilon
    for name, decay in weight_decays(optimizer).items():
        arguments[name] = decay * root
    return arguments
