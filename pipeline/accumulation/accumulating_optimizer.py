"""An optimizer that takes one step for several gradients: for `fit`, `train_on_batch` and loops by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from .gradient_accumulator import Gradient, GradientAccumulator
from .keras_internals import applying_sums


class AccumulatingOptimizer(keras.optimizers.Optimizer):
    """Applies the weighted mean of `factor` successive gradients by one step of another optimizer.

    Between two steps a call of `apply` adds its gradients and changes no weight. Schedules, averages of weights, weight
    decay and clipping are the inner optimizer's and see updates alone; so does `iterations`. The sums are among
    `variables`: a model that is saved between two steps goes on from there. See `GradientAccumulator` for their memory.

    In `fit` the size of a batch is not known here, so that all count alike: exact where batches have one size, and
    `AccumulatingModel` is where they have not. With `callbacks=[optimizer.flush_at_epoch_end()]` an epoch's last
    gradients are applied although they are fewer. Put it first: other callbacks then see the weights after that step.

    Under `MirroredStrategy` the replicas' gradients, as Keras' losses make them, are summed once an update.

    Args:
        inner: any optimizer; if it is a `LossScaleOptimizer`, a part that is not finite skips the whole update.
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
            raise ValueError(
                f"factor must be an integer of at least 1. Received: {factor!r}"
            )
        if getattr(inner, "gradient_accumulation_steps", None):
            raise ValueError(
                f"inner must not accumulate itself. Received: {inner.name}"
            )
        self.inner, self.factor = inner, factor
        self.gradient_accumulation_steps = (
            factor  # where Keras' own accumulation is refused, this one is
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scale_factor" and "inner" in vars(
            self
        ):  # what a LossScaleOptimizer does to its inner one
            rule = "a LossScaleOptimizer must be inside, AccumulatingOptimizer(LossScaleOptimizer(…)), with"
            raise ValueError(
                f"{rule} compile(auto_scale_loss=False). Received: one around it"
            )
        super().__setattr__(name, value)

    def build(self, variables: Sequence[keras.Variable | tf.Variable]) -> None:
        """Make the sums, and the variables of the inner optimizer, for `variables`; in the scope of a strategy."""
        variables = list(variables)
        self.inner.build(variables)
        self.accumulator = GradientAccumulator(variables)
        # How many gradients the sums hold.
        options = {
            "dtype": "int64",
            "trainable": False,
            "aggregation": "only_first_replica",
        }
        self.parts = keras.Variable(
            keras.initializers.Zeros(), shape=(), name="parts", **options
        )
        self.of = variables
        self.built = True

    @property
    def variables(self) -> list[keras.Variable]:
        """Return the count of gradients, their weight and sums, and the variables of the inner optimizer."""
        own = [self.parts, *self.accumulator.variables] if self.built else []
        return [*own, *self.inner.variables]

    @property
    def inner_optimizer(self) -> keras.optimizers.Optimizer:
        """The one that has the averages of weights, which `keras.callbacks.SwapEMAWeights` asks by this name."""
        return getattr(self.inner, "inner_optimizer", self.inner)

    @property
    def iterations(self) -> Any:
        """The number of updates."""
        return self.inner.iterations

    @property
    def learning_rate(self) -> Any:
        """That of the inner optimizer."""
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
        """Add one gradient; with the last of `factor` ones take a step by their weighted mean.

        Args:
            grads: of each variable, dense or `tf.IndexedSlices`, None where nothing depends on it.
            trainable_variables: all of them, in any order; those that this optimizer was built for by default.
            weight: how much this gradient counts, scalar: of a mean over examples their number; all alike by default.

        Raises:
            ValueError: they are not the variables that it was built for, or `GradientAccumulator.add` refuses them.
        """
        variables = None if trainable_variables is None else list(trainable_variables)
        if not self.built:
            self.build(variables or ())
        # The replicas' gradients add up to that of a call, so that their average is to be taken as often.
        replicas = self.accumulator.strategy.num_replicas_in_sync
        weight = 1 / replicas if weight is None else weight
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
        """Take a step by the gradients that are left over, by their own weight; without any do nothing.

        Call it outside of `strategy.run`.
        """
        if not self.built:
            return
        rest = partial(tf.cond, self.parts.value > 0, self._step, lambda: None)
        self.accumulator.strategy.run(self._merged, (rest,))

    def flush_at_epoch_end(self) -> keras.callbacks.Callback:
        """Return a callback that flushes when an epoch of `fit` ends, before it is validated."""
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
        self, grads: Sequence[Gradient], variables: Iterable[Any] | None
    ) -> list[Gradient]:
        if variables is None:
            return list(grads)
        by_variable = {
            id(variable): grad for variable, grad in zip(variables, grads, strict=True)
        }
        if by_variable.keys() != {id(variable) for variable in self.of}:
            rule = f"trainable_variables must be the {len(self.of)} that the optimizer was built for"
            raise ValueError(f"{rule}. Received: {len(by_variable)}")
        return [by_variable[id(variable)] for variable in self.of]

    def _merged(self, function: Callable[[], None]) -> None:
        # Under a strategy, also of one replica, no condition may have a branch that merges replicas, as a step does.
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
        self.inner.apply(self.accumulator.of_sums(sums), self.of)


keras.saving.register_keras_serializable("accumulation")(AccumulatingOptimizer)
