"""The private parts of Keras 3.15 and TensorFlow 2.21 that this package uses.

Those of XLA are in `xla_internals`. This module also replaces attributes of Keras
objects for a limited time.

`_keras_mask`, on an output: the mask of the output's elements, which the loss and the
    metrics of `fit` also read.
`_keras_logits`, on the output of a softmax or a sigmoid: the logits from which a
    cross-entropy with `from_logits=False` is computed.
`_flatten_layers`: all layers of a model, including those inside other layers and in
    lists. `layers` contains only the outermost ones.
`global_seed_generator`: the generator for `keras.random` without a seed. The first draw
    creates the generator, and no layer tracks it.
`_batches_seen_since_last_saving`, `_last_batch_seen`, `_current_epoch`, of
    `ModelCheckpoint`: the state that decides when it saves, and for which epoch.
`_global_train_batch`, `_global_test_batch`, of `TensorBoard`: the steps of its curves
    per batch.
`_compile_loss`, `_flat_losses`, `_compile_metrics`, `_flat_metrics`,
    `_flat_weighted_metrics`, `_loss_tracker`: the losses and metrics that `compile`
    builds, with names such as "accuracy" resolved. The history and `EarlyStopping` use
    the names of these objects.
`_get_own_metrics`, `_metrics`: the metrics of a model without those of its layers, and
    those among them that `compile` has not made. A model's `metrics` leave out the
    own metrics of a model inside of it.
`TensorFlowTrainer.train_step`, with its `self`, `y_pred` and `sample_weight`: the step
    of `fit`, which shows whether the batches have masks or sample weights.
`_momentums`, `_velocities`, `_get_variable_index`, of `Adam`: the moments, and their
    index for a variable. `fused_adam` needs them; without it, an update of a model with
    many weights takes up to 2.5 times as long.
`_all_reduce_sum_gradients`, of an optimizer: sums gradients over replicas. Outside of a
    replica it does not sum, but returns the gradients of the first replica.
`_var_key`, of an optimizer: a key that is the same for a Keras variable and for the
    TensorFlow variable inside, which a tape returns.
`_learning_rate`, of an optimizer: the rate or schedule from which each read of
    `learning_rate` computes a value.
`_iterations`, of an optimizer, and `_value`, of a variable: the count of steps, and the
    TensorFlow variable that holds it.
`model_supports_jit`: whether `fit` would compile a model with XLA, judging by the
    layers, the platform and determinism.
`get_loss`: the loss that `compile` builds from a name or a function.
`dot_product_attention`, of the TensorFlow backend's `nn`: the function that the Keras
    operation of that name and the attention layers call. If the causal mask is the only
    mask, the layers pass `is_causal` and no mask.
`_get_function`, of a TensorFlow graph: the graphs of loops, branches and calls, whose
    operations are counted.
`captures`, of a function's graph: the placeholders that are not arguments.
`record_operation`, `stop_recording`: record a gradient on a tape. `tf.custom_gradient`
    would keep each trace, with all that it captures, for the life of the process.
`pack_tangents`: the derivatives of a tensor in forward accumulators.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import nn as tensorflow_nn
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.random import seed_generator
from keras.src.trainers.compile_utils import get_loss as get_loss
from keras.src.trainers.trainer import model_supports_jit as model_supports_jit
from tensorflow.python.eager.forwardprop_util import pack_tangents as pack_tangents
from tensorflow.python.eager.record import record_operation as record_operation
from tensorflow.python.eager.record import stop_recording as stop_recording

from .batch import is_absent

MODEL_CHECKPOINT_KEEPS = (
    "_batches_seen_since_last_saving",
    "_last_batch_seen",
    "_current_epoch",
)
TENSORBOARD_KEEPS = ("_global_train_batch", "_global_test_batch")

MetricsByOutput = dict[str, list[keras.metrics.Metric]]

# Held while a layer's `call` is replaced, as another thread may trace the same model.
_REPLACING = threading.RLock()

# Returns the graph that is being traced. A loop or function in a layer has another one.
graph = tf.compat.v1.get_default_graph


def mask_of(output: Any) -> tf.Tensor | None:
    """Return the mask that Keras stores on an output, or None if there is none."""
    return getattr(output, "_keras_mask", None)


def logits_of(output: Any) -> tf.Tensor | None:
    """Return the logits that Keras stores on an output, or None if there are none."""
    return getattr(output, "_keras_logits", None)


def with_mask_and_logits(output: tf.Tensor, mask: Any, logits: Any) -> tf.Tensor:
    """Return a copy of an output, with a mask and logits stored on it.

    The mask may have any dtype. A mask or logits that are None or `ABSENT` are not
    stored.
    """
    copy = tf.identity(output)
    if mask is not None and not is_absent(mask):
        copy._keras_mask = tf.cast(mask, tf.bool)
    if logits is not None and not is_absent(logits):
        copy._keras_logits = logits
    return copy


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """Return all layers of a model, including nested ones, but not the model."""
    return list(model._flatten_layers(include_self=False))


def global_seed(*, make: bool = False) -> keras.Variable | None:
    """Return the state of Keras' global seed generator.

    Before the first draw, there is no generator and the result is None, unless `make`
    is true: the generator is then created.
    """
    if make:
        generator = seed_generator.global_seed_generator()
    else:
        generator = global_state.get_global_attribute(
            seed_generator.GLOBAL_SEED_GENERATOR
        )
    return None if generator is None else generator.state


class CompiledLoss(NamedTuple):
    """One of the losses of a compiled model.

    Attributes:
        path: keys and indices of the loss's output in the nest of outputs.
        loss: the loss that Keras has built.
        scale: the entry of `loss_weights` for this loss.
        mean: the mean over an epoch in the history, or None for a single loss.
    """

    path: tuple[Any, ...]
    loss: keras.losses.Loss
    scale: float | None
    mean: keras.metrics.Mean | None


def compiled_losses(model: keras.Model) -> list[CompiledLoss]:
    """Return the losses of a compiled model. Call this after `compute_loss`."""
    compiled = model._compile_loss
    if compiled is None:
        return []
    losses = compiled._flat_losses
    means = compiled.metrics or [None] * len(losses)
    compiled_losses = []
    for entry, mean in zip(losses, means, strict=True):
        path, loss, scale, *_ = entry
        compiled_losses.append(CompiledLoss(path, loss, scale, mean))
    return compiled_losses


def compiled_metrics(
    model: keras.Model, names: Sequence[str]
) -> tuple[MetricsByOutput, MetricsByOutput]:
    """Return `metrics` and `weighted_metrics` of a compiled model, by output name.

    Call this after `compute_metrics`. If the metrics state no name of their output, or
    one that is not in `names`, the entry of `names` is used: Keras gives two outputs of
    a shared layer the same name.
    """
    compiled = model._compile_metrics
    if compiled is None:
        return {}, {}
    metrics = _metrics_by_output(names, compiled._flat_metrics)
    weighted_metrics = _metrics_by_output(names, compiled._flat_weighted_metrics)
    return metrics, weighted_metrics


def _metrics_by_output(names: Sequence[str], lists: Sequence[Any]) -> MetricsByOutput:
    metrics = {}
    for name, metrics_of_output in zip(names, lists, strict=True):
        if metrics_of_output is not None:
            if metrics_of_output.output_name in names:
                name = metrics_of_output.output_name
            metrics[name] = metrics_of_output.metrics
    return metrics


def metrics_of_wrapper(
    metrics: Sequence[keras.metrics.Metric], wrapper: keras.Model, inner: keras.Model
) -> list[keras.metrics.Metric]:
    """Return `metrics`, those of a model that wraps `inner`, and the metrics of `inner`.

    They are in the order in which a plain `inner` would list them.
    """
    position = len(wrapper._get_own_metrics())
    return [*metrics[:position], *inner._metrics, *metrics[position:]]


class StepOfFit(NamedTuple):
    """Local variables of Keras' own `train_step` while it calls the optimizer."""

    model: keras.Model
    outputs: Any
    sample_weight: Any


