"""Layers whose `call` is another function for a while."""

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
    """Have the `call` of each layer be the given function meanwhile.

    The layers keep their class, config and weights: a model that is saved has Keras' own.
    """
    replaced = []
    try:
        for layer, call in calls:
            call.__signature__ = inspect.signature(layer.call)  # type: ignore[attr-defined]  # Keras looks at it
            object.__setattr__(layer, "call", call)  # past the layer's own, which tracks what it is given
            replaced.append(layer)
        yield
    finally:
        for layer in replaced:
            object.__delattr__(layer, "call")


def keeps_call_of(layer: keras.Layer, kind: type[keras.Layer]) -> bool:
    """Return whether the layer is called as `kind` is, so no subclass or wrapper has changed that."""
    return isinstance(layer, kind) and type(layer).call is kind.call and "call" not in vars(layer)


def graph() -> tf.Graph:
    """Return the graph that is traced now: in a layer's own loop or function it is another one than around it."""
    return tf.compat.v1.get_default_graph()
