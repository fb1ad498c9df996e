"""The private parts of Keras 3.15 and TensorFlow 2.21 that this package uses.

It also has the temporary replacements in objects of Keras, which Keras would track.

`_keras_mask`, on an output: which of its elements count. The loss and the metrics of
    `fit` read it there too.
`_keras_logits`, on the output of a softmax or a sigmoid: what a cross-entropy with
    `from_logits=False` is computed from.
`_flatten_layers`: all layers of a model, also those inside other layers and in lists;
    `layers` has the outermost alone.
`global_seed_generator`: what `keras.random` without a seed draws from. Its first draw
    makes it, and no layer has it.
`_batches_seen_since_last_saving`, `_last_batch_seen`, `_current_epoch`, of
    `ModelCheckpoint`: when it saves, and under which epoch.
`_compile_loss`, `_flat_losses`, `_compile_metrics`, `_flat_metrics`,
    `_flat_weighted_metrics`, `_loss_tracker`: what `compile` makes of its arguments,
    with "accuracy" resolved. The history and `EarlyStopping` use these names.
`TensorFlowTrainer.train_step`, with its `self`, `y_pred` and `sample_weight`: the step
    of `fit`, which says whether the batches have a mask or weights.
`_momentums`, `_velocities`, `_get_variable_index`, of `Adam`: its moments, and which of
    them are a variable's. Without them an update of a model with many weights takes up
    to 2.5 times as long.
`_all_reduce_sum_gradients`, of an optimizer: outside of a replica it sums nothing, and
    takes the gradients of the first replica.
`_var_key`, of an optimizer: the same for a variable of Keras and for TensorFlow's in
    it, which a tape returns.
`_learning_rate`, of an optimizer: what `learning_rate` computes a value from each time
    that it is read.
`_iterations`, of an optimizer, and `_value`, of a variable: the count of steps, and
    TensorFlow's variable that holds it.
`model_supports_jit`: whether `fit` would have XLA compile a model, by its layers, the
    platform and determinism.
`get_loss`: the loss that `compile` makes of a name or a function.
`_get_function`, of a TensorFlow graph: the graphs of loops, branches and calls, whose
    operations are counted.
`captures`, of a function's graph: which placeholders are not its arguments.
`record_operation`, `stop_recording`: declare a gradient. `tf.custom_gradient` would
    keep each trace forever, with all that it captures.
`pack_tangents`: what forward accumulators have for a tensor.
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

MetricsByOutput = dict[str, list[keras.metrics.Metric]]

# Held while a layer's `call` is replaced: another thread may trace the same model.
_REPLACING = threading.RLock()

# Returns the graph that is being traced. A layer's own loop or function has its own.
graph = tf.compat.v1.get_default_graph


def mask_of(output: Any) -> tf.Tensor | None:
    """Return the mask that Keras keeps on an output; None where there is none."""
    return getattr(output, "_keras_mask", None)


def logits_of(output: Any) -> tf.Tensor | None:
    """Return the logits that Keras keeps on an output; None where there are none."""
    return getattr(output, "_keras_logits", None)


def with_mask_and_logits(output: tf.Tensor, mask: Any, logits: Any) -> tf.Tensor:
    """Return a copy of an output that has a mask, of any dtype, and logits.

    `ABSENT` stands for a mask or logits that Keras does not keep.
    """
    copy = tf.identity(output)
    if not is_absent(mask):
        copy._keras_mask = tf.cast(mask, tf.bool)
    if not is_absent(logits):
        copy._keras_logits = logits
    return copy


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """Return the layers of a model and those inside them, without the model itself."""
    return list(model._flatten_layers(include_self=False))


def global_seed(*, make: bool = False) -> keras.Variable | None:
    """Return the state of Keras' global seed generator.

    Before its first draw the result is None, unless `make` makes the generator.
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
        path: the keys and indices of its output in the model's outputs.
        loss: the loss that Keras has made.
        scale: its entry of `loss_weights`.
        mean: the mean over an epoch that the history shows; None for a single loss.
    """

    path: tuple[Any, ...]
    loss: keras.losses.Loss
    scale: float | None
    mean: keras.metrics.Mean | None


def compiled_losses(model: keras.Model) -> list[CompiledLoss]:
    """Return the losses of a model after a `compute_loss`; none before."""
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
    """Return `metrics` and `weighted_metrics` of a model after a `compute_metrics`.

    Both are by the name that the metrics have for their output, else by its entry of
    `names`.
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
            key = metrics_of_output.output_name or name
            metrics[key] = metrics_of_output.metrics
    return metrics


class StepOfFit(NamedTuple):
    """What Keras' own `train_step` has when it calls the optimizer."""

    model: keras.Model
    outputs: Any
    sample_weight: Any


