"""AdaScale: a learning rate that follows the gradient noise, and updates that count for several of the reference batch.

Johnson et al. 2020 (arXiv:2007.05105), algorithm 1 and appendix B.3. For S = B / B_ref, the variance σ² = tr(Σ) / B_ref
of the gradient of a reference batch, and μ² = |G|²:

    r = (σ² + μ²) / (σ²/S + μ²)     # the gain, from 1 without noise to S for noise alone
    rate = schedule(⌊τ⌋) · r        # of SGD; · √r of Adam and AdamW, as in AdaptDL (Qiao et al. 2021, arXiv:2008.12260)
    τ += r                          # scale-invariant updates: the run ends when they reach its horizon

σ² and μ² are running averages of what `pipeline.accumulation.noise_scale` estimates, with θ = max(1 − S/1000, 0); the
first 1/(1 − θ) estimates have equal weights. As in the paper an estimate below 0 counts as 0, and r is 1 in the first
update; a least σ² of 1e-6 is left out, as it would depend on the scale of the loss. The averages are those before the
update: r does not depend on the gradient that it scales, and no update waits for its own noise. A short last batch
of an epoch counts for as many updates as the others.
"""

from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from pipeline import accumulation
from pipeline.common.errors import ConfigError
from pipeline.components.scaling import DerivedSchedule
from pipeline.config.plan import Plan
from pipeline.config.resolve import RunSpec
from pipeline.config.sizes import EFFECTIVE, FACTOR, MICRO


def check(spec: RunSpec) -> None:
    """Raise a ConfigError for a config in which the noise is not measured, or updates are not counted."""
    config, cut, horizon, given = (
        spec.config,
        spec.batching,
        spec.horizon,
        spec.resolved["accumulation"],
    )
    effective, reference = cut.effective_batch_size, config.scaling.reference_batch_size
    noise, over = config.accumulation.noise_scale_every, config.training.loss_over.name
    for key, rule, received, holds in (
        ("scaling.warmup", "be 0", config.scaling.warmup, config.scaling.warmup == 0),
        (
            "schedule.clock",
            "be updates",
            "examples",
            spec.resolved["schedule"].get("clock") != "examples",
        ),
        (
            "accumulation.batch_schedule",
            "be null",
            given.get("batch_schedule"),
            given.get("batch_schedule") is None,
        ),
        (MICRO, "be a number", given["micro_batch_size"], not spec.searches),
        (
            FACTOR,
            "be over 1, or there be replicas,",
            cut.factor,
            cut.factor * cut.replicas > 1,
        ),
        (
            EFFECTIVE,
            f"be at least the reference's {reference}",
            effective,
            effective >= reference,
        ),
        ("accumulation.noise_scale_every", "be 1", noise, noise == 1),
        ("training.loss_over", "be example", over, over == "example"),
        (
            f"training.{horizon.unit}",
            "give way to training.updates",
            horizon.length,
            horizon.unit == "updates",
        ),
    ):
        if not holds:
            raise ConfigError(key, f"must {rule} for scaling.rule=adascale", received)


