"""Snapshots of a run between two updates.

A run that is restored from a snapshot continues bit for bit like an uninterrupted run,
if its operations are deterministic and the states of its callbacks can be saved. A
snapshot has two parts:

    arrays      variables of the optimizer and of the model, including the seeds of its
                layers; Keras' global seed; arrays from the states below
    values      states of the training loop, of the recorder, of the callbacks, and of
                the random generators of Python and NumPy, as JSON

A snapshot contains neither the position in the data, which follows from the number of
updates, nor the state of metrics, which each update resets.
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
    TENSORBOARD_KEEPS,
    global_seed,
    layers_of,
    untracked_variables,
)
from pipeline.checkpoints import csv_rows
from pipeline.checkpoints.files import Checkpoint, LoopState
from pipeline.common import link_path
from pipeline.common.errors import ConfigError

if TYPE_CHECKING:  # a higher package, imported only for annotations
    from pipeline.training.recorder import Recorder

Callbacks = Mapping[str, keras.callbacks.Callback]
# Unique name of a variable → its copies on the replicas, or one copy if the copies are
# always equal.
Variables = dict[str, Sequence[Any]]
# Returns whether to restore the variable with a given name.
IsRestored = Callable[[str], bool]

_SEED = "keras' global seed"
_SAME_PATH = " #"  # `PATH #2` is the second variable with that path.
_REPLICA = " on replica "  # `NAME on replica 1` differs from the copy on replica 0.
_ARRAY = "__array__"  # `{"__array__": NAME}` stands for the array NAME.

# Attributes that hold the state of Keras' own callbacks between epochs. `best_weights`
# is a list of arrays.
_KEPT_ATTRIBUTES: dict[type, tuple[str, ...]] = {
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
    keras.callbacks.CSVLogger: (),  # see `csv_rows`
    keras.callbacks.TensorBoard: TENSORBOARD_KEEPS,
}


@dataclass(frozen=True)
class Snapshot:
    """The state of a run between two updates, in host memory.

    Attributes:
        arrays: the arrays, by name.
        values: the JSON values; see `_VALUES` in `pipeline.checkpoints.files`.
    """

    arrays: dict[str, np.ndarray]
    values: dict[str, Any]

    def specs(self) -> list[Any]:
        """Return the name, shape and dtype of each array, as lists for JSON."""
        specs = []
        for name, array in self.arrays.items():
            specs.append([name, list(array.shape), array.dtype.name])
        return specs

    def write_arrays(self, folder: Path) -> None:
        """Write the arrays into `folder`, and read them back to verify them.

        Raises:
            OSError: an array that was read back differs from the written one.
        """
        with tf.device("CPU:0"):
            variables = []
            for array in self.arrays.values():
                variables.append(tf.Variable(array, trainable=False))
            with link_path.without_pattern(folder) as path:
                tf.train.Checkpoint(arrays=variables).write(str(path / "arrays"))
        for name, array in read_arrays(folder, self.specs()).items():
            if array.tobytes() != self.arrays[name].tobytes():
                raise OSError(f"{name} was not read back as it was written")


def _restore_all(name: str) -> bool:
    return True


def read(checkpoint: Checkpoint) -> Snapshot:
    """Return the snapshot in a checkpoint."""
    meta = checkpoint.meta
    arrays = read_arrays(checkpoint.folder, meta.arrays)
    return Snapshot(arrays, dict(meta.values))


def read_arrays(folder: Path, specs: Sequence[Any]) -> dict[str, np.ndarray]:
    """Read the arrays in `folder`; return them by name.

    Args:
        folder: the folder in which `Snapshot.write_arrays` wrote the arrays.
        specs: name, shape and dtype of each array; see `Snapshot.specs`.
    """
    variables = []
    with tf.device("CPU:0"):
        for _, shape, dtype in specs:
            variables.append(tf.Variable(tf.zeros(shape, dtype), trainable=False))
        saved = tf.train.Checkpoint(arrays=variables)
        with link_path.without_pattern(folder) as path:
            saved.read(str(path / "arrays")).assert_consumed()
    arrays = {}
    for (name, _, _), variable in zip(specs, variables, strict=True):
        arrays[name] = variable.numpy()
    return arrays


def is_weight(name: str) -> bool:
    """Return whether a variable belongs to the model, and is not the seed of a layer."""
    return name.startswith("model/") and not name.endswith("/seed_generator_state")


def of_model(updater: Update) -> Snapshot:
    """Return a snapshot with only the variables of the model."""
    arrays = {}
    for name, array in _copied(_variables(updater)).items():
        if name.startswith("model/"):
            arrays[name] = array
    return Snapshot(arrays, {})


def capture(
    updater: Update, recorder: Recorder, callbacks: Callbacks, loop: LoopState
) -> Snapshot:
    """Return a snapshot: a copy of everything that an update changes.

    Args:
        updater: the update. The variables of its model and of its optimizer are copied.
        recorder: the recorder. Call its `fetch` first.
        callbacks: the callbacks. Their `get_state` may return only JSON values and
            NumPy arrays.
        loop: the state of the training loop.

    Raises:
        TypeError: the state of a callback has a value of another type.
    """
    arrays = _copied(_variables(updater))

    # Copy the random states only after this loop: `get_state` may draw random numbers.
    callback_states: dict[str, Any] = {}
    callback_classes: dict[str, str] = {}
    for name, callback in callbacks.items():
        callback_classes[name] = _class_name(callback)
        state = _state_of(callback)
        if state is not None:
            plain_state = _without_arrays(state, f"callback/{name}", arrays)
            callback_states[name] = plain_state

    python_state = random.getstate()
    numpy_state = np.random.get_state()
    values = {
        "loop": loop.as_json(),
        "stop_training": bool(updater.model.stop_training),
        "recorder": recorder.get_state(),
        "random": _without_arrays(python_state, "Python's random state", {}),
        "numpy": _without_arrays(numpy_state, "NumPy's random state", arrays),
        "callbacks": callback_states,
        "kinds": callback_classes,
    }
    return Snapshot(arrays, values)


def restore_variables(
    snapshot: Snapshot, updater: Update, is_restored: IsRestored = _restore_all
) -> None:
    """Restore the variables whose names `is_restored` accepts.

    Raises:
        ConfigError: a variable does not fit the snapshot. No variable was changed.
    """
    if _SEED in snapshot.arrays and is_restored(_SEED) and global_seed() is None:
        with updater.strategy.scope():
            global_seed(make=True)
    check_variables_fit(snapshot.specs(), updater, is_restored)
    restored: Variables = {}
    for name, copies in _variables(updater).items():
        if is_restored(name):
            restored[name] = copies
    _assign(restored, snapshot.arrays)


def restore(
    snapshot: Snapshot,
    updater: Update,
    recorder: Recorder,
    callbacks: Callbacks,
    is_restored: IsRestored = _restore_all,
) -> LoopState:
    """Restore a snapshot, except for the variables that `is_restored` rejects.

    Returns:
        The state of the training loop.
    """
    restore_variables(snapshot, updater, is_restored)
    values = snapshot.values
    updater.model.stop_training = values["stop_training"]
    recorder.set_state(values["recorder"])
    for name, callback in callbacks.items():
        if name in values["callbacks"] and values["kinds"][name] == _class_name(
            callback
        ):
            _restore_callback(callback, values["callbacks"][name], snapshot.arrays)
    np.random.set_state(tuple(_with_arrays(values["numpy"], snapshot.arrays)))
    version, numbers, gauss = values["random"]
    random.setstate((version, tuple(numbers), gauss))
    return LoopState.from_json(values["loop"])


def restore_normalization(snapshot: Snapshot, updater: Update) -> None:
    """Restore the statistics of the model's `Normalization` layers.

    Call this before the model is traced: a trace captures the statistics as constants.
    """
    layers = []
    names: set[str] = set()
    for layer in layers_of(updater.model):
        if isinstance(layer, keras.layers.Normalization):
            layers.append(layer)
            names.update(f"model/{variable.path}" for variable in layer.variables)

    variables: Variables = {}
    for name, copies in _variables(updater).items():
        if name.partition(_SAME_PATH)[0] in names:
            variables[name] = copies
    _assign(variables, snapshot.arrays)
    for layer in layers:
        layer.finalize_state()


@contextmanager
def weights_replaced(snapshot: Snapshot, updater: Update) -> Iterator[None]:
    """Within the block, assign the snapshot's values to the model and the optimizer.

    After the block, assign the values from before it.
    """
    variables = _variables(updater)
    before = _copied(variables)
    try:
        _assign(variables, snapshot.arrays)
        yield
    finally:
        _assign(variables, before)


def check_variables_fit(
    specs: Sequence[Any], updater: Update, is_restored: IsRestored = _restore_all
) -> None:
    """Check that a snapshot fits the variables of the model and the optimizer.

    Args:
        specs: the snapshot's `Snapshot.specs`: name, shape and dtype of each array.
        updater: the update with the model and the optimizer.
        is_restored: selects, by name, the variables to check.

    Raises:
        ConfigError: a variable is missing on one side, or differs in shape or dtype.
    """
    saved_specs: dict[str, str] = {}
    for name, shape, dtype in specs:
        saved_specs[name] = f"{tuple(shape)} {dtype}"

    variables = _variables(updater)
    for name, copies in variables.items():
        if not is_restored(name):
            continue
        if name == _SEED and name not in saved_specs:
            continue
        spec = f"{tuple(copies[0].shape)} {copies[0].dtype.name}"
        saved_spec = saved_specs.get(name)
        if saved_spec != spec:
            rule = f"must fit the model, whose {name} is {spec}"
            raise ConfigError("the checkpoint", rule, saved_spec)

    for saved_name in saved_specs:
        if not saved_name.startswith(("model/", "optimizer/")):
            continue
        name = saved_name.partition(_REPLICA)[0]
        if is_restored(name) and name not in variables:
            rule = "must fit the model, which has no such variable"
            raise ConfigError("the checkpoint", rule, name)


def check_callback_can_be_saved(name: str, callback: keras.callbacks.Callback) -> None:
    """Check, before training, that a callback's state can be saved in a checkpoint.

    Raises:
        TypeError: the state has values other than JSON values and NumPy arrays.
    """
    if _offers_state(callback):
        # Ignore a missing attribute: the callback may set it when training begins.
        with suppress(AttributeError):
            _without_arrays(callback.get_state(), name, {})


def starting_anew(callbacks: Callbacks) -> list[str]:
    """Return one message per callback whose state cannot be saved."""
    lines = []
    for name, callback in callbacks.items():
        if not _offers_state(callback) and _kept_attributes(callback) is None:
            lines.append(
                f"training.callbacks.{name} starts anew: it has no state to save"
            )
    return lines


def restore_csv_files(checkpoint: Checkpoint, callbacks: Callbacks) -> None:
    """Continue the files of `CSVLogger` callbacks after the rows of a checkpoint."""
    values = checkpoint.meta.values
    for name, callback in callbacks.items():
        if (
            isinstance(callback, keras.callbacks.CSVLogger)
            and not _offers_state(callback)
            and values["kinds"].get(name) == _class_name(callback)
            and name in values["callbacks"]
        ):
            csv_rows.restore(callback, values["callbacks"][name])


def expecting_epoch_begin(callbacks: Callbacks) -> list[keras.callbacks.Callback]:
    """Return the callbacks that need `on_epoch_begin` if an epoch is resumed midway.

    Their state is not saved, or not completely for `TensorBoard`. In `on_epoch_begin`
    they may set values for the rest of the epoch, as `TensorBoard` sets the start time.
    """
    found = []
    for callback in callbacks.values():
        if _offers_state(callback):
            continue
        is_board = isinstance(callback, keras.callbacks.TensorBoard)
        if is_board or _kept_attributes(callback) is None:
            found.append(callback)
    return found


def _variables(updater: Update) -> Variables:
    """Return all variables of the model and the optimizer, and Keras' global seed."""
    model = updater.model
    copies_of = updater.strategy.experimental_local_results
    trainable_ids = {id(variable) for variable in model.trainable_variables}

    named: list[tuple[str, Sequence[Any]]] = []
    for variable in model.trainable_variables:
        named.append((f"model/{variable.path}", [variable.value]))
    # Add the other variables, such as the seeds of layers.
    for variable in model.variables:
        if id(variable) not in trainable_ids:
            named.append((f"model/{variable.path}", copies_of(variable.value)))
    for name, variable in untracked_variables(model):
        named.append((f"model/{name}", copies_of(variable)))
    for variable in updater.optimizer.variables:
        named.append((f"optimizer/{variable.path}", [variable.value]))
    seed = global_seed()
    if seed is not None:
        named.append((_SEED, copies_of(seed.value)))

    variables: Variables = {}
    counts = Counter[str]()
    for name, copies in named:
        counts[name] += 1
        if counts[name] > 1:
            name = f"{name}{_SAME_PATH}{counts[name]}"
        variables[name] = copies
    return variables


