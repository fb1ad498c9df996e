"""What a run is between two updates, taken off the device and put back so that what follows is equal to the bit.

    arrays      the model's variables with the seeds of its layers, the optimizer's, what callbacks keep of arrays
    values      the random state of Python and NumPy, the recorder's and the callbacks' state: all that is JSON

The order of the data follows from the update alone, and metrics start anew in each: neither is in it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from pipeline.accumulation import (
    MODEL_CHECKPOINT_KEEPS,
    Update,
    global_seed,
    layers_of,
    make_global_seed,
    unknown_to_keras,
)
from pipeline.common.errors import ConfigError

if TYPE_CHECKING:  # a room above this one
    from pipeline.training.recorder import Recorder

Callbacks = Mapping[str, keras.callbacks.Callback]

_SEED = "keras' global seed"
_SAME = " #"  # between the path of several variables and the number of all but the first
_REPLICA = " on replica "  # between a variable's name and the number of one that differs from the first
_ARRAY = "__array__"  # the key under which the name of an array stands in its place
# What Keras' own callbacks know from one epoch to the next; for `best_weights` a list of arrays.
_KEPT: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "best_weights", "stopped_epoch", "wait"),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    keras.callbacks.ModelCheckpoint: ("best", *MODEL_CHECKPOINT_KEEPS),
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.LearningRateScheduler: (),
    keras.callbacks.TerminateOnNaN: (),
}


@dataclass(frozen=True)
class Taken:
    """What is taken of a checkpoint: all of it by the run that it is of, and less where another run begins with it.

    Attributes:
        weights_only: nothing but the model's weights.
        own_rate: a learning rate that is a variable stays as it is, and may be in one of the two alone.
    """

    weights_only: bool = False
    own_rate: bool = False

    def has(self, name: str) -> bool:
        """Return whether the variable `name` is taken."""
        if self.weights_only:
            return name.startswith("model/") and not name.endswith("/seed_generator_state")
        return not (self.own_rate and name.startswith("optimizer/") and name.endswith("/learning_rate"))


EVERYTHING = Taken()


@dataclass(frozen=True)
class State:
    """A copy on the host."""

    arrays: dict[str, np.ndarray]
    values: dict[str, Any]  # as JSON takes it

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the arrays into `folder`; return what `read` needs beside them, as JSON takes it.

        Raises:
            OSError: what was written is not what is read back.
        """
        with tf.device("CPU:0"):
            variables = [tf.Variable(array, trainable=False) for array in self.arrays.values()]
            tf.train.Checkpoint(arrays=variables).write(str(folder / "arrays"))
        specs = [[name, list(array.shape), array.dtype.name] for name, array in self.arrays.items()]
        meta = {"arrays": specs, "values": self.values}
        for name, array in read(folder, meta).arrays.items():
            if array.tobytes() != self.arrays[name].tobytes():
                raise OSError(f"{name} was read back other than it was written")
        return meta


def read(folder: Path, meta: Mapping[str, Any]) -> State:
    """Return what `State.write` has written into `folder`."""
    with tf.device("CPU:0"):
        variables = [tf.Variable(tf.zeros(shape, dtype), trainable=False) for _, shape, dtype in meta["arrays"]]
        tf.train.Checkpoint(arrays=variables).read(str(folder / "arrays")).assert_consumed()
    names = [name for name, _, _ in meta["arrays"]]
    return State(dict(zip(names, (v.numpy() for v in variables), strict=True)), dict(meta["values"]))


