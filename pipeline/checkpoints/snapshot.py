"""Snapshot of a run between two updates. A run that continues from it is equal to the bit.

    arrays      variables of the model (with the seeds of its layers) and of the optimizer; arrays of callbacks
    values      state of the random generators of Python and NumPy, of the recorder and of callbacks, as JSON

A snapshot holds no position in the data, which follows from the update, and no metrics, which each update resets.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from pipeline.accumulation import Update
from pipeline.accumulation.internals import (
    MODEL_CHECKPOINT_KEEPS,
    global_seed,
    layers_of,
    unknown_to_keras,
)
from pipeline.common.errors import ConfigError

if TYPE_CHECKING:  # a room above this one
    from pipeline.training.recorder import Recorder

Callbacks = Mapping[str, keras.callbacks.Callback]
Takes = Callable[[str], bool]  # whether a variable is meant, by its name

_SEED = "keras' global seed"
_SAME = " #"  # PATH #2 is the second variable with that path
_REPLICA = (
    " on replica "  # NAME on replica 1 is a copy that differs from the one on replica 0
)
_ARRAY = "__array__"  # {"__array__": NAME} stands for the array NAME
# Attributes that Keras' own callbacks keep from one epoch to the next; `best_weights` is a list of arrays.
_KEPT: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: (
        "best",
        "best_epoch",
        "best_weights",
        "stopped_epoch",
        "wait",
    ),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    keras.callbacks.ModelCheckpoint: ("best", *MODEL_CHECKPOINT_KEEPS),
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.LearningRateScheduler: (),
    keras.callbacks.TerminateOnNaN: (),
}


@dataclass(frozen=True)
class State:
    """A snapshot in host memory."""

    arrays: dict[str, np.ndarray]
    values: dict[str, Any]  # JSON

    def specs(self) -> list[Any]:
        return [
            [name, list(array.shape), array.dtype.name]
            for name, array in self.arrays.items()
        ]

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the arrays into `folder`, read them back, and return what else `read` needs, as JSON."""
        with tf.device("CPU:0"):
            variables = [
                tf.Variable(array, trainable=False) for array in self.arrays.values()
            ]
            tf.train.Checkpoint(arrays=variables).write(str(folder / "arrays"))
        meta = {"arrays": self.specs(), "values": self.values}
        for name, array in read(folder, meta).arrays.items():
            if array.tobytes() != self.arrays[name].tobytes():
                raise OSError(f"{name} was read back other than it was written")
        return meta


def read(folder: Path, meta: Mapping[str, Any]) -> State:
    """Return the snapshot that `State.write` wrote into `folder`, given what it returned."""
    with tf.device("CPU:0"):
        variables = [
            tf.Variable(tf.zeros(shape, dtype), trainable=False)
            for _, shape, dtype in meta["arrays"]
        ]
        tf.train.Checkpoint(arrays=variables).read(
            str(folder / "arrays")
        ).assert_consumed()
    arrays = {
        name: own.numpy()
        for (name, _, _), own in zip(meta["arrays"], variables, strict=True)
    }
    return State(arrays, dict(meta["values"]))


def capture(
    update: Update, recorder: Recorder, callbacks: Callbacks, loop: Mapping[str, Any]
) -> State:
    """Copy everything that an update changes, and `loop`, the state of the training loop as JSON.

    The recorder must have fetched all of its rows. A callback's `get_state` may return JSON values and arrays only.
    """
    arrays = _copied(_variables(update))
    states = {
        name: state
        for name, callback in callbacks.items()
        if (state := _state_of(callback)) is not None
    }
    values = {
        "loop": dict(loop),
        "stop_training": bool(update.model.stop_training),
        "recorder": recorder.get_state(),
    }
    values["random"] = _without_arrays(random.getstate(), "Python's random state", {})
    values["numpy"] = _without_arrays(
        np.random.get_state(), "NumPy's random state", arrays
    )
    values["callbacks"] = {
        name: _without_arrays(each, f"callback/{name}", arrays)
        for name, each in states.items()
    }
    return State(
        arrays,
        {
            **values,
            "kinds": {name: _kind(callback) for name, callback in callbacks.items()},
        },
    )


