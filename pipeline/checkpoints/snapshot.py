"""Snapshot of a run between two updates. A run that continues from it is equal to the bit.

    arrays      variables of the model (with the seeds of its layers) and of the optimizer; arrays of callbacks
    values      state of the random generators of Python and NumPy, of the recorder and of callbacks, as JSON

A snapshot holds no position in the data, which follows from the update, and no metrics, which each update resets.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from pipeline.accumulation import MODEL_CHECKPOINT_KEEPS, Update, global_seed, layers_of, unknown_to_keras
from pipeline.common.errors import ConfigError

if TYPE_CHECKING:  # a room above this one
    from pipeline.training.recorder import Recorder

Callbacks = Mapping[str, keras.callbacks.Callback]

_SEED = "keras' global seed"
_SAME = " #"  # PATH #2 is the second variable with that path
_REPLICA = " on replica "  # NAME on replica 1 is a copy that differs from the one on replica 0
_ARRAY = "__array__"  # {"__array__": NAME} stands for the array NAME
# Attributes that Keras' own callbacks keep from one epoch to the next; `best_weights` is a list of arrays.
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
    """Selects what is restored: everything where a run resumes, less where another run starts from its checkpoint."""

    weights_only: bool = False  # restore only the model's weights
    own_rate: bool = False  # keep a learning rate that is a variable; the checkpoint or the optimizer may lack it

    def has(self, name: str) -> bool:
        """Return whether the variable `name` is restored."""
        if self.weights_only:
            return name.startswith("model/") and not name.endswith("/seed_generator_state")
        return not (self.own_rate and name.startswith("optimizer/") and name.endswith("/learning_rate"))


EVERYTHING = Taken()


@dataclass(frozen=True)
class State:
    """A snapshot in host memory."""

    arrays: dict[str, np.ndarray]
    values: dict[str, Any]  # JSON

    def specs(self) -> list[Any]:
        """Return name, shape and dtype of each array."""
        return [[name, list(array.shape), array.dtype.name] for name, array in self.arrays.items()]

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the arrays into `folder`; return what else `read` needs, as JSON.

        Raises:
            OSError: an array was read back with another value.
        """
        with tf.device("CPU:0"):
            variables = [tf.Variable(array, trainable=False) for array in self.arrays.values()]
            tf.train.Checkpoint(arrays=variables).write(str(folder / "arrays"))
        meta = {"arrays": self.specs(), "values": self.values}
        for name, array in read(folder, meta).arrays.items():
            if array.tobytes() != self.arrays[name].tobytes():
                raise OSError(f"{name} was read back other than it was written")
        return meta


def read(folder: Path, meta: Mapping[str, Any]) -> State:
    """Return the snapshot that `State.write` wrote into `folder`, given what it returned."""
    with tf.device("CPU:0"):
        variables = [tf.Variable(tf.zeros(shape, dtype), trainable=False) for _, shape, dtype in meta["arrays"]]
        tf.train.Checkpoint(arrays=variables).read(str(folder / "arrays")).assert_consumed()
    names = [name for name, _, _ in meta["arrays"]]
    return State(dict(zip(names, (v.numpy() for v in variables), strict=True)), dict(meta["values"]))


def capture(update: Update, recorder: Recorder, callbacks: Callbacks, loop: Mapping[str, Any]) -> State:
    """Copy everything that an update changes, and `loop`, the state of the training loop as JSON.

    The recorder must have fetched all of its rows; `callbacks` are by name.

    Raises:
        TypeError: `get_state` of a callback returned something other than JSON and arrays.
    """
    arrays = _copied(_variables(update))
    states = {name: state for name, callback in callbacks.items() if (state := _state_of(callback)) is not None}
    values = {
        "loop": dict(loop),
        "stop_training": bool(update.model.stop_training),
        "recorder": recorder.get_state(),
        "random": _without_arrays(random.getstate(), "Python's random state", {}),
        "numpy": _without_arrays(np.random.get_state(), "NumPy's random state", arrays),
        "callbacks": {name: _without_arrays(state, f"callback/{name}", arrays) for name, state in states.items()},
        "kinds": {name: _kind(callback) for name, callback in callbacks.items()},
    }
    return State(arrays, values)


def restore(
    state: State, update: Update, recorder: Recorder, callbacks: Callbacks, taken: Taken = EVERYTHING
) -> dict[str, Any]:
    """Restore what `taken` selects; return the state of the training loop, empty with `weights_only`.

    Raises:
        ConfigError: the snapshot is of another model or optimizer; nothing was changed.
    """
    if _SEED in state.arrays and taken.has(_SEED) and global_seed() is None:
        with update.strategy.scope():
            global_seed(make=True)
    check({"arrays": state.specs()}, update, taken)
    _assign({name: copies for name, copies in _variables(update).items() if taken.has(name)}, state.arrays)
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