def capture(update: Update, recorder: Recorder, callbacks: Callbacks, loop: Mapping[str, Any]) -> State:
    """Return a copy of all that an update changes.

    Args:
        update: of the model and the optimizer.
        recorder: with nothing left to fetch.
        callbacks: by name.
        loop: what the loop itself knows, as JSON takes it.

    Raises:
        TypeError: a callback's `get_state` gives what is neither JSON nor an array.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, copies in _variables(update).items():
        arrays[name] = first = copies[0].numpy()
        for replica, copy in enumerate(copies[1:], start=1):  # a seed moves with the micro-batches of its replica
            if (value := copy.numpy()).tobytes() != first.tobytes():
                arrays[_on(replica, name)] = value
    values = {
        "loop": dict(loop),
        "stop_training": bool(update.model.stop_training),
        "recorder": recorder.get_state(),
        "random": _without_arrays(random.getstate(), "Python's random state", {}),
        "numpy": _without_arrays(np.random.get_state(), "NumPy's random state", arrays),
        "callbacks": {
            name: _without_arrays(state, f"callback/{name}", arrays)
            for name, callback in callbacks.items()
            if (state := _state_of(callback)) is not None
        },
        "kinds": {name: _kind(callback) for name, callback in callbacks.items()},
    }
    return State(arrays, values)


def restore(
    state: State, update: Update, recorder: Recorder, callbacks: Callbacks, taken: Taken = EVERYTHING
) -> dict[str, Any]:
    """Put what is `taken` of a captured state back; return what the loop knew, empty where the weights alone are.

    Raises:
        ConfigError: it is not of this model and optimizer; nothing was changed.
    """
    if _SEED in state.arrays and taken.has(_SEED) and global_seed() is None:
        with update.strategy.scope():
            make_global_seed()
    variables = _variables(update)
    _check({name: _spec(array) for name, array in state.arrays.items()}, variables, taken)
    for name, copies in variables.items():
        if name in state.arrays and taken.has(name):
            _assign(state, name, copies)
    if taken.weights_only:
        return {}
    values = state.values
    update.model.stop_training = values["stop_training"]
    recorder.set_state(values["recorder"])
    for name, callback in callbacks.items():
        if name in values["callbacks"] and values["kinds"][name] == _kind(callback):
            _set_state_of(callback, _with_arrays(values["callbacks"][name], state.arrays))
    np.random.set_state(tuple(_with_arrays(values["numpy"], state.arrays)))
    version, numbers, gauss = values["random"]
    random.setstate((version, tuple(numbers), gauss))
    return dict(values["loop"])


def _assign(state: State, name: str, copies: Sequence[Any]) -> None:
    for replica, copy in enumerate(copies):
        copy.assign(state.arrays.get(_on(replica, name), state.arrays[name]))


def adapt(update: Update, state: State) -> None:
    """Let the model normalise as that of a captured state did, whatever data it was adapted to when it was built.

    `Normalization` computes with constants that it makes of its variables: what is traced keeps them as they are then.
    """
    made = [layer for layer in layers_of(update.model) if isinstance(layer, keras.layers.Normalization)]
    own = {f"model/{variable.path}" for layer in made for variable in layer.variables}
    for name, copies in _variables(update).items():
        if name.partition(_SAME)[0] in own:
            _assign(state, name, copies)
    for layer in made:
        layer.finalize_state()


@contextmanager
def lent(state: State, update: Update) -> Iterator[None]:
    """Let the model and the optimizer have the variables of a captured state meanwhile."""
    variables = _variables(update)
    before = {name: [copy.numpy() for copy in copies] for name, copies in variables.items()}

    def assign(arrays: Mapping[str, Sequence[np.ndarray]]) -> None:
        for name, values in arrays.items():
            for copy, value in zip(variables[name], values, strict=True):
                copy.assign(value)

    there = {name: copies for name, copies in variables.items() if name in state.arrays}
    try:
        assign(
            {
                name: [state.arrays.get(_on(replica, name), state.arrays[name]) for replica in range(len(copies))]
                for name, copies in there.items()
            }
        )
        yield
    finally:
        assign(before)


def check(meta: Mapping[str, Any], update: Update, taken: Taken = EVERYTHING) -> None:
    """Refuse a checkpoint of another model or optimizer, by what `State.write` returned, before anything is read.

    Raises:
        ConfigError: a variable that is `taken` is not in both, or has another shape or dtype there.
    """
    _check({name: f"{tuple(shape)} {dtype}" for name, shape, dtype in meta["arrays"]}, _variables(update), taken)


def without_state(callbacks: Callbacks) -> list[str]:
    """Return the names of callbacks that may know what no checkpoint has: they start anew where a run goes on."""
    return [name for name, callback in callbacks.items() if type(callback) not in _KEPT and not _offers(callback)]


def _check(there: Mapping[str, str], variables: Mapping[str, Any], taken: Taken) -> None:
    """Refuse a checkpoint that lacks a variable, has one too many, or one of another shape or dtype."""
    for name, (copy, *_) in variables.items():
        here = _spec(copy)
        if taken.has(name) and there.get(name) != here and not (name == _SEED and name not in there):
            raise ConfigError("the checkpoint", f"must fit the model, whose {name} is {here}", there.get(name))
    for name in (name.partition(_REPLICA)[0] for name in there if name.startswith(("model/", "optimizer/"))):
        if taken.has(name) and name not in variables:
            raise ConfigError("the checkpoint", "must fit the model, which has no such variable", name)


def _spec(array: Any) -> str:
    return f"{tuple(array.shape)} {array.dtype.name}"


def _variables(update: Update) -> dict[str, Sequence[Any]]:
    """Return every variable by a name of its own: as one, or as its copies on the replicas where these may differ."""
    model, found = update.model, dict[str, Sequence[Any]]()

    def add(name: str, copies: Sequence[Any]) -> None:
        same = sum(other.partition(_SAME)[0] == name for other in found)
        found[name if not same else f"{name}{_SAME}{same + 1}"] = copies

    def on_replicas(variable: tf.Variable) -> Sequence[Any]:
        return update.strategy.experimental_local_results(variable)

    for variable in model.trainable_variables:
        add(f"model/{variable.path}", [variable.value])
    trained = {id(variable) for variable in model.trainable_variables}
    for variable in model.variables:  # with the seeds
        if id(variable) not in trained:
            add(f"model/{variable.path}", on_replicas(variable.value))
    for name, own in unknown_to_keras(model):
        add(f"model/{name}", on_replicas(own))
    for variable in update.optimizer.variables:
        add(f"optimizer/{variable.path}", [variable.value])
    if (seed := global_seed()) is not None:
        add(_SEED, on_replicas(seed.value))
    return found


def _on(replica: int, name: str) -> str:
    return f"{name}{_REPLICA}{replica}" if replica else name


def _kind(callback: keras.callbacks.Callback) -> str:
    return f"{type(callback).__module__}.{type(callback).__qualname__}"


def _offers(callback: keras.callbacks.Callback) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def _state_of(callback: Any) -> Any:
    """Return what the callback offers, or what is known of one of Keras'; None where neither is."""
    if _offers(callback):
        return callback.get_state()
    known = [kept for kind, kept in _KEPT.items() if isinstance(callback, kind)]
    return {name: getattr(callback, name) for name in known[0] if hasattr(callback, name)} if known else None


def _set_state_of(callback: Any, state: Any) -> None:
    if _offers(callback):
        callback.set_state(state)
        return
    for name, value in state.items():
        setattr(callback, name, value)


def _without_arrays(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """Return a copy of `value` as JSON takes it, with the name of each array in its place; put these in `arrays`."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "OSU":
        arrays[name] = np.array(value)
        return {_ARRAY: name}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value) and _ARRAY not in value:
        return {key: _without_arrays(entry, f"{name}/{key}", arrays) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_arrays(entry, f"{name}/{index}", arrays) for index, entry in enumerate(value)]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"the state of {name} must be JSON values and NumPy arrays. Received: {type(value).__name__}")


def _with_arrays(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, dict):
        if _ARRAY in value:
            array = arrays[value[_ARRAY]]
            return array if array.shape else array[()]
        return {key: _with_arrays(entry, arrays) for key, entry in value.items()}
    return [_with_arrays(entry, arrays) for entry in value] if isinstance(value, list) else value