def step_of_fit() -> StepOfFit | None:
    """Return the `train_step` of Keras that calls this; None if none does.

    An optimizer is told no more than gradients and variables.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is TensorFlowTrainer.train_step.__code__:
            local = frame.f_locals
            return StepOfFit(local["self"], local["y_pred"], local["sample_weight"])
        frame = frame.f_back
    return None


def loss_mean(model: keras.Model) -> keras.metrics.Mean:
    """Return the mean of the loss over an epoch, which the history shows."""
    return model._loss_tracker


def adam_moments(
    adam: keras.optimizers.Adam, variable: tf.Variable
) -> tuple[tf.Variable, tf.Variable]:
    """Return the means of the gradients of a variable and of their squares."""
    index = adam._get_variable_index(variable)
    return adam._momentums[index].value, adam._velocities[index].value


def key_of_variable(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable | tf.Variable
) -> Any:
    """Return what tells a variable, or TensorFlow's variable in it, from others."""
    return optimizer._var_key(variable)


@contextmanager
def constant_rate(optimizer: keras.optimizers.Optimizer) -> Iterator[tf.Tensor]:
    """Compute the learning rate once for all who read it in the `with` block; yield it.

    It is computed on the host and waits for nothing of this update. The rate of a
    `MultiOptimizer`, which has none, is NaN.
    """
    with tf.control_dependencies(None), tf.device("CPU:0"):
        rate = tf.convert_to_tensor(getattr(optimizer, "learning_rate", math.nan))
    # Adafactor decides by whether the attribute is callable.
    fixed = (lambda: rate) if callable(optimizer._learning_rate) else rate
    with replaced([(optimizer, "_learning_rate", fixed)]):
        yield rate


def counting_optimizers(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.optimizers.Optimizer]:
    """Return those of an optimizer and its inner ones that count their own steps."""
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
    """Read the counts of steps once for all who read them in the `with` block.

    They are read on the host and wait for nothing of this update.

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
        count.assign = variable.assign  # Keras may assign another value
        changes.append((counter, "_value", count))
        changes.append((counter, "assign_add", partial(advance, variable)))
    with replaced(changes):
        yield


def applying_sums(
    optimizer: keras.optimizers.Optimizer,
) -> AbstractContextManager[None]:
    """Have `apply` use each replica's gradients as they are, as they are sums already.

    This holds inside the `with` block.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)

    def unchanged(grads_and_vars: Any) -> Any:
        return grads_and_vars

    return replaced([(inner, "_all_reduce_sum_gradients", unchanged)])


@contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give attributes of objects other values inside the `with` block.

    Args:
        changes: the object, the name of the attribute, and the value. The value is set
            past Keras, which would track it.
    """
    with ExitStack() as after:
        for thing, name, value in changes:
            is_property = isinstance(getattr(type(thing), name, None), property)
            if name in vars(thing) or is_property:
                after.callback(object.__setattr__, thing, name, getattr(thing, name))
            else:  # a method of its class, or nothing
                after.callback(object.__delattr__, thing, name)
            object.__setattr__(thing, name, value)
        yield


@contextmanager
def calling(calls: Iterable[tuple[keras.Layer, Callable[..., Any]]]) -> Iterator[None]:
    """Replace the `call` of each layer inside the `with` block.

    A model that is saved meanwhile is saved with Keras' own.
    """

    def changes() -> Iterator[tuple[keras.Layer, str, Any]]:
        for layer, call in calls:
            signature = inspect.signature(layer.call)  # which Keras reads
            call.__signature__ = signature  # type: ignore[attr-defined]
            yield layer, "call", call

    with _REPLACING, replaced(changes()):
        yield


def keeps_call_of(layer: keras.Layer, kind: type[keras.Layer]) -> bool:
    """Return whether the layer's `call` is that of `kind`.

    It is not if a subclass or a wrapper has overridden it.
    """
    with _REPLACING:
        return (
            isinstance(layer, kind)
            and type(layer).call is kind.call
            and "call" not in vars(layer)
        )


def depending_on_batch(tensors: Sequence[tf.Tensor]) -> list[bool]:
    """Return for each tensor of a trace whether it is computed from what is read there.

    That is an argument of the function that is traced, or the next element of a
    dataset. What a function captures, such as a variable, is no batch.
    """
    traced_graph = graph()
    captured = {tensor.op.name for _, tensor in getattr(traced_graph, "captures", ())}
    of_batch = set()
    for operation in traced_graph.get_operations():  # each after its inputs
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

    `attribute` names the function among the operation's attributes: a loop has a
    `body`.
    """
    return operation.graph._get_function(operation.get_attr(attribute).name).graph
