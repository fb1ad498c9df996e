"""`compile` and `fit` with the update: a `keras.Model` around another one, fed with effective batches.

Keras hands each effective batch to `train_step`, outside of any replica, where an `Update` takes it. The dataset is not
distributed: TensorFlow would copy whole shares to the devices, and a plain `fit` raises where the shares of the first
batch differ in size. Each replica takes its share of a batch that stays on the host, as in any loop over `Update`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from numbers import Integral
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from .batch import Nest, parts_of, share_of
from .evaluation import Evaluation
from .forward_effects import unsupported
from .gradient_sums import GradientSums
from .keras_internals import compiled_losses, compiled_metrics, loss_mean, replaced
from .objective import Objective, by_name
from .update import Update


class AccumulatingModel(keras.Model):
    """A `keras.Model` around any other one that trains on effective batches in micro-batches.

    `compile`, `fit`, `evaluate`, `predict`, callbacks and `save` work as in Keras. One batch of `fit` is one effective
    batch and one step of the optimizer: weights and history are those of a plain `fit` on the same batches. `evaluate`
    uses micro-batches too; `predict` takes whole batches. Under a strategy each replica takes its share of a batch.

    Args:
        inner: any model, with no `train_step` or `compute_loss` of its own; it stays plain, to be saved or used alone.
        micro_batch_size: examples per forward+backward on one replica.
        same_noise: make the noise of Keras' dropout and noise layers independent of the micro-batch size: see `Update`.
        loss_over: "effective_batch" for losses of several examples at once: see `Update`.
        name, dtype, trainable: as of any model.

    Raises:
        ValueError: `inner` cannot be trained this way, or the micro-batch size is not a positive integer.
    """

    inner: keras.Model
    micro_batch_size: int
    same_noise: bool | str
    loss_over: str
    built: bool

    def __init__(
        self,
        inner: keras.Model,
        micro_batch_size: int,
        same_noise: bool | str = False,
        loss_over: str = "example",
        **arguments: Any,
    ):
        if not isinstance(inner, keras.Model):
            raise ValueError(
                f"inner must be a keras.Model. Received: {type(inner).__name__}"
            )
        for rule, received in unsupported(inner, as_by_fit=True):
            raise ValueError(f"inner {rule}. Received: {received}")
        if (
            not isinstance(micro_batch_size, Integral)
            or isinstance(micro_batch_size, bool)
            or micro_batch_size < 1
        ):
            raise ValueError(
                f"micro_batch_size must be a whole number of at least 1. Received: {micro_batch_size!r}"
            )
        with (
            inner.distribute_strategy.scope()
        ):  # that of `inner`, wherever this is called
            super().__init__(autocast=False, **arguments)  # `inner` casts its inputs
        if not all(
            map(
                self._strategy.extended.variable_created_in_scope,
                (v.value for v in inner.variables),
            )
        ):
            raise ValueError(
                "inner must be made in the scope of the strategy that it is to be trained under"
            )
        self.inner = inner
        self.micro_batch_size, self.same_noise, self.loss_over = (
            int(micro_batch_size),
            same_noise,
            loss_over,
        )
        self.built = inner.built

    def call(self, inputs: Nest, training: bool | None = None) -> Nest:
        return self.inner(inputs, training=training)

    @property
    def output_names(self) -> list[str]:
        """Those of `inner`: `compile` and the history go by them."""
        return self.inner.output_names

    def save_weights(self, *arguments: Any, **options: Any) -> None:
        """Save the weights of `inner`, so that the plain model loads them, and of the optimizer; as in Keras."""
        with self._lent():
            self.inner.save_weights(*arguments, **options)

    def load_weights(self, *arguments: Any, **options: Any) -> None:
        with self._lent():
            self.inner.load_weights(*arguments, **options)

    def _lent(self) -> AbstractContextManager[None]:
        return replaced([(self.inner, "optimizer", getattr(self, "optimizer", None))])

    def get_config(self) -> dict[str, Any]:
        inner = keras.saving.serialize_keras_object(self.inner)
        own = {
            name: getattr(self, name)
            for name in ("micro_batch_size", "same_noise", "loss_over")
        }
        return {**super().get_config(), "inner": inner, **own}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> AccumulatingModel:
        inner = keras.saving.deserialize_keras_object(
            config["inner"], custom_objects=custom_objects
        )
        return cls(**{**config, "inner": inner})

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: bool | str = "auto",
        auto_scale_loss: bool = True,
    ) -> None:
        """Set what is minimised and measured, as `keras.Model.compile` does.

        `jit_compile` compiles each forward+backward and each evaluation with XLA; "auto" where `fit` would.

        Raises:
            ValueError: the optimizer has `gradient_accumulation_steps`, or `run_eagerly` is true.
        """
        if run_eagerly:
            rule = "run_eagerly must be False: micro-steps are traced. Compile and fit `inner` to debug it"
            raise ValueError(f"{rule}. Received: True")
        for accumulating in (optimizer, getattr(optimizer, "inner_optimizer", None)):
            if steps := getattr(accumulating, "gradient_accumulation_steps", None):
                rule = "the optimizer must not accumulate a second time: leave gradient_accumulation_steps out"
                raise ValueError(f"{rule}. Received: {steps}")
        self._micro_steps_by_xla = jit_compile
        self._objective: Objective | None = None
        self._update: Update | None = None
        self._evaluation: Evaluation | None = None
        with self._strategy.scope():
            goal = loss, loss_weights, metrics, weighted_metrics
            options = {
                "steps_per_execution": steps_per_execution,
                "auto_scale_loss": auto_scale_loss,
            }
            super().compile(
                optimizer, *goal, jit_compile=False, **options
            )  # no XLA around the micro-steps

    def get_compile_config(self) -> dict[str, Any]:
        config = super().get_compile_config()
        return config and {**config, "jit_compile": self._micro_steps_by_xla}

    def compile_from_config(self, config: dict[str, Any]) -> None:
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            self.optimizer.build(
                self.trainable_variables
            )  # so that its state can be loaded

    @property
    def _strategy(self) -> tf.distribute.Strategy:
        return super().distribute_strategy

    @property
    def distribute_strategy(self) -> _Undistributed:
        """The strategy as Keras' loops see it: batches stay whole."""
        return _Undistributed(self._strategy)

    def train_step(self, data: Nest) -> dict[str, tf.Tensor]:
        """Apply the gradient of one effective batch once; return the running means of the epoch."""
        if tf.distribute.has_strategy():  # Keras would apply as inside of a replica
            raise ValueError(
                "fit must be called outside of the strategy's scope; the model is made inside of it"
            )
        update = self._update or self._made_update(self._compiled_objective(data))
        sums = update.sums(data)
        update.apply(sums.gradients(), sums)
        return self._means(sums)

    def _made_update(self, objective: Objective) -> Update:
        """Make the update and its variables in a function of its own: one that makes variables is traced twice."""
        parts = self.inner, objective, self.optimizer, self.micro_batch_size
        by: dict[str, Any] = {
            "same_noise": self.same_noise,
            "jit_compile": self._micro_steps_by_xla,
        }
        made: list[Update] = []

        def make() -> None:
            with tf.init_scope():  # variables are made outside of what is traced
                if (
                    not self.optimizer.built
                ):  # a second `build` of a loss scale resets it
                    self.optimizer.build(self.inner.trainable_variables)
                if not made:
                    made.append(Update(*parts, strategy=self._strategy, **by))

        tf.function(make, autograph=False).get_concrete_function()
        (self._update,) = made
        return self._update

    def test_step(self, data: Nest) -> dict[str, tf.Tensor]:
        """Evaluate one batch in micro-batches; return the running means so far."""
        if self._evaluation is None:
            parts = self.inner, self._compiled_objective(data), self.micro_batch_size
            self._evaluation = Evaluation(
                *parts, strategy=self._strategy, jit_compile=self._micro_steps_by_xla
            )
        return self._means(self._evaluation(data))

    def predict_step(self, data: Nest) -> Nest:
        """Return the outputs for one batch, each replica's for its share."""
        _check_whole(data)
        return self._strategy.run(lambda: self.inner.predict_step(share_of(data)[0]))

    def _means(self, sums: GradientSums) -> dict[str, tf.Tensor]:
        loss_mean(self).update_state(sums.mean_loss(), sums.examples)
        for key, value in sums.output_losses().items():
            self._output_means[key].update_state(value, sums.examples)
        return self.get_metrics_result()

    def _compiled_objective(self, data: Nest) -> Objective:
        """Return what `compile` makes of its arguments, which Keras does at the first batch; nothing is computed."""
        if self._objective is None:
            _check_whole(data)
            x, y, sample_weight = parts_of(data)

            def see() -> Nest:
                outputs = self.inner(x, training=False)
                self.compute_loss(x, y, outputs, sample_weight, training=False)
                self.compute_metrics(x, y, outputs, sample_weight)
                return outputs

            outputs = (
                tf.function(see, autograph=False)
                .get_concrete_function()
                .structured_outputs
            )
            self._objective, means = _objective(self, outputs)
            self._output_means = MappingProxyType(
                means
            )  # in a dict Keras would add them to its metrics once more
            self.built = True
        return self._objective


