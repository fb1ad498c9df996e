"""A weighted sum of gradients that outlives a step: for loops with a tape of their own.

    S += w·g;  W += w        # for each part, on each replica by itself
    S / W                    # once an update, over all replicas

Where g is the gradient of a mean over w examples, or over weights whose sum is w, S / W
is that of the mean over all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from .batch import of_first_replica, reduce
from .keras_internals import depending_on_batch
from .loss_sums import divide

Gradient: TypeAlias = Any  # a tensor, `tf.IndexedSlices` or None

ZERO = (
    "gradients must be zero, not None, where other parts have one "
    "(unconnected_gradients='zero')"
)


class GradientAccumulator(tf.Module):
    """Sums of gradients, and of their weights, in variables.

    The variables are those of the strategy that is current when it is made. A sum is
    dense, in float32 at least; the sum for an embedding has the size of its table. A
    `tf.train.Checkpoint` saves all of it, also between two parts.

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
        # How many gradients each sum has. A variable without any has none in this
        # update, and is left as it is. They are kept in a variable: after a restart,
        # Python would not know them.
        self.counts = _zeros((len(self.sums),), "float64")
        # The sets of indices of variables that had a gradient in one part. They decide
        # what is traced, never what is computed. Lists would be tracked, and could not
        # be saved after a change.
        self._patterns = set[frozenset[int]]()
        # Indices of variables that a traced average leaves out.
        self._left_out = set[int]()

    @property
    def variables(self) -> list[keras.Variable]:
        """What a checkpoint must hold between two parts.

        They are the weight, the sums, and how many gradients each sum has.
        """
        return [self.weight, *self.sums, self.counts]

    def add(
        self, gradients: Sequence[Gradient], weight: Any = 1.0, times: int = 1
    ) -> None:
        """Add the gradients of one part.

        Under a strategy call it inside `strategy.run`: each replica adds those of its
        share. Where it raises, nothing was added.

        Args:
            gradients: of each variable, of the mean over the part or share, dense or
                `tf.IndexedSlices`; None where there is none. Inside `strategy.run`
                multiply by the number of replicas: Keras' losses divide by it.
            weight: of the part, scalar: by how much its mean counts.
            times: by what the gradients are multiplied.

        Raises:
            ValueError: their number or shapes are not the variables', the weight is no
                scalar, or an average that was traced before leaves one out.
        """
        gradients, uncertain = self._checked(gradients)
        weight = tf.convert_to_tensor(weight)
        if weight.shape.rank:
            received = f"one of shape {tuple(weight.shape)}"
            raise ValueError(f"weight must be a scalar. Received: {received}")
        indices = [i for i, each in enumerate(gradients) if each is not None]
        self._note(frozenset(indices))
        present = [gradients[index] for index in indices]
        counts = [float(each is not None) for each in gradients]

        for index, wait in zip(indices, self._waits(present, uncertain), strict=True):
            total = self.sums[index]
            with tf.control_dependencies(wait):
                # A replica's share may be empty: its mean is not a number, and its
                # weight zero.
                factor = tf.cast(weight, total.dtype) * times
                summand = tf.math.multiply_no_nan(gradients[index], factor)
                total.assign_add(summand)
        with tf.control_dependencies(present):
            self.weight.assign_add(tf.cast(weight, self.weight.dtype))
            self.counts.assign_add(tf.constant(counts, self.counts.dtype))

    def average(self) -> list[tf.Tensor | None]:
        """Return Σ w·g / Σ w over all parts and replicas.

        It is None for a variable that had no gradient in any part, and zero where
        nothing was added. Call it and apply it outside of `strategy.run`: inside, Keras
        would add up averages.

        Inside a `tf.function` what is None is fixed when it is traced: a variable that
        had a gradient until then has to have one in each update.

        Raises:
            tf.errors.InvalidArgumentError: inside a `tf.function`, a variable has no
                gradient in this update, and had one when it was traced.
        """
        values = of_first_replica(self.strategy, self.reduced())
        if tf.inside_function():
            return self._traced_average(values)
        weight, *_, counts = values
        if not weight and not tf.reduce_any(counts > 0):
            return self.averages_from(values, range(len(self.sums)))
        return self.averages_from(values, present_in(counts))

    def reduced(self) -> list[Any]:
        """Return the values of `variables` over all replicas, on each of them.

        Call it outside of `strategy.run`.
        """
        values = [variable.value for variable in self.variables]
        if self.strategy.num_replicas_in_sync > 1:
            return reduce(self.strategy, values)
        return [tf.convert_to_tensor(value) for value in values]

    def averages_from(
        self, values: Sequence[tf.Tensor], indices: Collection[int]
    ) -> list[tf.Tensor | None]:
        """Return the averages for some variables, and None for the others.

        Args:
            values: what `reduced` has returned.
            indices: of the variables.
        """
        weight, *sums, _ = values
        averages: list[tf.Tensor | None] = [None] * len(sums)
        for index in indices:
            averages[index] = divide(sums[index], weight)
        return averages

    def groups_beside(self, indices: Collection[int]) -> list[list[int]]:
        """Return sets of variables that had a gradient in the same parts until now.

        Together they are all variables but those at `indices`.
        """
        patterns = [*self._patterns, self._present_when_traced()]
        groups: dict[tuple[bool, ...], list[int]] = {}
        for index in range(len(self.sums)):
            if index not in indices:
                key = tuple(index in pattern for pattern in patterns)
                groups.setdefault(key, []).append(index)
        return list(groups.values())

    def reset(self) -> None:
        """Begin the next update."""
        for variable in self.variables:
            variable.assign(tf.zeros(variable.shape, variable.dtype))

    def _waits(
        self, present: Sequence[tf.Tensor], uncertain: Sequence[tf.Tensor]
    ) -> list[Sequence[tf.Tensor]]:
        """Return for each gradient which ones are computed before it is added.

        A traced step of `fit` runs once more where data of an unknown length ends, and
        fails where the batch is read. A gradient that does not depend on the batch, as
        of a regularizer alone, must not be added then: it waits for all others. If all
        waited, all would be in memory at once.

        Args:
            present: the gradients.
            uncertain: those whose shapes are checked only as they are computed.
        """
        if not present or not tf.inside_function():
            return [()] * len(present)
        depends = depending_on_batch(present)
        if not any(depends):  # as in a branch, which captures what it computes from
            return [present] * len(present)
        waits: list[Sequence[tf.Tensor]] = []
        for depends_on_batch in depends:
            if depends_on_batch:
                waits.append(uncertain)
            else:
                waits.append(present)
        return waits

    def _checked(
        self, gradients: Sequence[Gradient]
    ) -> tuple[list[tf.Tensor | None], list[tf.Tensor]]:
        """Return the gradients, dense and in the dtypes of the sums.

        Returns:
            Them, and those whose shapes are checked only as they are computed.
        """
        if len(gradients) != len(self.sums):
            rule = f"gradients must be {len(self.sums)}, one a variable"
            raise ValueError(f"{rule}. Received: {len(gradients)}")
        checked: list[tf.Tensor | None] = []
        uncertain: list[tf.Tensor] = []
        for index, (gradient, total) in enumerate(
            zip(gradients, self.sums, strict=True)
        ):
            if gradient is None:
                checked.append(None)
                continue
            if not isinstance(gradient, tf.IndexedSlices):
                gradient = tf.convert_to_tensor(gradient)
            if not gradient.shape.is_compatible_with(total.shape):
                rule = "gradients must have the shapes of their variables"
                received = f"{tuple(gradient.shape)} for variable {index}"
                raise ValueError(
                    f"{rule}. Received: {received}, which has {tuple(total.shape)}"
                )
            if isinstance(gradient, tf.IndexedSlices):
                shape = tf.constant(list(total.shape))
                gradient = tf.IndexedSlices(gradient.values, gradient.indices, shape)
            dense = tf.convert_to_tensor(gradient)
            if not dense.shape.is_fully_defined():
                dense = tf.ensure_shape(dense, total.shape)
                uncertain.append(dense)
            checked.append(tf.cast(dense, total.dtype))
        return checked, uncertain

    def _note(self, pattern: frozenset[int]) -> None:
        """Note which variables have a gradient in a part."""
        left_out = sorted(pattern & self._left_out)
        if left_out:
            received = f"None for variable {left_out[0]} when the average was traced"
            raise ValueError(f"{ZERO}. Received: {received}")
        self._patterns.add(pattern)

    def _present_when_traced(self) -> frozenset[int]:
        """Return the indices of variables that have a gradient now, while tracing."""
        with tf.init_scope():
            return frozenset(present_in(self.counts))

    def _traced_average(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
        everything = frozenset(range(len(self.sums)))
        indices = self._present_when_traced().union(*self._patterns) or everything
        self._left_out |= everything - indices

        weight, *_, counts = values
        # With nothing added, all averages are zero.
        is_empty = tf.equal(weight, 0) & tf.reduce_all(counts <= 0)
        present = tf.gather(counts, sorted(indices)) > 0
        message = f"{ZERO}. Received: None in all parts of an update"
        has_all = tf.debugging.Assert(is_empty | tf.reduce_all(present), [message])
        with tf.control_dependencies([has_all]):
            values = [tf.identity(value) for value in values]
        return self.averages_from(values, sorted(indices))


def present_in(counts: Any) -> list[int]:
    """Return the indices of the counts, (variables,), that are not zero."""
    return [index for index, count in enumerate(counts.numpy()) if count > 0]


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
