"""Temporary replacements of layers' `call`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

Call = Callable[..., Any]


@contextmanager
def calling(calls: Iterable[tuple[keras.Layer, Call]]) -> Iterator[None]:
    """Replace the `call` of each layer by the given function inside the `with` block.

    The layers keep their class, config and weights: a model saved meanwhile has Keras' own `call`.
    """
    replaced = []
    try:
        for layer, call in calls:
            call.__signature__ = inspect.signature(layer.call)  # type: ignore[attr-defined]  # Keras reads it
            object.__setattr__(layer, "call", call)  # bypasses the layer's own, which tracks attributes
            replaced.append(layer)
        yield
    finally:
        for layer in replaced:
            object.__delattr__(layer, "call")


def keeps_call_of(layer: keras.Layer, kind: type[keras.Layer]) -> bool:
    """Return whether the layer's `call` is that of `kind`, not overridden by a subclass or a wrapper."""
    return isinstance(layer, kind) and type(layer).call is kind.call and "call" not in vars(layer)


def graph() -> tf.Graph:
    """Return the graph that is being traced: a layer's own loop or function has a graph of its own."""
    return tf.compat.v1.get_default_graph()
