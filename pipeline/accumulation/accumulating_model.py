"""A Keras model that wraps another model, and trains it in micro-batches by `fit`.

Keras calls `train_step` with each effective batch, outside of any replica, and
`train_step` calls an `Update`. The dataset is not distributed: TensorFlow would copy
each replica's whole share to its device, and a plain `fit` raises an error if the
shares of the first batch differ in size. Instead, the batch stays on the host, and each
replica takes its share there, as in any loop that calls an `Update`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from .batch import Nest, first_leaf, parts_of, share_of, tensors_of
from .choices import check_choice
from .evaluation import Evaluation
from .forward_effects import (
    differences_from_large_batch,
    trace_forward,
    unsupported,
)
from .gradient_sums import GradientSums
from .keras_internals import (
    compiled_losses,
    compiled_metrics,
    loss_mean,
    metrics_of_wrapper,
    replaced,
)
from .objective import Objective, by_name, check_added_losses, check_loss_over
from .padding import padded_parts
from .ragged_checks import check_takes_ragged
from .token_cut import (
    TokenLimit,
    check_lengths_for_xla,
    micro_batch_limit,
)
from .update import Update


class AccumulatingModel(keras.Model):
    """A `keras.Model` that wraps another model and trains it in micro-batches.

    `compile`, `fit`, `evaluate`, `predict`, callbacks and `save` work as in Keras. Each
    batch of `fit` is one effective batch and one optimizer step: the weights and the
    history are those of a plain `fit` on the same batches, within rounding, except for
    what docs/exact.md lists, such as dropout and BatchNormalization. With an embedding,
    they are those that a dense gradient would give: in `fit`, Keras' Adam and similar
    optimizers take a different step for a row that a batch looks up several times.
    `fit` warns once of BatchNormalization and of layers that keep a state of their own.
    `evaluate` also cuts its batches into micro-batches; `predict` does not. Under a
    strategy, each replica takes its share of a batch.

    Args:
        inner: a model that does not override `train_step`, `test_step`, `compute_loss`
            or `compute_metrics`. It remains a plain model, which can be saved or used
            alone.
        micro_batch_size: examples per forward and backward pass on one replica. With
            `micro_batch_tokens`, the maximum number of examples, or None.
        micro_batch_tokens: maximum number of positions per pass, in place of a number
            of examples, for ragged inputs; see `Update`. `evaluate` cuts in the same
            way. `predict` pads a batch to its longest example.
        pad_multiple: with `micro_batch_tokens`, lengths are rounded up to a multiple of
            it.
        xla_lengths: with `micro_batch_tokens`, the lengths for which XLA compiles if
            `compile` turns XLA on; see `Update`.
        same_noise: whether the noise of Keras' dropout and noise layers is independent
            of the micro-batch size; see `Update`.
        loss_over: "effective_batch" for losses that compare several examples; see
            `Update`.
        added_losses: whether a scalar that a layer adds to the loss is a "mean" or a
            "sum" over its batch. Which of them it is cannot be seen, and is not checked.
        name, dtype, trainable: see `keras.Model`.

    Raises:
        ValueError: `inner` cannot be trained this way, there is neither a
            `micro_batch_size` nor `micro_batch_tokens`, one of them is not a positive
            integer, or `pad_multiple` or `xla_lengths` is wrong or has no effect.
    """

    inner: keras.Model
    micro_batch_size: int | None
    micro_batch_tokens: int | None
    pad_multiple: int
    xla_lengths: tuple[int, ...]
    same_noise: bool | str
    loss_over: str
    added_losses: str
    built: bool

    def __init__(
        self,
        inner: keras.Model,
        micro_batch_size: int | None = None,
        same_noise: bool | str = False,
        loss_over: str = "example",
        micro_batch_tokens: int | None = None,
        pad_multiple: int = 1,
        xla_lengths: Sequence[int] = (),
        added_losses: str = "mean",
        **arguments: Any,
    ):
        if not isinstance(inner, keras.Model):
            rule = "inner must be a keras.Model"
            raise ValueError(f"{rule}. Received: {type(inner).__name__}")
        for rule, received in unsupported(inner, as_by_fit=True):
            raise ValueError(f"inner {rule}. Received: {received}")
        check_choice("same_noise", same_noise, (True, False, "auto"))
        check_loss_over(loss_over)
        check_added_losses(added_losses)
        micro_batch_limit(
            micro_batch_size, micro_batch_tokens, pad_multiple, xla_lengths
        )
        # Use the strategy of `inner`, even if another one is current.
        with inner.distribute_strategy.scope():
            # No autocast: `inner` casts its inputs.
            super().__init__(autocast=False, **arguments)
        for variable in inner.variables:
            if not self._strategy.extended.variable_created_in_scope(variable.value):
                rule = "inner must be made in the scope of the strategy"
                raise ValueError(f"{rule} under which it is trained")
        self.inner = inner
        self.micro_batch_size = _as_int(micro_batch_size)
        self.micro_batch_tokens = _as_int(micro_batch_tokens)
        self.pad_multiple = int(pad_multiple)
        self.xla_lengths = tuple(int(length) for length in xla_lengths)
        self.same_noise = same_noise
        self.loss_over = loss_over
        self.added_losses = added_losses
        self.built = inner.built

    def call(self, inputs: Nest, training: bool | None = None) -> Nest:
        """Return the outputs of `inner`."""
        return self.inner(inputs, training=training)

    @property
    def output_names(self) -> list[str]:
        """The names of the outputs of `inner`, which `compile` and the history use."""
        return self.inner.output_names

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """The metrics of `compile`, of `inner` itself and of its layers."""
        return metrics_of_wrapper(super().metrics, self, self.inner)

    def summary(self, *arguments: Any, **options: Any) -> None:
        """Print the layers of `inner`, and the size of the optimizer, as Keras does."""
        is_compiled = replaced([(self.inner, "compiled", self.compiled)])
        with self._optimizer_lent(), is_compiled:
            self.inner.summary(*arguments, **options)

    def export(self, *arguments: Any, **options: Any) -> None:
        """Export `inner` for inference, as Keras does."""
        self.inner.export(*arguments, **options)

    def save_weights(self, *arguments: Any, **options: Any) -> None:
        """Save the weights of `inner` and of the optimizer, as Keras does.

        The plain model can load the file, too.
        """
        with self._optimizer_lent():
            self.inner.save_weights(*arguments, **options)

    def load_weights(self, *arguments: Any, **options: Any) -> None:
        """Load the weights of `inner` and of the optimizer, as Keras does."""
        with self._optimizer_lent():
            self.inner.load_weights(*arguments, **options)

    def _optimizer_lent(self) -> AbstractContextManager[None]:
        optimizer = getattr(self, "optimizer", None)
        return replaced([(self.inner, "optimizer", optimizer)])

    def get_config(self) -> dict[str, Any]:
        """Return the config for `from_config`."""
        return {
            **super().get_config(),
            "inner": keras.saving.serialize_keras_object(self.inner),
            "micro_batch_size": self.micro_batch_size,
            "same_noise": self.same_noise,
            "loss_over": self.loss_over,
            "micro_batch_tokens": self.micro_batch_tokens,
            "pad_multiple": self.pad_multiple,
            "xla_lengths": self.xla_lengths,
            "added_losses": self.added_losses,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> AccumulatingModel:
        """Return the model that a config describes."""
        inner = keras.saving.deserialize_keras_object(
            config["inner"], custom_objects=custom_objects
        )
        return cls(**{**config, "inner": inner})

    # The parameters are those of `keras.Model.compile`.
    def compile(  # noqa: PLR0913  the interface of Keras
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
        """Configure the training, as `keras.Model.compile` does.

        With `jit_compile`, XLA compiles the forward and backward pass and the
        evaluation of each micro-batch, but not those of a smaller last one. "auto"
        compiles them if a plain `fit` would be compiled, except for ragged input
        without `xla_lengths`.

        Raises:
            ValueError: the optimizer has `gradient_accumulation_steps`, `run_eagerly`
                is true, or `jit_compile` is true with `micro_batch_tokens` but without
                `xla_lengths`.
        """
        if run_eagerly:
            rule = "run_eagerly must be False, because micro-steps are traced"
            remedy = "To debug `inner`, compile and fit it alone"
            raise ValueError(f"{rule}. {remedy}. Received: True")
        for accumulating in (optimizer, getattr(optimizer, "inner_optimizer", None)):
            steps = getattr(accumulating, "gradient_accumulation_steps", None)
            if steps:
                rule = (
                    "the optimizer must not accumulate gradients itself: "
                    "leave out gradient_accumulation_steps, and multiply the batch_size "
                    "of fit by it"
                )
                raise ValueError(f"{rule}. Received: {steps}")
        limit = micro_batch_limit(
            self.micro_batch_size,
            self.micro_batch_tokens,
            self.pad_multiple,
            self.xla_lengths,
        )
        if isinstance(limit, TokenLimit):
            check_lengths_for_xla(limit, jit_compile)
        self._micro_steps_by_xla = jit_compile
        self._objective: Objective | None = None
        self._update: Update | None = None
        self._evaluation: Evaluation | None = None
        with self._strategy.scope():
            super().compile(
                optimizer,
                loss,
                loss_weights,
                metrics,
                weighted_metrics,
                steps_per_execution=steps_per_execution,
                jit_compile=False,  # no XLA around the micro-steps
                auto_scale_loss=auto_scale_loss,
            )

    def get_compile_config(self) -> dict[str, Any]:
        """Return the config for `compile_from_config`; it is empty before `compile`."""
        config = super().get_compile_config()
        if config:
            return {**config, "jit_compile": self._micro_steps_by_xla}
        return config

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compile with a config from `get_compile_config`."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            # Create the optimizer's variables, so that their values can be loaded.
            self.optimizer.build(self.trainable_variables)

    @property
    def _strategy(self) -> tf.distribute.Strategy:
        return super().distribute_strategy

    @property
    def distribute_strategy(self) -> _Undistributed:
        """The strategy for Keras' loops; it does not distribute batches."""
        return _Undistributed(self._strategy)

    def train_step(self, data: Nest) -> dict[str, tf.Tensor]:
        """Apply the gradient of one effective batch.

        Returns:
            The mean losses and the metrics of the epoch so far, by name.
        """
        if tf.distribute.has_strategy():  # Keras would act as in a replica
            rule = "fit must be called outside of the strategy's scope"
            raise ValueError(f"{rule}; the model is created inside it")
        if self._update is None:
            self._update = self._make_update(self._objective_for(data))
            self._warn_of_layers(data)
        sums = self._update.sums(data)
        # Wait for the batch: `iterations` and weight decay do not depend on a gradient,
        # and would change once more at the end of the data. See `tensors_of`.
        with tf.control_dependencies(tensors_of(data)):
            self._update.apply(sums.gradients(), sums)
        return self._means(sums)

    def _make_update(self, objective: Objective) -> Update:
        """Create the `Update` and its variables.

        A separate traced function creates them, because TensorFlow traces a function
        that creates variables twice.
        """
        updates: list[Update] = []

        def make() -> None:
            with tf.init_scope():  # create the variables outside the graph
                # A second `build` would reset a loss scale.
                if not self.optimizer.built:
                    self.optimizer.build(self.inner.trainable_variables)
                if not updates:
                    update = Update(
                        self.inner,
                        objective,
                        self.optimizer,
                        self.micro_batch_size,
                        micro_batch_tokens=self.micro_batch_tokens,
                        pad_multiple=self.pad_multiple,
                        xla_lengths=self.xla_lengths,
                        strategy=self._strategy,
                        same_noise=self.same_noise,
                        jit_compile=self._micro_steps_by_xla,
                    )
                    updates.append(update)

        tf.function(make, autograph=False).get_concrete_function()
        return updates[0]

    def _warn_of_layers(self, data: Nest) -> None:
        """Warn if layers compute something else once a batch is cut."""
        x, _, _ = self._dense(parts_of(data))
        examples = first_leaf(x).shape[0]
        is_one_replica = self._strategy.num_replicas_in_sync == 1
        if is_one_replica and examples is not None and self.micro_batch_tokens is None:
            if examples <= self.micro_batch_size:
                return
        # Trace only if needed, as it takes long for large models. Seeds are no weights.
        allow_noise = self.same_noise == "auto"
        if not self.inner.non_trainable_weights and not allow_noise:
            return

        by_tokens = self.micro_batch_tokens is not None
        forward = trace_forward(self.inner, x, bool(self.same_noise), by_tokens)
        reasons = differences_from_large_batch(
            self.inner, forward, hold_statistics=True, allow_noise=allow_noise
        )
        if reasons:
            text = (
                "If fit cuts a batch into micro-batches, the update differs from that "
                f"of the whole batch: {'; '.join(reasons)}"
            )
            warnings.warn(text, stacklevel=3)

    def test_step(self, data: Nest) -> dict[str, tf.Tensor]:
        """Evaluate one batch in micro-batches.

        Returns:
            The mean losses and the metrics so far, by name.
        """
        if self._evaluation is None:
            self._evaluation = Evaluation(
                self.inner,
                self._objective_for(data),
                self.micro_batch_size,
                micro_batch_tokens=self.micro_batch_tokens,
                pad_multiple=self.pad_multiple,
                xla_lengths=self.xla_lengths,
                strategy=self._strategy,
                jit_compile=self._micro_steps_by_xla,
            )
        return self._means(self._evaluation(data))

    def predict_step(self, data: Nest) -> Nest:
        """Return the outputs for one batch. Each replica computes its share."""
        _check_undistributed(data)

        def predict_share() -> Nest:
            share, _ = share_of(data)
            return self.inner.predict_step(self._dense(share))

        return self._strategy.run(predict_share)

    def _dense(self, parts: tuple[Nest, Nest, Nest]) -> tuple[Nest, Nest, Nest]:
        """Return `(x, y, sample_weight)`, padded if micro-batches are.

        Raises:
            ValueError: the inputs are ragged and are not padded here, but `inner` takes
                only dense ones.
        """
        if self.micro_batch_tokens is None:
            check_takes_ragged(self.inner, parts)
            return parts
        return padded_parts(parts, self.pad_multiple)

    def _means(self, sums: GradientSums) -> dict[str, tf.Tensor]:
        loss_mean(self).update_state(sums.mean_loss(), sums.examples)
        for key, value in sums.output_losses().items():
            self._output_means[key].update_state(value, sums.examples)
        return self.get_metrics_result()

    def _objective_for(self, data: Nest) -> Objective:
        """Return the objective that Keras builds from the arguments of `compile`.

        Keras builds it when it first sees a batch. So this method traces Keras'
        functions with the first batch, `data`, but computes nothing.
        """
        if self._objective is None:
            _check_undistributed(data)
            x, y, sample_weight = self._dense(parts_of(data))

            def forward() -> Nest:
                outputs = self.inner(x, training=False)
                self.compute_loss(x, y, outputs, sample_weight, training=False)
                self.compute_metrics(x, y, outputs, sample_weight)
                return outputs

            traced = tf.function(forward, autograph=False).get_concrete_function()
            compiled = _compiled_objective(self, traced.structured_outputs)
            self._objective = compiled.objective
            # Keras would track a dict, and so add the means to its metrics once more.
            self._output_means = MappingProxyType(compiled.output_means)
            self.built = True
        return self._objective


