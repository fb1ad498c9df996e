"""The side effects of a forward pass in training: assigned variables, and noise."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from .batch import examples_in, slice_specs
from .keras_internals import global_seed, layers_of
from .moving_statistics import normalizing_layers
from .same_noise import noise_by_position, noisy_layers

# TensorFlow operations that draw random numbers from a state in TensorFlow, such as
# those of `tf.random.normal` and `tf.random.Generator`.
_DRAWING = re.compile(
    r"(?!Stateless).*Random.*|Rng.*|Stateful(Standard|Uniform).*"
    r"|.*TruncatedNormal|Multinomial"
)

# Methods that a model must not override: `fit` and `evaluate` of a plain model call
# them, but `AccumulatingModel` does not.
_METHODS_OF_FIT = ("train_step", "test_step", "compute_loss", "compute_metrics")


@dataclass(frozen=True)
class Forward:
    """The side effects of a forward pass in training.

    Attributes:
        assigned: variables that the pass assigns: moving statistics, other states, and
            the seeds of layers.
        cut_dependent_noise: names of layers and operations whose noise depends on the
            cut, because they draw new noise for each micro-batch.
        drawing_by_position: layers whose noise for an example depends on its position
            in the effective batch, and so not on the cut.
    """

    assigned: list[keras.Variable]
    cut_dependent_noise: list[str]
    drawing_by_position: list[keras.Layer]


def trace_forward(
    model: keras.Model, x: Any, same_noise: bool, by_tokens: bool = False
) -> Forward:
    """Trace a forward pass of a built model, without changing the model.

    Args:
        model: the built model.
        x: inputs of a few examples.
        same_noise: whether noise is drawn by the position of an example, where the
            layer allows it; see `Update`.
        by_tokens: whether micro-batches are cut by tokens, so that the padded length of
            an example depends on the cut.
    """
    noisy = noisy_layers(model, x) if same_noise else []
    x = tf.nest.map_structure(_as_tensor, x)

    @tf.function(input_signature=[slice_specs(x)], autograph=False)
    def call(x: Any) -> None:
        keys = [tf.zeros([2], tf.int64)] * len(noisy)
        examples = examples_in(x)
        position = tf.range(examples) if by_tokens else 0
        with noise_by_position(noisy, keys, position, examples):
            model(x, training=True)

    with keras.StatelessScope() as scope:
        graph = call.get_concrete_function().graph

    def is_assigned(variable: keras.Variable) -> bool:
        return scope.get_current_value(variable) is not None

    assigned = [variable for variable in model.variables if is_assigned(variable)]
    drawing = {*_drawing_layers(model, assigned), *_drawing_operations(graph)}
    seed = global_seed()
    if seed is not None and is_assigned(seed):
        drawing.add("keras.random without a seed")

    # Leave out a layer whose seed was assigned: some of its calls drew as in Keras.
    ids = {id(variable) for variable in assigned}
    drawing_by_position = [
        layer for layer in noisy if id(layer.seed_generator.state) not in ids
    ]
    seeds = [layer.seed_generator.state for layer in drawing_by_position]
    return Forward([*assigned, *seeds], sorted(drawing), drawing_by_position)


def _as_tensor(leaf: Any) -> Any:
    return leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)


def batch_dependent_layers(
    model: keras.Model, forward: Forward, but: Sequence[keras.Layer] = ()
) -> list[str]:
    """Return the names of layers that assign a state other than a seed in training.

    Such a state depends on the micro-batch. The weights of layers in `but` are ignored.
    """
    ids = {id(variable) for variable in forward.assigned}
    for layer in but:
        ids -= {id(weight) for weight in layer.weights}

    names = []
    for layer in outermost_layers(model):
        is_model = isinstance(layer, keras.Model)
        if not is_model and any(id(weight) in ids for weight in layer.weights):
            names.append(layer.name)
    return sorted(names)


def differences_from_large_batch(
    model: keras.Model,
    forward: Forward,
    *,
    hold_statistics: bool,
    allow_noise: bool,
) -> list[str]:
    """Return the reasons why an update in micro-batches differs from an uncut one.

    Each reason is one line that ends with the names of the layers that cause it.

    Args:
        model: the built model.
        forward: the side effects of its forward pass.
        hold_statistics: whether moving statistics are updated once per update.
        allow_noise: whether layers are named that draw noise per micro-batch although
            the noise of others does not depend on the cut.
    """
    normalizing = normalizing_layers(model)
    noisy = []
    if allow_noise:
        noisy = forward.cut_dependent_noise

    moves = "with every micro-batch"
    if hold_statistics:
        moves = "once per update"
    layers_by_reason = {
        f"normalized within each micro-batch, moving statistics updated {moves}": [
            layer.name for layer in normalizing if layer.trainable
        ],
        "state that is updated with every micro-batch": batch_dependent_layers(
            model, forward, normalizing
        ),
        "noise of each micro-batch, not of the effective batch": noisy,
    }
    return [
        f"{reason}: {', '.join(layers)}"
        for reason, layers in layers_by_reason.items()
        if layers
    ]


def unsupported(
    model: keras.Model, *, as_by_fit: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the reasons why a model cannot be trained in micro-batches.

    Args:
        model: a built model.
        as_by_fit: whether to also reject a model that overrides a method which `fit` or
            `evaluate` of a plain model would call.

    Yields:
        A rule that the model breaks, and the layer, variable or class that breaks it.
    """
    if as_by_fit:
        yield from _own_methods(model)
    for layer in layers_of(model):
        if getattr(layer, "synchronized", False):
            rule = (
                "must have no BatchNormalization(synchronized=True), because "
                "TensorFlow cannot sum over replicas in a loop"
            )
            yield rule, layer.name
        if getattr(layer, "stateful", False):
            rule = (
                "must have no stateful RNN, because "
                "its states belong to the examples of one batch"
            )
            yield rule, layer.name
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            rule = (
                "must have no weights that are overwritten with their gradient, as in "
                "float8"
            )
            yield rule, variable.path


