"""What this package uses of the private parts of Keras 3.15 and TensorFlow 2.21, and temporary replacements in layers.

_keras_mask       on an output: which of its elements count; the loss and the metrics of `fit` read it there too
_keras_logits     on a softmax's or a sigmoid's output: what a cross-entropy with `from_logits=False` is computed from
_flatten_layers   all layers of a model, those inside of others and in lists too; `layers` has the outermost alone
global_seed_generator     where `keras.random` without a seed draws from; made by its first draw, and no layer has it
_batches_seen_since_last_saving, _last_batch_seen, _current_epoch   of `ModelCheckpoint`: when and under which epoch
_compile_loss, _flat_losses, _compile_metrics, _flat_metrics, _flat_weighted_metrics, _loss_tracker   what `compile` has
                  made of its arguments, "accuracy" resolved: the history and `EarlyStopping` go by these names
_momentums, _velocities, _get_variable_index   of `Adam`: its moments, and which of them are a variable's; without them
                  an update of a model with many weights takes up to 2.5 times as long
_all_reduce_sum_gradients     of an optimizer: outside of a replica it sums nothing, and takes those of the first one
_learning_rate    of an optimizer: what `learning_rate` computes a value from each time that it is read
model_supports_jit        whether `fit` would have XLA compile a model, by its layers, the platform and determinism
get_loss          the loss that `compile` makes of a name or a function
_get_function     of a TensorFlow graph: the graphs of loops, branches and calls, whose operations are counted
record_operation, stop_recording, pack_tangents     of TensorFlow: declare a gradient, where `tf.custom_gradient` would
                  keep each trace forever, with all that it captures; and what forward accumulators hold for a tensor
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from keras.src.trainers.compile_utils import get_loss as get_loss
from keras.src.trainers.trainer import model_supports_jit as model_supports_jit
from tensorflow.python.eager.forwardprop_util import pack_tangents as pack_tangents
from tensorflow.python.eager.record import record_operation as record_operation
from tensorflow.python.eager.record import stop_recording as stop_recording

MODEL_CHECKPOINT_KEEPS = (
    "_batches_seen_since_last_saving",
    "_last_batch_seen",
    "_current_epoch",
)

Listed = dict[str, list[keras.metrics.Metric]]  # metrics by output
_REPLACING = (
    threading.RLock()
)  # held while a layer's `call` is replaced: another thread may trace the same model


def mask_of(output: Any) -> tf.Tensor | None:
    """Return the mask that Keras keeps on a layer's output; None where there is none."""
    return getattr(output, "_keras_mask", None)


def logits_of(output: Any) -> tf.Tensor | None:
    """Return the logits that an output was computed from; None where Keras keeps none."""
    return getattr(output, "_keras_logits", None)


def with_mask_and_logits(output: tf.Tensor, mask: Any, logits: Any) -> tf.Tensor:
    """Return a copy of an output with what Keras keeps on one, `()` if nothing; the mask in any dtype."""
    copy = tf.identity(output)
    if tf.is_tensor(mask):
        copy._keras_mask = tf.cast(mask, tf.bool)
    if tf.is_tensor(logits):
        copy._keras_logits = logits
    return copy


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """Return the layers of a model and those inside of them, without the model itself."""
    return list(model._flatten_layers(include_self=False))


def global_seed(*, make: bool = False) -> keras.Variable | None:
    """Return the state of Keras' global seed generator; None before its first draw, unless `make` makes it."""
    known = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    generator = seed_generator.global_seed_generator() if make else known
    return None if generator is None else generator.state


def compiled_losses(
    model: keras.Model,
) -> list[tuple[Any, keras.losses.Loss, float | None, Any]]:
    """Return each loss of a model after a `compute_loss`: its path in the outputs, it, its weight, its epoch's mean."""
    made = model._compile_loss
    if made is None:
        return []
    means = made.metrics or [None] * len(made._flat_losses)  # a single loss has none
    return [
        (*flat[:3], mean) for flat, mean in zip(made._flat_losses, means, strict=True)
    ]


