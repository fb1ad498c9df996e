"""How the learning rate and an optimizer's other arguments follow the effective batch."""

import math
from typing import Any, Self

import keras
from keras import ops

from pipeline.common.errors import ConfigError
from pipeline.config.schema import Rule, ScalingConfig

# The optimizers that a rule is derived for; the other rules are for all, `timescale` for those that decay weights.
_FOR = {
    Rule.sde: ("Adam", "AdamW", "RMSprop"),
    Rule.half_life: ("Adam", "AdamW"),
    Rule.surge: ("Adam", "AdamW", "Nadam", "Lion"),
}


def rate_factor(scaling: ScalingConfig, effective_batch_size: int) -> float:
    """Return what the rule multiplies every learning rate by, for κ = effective batch / `reference_batch_size`.

    - `none`: 1.
    - `linear`: κ, which keeps the step that an example takes: Krizhevsky 2014 (arXiv:1404.5997, section 5); Goyal et
      al. 2017 (arXiv:1706.02677, section 2.1).
    - `sqrt`: √κ, which keeps the variance of an update: Krizhevsky 2014; Hoffer et al. 2017 (arXiv:1705.08741).
    - `sde`: √κ, with what `rescale` does: Malladi et al. 2022 (arXiv:2205.10287).
    - `half_life`: 1, or √κ if `scaling.rate` is sqrt: Marek et al. 2025 (arXiv:2507.07101).
    - `timescale`: 1, or √κ if `scaling.rate` is sqrt: Bergsma et al. 2025 (arXiv:2505.13738).
    - `surge`: f(B) / f(B_ref), f(B) = 2 / (√(B_n/B) + √(B/B_n)), which has its peak at B_n, `scaling.peak_batch_size`,
      and falls beyond it: Li et al. 2024 (arXiv:2405.14578, equation 13). B_n is not the gradient noise scale.
    """
    kappa = effective_batch_size / scaling.reference_batch_size
    if scaling.rule == Rule.linear:
        return kappa
    if scaling.rule == Rule.surge:
        peak = scaling.peak_batch_size or 1  # given, see `check`
        now, then = effective_batch_size / peak, scaling.reference_batch_size / peak
        return (math.sqrt(then) + 1 / math.sqrt(then)) / (
            math.sqrt(now) + 1 / math.sqrt(now)
        )
    return (
        math.sqrt(kappa)
        if scaling.rule in (Rule.sqrt, Rule.sde) or scaling.rate == "sqrt"
        else 1.0
    )


def check(scaling: ScalingConfig) -> None:
    """Raise a ConfigError for a key that the rule needs, or does not read."""
    rule = scaling.rule.name
    if (rule == "surge") != (scaling.peak_batch_size is not None):
        needed, why = (
            ("a number of examples", "")
            if rule == "surge"
            else ("null", ": only surge reads it")
        )
        rule = f"must be {needed} for scaling.rule={rule}{why}"
        raise ConfigError("scaling.peak_batch_size", rule, scaling.peak_batch_size)
    if scaling.rate is not None and scaling.rule not in (
        Rule.half_life,
        Rule.timescale,
    ):
        why = f"must be null for scaling.rule={rule}: only half_life and timescale leave the rate to choose"
        raise ConfigError("scaling.rate", why, scaling.rate)


def rescale(
    optimizer: Any, scaling: ScalingConfig, effective_batch_size: int
) -> list[str]:
    """Set the arguments that the rule changes besides the rate; return what it changed, such as `rho 0.9 → 0.6`.

    For κ = effective batch / `reference_batch_size`:

    - `sde`: β → 1 − κ(1 − β), ε → ε/√κ (ε/κ where Keras adds it to the square), decoupled weight decay × √κ.
    - `half_life`: β₂ → β₂^κ; the half-life of the second moment stays, counted in examples.
    - `timescale`: weight decay × κ, or × √κ beside a rate × √κ; B/(ηλD) stays: Wang and Aitchison 2024
      (arXiv:2405.13698).
    - any rule, if `scaling.ema`: the momentum of weight averaging ρ → ρ^κ: Busbridge et al. 2023 (arXiv:2307.13813).

    A rule that is not for this optimizer, or not for so large a κ, is refused with a `ConfigError`.
    """
    name, rule, kappa = (
        type(optimizer).__name__,
        scaling.rule,
        effective_batch_size / scaling.reference_batch_size,
    )
    root, new = math.sqrt(kappa), dict[str, float]()
    decays = isinstance(optimizer.weight_decay, int | float)
    if name not in _FOR.get(rule, (name,)):
        why = f"must fit the optimizer: {rule.name} is for {', '.join(_FOR[rule])}"
        of_sgd = "; for SGD it is linear" if rule == Rule.sde else ""
        raise ConfigError("scaling.rule", why + of_sgd, f"{rule.name} for {name}")
    if rule == Rule.timescale:
        if not decays:
            raise ConfigError(
                "optimizer.weight_decay",
                "must be a number for scaling.rule=timescale",
                None,
            )
        new["weight_decay"] = optimizer.weight_decay * (
            root if scaling.rate == "sqrt" else kappa
        )
    if rule == Rule.half_life:
        new["beta_2"] = optimizer.beta_2**kappa
    if rule == Rule.sde:
        if name == "RMSprop" and (optimizer.momentum or optimizer.centered):
            raise ConfigError(
                "scaling.rule",
                "must not be sde for RMSprop with momentum or centered",
                rule.name,
            )
        for beta in ("rho",) if name == "RMSprop" else ("beta_1", "beta_2"):
            new[beta] = 1 - kappa * (1 - getattr(optimizer, beta))
            if new[beta] < 0:
                why = f"must be at least {1 - 1 / kappa:g} for scaling.rule=sde at κ = {kappa:g}: κ(1 − β) ≤ 1"
                raise ConfigError(f"optimizer.{beta}", why, getattr(optimizer, beta))
        new["epsilon"] = optimizer.epsilon / (kappa if name == "RMSprop" else root)
        if decays:
            new["weight_decay"] = optimizer.weight_decay * root
    if scaling.ema and rule != Rule.none and optimizer.use_ema:
        new["ema_momentum"] = optimizer.ema_momentum**kappa
    old = {key: getattr(optimizer, key) for key in new}
    for key, value in new.items():
        setattr(optimizer, key, value)
    return [
        f"{key} {old[key]:g} → {value:g}"
        for key, value in new.items()
        if value != old[key]
    ]


class DerivedSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that changes the rates of another one, `schedule`, which may be a number."""

    schedule: Any

    def rate(self, step: Any) -> Any:
        """Return the rate of the other schedule at `step`."""
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
class Scaled(DerivedSchedule):
    """schedule(u) · (1 + (factor − 1) · min(1, (u + 1)/warmup)): Goyal et al. 2017, section 2.2, gradual warm-up.

    It starts at the rate of the reference batch and rises to the scaled one. A factor below 1 has nothing to rise to:
    it applies from the first update on. `schedule` may be a number; a `warmup` of 0 updates scales from the first one.
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