@keras.saving.register_keras_serializable("pipeline")
class Gain(DerivedSchedule):
    """schedule(⌊τ⌋) · r, or · √r; `schedule` alone until it is attached to an optimizer, which keeps its state.

    Args:
        schedule: of scale-invariant updates; may be a number.
        effective, reference: examples of an update, and of one that `schedule` is for.
    """

    def __init__(self, schedule: Any, effective: int, reference: int):
        self.schedule, self.effective, self.reference = schedule, effective, reference
        self.scale, self.power = effective / reference, 1.0
        self.state: Any = (
            None  # τ, how many estimates, and the averages of tr(Σ) and |G|²
        )

    def attach(self, optimizer: Any) -> str:
        """Keep the state among the optimizer's variables, in checkpoints too; return what becomes of its rate."""
        self.power = 1.0 if isinstance(optimizer, keras.optimizers.SGD) else 0.5
        self.state = optimizer.add_variable(
            (4,), dtype="float64", aggregation="only_first_replica", name="adascale"
        )
        optimizer.adascale = self
        rate = f"learning rate × {'' if self.power == 1 else '√'}r, r from 1 to {self.scale:g} by the gradient noise"
        return f"{rate}, an update counts as r of training.updates"

    def __call__(self, step: Any) -> Any:
        with tf.device(
            None
        ):  # where the state is: on the host, the host would wait for a GPU
            if self.state is not None:
                step = tf.cast(tf.floor(self.state.value[0]), tf.int64)
            rate = self.rate(step)
            return (
                rate
                if self.state is None
                else rate * ops.cast(self.gain() ** self.power, rate.dtype)
            )

    def gain(self) -> tf.Tensor:
        """Return r of the next update; scalar, float64."""
        _, _, variance, square = tf.unstack(tf.convert_to_tensor(self.state.value))
        variance /= self.reference
        gain = tf.math.divide_no_nan(variance + square, variance / self.scale + square)
        return tf.where(gain > 0, tf.minimum(gain, self.scale), tf.ones_like(gain))

    def advance(self, results: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Count an update and average its estimates, if they are finite; return its results with r and τ."""
        gain = self.gain()
        updates, count, *averages = tf.unstack(tf.convert_to_tensor(self.state.value))
        # An update that a loss scale skips counts for nothing.
        updates += tf.where(
            tf.math.is_finite(results["gradient_norm"]), gain, tf.zeros_like(gain)
        )
        found = [
            tf.cast(results[name], tf.float64)
            for name in ("gradient_variance", "gradient_square")
        ]
        finite = tf.reduce_all(tf.math.is_finite(found))
        count += tf.cast(finite, count.dtype)
        share = tf.minimum(tf.maximum(1 / count, self.scale / 1000), 1)  # 1 − θ
        pairs = zip(averages, found, strict=True)
        moved = [
            tf.where(finite, old + share * (tf.maximum(new, 0) - old), old)
            for old, new in pairs
        ]
        self.state.assign(tf.stack([updates, count, *moved]))
        return results | {"gain": gain, "scale_invariant_updates": updates}


def of(optimizer: Any) -> Any:
    """Return the `Gain` of an optimizer; None if it has none."""
    return getattr(getattr(optimizer, "inner_optimizer", optimizer), "adascale", None)


class Update(accumulation.Update):
    """An update whose optimizer has a gain, which the next one follows."""

    def __call__(self, batch: Any) -> dict[str, tf.Tensor]:
        results = super().__call__(batch)
        with tf.control_dependencies(
            [self.applying.read_value()]
        ):  # an update that may be retried changes nothing
            return dict(of(self.optimizer).advance(results))


@dataclass(frozen=True)
class EstimatedPlan(Plan):
    """A run that ends when its scale-invariant updates reach `updates`, which is the most that it takes."""

    gain: Any = field(default=None, compare=False)  # counts the scale-invariant ones
    _next: list[int] = field(
        default_factory=lambda: [0], init=False, compare=False
    )  # the first that may be the last

    def ended(self, update: int) -> bool:
        if super().ended(
            update
        ):  # the most that it takes, and all that is read: a loss scale may have skipped some
            return True
        if update < self._next[0]:  # reading what is left waits for the device
            return False
        left = self.updates - float(self.gain.state.numpy()[0])
        self._next[0] = (
            update + max(1, int(left / self.gain.scale - 1e-6)) if left > 0 else update
        )
        return left <= 0

    def __str__(self) -> str:
        least, known = -int(-self.updates // self.gain.scale), f"{self.updates} in all"
        estimate = f"{least} to {known}, an estimate: until {self.updates} scale-invariant ones"
        return super().__str__().removesuffix(known) + estimate
