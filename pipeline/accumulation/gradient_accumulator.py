"""A weighted sum of gradients that outlives a step: for loops with a tape of their own.

    S += w·g;  W += w        # for each part, on each replica by itself
    S / W                    # once an update, over all replicas

Where g is the gradient of a mean over w examples, or over weights whose sum is w, S / W is that of the mean over all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from .batch import of_first_replica, reduce
from .loss_sums import divide

Gradient: TypeAlias = Any  # a tensor, `tf.IndexedSlices` or None


class GradientAccumulator(tf.Module):
    """Sums of gradients, and of their weights, in variables of the strategy that is current when it is made.

    A sum is dense, in float32 at least: of an embedding the whole table. A `tf.train.Checkpoint` saves the sums.

    Args:
        variables: those that the gradients are of, in their order.
    """

    def __init__(self, variables: Sequence[keras.Variable | tf.Variable]):
        super().__init__()
        self.strategy = tf.distribute.get_strategy()
        if self.strategy.num_replicas_in_sync > 1 and not isinstance(
            self.strategy, tf.distribute.MirroredStrategy
        ):
            rule = "strategy must be MirroredStrategy or have one replica; `Update` runs under the others"
            raise ValueError(f"{rule}. Received: {type(self.strategy).__name__}")
        self.sums = [_zeros(tuple(each.shape), each.dtype) for each in variables]
        self.weight = _zeros((), "float64")
        # By variable; lists would be tracked, and could not be saved after a change.
        self._have_gradient, self._left_out = set[int](), set[int]()

    @property
    def variables(self) -> list[keras.Variable]:
        """Return what a checkpoint has to hold between two parts: the weight, then a sum for each variable."""
        return [self.weight, *self.sums]

    def add(
        self, gradients: Sequence[Gradient], weight: Any = 1.0, times: int = 1
    ) -> None:
        """Add the gradients of one part; under a strategy inside of `strategy.run`, each replica those of its share.

        Args:
            gradients: of each variable, of the mean over the part or share, dense or `tf.IndexedSlices`; None where
                there is none. Inside of `strategy.run` multiply by the number of replicas: Keras' losses divide by it.
            weight: of the part, scalar: by how much its mean counts.
            times: by what the gradients are multiplied.

        Raises:
            ValueError: their number or shapes are not the variables', or an average traced before leaves one out.
        """
        if len(gradients) != len(self.sums):
            raise ValueError(
                f"gradients must be {len(self.sums)}, one a variable. Received: {len(gradients)}"
            )
        for index, (gradient, total) in enumerate(
            zip(gradients, self.sums, strict=True)
        ):
            if gradient is None:
                continue
            if index in self._left_out:
                rule = "gradients must be zero, not None, where other parts have one (unconnected_gradients='zero')"
                raise ValueError(
                    f"{rule}. Received: None for variable {index} when the average was traced"
                )
            self._have_gradient.add(index)
            dense = tf.cast(tf.convert_to_tensor(gradient), total.dtype)
            # A replica's share may be empty: its mean is not a number, and its weight zero.
            total.assign_add(
                tf.math.multiply_no_nan(dense, tf.cast(weight, total.dtype) * times)
            )
        self.weight.assign_add(tf.cast(weight, self.weight.dtype))

    def average(self) -> list[tf.Tensor | None]:
        """Return Σ w·g / Σ w over all parts and replicas; None for a variable that no part depended on.

        Call it and apply it outside of `strategy.run`: inside, Keras would add up averages. Without weight it is zero.
        """
        return self.of_sums(of_first_replica(self.strategy, self.reduced()))

    def reduced(self) -> list[Any]:
        """Return the values of `variables` over all replicas, on each of them; call it outside of `strategy.run`."""
        values = [variable.value for variable in self.variables]
        if self.strategy.num_replicas_in_sync > 1:
            return reduce(self.strategy, values)
        return [tf.convert_to_tensor(value) for value in values]

    def of_sums(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
        """Return the average that such values hold."""
        weight, *sums = values
        have = self._have_gradient or set(
            range(len(sums))
        )  # of sums that were loaded all may
        if tf.inside_function():
            self._left_out |= set(range(len(sums))) - have
        return [
            divide(total, weight) if index in have else None
            for index, total in enumerate(sums)
        ]

    def reset(self) -> None:
        """Begin the next update."""
        for variable in self.variables:
            variable.assign(tf.zeros(variable.shape, variable.dtype))


def _zeros(shape: tuple[int, ...], dtype: Any) -> keras.Variable:
    name = keras.backend.standardize_dtype(dtype)
    name = "float32" if name in ("float16", "bfloat16") else name
    options = {"trainable": False, "synchronization": "on_read", "aggregation": "sum"}
    return keras.Variable(
        keras.initializers.Zeros(), shape=shape, dtype=name, **options
    )
