"""The side effects of a forward pass in training: which variables it assigns, and which layers draw noise."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from .batch import examples_in, slice_specs
from .keras_internals import global_seed, layers_of
from .same_noise import drawn, noisy_layers

# TensorFlow operations that draw from a state of their own, as `tf.random.normal` and `tf.random.Generator` do.
_DRAWING = re.compile(
    "(?!Stateless).*Random.*|Rng.*|Stateful(Standard|Uniform).*|.*TruncatedNormal|Multinomial"
)


@dataclass(frozen=True)
class Forward:
    """The side effects of a forward pass in training."""

    assigned: list[keras.Variable]  # moving statistics, and the seeds of layers
    cut_dependent_noise: list[
        str
    ]  # names of layers and operations that draw new noise for each micro-batch
    placed: list[
        keras.Layer
    ]  # those that draw for each example by its position in the effective batch


def trace_forward(model: keras.Model, x: Any, same_noise: bool) -> Forward:
    """Trace a forward pass of a built model on a few examples, without changing it; `same_noise` is an `Update`'s."""
    placed = noisy_layers(model, x) if same_noise else []
    x = tf.nest.map_structure(
        lambda leaf: leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf), x
    )

    @tf.function(input_signature=[slice_specs(x)], autograph=False)
    def call(x: Any) -> None:
        with drawn(placed, [tf.zeros([2], tf.int64)] * len(placed), 0, examples_in(x)):
            model(x, training=True)

    with keras.StatelessScope() as scope:
        graph = call.get_concrete_function().graph
    found = [
        variable
        for variable in model.variables
        if scope.get_current_value(variable) is not None
    ]
    seed = global_seed()
    drew = seed is not None and scope.get_current_value(seed) is not None
    own = {
        *_drawing(model, found),
        *_operations(graph),
        *(["keras.random without a seed"] if drew else []),
    }
    known = {id(variable) for variable in found}
    by_place = [
        layer for layer in placed if id(layer.seed_generator.state) not in known
    ]
    return Forward(
        [*found, *(layer.seed_generator.state for layer in by_place)],
        sorted(own),
        by_place,
    )


def batch_dependent_layers(
    model: keras.Model, forward: Forward, but: Sequence[keras.Layer] = ()
) -> list[str]:
    """Return the names of the layers that assign state in training, other than seeds: it depends on the micro-batch.

    The state of the layers in `but` is left out.
    """
    ids = {id(variable) for variable in forward.assigned} - {
        id(weight) for layer in but for weight in layer.weights
    }
    layers = (
        layer for layer in _outermost(model) if not isinstance(layer, keras.Model)
    )
    return sorted(
        layer.name
        for layer in layers
        if any(id(weight) in ids for weight in layer.weights)
    )


def unsupported(
    model: keras.Model, *, as_by_fit: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield what a model must not have to be trained in micro-batches, and the layer or the variable that it has.

    To train it `as_by_fit`, it must not have methods of its own that `fit` and `evaluate` of a plain model call.
    """
    for name in (
        ("train_step", "test_step", "compute_loss", "compute_metrics")
        if as_by_fit
        else ()
    ):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            rule = f"must not define {name}, which is not called here: use add_loss or a keras.losses.Loss, or an own "
            yield f"{rule}loop over accumulate_gradients", type(model).__name__
    for layer in layers_of(model):
        if getattr(layer, "synchronized", False):
            rule = "must have no BatchNormalization(synchronized=True): TensorFlow cannot sum over replicas in a loop"
            yield rule, layer.name
        if getattr(layer, "stateful", False):
            yield (
                "must have no stateful RNN: its states are those of the examples of one batch",
                layer.name,
            )
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            yield (
                "must have no weights that are overwritten with their gradient, as float8 has them",
                variable.path,
            )


def unknown_to_keras(model: keras.Model) -> Iterator[tuple[str, tf.Variable]]:
    """Yield TensorFlow's own variables and generators in the attributes of layers, with names that may repeat."""
    for layer in (model, *layers_of(model)):
        for attribute, entry in _attributes(layer):
            if isinstance(entry, tf.Variable | tf.random.Generator):
                yield (
                    f"{layer.path}/{attribute}",
                    entry if isinstance(entry, tf.Variable) else entry.state,
                )


def _attributes(layer: keras.Layer) -> Iterator[tuple[str, Any]]:
    for attribute, value in vars(layer).items():
        several = list(value.values()) if isinstance(value, dict) else value
        for entry in several if isinstance(several, list | tuple) else [several]:
            yield attribute, entry


def _drawing(model: keras.Model, assigned: list[keras.Variable]) -> Iterator[str]:
    """Yield the names of the layers whose seeds, or those of a layer inside of them, are among the variables."""
    ids = {id(variable) for variable in assigned}
    for layer in _outermost(model):
        inside = [] if isinstance(layer, keras.Model) else layers_of(layer)
        values = (value for each in (layer, *inside) for _, value in _attributes(each))
        if any(
            isinstance(value, keras.random.SeedGenerator) and id(value.state) in ids
            for value in values
        ):
            yield layer.name


def _outermost(model: keras.Model) -> Iterator[keras.Layer]:
    yield model
    for layer in model.layers:
        yield from _outermost(layer) if isinstance(layer, keras.Model) else [layer]


def _operations(graph: tf.Graph) -> Iterator[str]:
    """Yield the names of the operations that draw from TensorFlow's own state, those in functions included."""
    definition = graph.as_graph_def()
    for node in (
        *definition.node,
        *(
            node
            for function in definition.library.function
            for node in function.node_def
        ),
    ):
        if _DRAWING.fullmatch(node.op):
            yield node.name.rpartition("/")[0] or node.name