def restore_variables(
    state: State, update: Update, takes: Takes = lambda _: True
) -> None:
    """Restore the variables whose names `takes` accepts; a `ConfigError` says that one does not fit."""
    if _SEED in state.arrays and takes(_SEED) and global_seed() is None:
        with update.strategy.scope():
            global_seed(make=True)
    check({"arrays": state.specs()}, update, takes)
    _assign(
        {name: copies for name, copies in _variables(update).items() if takes(name)},
        state.arrays,
    )


def restore(
    state: State,
    update: Update,
    recorder: Recorder,
    callbacks: Callbacks,
    takes: Takes = lambda _: True,
) -> dict[str, Any]:
    """Restore everything but the variables that `takes` leaves out; return the state of the training loop."""
    restore_variables(state, update, takes)
    values = state.values
    update.model.stop_training = values["stop_training"]
    recorder.set_state(values["recorder"])
    for name, callback in callbacks.items():
        if name in values["callbacks"] and values["kinds"][name] == _kind(callback):
            own = _with_arrays(values["callbacks"][name], state.arrays)
            if _offers(callback):
                callback.set_state(own)
            else:
                for attribute, value in own.items():
                    setattr(callback, attribute, value)
    np.random.set_state(tuple(_with_arrays(values["numpy"], state.arrays)))
    version, numbers, gauss = values["random"]
    random.setstate((version, tuple(numbers), gauss))
    return dict(values["loop"])


def adapt(update: Update, state: State) -> None:
    """Give `Normalization` layers the statistics of the snapshot, before a trace captures constants of theirs."""
    layers = [
        layer
        for layer in layers_of(update.model)
        if isinstance(layer, keras.layers.Normalization)
    ]
    own = {f"model/{variable.path}" for layer in layers for variable in layer.variables}
    _assign(
        {
            name: at
            for name, at in _variables(update).items()
            if name.partition(_SAME)[0] in own
        },
        state.arrays,
    )
    for layer in layers:
        layer.finalize_state()


@contextmanager
def lent(state: State, update: Update) -> Iterator[None]:
    """Run the block with the variables of the snapshot in the model and the optimizer, then restore their own."""
    variables = _variables(update)
    before = _copied(variables)
    try:
        _assign(variables, state.arrays)
        yield
    finally:
        _assign(variables, before)


def check(
    meta: Mapping[str, Any], update: Update, takes: Takes = lambda _: True
) -> None:
    """Check that all variables that `takes` accepts are in `meta` and in the model, with the same shape and dtype."""
    saved, variables = (
        {name: f"{tuple(shape)} {dtype}" for name, shape, dtype in meta["arrays"]},
        _variables(update),
    )
    for name, (copy, *_) in variables.items():
        spec = f"{tuple(copy.shape)} {copy.dtype.name}"
        if (
            takes(name)
            and saved.get(name) != spec
            and not (name == _SEED and name not in saved)
        ):
            raise ConfigError(
                "the checkpoint",
                f"must fit the model, whose {name} is {spec}",
                saved.get(name),
            )
    for name in (
        name.partition(_REPLICA)[0]
        for name in saved
        if name.startswith(("model/", "optimizer/"))
    ):
        if takes(name) and name not in variables:
            raise ConfigError(
                "the checkpoint", "must fit the model, which has no such variable", name
            )


def check_state(name: str, callback: keras.callbacks.Callback) -> None:
    """Raise a TypeError for a state, before the training, that a checkpoint cannot hold."""
    if _offers(callback):
        with suppress(AttributeError):  # of what the training begins with
            _without_arrays(callback.get_state(), name, {})