def _copied(variables: Variables) -> dict[str, np.ndarray]:
    """Copy variables to host memory.

    Of the copies on other replicas, only those that differ from the copy on replica 0
    are returned.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, copies in variables.items():
        first = copies[0].numpy()
        arrays[name] = first
        # Seeds can differ: each micro-batch on a replica advances the replica's seeds.
        for replica, copy in enumerate(copies[1:], start=1):
            value = copy.numpy()
            if value.tobytes() != first.tobytes():
                arrays[f"{name}{_REPLICA}{replica}"] = value
    return arrays


def _assign(variables: Variables, arrays: Mapping[str, np.ndarray]) -> None:
    """Set variables to the arrays that `_copied` returned.

    A variable without an array keeps its value.
    """
    for name, copies in variables.items():
        if name not in arrays:
            continue
        for replica, copy in enumerate(copies):
            copy.assign(arrays.get(f"{name}{_REPLICA}{replica}", arrays[name]))


def _class_name(callback: keras.callbacks.Callback) -> str:
    return f"{type(callback).__module__}.{type(callback).__qualname__}"


def _offers_state(callback: keras.callbacks.Callback) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def _kept_attributes(callback: keras.callbacks.Callback) -> tuple[str, ...] | None:
    """Return the names of the attributes that hold the state of a Keras callback.

    This includes subclasses of Keras' own callbacks. Return None for other callbacks.
    """
    for keras_class, attributes in _KEPT_ATTRIBUTES.items():
        if isinstance(callback, keras_class):
            return attributes
    return None


def _state_of(callback: Any) -> Any:
    """Return a callback's state, or None if its state cannot be read.

    The state is the result of `get_state`, or else, for a Keras callback, its kept
    attributes or the state of its CSV file.
    """
    if _offers_state(callback):
        return callback.get_state()
    if isinstance(callback, keras.callbacks.CSVLogger):
        return csv_rows.state_of(callback)
    attributes = _kept_attributes(callback)
    if attributes is None:
        return None
    state = {}
    for name in attributes:
        if hasattr(callback, name):
            state[name] = tf.nest.map_structure(_as_array, getattr(callback, name))
    return state


def _as_array(value: Any) -> Any:
    """Return a tensor as an array; other values are returned as they are.

    A Keras callback keeps tensors if it monitors a value that a callback of the user
    has added to the logs as a tensor.
    """
    if isinstance(value, tf.Tensor | tf.Variable | keras.Variable):
        return keras.ops.convert_to_numpy(value)
    return value


def _restore_callback(
    callback: Any, saved: Any, arrays: Mapping[str, np.ndarray]
) -> None:
    state = _with_arrays(saved, arrays)
    if _offers_state(callback):
        callback.set_state(state)
        return
    if isinstance(callback, keras.callbacks.CSVLogger):
        return  # A fork has a file of its own; see `restore_csv_files`.
    for attribute, value in state.items():
        setattr(callback, attribute, value)


def _without_arrays(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """Return `value` as JSON, with each array replaced by `{"__array__": NAME}`.

    Args:
        value: nested JSON values and NumPy arrays.
        name: the beginning of the arrays' names.
        arrays: receives the arrays, by name.

    Raises:
        TypeError: `value` contains something else.
    """
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "OSU":
        arrays[name] = np.array(value)
        return {_ARRAY: name}
    if _is_plain_mapping(value):
        mapping = {}
        for key, entry in value.items():
            mapping[key] = _without_arrays(entry, f"{name}/{key}", arrays)
        return mapping
    if isinstance(value, list | tuple):
        entries = []
        for index, entry in enumerate(value):
            entries.append(_without_arrays(entry, f"{name}/{index}", arrays))
        return entries
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(
        f"the state of {name} must be JSON values and NumPy arrays. "
        f"Received: {type(value).__name__}"
    )


def _is_plain_mapping(value: Any) -> bool:
    if not isinstance(value, dict) or _ARRAY in value:
        return False
    return all(isinstance(key, str) for key in value)


def _with_arrays(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return `value` with each `{"__array__": NAME}` replaced by the array."""
    if isinstance(value, dict):
        if _ARRAY in value:
            array = arrays[value[_ARRAY]]
            return array if array.shape else array[()]
        return {key: _with_arrays(entry, arrays) for key, entry in value.items()}
    if isinstance(value, list):
        return [_with_arrays(entry, arrays) for entry in value]
    return value