def compiled_metrics(model: keras.Model, names: Sequence[str]) -> tuple[Listed, Listed]:
    """Return `metrics` and `weighted_metrics` of a model after a `compute_metrics` by output, else by its `names`."""

    def by_output(found: Sequence[Any]) -> Listed:
        of_outputs = zip(names, found, strict=True)
        return {
            listed.output_name or name: listed.metrics
            for name, listed in of_outputs
            if listed is not None
        }

    made = model._compile_metrics
    return (
        ({}, {})
        if made is None
        else (by_output(made._flat_metrics), by_output(made._flat_weighted_metrics))
    )


def loss_mean(model: keras.Model) -> keras.metrics.Mean:
    """Return the mean of the loss over an epoch, as the history of a compiled model shows it."""
    return model._loss_tracker


def adam_moments(
    adam: keras.optimizers.Adam, variable: tf.Variable
) -> tuple[tf.Variable, tf.Variable]:
    """Return the means of the gradients of a variable and of their squares."""
    index = adam._get_variable_index(variable)
    return adam._momentums[index].value, adam._velocities[index].value


@contextmanager
def constant_rate(optimizer: keras.optimizers.Optimizer) -> Iterator[tf.Tensor]:
    """Compute the learning rate once, for all who read it inside the `with` block; yield it.

    It is computed on the host and waits for nothing of this update. NaN for a `MultiOptimizer`, which has none.
    """
    with tf.control_dependencies(None), tf.device("CPU:0"):
        rate = tf.convert_to_tensor(getattr(optimizer, "learning_rate", math.nan))
    fixed = (
        (lambda: rate) if callable(optimizer._learning_rate) else rate
    )  # Adafactor asks whether it is callable
    with replaced([(optimizer, "_learning_rate", fixed)]):
        yield rate


def applying_sums(
    optimizer: keras.optimizers.Optimizer,
) -> AbstractContextManager[None]:
    """Have `apply` use the gradients on each replica as they are, inside the `with` block: they are sums already."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return replaced(
        [(inner, "_all_reduce_sum_gradients", lambda grads_and_vars: grads_and_vars)]
    )


@contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give attributes of objects other values inside the `with` block, past Keras, which tracks what it is given."""
    with ExitStack() as after:
        for thing, name, value in changes:
            if name in vars(thing) or isinstance(
                getattr(type(thing), name, None), property
            ):
                after.callback(object.__setattr__, thing, name, getattr(thing, name))
            else:  # a method of its class, or nothing
                after.callback(object.__delattr__, thing, name)
            object.__setattr__(thing, name, value)
        yield


@contextmanager
def calling(calls: Iterable[tuple[keras.Layer, Callable[..., Any]]]) -> Iterator[None]:
    """Replace each layer's `call` inside the `with` block; a model saved meanwhile has Keras' own."""

    def changes() -> Iterator[tuple[keras.Layer, str, Any]]:
        for layer, call in calls:
            call.__signature__ = inspect.signature(layer.call)  # type: ignore[attr-defined]  # Keras reads it
            yield layer, "call", call

    with _REPLACING, replaced(changes()):
        yield


def keeps_call_of(layer: keras.Layer, kind: type[keras.Layer]) -> bool:
    """Return whether the layer's `call` is that of `kind`, not overridden by a subclass or a wrapper."""
    with _REPLACING:
        return (
            isinstance(layer, kind)
            and type(layer).call is kind.call
            and "call" not in vars(layer)
        )


graph = (
    tf.compat.v1.get_default_graph
)  # that is being traced: a layer's own loop or function has one of its own


def function_graph(operation: tf.Operation, attribute: str) -> tf.Graph:
    """Return the graph of the function that an operation calls by an attribute, such as a loop by its `body`."""
    return operation.graph._get_function(operation.get_attr(attribute).name).graph