# No decorator: the documentation is built without Keras, and would see no class.
keras.saving.register_keras_serializable("accumulation")(AccumulatingModel)


class _Undistributed:
    """A strategy that distributes no dataset and runs a step unchanged: the steps above distribute themselves."""

    def __init__(self, strategy: tf.distribute.Strategy):
        self._strategy = strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def experimental_distribute_dataset(
        self, dataset: tf.data.Dataset
    ) -> tf.data.Dataset:
        return dataset

    def run(self, step: Callable[..., Any], args: Sequence[Any]) -> Any:
        return step(*args)


def _objective(
    model: AccumulatingModel, outputs: Nest
) -> tuple[Objective, dict[str, keras.metrics.Mean]]:
    """Return what a compiled model minimises and measures, and the mean of each `<output>_loss` over an epoch."""
    names = list(by_name(model.inner, outputs))
    of_path = dict(
        zip(
            (path for path, _ in keras.tree.flatten_with_path(outputs)),
            names,
            strict=True,
        )
    )
    losses, scales, means = (
        dict[str, Any](),
        dict[str, float | None](),
        dict[str, Any](),
    )
    for path, loss, scale, mean in compiled_losses(model):
        # Where the losses of a list of outputs are in a dict, the path is the name.
        name = (
            names[0] if len(names) == 1 else of_path.get(path, "/".join(map(str, path)))
        )
        if name in losses:
            raise ValueError(
                f"loss must have one entry for an output. Received a second one: {loss.name}"
            )
        if type(loss).__call__ is not keras.losses.Loss.__call__:
            rule = "loss must compute in `call`, one value per example: its __call__ is not called"
            raise ValueError(f"{rule}. Received: {loss.name}")
        losses[name], scales[name], means[f"{name}_loss"] = loss, scale, mean
    metrics, weighted_metrics = compiled_metrics(model, names)
    every = {name: losses.get(name) for name in names} if losses else None
    return Objective(
        every, scales, metrics, weighted_metrics, loss_over=model.loss_over
    ), means


def _check_whole(data: Nest) -> None:
    if any(
        isinstance(leaf, tf.distribute.DistributedValues)
        for leaf in tf.nest.flatten(data)
    ):
        raise ValueError(
            "the dataset must not be distributed: each replica takes its share of every batch"
        )
