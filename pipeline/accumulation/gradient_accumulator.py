"""A weighted sum of gradients that outlives a step: for loops with a tape of their own.

    S += w·g;  W += w        # for each part, on each replica by itself
    S / W                    # once an update, over all replicas

Where g is the gradient of a mean over w examples, or over weights whose sum is w, S / W
is that of the mean over all.
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
    """Sums of gradients, and of their weights, in variables.

    The variables are those of the strategy that is current when it is made. A sum is
    dense, in float32 at least; the sum for an embedding has the size of its table. A
    `tf.train.Checkpoint` saves the sums.

    Args:
        variables: those that the gradients are of, in their order.

    Raises:
        ValueError: the strategy has several replicas and is not a `MirroredStrategy`.
    """

    def __init__(self, variables: Sequence[keras.Variable | tf.Variable]):
        super().__init__()
        self.strategy = tf.distribute.get_strategy()
        is_mirrored = isinstance(self.strategy, tf.distribute.MirroredStrategy)
        if self.strategy.num_replicas_in_sync > 1 and not is_mirrored:
            rule = (
                "strategy must be MirroredStrategy or have one replica; "
                "`Update` runs under the others"
            )
            raise ValueError(f"{rule}. Received: {type(self.strategy).__name__}")
        self.sums = [_zeros(tuple(each.shape), each.dtype) for each in variables]
        self.weight = _zeros((), "float64")
        # Indices of variables: of those that had a gradient, and of those that an
        # average has left out. Lists would be tracked, and could not be saved after a
        # change.
        self._have_gradient = set[int]()
        self._left_out = set[int]()

    @property
    def variables(self) -> list[keras.Variable]:
        """What a checkpoint must hold between two parts: the weight, then all sums."""
        return [self.weight, *self.sums]

    def add(
        self, gradients: Sequence[Gradient], weight: Any = 1.0, times: int = 1
    ) -> None:
        """Add the gradients of one part.

        Under a strategy call it inside `strategy.run`: each replica adds those of its
        share.

        Args:
            gradients: of each variable, of the mean over the part or share, dense or
                `tf.IndexedSlices`; None where there is none. Inside `strategy.run`
                multiply by the number of replicas: Keras' losses divide by it.
            weight: of the part, scalar: by how much its mean counts.
            times: by what the gradients are multiplied.

        Raises:
            ValueError: their number or shapes are not the variables', or an average
                that was traced before leaves one out.
        """
        if len(gradients) != len(self.sums):
            rule = f"gradients must be {len(self.sums)}, one a variable"
            raise ValueError(f"{rule}. Received: {len(gradients)}")
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if index in self._left_out:
                rule = (
                    "gradients must be zero, not None, where other parts have one "
                    "(unconnected_gradients='zero')"
                )
                received = f"None for variable {index} when the average was traced"
                raise ValueError(f"{rule}. Received: {received}")
            self._have_gradient.add(index)
            total = self.sums[index]
            dense = tf.cast(tf.convert_to_tensor(gradient), total.dtype)
            # A replica's share may be empty: its mean is not a number, and its weight
            # zero.
            factor = tf.cast(weight, total.dtype) * times
            total.assign_add(tf.math.multiply_no_nan(dense, factor))
        self.weight.assign_add(tf.cast(weight, self.weight.dtype))

    def average(self) -> list[tf.Tensor | None]:
        """Return Σ w·g / Σ w over all parts and replicas.

        It is None for a variable that no part depended on, and zero without weight.
        Call it and apply it outside of `strategy.run`: inside, Keras would add up
        averages.
        """
        return self.averages_from(of_first_replica(self.strategy, self.reduced()))

    def reduced(self) -> list[Any]:
        """Return the values of `variables` over all replicas, on each of them.

        Call it outside of `strategy.run`.
        """
        values = [variable.value for variable in self.variables]
        if self.strategy.num_replicas_in_sync > 1:
            return reduce(self.strategy, values)
        return [tf.convert_to_tensor(value) for value in values]

    def averages_from(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
        """Return the average for what `reduced` has returned."""
        weight, *sums = values
        indices = set(range(len(sums)))
        # Sums that were loaded from a checkpoint may all have one.
        have_gradient = self._have_gradient or indices
        if tf.inside_function():
            self._left_out |= indices - have_gradient

        averages: list[tf.Tensor | None] = []
        for index, total in enumerate(sums):
            if index in have_gradient:
                averages.append(divide(total, weight))
            else:
                averages.append(None)
        return averages

    def reset(self) -> None:
        """Begin the next update."""
        for variable in self.variables:
            variable.assign(tf.zeros(variable.shape, variable.dtype))


def _zeros(shape: tuple[int, ...], dtype: Any) -> keras.Variable:
    """Return a variable for a sum of values of `dtype`, one on each replica."""
    name = keras.backend.standardize_dtype(dtype)
    if name in ("float16", "bfloat16"):
        name = "float32"
    return keras.Variable(
        keras.initializers.Zeros(),
        shape=shape,
        dtype=name,
        trainable=False,
        synchronization="on_read",
        aggregation="sum",
    )
