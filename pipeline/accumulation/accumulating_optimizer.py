"""An optimizer that applies several successive gradients in one step.

Use it in `fit`, in `train_on_batch` and in your own loops.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from .batch import of_first_replica
from .gradient_accumulator import ZERO, Gradient, GradientAccumulator, present_in
from .keras_internals import (
    applying_sums,
    compiled_losses,
    depending_on_batch,
    key_of_variable,
    mask_of,
    step_of_fit,
)

NONE_AT_ALL = (
    "grads must have a gradient for at least one variable in each update. Received: "
    "only None"
)

# Maximum number of sets of variables that get their gradients in different calls of
# `apply`. A traced step has one branch per combination of sets: 2⁴ = 16.
MOST_SETS = 4


class AccumulatingOptimizer(keras.optimizers.Optimizer):
    """Applies the weighted mean of `factor` gradients with another optimizer.

    Each call of `apply` adds its gradients, which are a part of the update, to sums,
    and every `factor`-th call also takes a step. The other calls change no weight.
    Schedules, weight averaging, weight decay and clipping are left to the inner
    optimizer, which acts once per update; `iterations` counts updates. The sums are
    among `variables`, so a model that is saved between two steps resumes from there.
    For the memory of the sums, see `GradientAccumulator`.

    In `fit`, the optimizer does not receive the weight of a batch, so all batches count
    alike. The result is exact if the loss is a mean and all batches have the same
    weight. The weight of a batch is its number of examples; with a mask, its number of
    unmasked elements; with the reduction `mean_with_sample_weight`, the sum of its
    sample weights. The optimizer warns once about a mask, about sample weights with
    that reduction, and about a loss that is a sum. `AccumulatingModel` is exact for all
    three.

    With `callbacks=[optimizer.flush_at_epoch_end()]`, the last gradients of an epoch
    are applied even if they are fewer than `factor`. Put this callback first, so that
    other callbacks see the weights after that step.

    Under `MirroredStrategy`, the gradients are summed over replicas once per update.
    They must come from Keras' losses, which divide by the number of replicas.

    Args:
        inner: any optimizer. If it is a `LossScaleOptimizer`, it skips the whole update
            if one gradient is not finite.
        factor: number of gradients per update, at least 1.
        name: name of this optimizer.

    Raises:
        ValueError: the factor is not a positive integer, or `inner` accumulates
            gradients itself.
    """

    built: bool

    def __init__(
        self, inner: keras.optimizers.Optimizer, factor: int, name: str | None = None
    ):
        super().__init__(learning_rate=0.0, name=name)
        inner = keras.optimizers.get(inner)
        if not isinstance(factor, int) or isinstance(factor, bool) or factor < 1:
            rule = "factor must be an integer of at least 1"
            raise ValueError(f"{rule}. Received: {factor!r}")
        if getattr(inner, "gradient_accumulation_steps", None):
            rule = "inner must not accumulate gradients itself"
            raise ValueError(f"{rule}. Received: {inner.name}")
        self.inner = inner
        self.factor = factor
        self._has_warned = False
        # Set the attribute of Keras' own accumulation, so that code which rejects an
        # accumulating optimizer rejects this one as well.
        self.gradient_accumulation_steps = factor

    def __setattr__(self, name: str, value: Any) -> None:
        # Reject a LossScaleOptimizer around this optimizer: it sets
        # `loss_scale_factor`.
        if name == "loss_scale_factor" and "inner" in vars(self):
            rule = (
                "a LossScaleOptimizer must be inside this optimizer: "
                "AccumulatingOptimizer(LossScaleOptimizer(…)), with "
                "compile(auto_scale_loss=False)"
            )
            raise ValueError(f"{rule}. Received: one around it")
        super().__setattr__(name, value)

    def build(self, variables: Sequence[keras.Variable | tf.Variable]) -> None:
        """Create the sums and the inner optimizer's variables for `variables`.

        Call this in the scope of the strategy, if there is one. A second call does
        nothing.
        """
        if self.built:
            return
        variables = list(variables)
        self.inner.build(variables)
        self.accumulator = GradientAccumulator(variables)
        # The number of parts, calls of `apply`, since the last step.
        self.parts = keras.Variable(
            keras.initializers.Zeros(),
            shape=(),
            name="parts",
            dtype="int64",
            trainable=False,
            aggregation="only_first_replica",
        )
        self.updated_variables = variables
        self.built = True

    @property
    def variables(self) -> list[keras.Variable]:
        """The state of the sums, and the variables of the inner optimizer."""
        if not self.built:
            return [*self.inner.variables]
        return [self.parts, *self.accumulator.variables, *self.inner.variables]

    @property
    def inner_optimizer(self) -> keras.optimizers.Optimizer:
        """The optimizer inside a `LossScaleOptimizer`, or else `inner` itself.

        This optimizer may average the weights:
        `keras.callbacks.SwapEMAWeights` reads this attribute.
        """
        return getattr(self.inner, "inner_optimizer", self.inner)

    @property
    def iterations(self) -> Any:
        """The number of updates."""
        return self.inner.iterations

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the inner optimizer."""
        return self.inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner.learning_rate = value

    def apply(
        self,
        grads: Sequence[Gradient],
        trainable_variables: Iterable[Any] | None = None,
        weight: Any = None,
    ) -> None:
        """Add a gradient per variable; at every `factor`-th call, apply the means.

        Args:
            grads: a gradient per variable: a dense tensor, `tf.IndexedSlices`, or None
                if the loss does not depend on the variable. A variable that has no
                gradient in any part of an update is not changed. If `grads` is empty,
                the call does nothing.
            trainable_variables: the variables of the gradients: all or some of the
                variables that this optimizer was built for, in any order. Variables
                that are left out have no gradient. By default, all variables in their
                order.
            weight: weight of this gradient, scalar. For the gradient of a mean over
                examples, it is the number of examples. By default, all gradients count
                alike.

        Raises:
            ValueError: the variables of an optimizer that is not built are not given,
                the optimizer was not built for a variable, a variable appears twice,
                there is not one gradient per variable, no variable had a gradient in
                the whole update,
                `GradientAccumulator.add` rejects the gradients, or, in a traced
                function, more than `MOST_SETS` sets of variables had their gradients in
                different parts. Nothing has changed then.
            tf.errors.InvalidArgumentError: one of these errors in a traced function, if
                it is known only at run time; or only some variables of a set have a
                gradient in this update, because they got their gradients in different
                parts only after the function was traced. Nothing has changed then.
        """
        if not len(grads):
            return
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if not self.built:
            if trainable_variables is None:
                rule = "trainable_variables must be given if the optimizer is not built"
                raise ValueError(f"{rule}. Received: None")
            self.build(trainable_variables)
        gradients = self._in_order(grads, trainable_variables)
        present = [i for i, each in enumerate(gradients) if each is not None]

        # Multiply the gradients by the number of replicas R, by which Keras divides
        # each replica's loss: this gives the gradient of the mean over the replica's
        # share. Without weights, all shares count alike, and the weights of one call
        # add up to 1.
        replicas = self.accumulator.strategy.num_replicas_in_sync
        if weight is None:
            self._warn_of_weights()
            weight = 1 / replicas
        with tf.control_dependencies(self._checks_before(gradients, present)):
            self.accumulator.add(gradients, weight, times=replicas)
            # Count the part only after the batch was read, as for the sums: see
            # `GradientAccumulator._waits`.
            with tf.control_dependencies([gradients[index] for index in present]):
                self._merged(partial(self._count, present))

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Gradient, Any]], weight: Any = None
    ) -> Any:
        """Call `apply` with (gradient, variable) pairs; return `iterations`."""
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, variables, weight)
        return self.iterations

    def flush(self) -> None:
        """Apply the mean of the gradients that were added since the last step.

        If there are none, the call does nothing. Call this outside of `strategy.run`.
        """
        if not self.built:
            return
        has_gradients = self.parts.value > 0

        def step_if_any() -> None:
            tf.cond(has_gradients, self._step, lambda: None)

        self.accumulator.strategy.run(self._merged, (step_if_any,))

    def flush_at_epoch_end(self) -> keras.callbacks.Callback:
        """Return a callback that calls `flush` at the end of each epoch of `fit`.

        The call comes before the validation of the epoch.
        """
        return keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: self.flush(), on_test_begin=lambda *_: self.flush()
        )

    def exclude_from_weight_decay(self, *arguments: Any, **options: Any) -> None:
        """Exclude variables from the inner optimizer's weight decay; as in Keras."""
        self.inner_optimizer.exclude_from_weight_decay(*arguments, **options)

    def scale_loss(self, loss: Any) -> Any:
        """Scale a loss as the inner optimizer does."""
        return self.inner.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        """Have the inner optimizer set the weights to their averages, if it has any."""
        self.inner.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        """Return the config for `from_config`."""
        inner = keras.saving.serialize_keras_object(self.inner)
        return {"inner": inner, "factor": self.factor, "name": self.name}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> AccumulatingOptimizer:
        """Return the optimizer that a config describes."""
        inner = keras.saving.deserialize_keras_object(config["inner"], custom_objects)
        return cls(**{**config, "inner": inner})

    def _in_order(
        self, grads: Sequence[Gradient], variables: Sequence[Any] | None
    ) -> list[Gradient]:
        """Return the gradients in the order of `updated_variables`."""
        if variables is None:
            return list(grads)
        if len(variables) != len(grads):
            rule = "grads must have as many entries as trainable_variables"
            raise ValueError(f"{rule}. Received: {len(grads)} for {len(variables)}")
        indices: dict[Any, int] = {}
        for index, variable in enumerate(self.updated_variables):
            indices[key_of_variable(self, variable)] = index

        gradients: list[Gradient] = [None] * len(self.updated_variables)
        for variable, gradient in zip(variables, grads, strict=True):
            key = key_of_variable(self, variable)
            if key not in indices:
                count = len(self.updated_variables)
                rule = (
                    f"trainable_variables must be the {count} that the optimizer was "
                    "built for, or some of them, each only once"
                )
                raise ValueError(f"{rule}. Received: {variable.name}")
            gradients[indices.pop(key)] = gradient
        return gradients

    def _warn_of_weights(self) -> None:
        """Warn once if the batches of `fit` may differ in weight."""
        if self._has_warned or self.factor == 1:
            return
        step = step_of_fit()
        if step is None:
            return
        reductions = {loss.loss.reduction for loss in compiled_losses(step.model)}
        masks = [mask_of(leaf) for leaf in tf.nest.flatten(step.outputs)]
        if "sum" in reductions:
            reason = "a loss is a sum, whereas batches are averaged"
        elif any(mask is not None for mask in masks):
            reason = "an output has a mask, so the weights of batches may differ"
        elif step.sample_weight is not None and "mean_with_sample_weight" in reductions:
            reason = (
                "a loss divides by a sum of sample weights, which may differ "
                "between batches"
            )
        else:
            return
        self._has_warned = True
        text = (
            f"{self.name} gives all batches of fit the same weight, but {reason}. So "
            "its updates differ from those of large batches; the updates of "
            "AccumulatingModel do not"
        )
        warnings.warn(text, stacklevel=4)

    def _merged(self, function: Callable[[], None]) -> None:
        # Call `function` once for all replicas. TensorFlow allows no `merge_call` in a
        # branch of a condition, even with a single replica, so merge the replicas
        # before `function` creates a condition.
        if tf.distribute.has_strategy():
            tf.distribute.get_replica_context().merge_call(lambda _: function())
        else:
            function()

    def _checks_before(
        self, gradients: Sequence[Gradient], present: Sequence[int]
    ) -> list[tf.Operation]:
        """Reject the last part of an update that cannot be applied.

        This is so if no variable had a gradient in any part and, in a traced function,
        also if only some variables of a set had one: see `_apply_one_of`.

        Args:
            gradients: the gradients of this part, in the order of `updated_variables`.
            present: indices of the variables that have a gradient in this part.

        Returns:
            The operations that must run before any variable changes.
        """
        counts = self.accumulator.counts.value
        if not tf.inside_function():
            ends = self.parts.value + 1 >= self.factor
            if not present and ends and tf.reduce_all(counts <= 0):
                raise ValueError(NONE_AT_ALL)
            return []

        sets = self._sets_beside(present)
        if present and not sets:
            return []
        # At the end of the data, the function starts once more and fails when it reads
        # the batch: see `GradientAccumulator._waits`. No check must fail before that.
        with tf.control_dependencies(_of_batch([gradients[i] for i in present])):
            ends = self.parts.value + 1 >= self.factor
            checks = [_check_sets(counts, sets, ~ends)]
            if not present:
                has_any = tf.reduce_any(counts > 0)
                checks.append(tf.debugging.Assert(~ends | has_any, [NONE_AT_ALL]))
        return checks

    def _count(self, present: Sequence[int]) -> None:
        self.parts.assign_add(1)
        is_last = self.parts.value >= self.factor
        tf.cond(is_last, partial(self._step, present), lambda: None)

    def _step(self, present: Sequence[int] = ()) -> None:
        """Apply the averages of the gradients, and reset the sums.

        Args:
            present: indices of the variables that had a gradient in the last part. In a
                traced function, it is known only at run time which other variables had
                a gradient in an earlier part.
        """
        sums = self.accumulator.reduced()
        *_, counts = of_first_replica(self.accumulator.strategy, sums)
        if not tf.inside_function():
            self._apply_in_replicas(sums, present_in(counts))
        else:
            self._apply_one_of(sums, counts, present)
        self.accumulator.reset()
        self.parts.assign(0)

    def _apply_one_of(
        self, sums: Sequence[Any], counts: tf.Tensor, present: Sequence[int]
    ) -> None:
        """Apply the averages of the variables that had a gradient, in a traced step.

        Keras needs to know these variables during tracing, but they become known only
        at run time. So one step is traced per case, and one of these steps runs.
        Variables that have so far had their gradients in the same parts form a set, and
        a case is a combination of sets that have gradients.
        """
        groups = self._sets_beside(present)
        if not groups:
            self._apply_in_replicas(sums, present)
            return

        case = tf.constant(0)
        for index, group in enumerate(groups):
            has_gradient = tf.gather(counts, group) > 0
            # Bit `index` of the case tells whether this set has gradients.
            case += tf.cast(tf.reduce_any(has_gradient), tf.int32) * 2**index

        steps = []
        for number in range(2 ** len(groups)):
            indices = list(present)
            for index, group in enumerate(groups):
                if number >> index & 1:
                    indices += group
            steps.append(partial(self._apply_in_replicas, sums, indices))
        # `apply` has checked the sets on each replica, but `flush` has not.
        with tf.control_dependencies([_check_sets(counts, groups)]):
            tf.switch_case(tf.identity(case), steps)

    def _sets_beside(self, present: Sequence[int]) -> list[list[int]]:
        """Return the sets of variables without the ones at `present`.

        Raises:
            ValueError: there are more than `MOST_SETS`.
        """
        sets = self.accumulator.groups_beside(present)
        if len(sets) > MOST_SETS:
            received = (
                f"{len(sets)} sets of variables that had gradients in different parts"
            )
            raise ValueError(f"{ZERO}. Received: {received}")
        return sets

    def _apply_in_replicas(self, sums: Sequence[Any], indices: Sequence[int]) -> None:
        """Apply the averages of the variables at `indices`, on each replica."""
        if not indices:
            if not tf.inside_function():
                raise ValueError(NONE_AT_ALL)
            tf.debugging.Assert(False, [NONE_AT_ALL])
            return
        apply = partial(self._apply, indices=indices)
        if tf.distribute.has_strategy():
            with applying_sums(self.inner):
                self.accumulator.strategy.run(apply, (sums,))
        else:
            apply(sums)

    def _apply(self, sums: Sequence[tf.Tensor], indices: Sequence[int]) -> None:
        averages = self.accumulator.averages_from(sums, indices)
        self.inner.apply(averages, self.updated_variables)