def starting_anew(callbacks: Callbacks) -> list[str]:
    """Return a line for each callback whose state cannot be saved."""
    stateless = [
        name
        for name, callback in callbacks.items()
        if type(callback) not in _KEPT and not _offers(callback)
    ]
    return [
        f"training.callbacks.{name} starts anew: it offers no state"
        for name in stateless
    ]


def _variables(update: Update) -> dict[str, Sequence[Any]]:
    """Return all variables by unique name, each as a list of its copies on the replicas, or of one if all are equal."""
    model, local = update.model, update.strategy.experimental_local_results
    trainable = {id(variable) for variable in model.trainable_variables}
    named: list[tuple[str, Any]] = [
        (f"model/{each.path}", [each.value]) for each in model.trainable_variables
    ]
    # The others include the seeds.
    named += [
        (f"model/{each.path}", local(each.value))
        for each in model.variables
        if id(each) not in trainable
    ]
    named += [(f"model/{name}", local(own)) for name, own in unknown_to_keras(model)]
    named += [
        (f"optimizer/{each.path}", [each.value]) for each in update.optimizer.variables
    ]
    named += [] if (seed := global_seed()) is None else [(_SEED, local(seed.value))]
    found, count = dict[str, Sequence[Any]](), Counter[str]()
    for name, copies in named:
        count[name] += 1
        found[name if count[name] == 1 else f"{name}{_SAME}{count[name]}"] = copies
    return found


def _copied(variables: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray]:
    """Copy variables to the host. A copy on a replica is left out if it equals the one on replica 0."""
    arrays: dict[str, np.ndarray] = {}
    for name, copies in variables.items():
        arrays[name] = first = copies[0].numpy()
        for replica, copy in enumerate(
            copies[1:], start=1
        ):  # a seed moves with the micro-batches of its replica
            if (value := copy.numpy()).tobytes() != first.tobytes():
                arrays[f"{name}{_REPLICA}{replica}"] = value
    return arrays


def _assign(
    variables: Mapping[str, Sequence[Any]], arrays: Mapping[str, np.ndarray]
) -> None:
    """Assign to `variables` what `_copied` returned; a variable without an array keeps its value."""
    for name, copies in variables.items():
        for replica, copy in enumerate(copies if name in arrays else ()):
            copy.assign(arrays.get(f"{name}{_REPLICA}{replica}", arrays[name]))


def _kind(callback: keras.callbacks.Callback) -> str:
    return f"{type(callback).__module__}.{type(callback).__qualname__}"


def _offers(callback: keras.callbacks.Callback) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def _state_of(callback: Any) -> Any:
    """Return the callback's `get_state()`, or the attributes in `_KEPT`; None for a callback with neither."""
    if _offers(callback):
        return callback.get_state()
    known = [kept for kind, kept in _KEPT.items() if isinstance(callback, kind)]
    return (
        {name: getattr(callback, name) for name in known[0] if hasattr(callback, name)}
        if known
        else None
    )


def _without_arrays(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """Return a copy of `value` as JSON; each array in it moves to `arrays`, and its name takes its place."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "OSU":
        arrays[name] = np.array(value)
        return {_ARRAY: name}
    if (
        isinstance(value, dict)
        and all(isinstance(key, str) for key in value)
        and _ARRAY not in value
    ):
        return {
            key: _without_arrays(entry, f"{name}/{key}", arrays)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            _without_arrays(entry, f"{name}/{index}", arrays)
            for index, entry in enumerate(value)
        ]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(
        f"the state of {name} must be JSON values and NumPy arrays. Received: {type(value).__name__}"
    )


def _with_arrays(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, dict):
        if _ARRAY in value:
            array = arrays[value[_ARRAY]]
            return array if array.shape else array[()]
        return {key: _with_arrays(entry, arrays) for key, entry in value.items()}
    return (
        [_with_arrays(entry, arrays) for entry in value]
        if isinstance(value, list)
        else value
    )
