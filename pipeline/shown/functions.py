"""Calls the user's own functions of `training.shown`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from pipeline.accumulation import Evaluation
from pipeline.accumulation.internals import examples_in, parts_of, slice_of
from pipeline.common.errors import first_line, say
from pipeline.shown import encoding, tables
from pipeline.tracking.shown_files import EncodedPicture

# A function of (x, y, outputs), which are arrays or nests of them with the examples on
# axis 0. It returns a picture, a figure or a mapping of columns.
ShownFunction = Callable[[Any, Any, Any], Any]


class Functions:
    """The user's functions, which all get the same examples at each evaluation.

    Args:
        functions: the functions by name.
        batch: `(x, y)` or `(x, y, sample_weight)` of the examples.
        evaluation: the evaluation, whose model gives the outputs.
        changed: variables that a forward pass may change. Each call restores them.
    """

    def __init__(
        self,
        functions: Mapping[str, ShownFunction],
        batch: Any,
        evaluation: Evaluation,
        changed: Sequence[tf.Variable] = (),
    ):
        self._functions = functions
        inputs, labels, _ = parts_of(batch)
        self._inputs = inputs
        self._arrays = tf.nest.map_structure(_array, (inputs, labels))
        self._evaluation = evaluation
        self._changed = changed
        self._outputs: Any = None
        self._failed: set[str] = set()
        self._forward = tf.function(
            lambda x: self._evaluation.model(x, training=False), autograph=False
        )

    def compute_outputs(self) -> None:
        """Compute the outputs with the current weights; `results` uses them."""
        self._outputs = None
        with self._reported("training.shown"), _state_kept(self._changed):
            parts = []
            count = int(examples_in(self._inputs))
            # In a cut by tokens, the number of examples may have no limit.
            size = self._evaluation.micro_batch_size or count
            for start in range(0, count, size):
                x = slice_of(self._inputs, start, start + size)
                outputs = self._forward(x)
                parts.append(tf.nest.map_structure(_array, outputs))
            self._outputs = tf.nest.map_structure(
                lambda *arrays: np.concatenate(arrays), *parts
            )

    def results(self) -> tuple[dict[str, EncodedPicture], dict[str, str]]:
        """Return the pictures and the tables that the functions return, by name.

        The result of a function that fails is left out. Its first failure is printed.
        """
        pictures = {}
        columns = {}
        if self._outputs is None:
            return {}, {}
        for name, function in self._functions.items():
            with self._reported(f"training.shown.{name}"), _state_kept(self._changed):
                # Each function gets its own copy, which it may change.
                x, y, outputs = tf.nest.map_structure(
                    _copy, (*self._arrays, self._outputs)
                )
                result = function(x, y, outputs)
                if isinstance(result, Mapping):
                    columns[name] = tables.of_columns(result)
                    continue
                picture = encoding.picture_of(result)
                if picture is None:
                    rule = (
                        "the function must return an array, a Pillow image, a "
                        "Matplotlib figure or a mapping of columns"
                    )
                    raise TypeError(f"{rule}. Received: {type(result).__name__}")
                pictures[name] = encoding.encoded(picture)
        return pictures, columns

    @contextmanager
    def _reported(self, key: str) -> Iterator[None]:
        """Suppress an error in the block, and print it the first time."""
        try:
            yield
        except Exception as error:
            if key not in self._failed:
                self._failed.add(key)
                say(f"{key} is left out: {type(error).__name__}: {first_line(error)}")


@contextmanager
def _state_kept(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Restore variables, and the random states of Python and NumPy, after the block.

    So training continues as it would without the block.
    """
    values = [tf.identity(variable) for variable in variables]
    state_of_python = random.getstate()
    state_of_numpy = np.random.get_state()
    try:
        yield
    finally:
        random.setstate(state_of_python)
        np.random.set_state(state_of_numpy)
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def _array(leaf: Any) -> Any:
    return leaf.numpy() if tf.is_tensor(leaf) else leaf


def _copy(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