def _check_sets(
    counts: tf.Tensor, sets: Sequence[Sequence[int]], unless: Any = False
) -> tf.Operation:
    """Assert that all variables of a set have gradients, or none of them.

    Args:
        counts: the number of gradients of each variable.
        sets: indices of the variables of each set.
        unless: a condition under which nothing is asserted.
    """
    is_alike = tf.constant(True)
    for indices in sets:
        has_gradient = tf.gather(counts, indices) > 0
        is_alike &= tf.reduce_all(has_gradient) | ~tf.reduce_any(has_gradient)
    message = f"{ZERO}. Received: None for some variables of a traced step"
    return tf.debugging.Assert(is_alike | unless, [message])


def _of_batch(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Return one gradient that depends on the batch, or all if none is known to do so.

    The last such gradient is returned, because the backward pass computes it first.
    Waiting for a gradient that is computed later would keep all gradients before it in
    memory.
    """
    depends = depending_on_batch(gradients)
    for gradient, depends_on_batch in zip(gradients[::-1], depends[::-1], strict=True):
        if depends_on_batch:
            return [gradient]
    return list(gradients)


# Do not use this as a decorator: the documentation is built with a mock of Keras, which
# would replace the class.
keras.saving.register_keras_serializable("accumulation")(AccumulatingOptimizer)