def step_of_fit() -> StepOfFit | None:
    """Return variables of the Keras `train_step` that is running, or None.

    They are read from the call stack, because an optimizer receives only gradients and
    variables.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is TensorFlowTrainer.train_step.__code__:
            local = frame.f_locals
            return StepOfFit(local["self"], local["y_pred"], local["sample_weight"])
        frame = frame.f_back
    return None


def loss_mean(model: keras.Model) -> keras.metrics.Mean:
    """Return the metric that averages the loss over an epoch, for the history."""
    return model._loss_tracker


def adam_moments(
    adam: keras.optimizers.Adam, variable: tf.Variable
) -> tuple[tf.Variable, tf.Variable]:
    """Return Adam's first and second moment of the gradients of a variable."""
    index = adam._get_variable_index(variable)
    return adam._momentums[index].value, adam._velocities[index].value


def key_of_variable(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable | tf.Variable
) -> Any:
    """Return the key of a variable, or of the TensorFlow variable in it."""
    return optimizer._var_key(variable)


@contextmanager
def constant_rate(optimizer: keras.optimizers.Optimizer) -> Iterator[tf.Tensor]:
    """Compute the learning rate once for all reads in the `with` block; yield the rate.

    The rate is computed on the host, without waiting for other operations. It is NaN
    for an optimizer without a learning rate, such as a `MultiOptimizer`.
    """
    with tf.control_dependencies(None), tf.device("CPU:0"):
        rate = tf.convert_to_tensor(getattr(optimizer, "learning_rate", math.nan))
    # Keep a schedule callable: Adafactor distinguishes schedules from constants.
    fixed = (lambda: rate) if callable(optimizer._learning_rate) else rate
    with replaced([(optimizer, "_learning_rate", fixed)]):
        yield rate