# Do not use this as a decorator: the documentation is built with a mock of Keras, which
# would replace the class.
keras.saving.register_keras_serializable("accumulation")(AccumulatingModel)


class _Undistributed:
    """A strategy that does not distribute datasets, and calls each step only once.

    The steps of an `AccumulatingModel` divide the work among the replicas themselves.
    """

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


class _CompiledObjective(NamedTuple):
    """The objective that `compile` has built, and the running means of the losses."""

    objective: Objective
    output_means: dict[str, Any]  # Keras' running mean of each `<output>_loss`


def _compiled_objective(model: AccumulatingModel, outputs: Nest) -> _CompiledObjective:
    """Return the losses and metrics of a compiled model that has these outputs."""
    names = list(by_name(model.inner, outputs))
    paths = [path for path, _ in keras.tree.flatten_with_path(outputs)]
    names_by_path = dict(zip(paths, names, strict=True))

    losses: dict[str, keras.losses.Loss] = {}
    scales: dict[str, float | None] = {}
    output_means: dict[str, Any] = {}
    for compiled in compiled_losses(model):
        if len(names) == 1:
            name = names[0]
        else:
            # If the outputs are a list but the losses a dict, the path is the name.
            path_as_name = "/".join(map(str, compiled.path))
            name = names_by_path.get(compiled.path, path_as_name)
        loss = compiled.loss
        if name in losses:
            rule = "loss must have only one entry per output"
            raise ValueError(f"{rule}. Received: a second one, {loss.name}")
        losses[name] = loss
        scales[name] = compiled.scale
        output_means[f"{name}_loss"] = compiled.mean

    metrics, weighted_metrics = compiled_metrics(model, names)
    losses_by_output = None  # without any loss, the model learns from `add_loss`
    if losses:
        losses_by_output = {name: losses.get(name) for name in names}
    objective = Objective(
        losses_by_output,
        scales,
        metrics,
        weighted_metrics,
        added_losses=model.added_losses,
        loss_over=model.loss_over,
    )
    return _CompiledObjective(objective, output_means)


def _as_int(value: Any) -> int | None:
    return None if value is None else int(value)


def _check_undistributed(data: Nest) -> None:
    for leaf in tf.nest.flatten(data):
        if isinstance(leaf, tf.distribute.DistributedValues):
            rule = "the dataset must not be distributed"
            reason = "because each replica takes its share of every batch"
            raise ValueError(f"{rule}, {reason}")