def adapt(update: Update, state: State) -> None:
    """Give `Normalization` layers the statistics of the snapshot, whatever data the model was adapted to.

    Such a layer computes with constants that it derives from its variables, and tracing captures the constants: call
    this before anything is traced.
    """
    layers = [layer for layer in layers_of(update.model) if isinstance(layer, keras.layers.Normalization)]
    own = {f"model/{variable.path}" for layer in layers for variable in layer.variables}
    adapted = {name: copies for name, copies in _variables(update).items() if name.partition(_SAME)[0] in own}
    _assign(adapted, state.arrays)
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


def check(meta: Mapping[str, Any], update: Update, taken: Taken = EVERYTHING) -> None:
    """Check that a checkpoint fits the model and optimizer, as far as `taken` selects their variables.

    Args:
        meta: what `State.write` returned.

    Raises:
        ConfigError: a variable is missing on one side, or has another shape or dtype.
    """
    saved, variables = {name: f"{tuple(shape)} {dtype}" for name, shape, dtype in meta["arrays"]}, _variables(update)
    for name, (copy, *_) in variables.items():
        spec = f"{tuple(copy.shape)} {copy.dtype.name}"
        if taken.has(name) and saved.get(name) != spec and not (name == _SEED and name not in saved):
            raise ConfigError("the checkpoint", f"must fit the model, whose {name} is {spec}", saved.get(name))
    for name in (name.partition(_REPLICA)[0] for name in saved if name.startswith(("model/", "optimizer/"))):
        if taken.has(name) and name not in variables:
            raise ConfigError("the checkpoint", "must fit the model, which has no such variable", name)


def without_state(callbacks: Callbacks) -> list[str]:
    """Return the names of callbacks whose state cannot be saved: they start anew when a run resumes."""
    return [name for name, callback in callbacks.items() if type(callback) not in _KEPT and not _offers(callback)]


def _variables(update: Update) -> dict[str, Sequence[Any]]:
    """Return all variables by unique name, each as a list of its copies on the replicas.

    The list has one entry for a variable that is equal on all replicas: trainable weights, the optimizer's variables.
    """
    model, found, count = update.model, dict[str, Sequence[Any]](), Counter[str]()

    def add(name: str, variable: Any, per_replica: bool = True) -> None:
        count[name] += 1
        unique = name if count[name] == 1 else f"{name}{_SAME}{count[name]}"
        found[unique] = update.strategy.experimental_local_results(variable) if per_replica else [variable]

    trainable = {id(variable) for variable in model.trainable_variables}
    for variable in model.trainable_variables:
        add(f"model/{variable.path}", variable.value, per_replica=False)
    for variable in model.variables:  # also the seeds
        if id(variable) not in trainable:
            add(f"model/{variable.path}", variable.value)
    for name, own in unknown_to_keras(model):
        add(f"model/{name}", own)
    for variable in update.optimizer.variables:
        add(f"optimizer/{variable.path}", variable.value, per_replica=False)
    if (seed := global_seed()) is not None:
        add(_SEED, seed.value)
    return found


def _copied(variables: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray]:
    """Copy variables to the host. A copy on a replica is left out if it equals the one on replica 0."""
    arrays: dict[str, np.ndarray] = {}
    for name, copies in variables.items():
        arrays[name] = first = copies[0].numpy()
        for replica, copy in enumerate(copies[1:], start=1):  # a seed moves with the micro-batches of its replica
            if (value := copy.numpy()).tobytes() != first.tobytes():
                arrays[_on(replica, name)] = value
    return arrays


def _assign(variables: Mapping[str, Sequence[Any]], arrays: Mapping[str, np.ndarray]) -> None:
    """Assign to `variables` what `_copied` returned; a variable without an array keeps its value."""
    for name, copies in variables.items():
        for replica, copy in enumerate(copies if name in arrays else ()):
            copy.assign(arrays.get(_on(replica, name), arrays[name]))


def _on(replica: int, name: str) -> str:
    return f"{name}{_REPLICA}{replica}" if replica else name


def _kind(callback: keras.callbacks.Callback) -> str:
    return f"{type(callback).__module__}.{type(callback).__qualname__}"


def _offers(callback: keras.callbacks.Callback) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def _state_of(callback: Any) -> Any:
    """Return the callback's `get_state()`, or the attributes in `_KEPT`; None for a callback with neither."""
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
    """Return a copy of `value` as JSON; each array in it moves to `arrays`, and its name takes its place."""
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