def counting_optimizers(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.optimizers.Optimizer]:
    """Return the optimizers that count their own steps: `optimizer` or inner ones."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return [inner, *getattr(inner, "optimizers", [])]


def step_counters(optimizer: keras.optimizers.Optimizer) -> list[tf.Variable]:
    """Return the variables that count the steps of an optimizer."""
    optimizers = counting_optimizers(optimizer)
    return [counting._iterations.value for counting in optimizers]


def _assign_add(counter: tf.Variable, number: Any) -> None:
    counter.assign_add(number)


@contextmanager
def constant_counts(
    optimizer: keras.optimizers.Optimizer,
    advance: Callable[[tf.Variable, Any], None] = _assign_add,
) -> Iterator[None]:
    """Read the counts of steps once for all readers in the `with` block.

    They are read on the host, without waiting for anything in this update.

    Args:
        optimizer: the counts are its own and those of its inner optimizers.
        advance: called with a counter and a number, to add the number. It may be called
            in another graph.
    """
    changes: list[tuple[Any, str, Any]] = []
    for counting in counting_optimizers(optimizer):
        counter = counting._iterations
        variable = counter.value
        with tf.control_dependencies(None), tf.device("CPU:0"):
            count = tf.identity(variable)
        count.assign = variable.assign  # Keras may also assign to it
        changes.append((counter, "_value", count))
        changes.append((counter, "assign_add", partial(advance, variable)))
    with replaced(changes):
        yield


def applying_sums(
    optimizer: keras.optimizers.Optimizer,
) -> AbstractContextManager[None]:
    """Within the block, prevent `apply` from summing gradients over replicas.

    The gradients must already be summed.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)

    def unchanged(grads_and_vars: Any) -> Any:
        return grads_and_vars

    return replaced([(inner, "_all_reduce_sum_gradients", unchanged)])


@contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give attributes of objects other values inside the `with` block.

    Args:
        changes: an object, the name of an attribute, and its value, per change. Keras
            does not track the value.
    """
    with ExitStack() as after:
        for thing, name, value in changes:
            is_property = isinstance(getattr(type(thing), name, None), property)
            if name in vars(thing) or is_property:
                after.callback(object.__setattr__, thing, name, getattr(thing, name))
            else:  # a method of the class, or no attribute yet
                after.callback(object.__delattr__, thing, name)
            object.__setattr__(thing, name, value)
        yield


@contextmanager
def calling(calls: Iterable[tuple[keras.Layer, Callable[..., Any]]]) -> Iterator[None]:
    """Replace the `call` of each layer inside the `with` block.

    A model that is saved inside the block is saved with its original `call`.
    """

    def changes() -> Iterator[tuple[keras.Layer, str, Any]]:
        for layer, call in calls:
            signature = inspect.signature(layer.call)  # Keras reads it
            call.__signature__ = signature  # type: ignore[attr-defined]
            yield layer, "call", call

    with _REPLACING, replaced(changes()):
        yield


@contextmanager
def attending(attention: Callable[..., Any]) -> Iterator[None]:
    """Have `attention` called for each attention of Keras inside the `with` block.

    Its arguments are Keras' own function and a dict of that function's arguments. Other
    threads, which may trace a model meanwhile, call Keras' own function.
    """
    thread = threading.get_ident()
    with _REPLACING:
        keras_attention = tensorflow_nn.dot_product_attention

        def attend(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() != thread:
                return keras_attention(*arguments, **options)
            bound = inspect.signature(keras_attention).bind(*arguments, **options)
            return attention(keras_attention, bound.arguments)

        with replaced([(tensorflow_nn, "dot_product_attention", attend)]):
            yield


def keeps_call_of(layer: keras.Layer, kind: type[keras.Layer]) -> bool:
    """Return whether a layer is a `kind` and uses the `call` of that class.

    It does not if a subclass or a wrapper has overridden `call`.
    """
    with _REPLACING:
        return (
            isinstance(layer, kind)
            and type(layer).call is kind.call
            and "call" not in vars(layer)
        )


def depending_on_batch(tensors: Sequence[tf.Tensor]) -> list[bool]:
    """Return, for each tensor of a trace, whether it depends on the batch.

    The batch is an argument of the traced function, or the next element of a dataset.
    Tensors that the function captures, such as variables, are not part of the batch.
    """
    traced_graph = graph()
    captured = {tensor.op.name for _, tensor in getattr(traced_graph, "captures", ())}
    of_batch = set()
    for operation in traced_graph.get_operations():  # inputs come before their users
        if operation.type == "Placeholder":
            is_data = operation.outputs[0].dtype not in (tf.resource, tf.variant)
            depends = is_data and operation.name not in captured
        else:
            depends = "GetNext" in operation.type
            for tensor in operation.inputs:
                depends |= tensor.op.name in of_batch
        if depends:
            of_batch.add(operation.name)
    return [tensor.op.name in of_batch for tensor in tensors]


def function_graph(operation: tf.Operation, attribute: str) -> tf.Graph:
    """Return the graph of a function that an operation calls.

    `attribute` is the operation's attribute for the function, such as `body` of a loop.
    """
    return operation.graph._get_function(operation.get_attr(attribute).name).graph
