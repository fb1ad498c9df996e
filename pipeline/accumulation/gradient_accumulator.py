"""A weighted sum of gradients that is kept between steps, for your own loops.

    S += w·g;  W += w        # for each part, separately on each replica
    S / W                    # once per update, over all replicas

If g is the gradient of a mean over w examples, or of a weighted mean whose weights sum
to w, then S / W is the gradient of the mean over all parts.
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
    "gradients must be zero, not None, for a variable that has a gradient in other "
    "parts (unconnected_gradients='zero')"
)


class GradientAccumulator(tf.Module):
    """Sums of gradients and of their weights, in TensorFlow variables.

    The sums are created under the current strategy. Each sum is dense, in float32 at
    least; the sum for an embedding is as large as the embedding table. A
    `tf.train.Checkpoint` saves the whole state, even between two parts of an update.

    Args:
        variables: the variables that the gradients belong to, in the same order.

    Raises:
        ValueError: the strategy has several replicas and is not a `MirroredStrategy`.
    """

    def __init__(self, variables: Sequence[keras.Variable | tf.Variable]):
        super().__init__()
        self.strategy = tf.distribute.get_strategy()
        is_mirrored = isinstance(self.strategy, tf.distribute.MirroredStrategy)
        if self.strategy.num_replicas_in_sync > 1 and not is_mirrored:
            rule = (
                "strategy must be MirroredStrategy or have one replica; `Update` runs "
                "under other strategies"
            )
            raise ValueError(f"{rule}. Received: {type(self.strategy).__name__}")
        self.sums = [_zeros(tuple(each.shape), each.dtype) for each in variables]
        self.weight = _zeros((), "float64")
        # The number of gradients in each sum. With 0, the variable is not changed in
        # this update. The counts are a variable so that a checkpoint restores them.
        self.counts = _zeros((len(self.sums),), "float64")
        # One set per combination of variables that had a gradient in the same part: the
        # indices of these variables. The sets affect what is traced, but not what is
        # computed. Do not use lists: `tf.Module` would track a list, and a checkpoint
        # could not save it after a change.
        self._patterns = set[frozenset[int]]()
        # Indices of variables that a traced average leaves out.
        self._left_out = set[int]()

    @property
    def variables(self) -> list[keras.Variable]:
        """The state that a checkpoint must save between two parts.

        It consists of the weight, the sums, and the number of gradients in each sum.
        """
        return [self.weight, *self.sums, self.counts]

    def add(
        self, gradients: Sequence[Gradient], weight: Any = 1.0, times: int = 1
    ) -> None:
        """Add the gradients of one part.

        Under a strategy, call this inside `strategy.run`: each replica adds the
        gradients of its share. If the call raises an error, nothing was added.

        Args:
            gradients: for each variable, the gradient of the mean over the part or
                share: a dense tensor, `tf.IndexedSlices`, or None for no gradient.
                Inside `strategy.run`, Keras' losses divide by the number of replicas,
                so multiply their gradients by that number.
            weight: weight of the mean over this part, scalar.
            times: factor by which the gradients are multiplied.

        Raises:
            ValueError: the number or the shapes of the gradients do not match the
                variables, the weight is not a scalar, or an average that was traced
                before leaves out a variable that has a gradient.
        """
        gradients, uncertain = self._checked(gradients)
        weight = tf.convert_to_tensor(weight)
        if weight.shape.rank:
            received = f"a tensor of shape {tuple(weight.shape)}"
            raise ValueError(f"weight must be a scalar. Received: {received}")
        indices = [i for i, each in enumerate(gradients) if each is not None]
        self._note(frozenset(indices))
        present = [gradients[index] for index in indices]
        counts = [float(each is not None) for each in gradients]

        for index, wait in zip(indices, self._waits(present, uncertain), strict=True):
            total = self.sums[index]
            with tf.control_dependencies(wait):
                # Multiply without NaN: if a replica's share is empty, its mean is NaN
                # and its weight is 0.
                factor = tf.cast(weight, total.dtype) * times
                summand = tf.math.multiply_no_nan(gradients[index], factor)
                total.assign_add(summand)
        with tf.control_dependencies(present):
            self.weight.assign_add(tf.cast(weight, self.weight.dtype))
            self.counts.assign_add(tf.constant(counts, self.counts.dtype))

    def average(self) -> list[tf.Tensor | None]:
        """Return Σ w·g / Σ w over all parts and replicas, for each variable.

        The average is None for a variable that had no gradient in any part. All
        averages are zero if nothing was added. Call this and apply the result outside
        of `strategy.run`: inside, Keras would sum the averages over replicas.

        Inside a `tf.function`, tracing fixes which averages are None. A variable that
        had a gradient before then must have one in each update.

        Raises:
            tf.errors.InvalidArgumentError: inside a `tf.function`, a variable that had
                a gradient before the tracing has none in this update.
        """
        values = of_first_replica(self.strategy, self.reduced())
        if tf.inside_function():
            return self._traced_average(values)
        weight, *_, counts = values
        if not weight and not tf.reduce_any(counts > 0):
            return self.averages_from(values, range(len(self.sums)))
        return self.averages_from(values, present_in(counts))

    def reduced(self) -> list[Any]:
        """Return the sums of `variables` over replicas, on each replica.

        Call this outside of `strategy.run`.
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
            values: the result of `reduced`.
            indices: indices of the variables whose averages are returned.
        """
        weight, *sums, _ = values
        averages: list[tf.Tensor | None] = [None] * len(sums)
        for index in indices:
            averages[index] = divide(sums[index], weight)
        return averages

    def groups_beside(self, indices: Collection[int]) -> list[list[int]]:
        """Return groups of variables that have had gradients in the same parts so far.

        The groups, lists of indices, contain all variables except those at `indices`.
        """
        patterns = [*self._patterns, self._present_when_traced()]
        groups: dict[tuple[bool, ...], list[int]] = {}
        for index in range(len(self.sums)):
            if index not in indices:
                key = tuple(index in pattern for pattern in patterns)
                groups.setdefault(key, []).append(index)
        return list(groups.values())

    def reset(self) -> None:
        """Set all sums, weights and counts to 0, for the next update."""
        for variable in self.variables:
            variable.assign(tf.zeros(variable.shape, variable.dtype))

    def _waits(
        self, present: Sequence[tf.Tensor], uncertain: Sequence[tf.Tensor]
    ) -> list[Sequence[tf.Tensor]]:
        """Return, for each gradient, the tensors to compute before it is added.

        At the end of data of unknown length, a traced step of `fit` starts once more
        and fails when it reads the batch. A gradient that does not depend on the batch,
        such as that of a regularizer alone, must not be added then, so it waits for all
        other gradients. If each gradient waited for all others, all would be in memory
        at once. So a gradient that depends on the batch waits only for the gradients in
        `uncertain`: if a shape is wrong, nothing is added.

        Args:
            present: the gradients.
            uncertain: the gradients whose shapes are checked only at run time.
        """
        if not present or not tf.inside_function():
            return [()] * len(present)
        depends = depending_on_batch(present)
        if not any(depends):  # as in a branch, whose graph captures the batch
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
        """Check the gradients; make them dense, in the dtypes of the sums.

        Returns:
            The gradients, and the ones among them whose shapes are checked only at run
            time.
        """
        if len(gradients) != len(self.sums):
            rule = f"there must be {len(self.sums)} gradients, one per variable"
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
                received = f"shape {tuple(gradient.shape)} for variable {index}"
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
        """Record which variables have a gradient in a part."""
        left_out = sorted(pattern & self._left_out)
        if left_out:
            received = f"None for variable {left_out[0]} when the average was traced"
            raise ValueError(f"{ZERO}. Received: {received}")
        self._patterns.add(pattern)

    def _present_when_traced(self) -> frozenset[int]:
        """Return the indices of the variables that have a gradient during tracing."""
        with tf.init_scope():
            return frozenset(present_in(self.counts))

    def _traced_average(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
        everything = frozenset(range(len(self.sums)))
        indices = self._present_when_traced().union(*self._patterns) or everything
        self._left_out |= everything - indices

        weight, *_, counts = values
        # If nothing was added, missing gradients are allowed: the averages are zero.
        is_empty = tf.equal(weight, 0) & tf.reduce_all(counts <= 0)
        present = tf.gather(counts, sorted(indices)) > 0
        message = f"{ZERO}. Received: None in all parts of an update"
        has_all = tf.debugging.Assert(is_empty | tf.reduce_all(present), [message])
        with tf.control_dependencies([has_all]):
            values = [tf.identity(value) for value in values]
        return self.averages_from(values, sorted(indices))


def present_in(counts: Any) -> list[int]:
    """Return the indices of the positive `counts`, which are one per variable."""
    return [index for index, count in enumerate(counts.numpy()) if count > 0]


def _zeros(shape: tuple[int, ...], dtype: Any) -> keras.Variable:
    """Return a variable, with one copy per replica, for a sum of values of `dtype`.

    Half precision is summed in float32.
    """
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