def _own_methods(model: keras.Model) -> Iterator[tuple[str, str]]:
    kind = type(model)
    for name in _METHODS_OF_FIT:
        if getattr(kind, name) is not getattr(keras.Model, name):
            rule = (
                f"must not define {name}, which is never called: use add_loss or a "
                "keras.losses.Loss, or your own loop with accumulate_gradients"
            )
            yield rule, kind.__name__


def untracked_variables(model: keras.Model) -> Iterator[tuple[str, tf.Variable]]:
    """Yield the variables in layers' attributes that Keras does not track, with names.

    They are TensorFlow variables and states of `tf.random.Generator`. Names may repeat.
    """
    for layer in (model, *layers_of(model)):
        for attribute, value in _attributes(layer):
            name = f"{layer.path}/{attribute}"
            if isinstance(value, tf.Variable):
                yield name, value
            elif isinstance(value, tf.random.Generator):
                yield name, value.state


def _attributes(layer: keras.Layer) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each attribute.

    Lists and dicts are yielded entry by entry.
    """
    for name, value in vars(layer).items():
        entries = list(value.values()) if isinstance(value, dict) else value
        if isinstance(entries, list | tuple):
            for entry in entries:
                yield name, entry
        else:
            yield name, entries


def _drawing_layers(
    model: keras.Model, assigned: list[keras.Variable]
) -> Iterator[str]:
    """Yield the names of the layers whose seeds are among the assigned variables.

    The seed may also belong to a nested layer.
    """
    ids = {id(variable) for variable in assigned}

    def has_seed(layer: keras.Layer) -> bool:
        for _, value in _attributes(layer):
            if isinstance(value, keras.random.SeedGenerator) and id(value.state) in ids:
                return True
        return False

    for layer in outermost_layers(model):
        inside = [] if isinstance(layer, keras.Model) else layers_of(layer)
        if any(has_seed(each) for each in (layer, *inside)):
            yield layer.name


def outermost_layers(model: keras.Model) -> Iterator[keras.Layer]:
    """Yield a model and its layers; layers that are models are expanded likewise."""
    yield model
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from outermost_layers(layer)
        else:
            yield layer


def _drawing_operations(graph: tf.Graph) -> Iterator[str]:
    """Yield the names of the operations that draw from a state in TensorFlow.

    Operations in functions of the graph are included.
    """
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes += function.node_def
    for node in nodes:
        if _DRAWING.fullmatch(node.op):
            yield node.name.rpartition("/")[0] or node.name
