"""An optimizer that takes one step for several gradients.

It is for `fit`, `train_on_batch` and loops of your own.
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
    key_of_variable,
    mask_of,
    step_of_fit,
)

NONE_AT_ALL = (
    "grads must have a gradient of at least one variable in each update. "
    "Received: None alone"
)

# The most sets of variables that may have their gradients in different parts of an
# update. A traced step has a branch for each combination of them: 2⁴ = 16.
MOST_SETS = 4


class AccumulatingOptimizer(keras.optimizers.Optimizer):
    """Applies the weighted mean of `factor` successive gradients by another optimizer.

    Between two steps a call of `apply` adds its gradients and changes no weight.
    Schedules, averages of weights, weight decay and clipping are the inner optimizer's
    and see updates alone; so does `iterations`. The sums are among `variables`: a model
    that is saved between two steps goes on from there. See `GradientAccumulator` for
    their memory.

    In `fit` the optimizer does not know the weight of a batch, so all batches count
    alike. That is exact where the loss is a mean and all batches have the same weight.
    The weight of a batch is its number of examples, with a mask the number of its
    elements that count, with the reduction `mean_with_sample_weight` the sum of its
    sample weights. A warning names a mask, such weights, or a loss that is a sum.
    `AccumulatingModel` is exact for all of them.

    With `callbacks=[optimizer.flush_at_epoch_end()]` an epoch's last gradients are
    applied although they are fewer. Put it first: other callbacks then see the weights
    after that step.

    Under `MirroredStrategy` the replicas' gradients, as Keras' losses make them, are
    summed once an update.

    Args:
        inner: any optimizer; if it is a `LossScaleOptimizer`, a part that is not finite
            skips the update.
        factor: gradients in an update, at least 1.
        name: of this optimizer.

    Raises:
        ValueError: the factor is not a positive integer, or `inner` accumulates, too.
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
            rule = "inner must not accumulate itself"
            raise ValueError(f"{rule}. Received: {inner.name}")
        self.inner = inner
        self.factor = factor
        self._has_warned = False
        # Code that rejects an optimizer with Keras' own accumulation looks at this
        # attribute, and has to reject this optimizer, too.
        self.gradient_accumulation_steps = factor

    def __setattr__(self, name: str, value: Any) -> None:
        # A LossScaleOptimizer sets its inner optimizer's factor.
        if name == "loss_scale_factor" and "inner" in vars(self):
            rule = (
                "a LossScaleOptimizer must be inside, "
                "AccumulatingOptimizer(LossScaleOptimizer(…)), "
                "with compile(auto_scale_loss=False)"
            )
            raise ValueError(f"{rule}. Received: one around it")
        super().__setattr__(name, value)

    def build(self, variables: Sequence[keras.Variable | tf.Variable]) -> None:
        """Make the sums and the variables of the inner optimizer for `variables`.

        Call it in the scope of the strategy, if there is one. A second call does
        nothing.
        """
        if self.built:
            return
        variables = list(variables)
        self.inner.build(variables)
        self.accumulator = GradientAccumulator(variables)
        # How many gradients the sums hold.
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
        """The count of gradients, their weight and sums, and the inner variables."""
        if not self.built:
            return [*self.inner.variables]
        return [self.parts, *self.accumulator.variables, *self.inner.variables]

    @property
    def inner_optimizer(self) -> keras.optimizers.Optimizer:
        """The optimizer that has the averages of weights.

        `keras.callbacks.SwapEMAWeights` looks for it by this name.
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
        """Add one gradient; with the last of `factor` ones take a step by their mean.

        Args:
            grads: of each variable, dense or `tf.IndexedSlices`, None where nothing
                depends on it. An update leaves a variable as it is that had no gradient
                in any part. Without any grads nothing is done.
            trainable_variables: those that this optimizer was built for, or some of
                them, in any order; the others have no gradient. All of them by default.
            weight: how much this gradient counts, scalar: for the gradient of a mean
                over examples their number; all count alike by default.

        Raises:
            ValueError: there are others than it was built for, or one twice; no
                variable had a gradient in the whole update; or
                `GradientAccumulator.add` rejects the gradients. Nothing has changed
                then.
            tf.errors.InvalidArgumentError: the same in a traced function, where it is
                known only as it runs.
        """
        if not len(grads):
            return
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if not self.built:
            if trainable_variables is None:
                rule = "trainable_variables must be given before the optimizer is built"
                raise ValueError(f"{rule}. Received: None")
            self.build(trainable_variables)
        gradients = self._in_order(grads, trainable_variables)
        present = [i for i, each in enumerate(gradients) if each is not None]

        # Keras divides each replica's loss by the number of replicas R, so a gradient
        # times R is that of the mean over the replica's share. Without weights all
        # shares count alike, and the weights of one call add up to 1.
        replicas = self.accumulator.strategy.num_replicas_in_sync
        if weight is None:
            self._warn_of_weights()
            weight = 1 / replicas
        with tf.control_dependencies(self._checks_before(present)):
            self.accumulator.add(gradients, weight, times=replicas)
            # The count of parts waits for the batch as the sums do: see `add`.
            with tf.control_dependencies([gradients[index] for index in present]):
                self._merged(partial(self._count, present))

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Gradient, Any]], weight: Any = None
    ) -> Any:
        """Call `apply` with pairs; return `iterations`."""
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, variables, weight)
        return self.iterations

    def flush(self) -> None:
        """Take a step by the gradients that are left over, by their own weight.

        Without any it does nothing. Call it outside of `strategy.run`.
        """
        if not self.built:
            return
        has_gradients = self.parts.value > 0

        def step_if_any() -> None:
            tf.cond(has_gradients, self._step, lambda: None)

        self.accumulator.strategy.run(self._merged, (step_if_any,))

    def flush_at_epoch_end(self) -> keras.callbacks.Callback:
        """Return a callback that flushes when an epoch of `fit` ends.

        It does so before the epoch is validated.
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
        """Let the inner optimizer set its averages of weights."""
        self.inner.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        """Return what `from_config` takes."""
        inner = keras.saving.serialize_keras_object(self.inner)
        return {"inner": inner, "factor": self.factor, "name": self.name}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> AccumulatingOptimizer:
        """Return an optimizer by its config."""
        inner = keras.saving.deserialize_keras_object(config["inner"], custom_objects)
        return cls(**{**config, "inner": inner})

    def _in_order(
        self, grads: Sequence[Gradient], variables: Sequence[Any] | None
    ) -> list[Gradient]:
        """Return the gradients in the order of the variables that it was built for."""
        if variables is None:
            return list(grads)
        if len(variables) != len(grads):
            rule = "grads must be as many as trainable_variables"
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
                    "built for, or some of them, each once"
                )
                raise ValueError(f"{rule}. Received: {variable.name}")
            gradients[indices.pop(key)] = gradient
        return gradients

    def _warn_of_weights(self) -> None:
        """Warn once where `fit` has batches whose weights may differ."""
        if self._has_warned or self.factor == 1:
            return
        step = step_of_fit()
        if step is None:
            return
        reductions = {loss.loss.reduction for loss in compiled_losses(step.model)}
        masks = [mask_of(leaf) for leaf in tf.nest.flatten(step.outputs)]
        if "sum" in reductions:
            reason = "a loss is a sum, of which a mean is taken"
        elif any(mask is not None for mask in masks):
            reason = "an output has a mask, by which they may weigh differently"
        elif step.sample_weight is not None and "mean_with_sample_weight" in reductions:
            reason = "a loss divides by sample weights, which may differ"
        else:
            return
        self._has_warned = True
        text = (
            f"{self.name} counts all batches of fit alike, and {reason}: the updates "
            "are not those of large batches. AccumulatingModel's are"
        )
        warnings.warn(text, stacklevel=4)

    def _merged(self, function: Callable[[], None]) -> None:
        # A step needs all replicas. TensorFlow allows no `merge_call` in a branch of a
        # condition, so the replicas are merged before the condition is made. That holds
        # under a strategy of one replica, too.
        if tf.distribute.has_strategy():
            tf.distribute.get_replica_context().merge_call(lambda _: function())
        else:
            function()

    def _checks_before(self, present: Sequence[int]) -> list[tf.Operation]:
        """Reject a part that ends an update in which no variable had a gradient.

        Args:
            present: indices of the variables that have a gradient in this part.

        Returns:
            What must run before anything is changed.
        """
        if present:
            return []
        ends = self.parts.value + 1 >= self.factor
        is_empty = tf.reduce_all(self.accumulator.counts.value <= 0)
        if tf.inside_function():
            return [tf.debugging.Assert(~(ends & is_empty), [NONE_AT_ALL])]
        if ends and is_empty:
            raise ValueError(NONE_AT_ALL)
        return []

    def _count(self, present: Sequence[int]) -> None:
        self.parts.assign_add(1)
        is_last = self.parts.value >= self.factor
        tf.cond(is_last, partial(self._step, present), lambda: None)

    def _step(self, present: Sequence[int] = ()) -> None:
        """Take a step by the sums, and begin the next update.

        Args:
            present: indices of variables that had a gradient in the last part. Which
                others had one in an earlier part is known only as this runs.
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
        """Apply the averages of those variables that had a gradient, in a trace.

        Keras has to know these variables while it traces, but they are known only as
        the step runs. So a step is traced for each case, and one of them runs.
        Variables that have had their gradients in the same parts until now make one
        set, and a case is which of the sets have gradients.
        """
        groups = self.accumulator.groups_beside(present)
        if not groups:
            self._apply_in_replicas(sums, present)
            return
        if len(groups) > MOST_SETS:
            received = f"{len(groups)} sets of variables that had theirs apart"
            raise ValueError(f"{ZERO}. Received: {received}")

        case = tf.constant(0)
        is_alike = tf.constant(True)
        for index, group in enumerate(groups):
            has_gradient = tf.gather(counts, group) > 0
            is_alike &= tf.reduce_all(has_gradient) | ~tf.reduce_any(has_gradient)
            # Bit `index` of the case is whether that set has gradients.
            case += tf.cast(tf.reduce_any(has_gradient), tf.int32) * 2**index

        steps = []
        for number in range(2 ** len(groups)):
            indices = list(present)
            for index, group in enumerate(groups):
                if number >> index & 1:
                    indices += group
            steps.append(partial(self._apply_in_replicas, sums, indices))
        message = f"{ZERO}. Received: None for some variables of a traced step"
        check = tf.debugging.Assert(is_alike, [message])
        with tf.control_dependencies([check]):
            tf.switch_case(tf.identity(case), steps)

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


# No decorator: the documentation is built without Keras, and would see no class.
keras.saving.register_keras_serializable("accumulation")(AccumulatingOptimizer)
