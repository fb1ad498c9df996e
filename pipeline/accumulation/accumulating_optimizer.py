"""An optimizer that takes one step for several gradients.

It is for `fit`, `train_on_batch` and loops of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from .gradient_accumulator import Gradient, GradientAccumulator
from .keras_internals import applying_sums


class AccumulatingOptimizer(keras.optimizers.Optimizer):
    """Applies the weighted mean of `factor` successive gradients by another optimizer.

    Between two steps a call of `apply` adds its gradients and changes no weight.
    Schedules, averages of weights, weight decay and clipping are the inner optimizer's
    and see updates alone; so does `iterations`. The sums are among `variables`: a model
    that is saved between two steps goes on from there. See `GradientAccumulator` for
    their memory.

    In `fit` the size of a batch is not known here, so that all count alike. That is
    exact where batches have one size, and `AccumulatingModel` is for where they have
    not. With `callbacks=[optimizer.flush_at_epoch_end()]` an epoch's last gradients are
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
        # Who rejects Keras' own accumulation by this attribute rejects this one, too.
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

        Call it in the scope of the strategy, if there is one.
        """
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
                depends on it.
            trainable_variables: all of them, in any order; those that this optimizer
                was built for by default.
            weight: how much this gradient counts, scalar: for the gradient of a mean
                over examples their number; all count alike by default.

        Raises:
            ValueError: they are not the variables that it was built for, or
                `GradientAccumulator.add` rejects them.
        """
        variables = None
        if trainable_variables is not None:
            variables = list(trainable_variables)
        if not self.built:
            self.build(variables or ())
        # The replicas' gradients add up to that of a call, so that their average is to
        # be taken as often.
        replicas = self.accumulator.strategy.num_replicas_in_sync
        if weight is None:
            weight = 1 / replicas
        self.accumulator.add(self._in_order(grads, variables), weight, times=replicas)
        self._merged(self._count)

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
        by_variable = {}
        for variable, gradient in zip(variables, grads, strict=True):
            by_variable[id(variable)] = gradient
        ids = [id(variable) for variable in self.updated_variables]
        if by_variable.keys() != set(ids):
            count = len(ids)
            rule = f"trainable_variables must be the {count} that the optimizer was"
            raise ValueError(f"{rule} built for. Received: {len(by_variable)}")
        return [by_variable[identity] for identity in ids]

    def _merged(self, function: Callable[[], None]) -> None:
        # Under a strategy, even of one replica, no condition may have a branch that
        # merges replicas, as a step does.
        if tf.distribute.has_strategy():
            tf.distribute.get_replica_context().merge_call(lambda _: function())
        else:
            function()

    def _count(self) -> None:
        self.parts.assign_add(1)
        tf.cond(self.parts.value >= self.factor, self._step, lambda: None)

    def _step(self) -> None:
        sums = self.accumulator.reduced()
        if tf.distribute.has_strategy():
            with applying_sums(self.inner):
                self.accumulator.strategy.run(self._apply, (sums,))
        else:
            self._apply(sums)
        self.accumulator.reset()
        self.parts.assign(0)

    def _apply(self, sums: Sequence[tf.Tensor]) -> None:
        self.inner.apply(self.accumulator.averages_from(sums), self.updated_variables)


# No decorator: the documentation is built without Keras, and would see no class.
keras.saving.register_keras_serializable("accumulation")(AccumulatingOptimizer)
