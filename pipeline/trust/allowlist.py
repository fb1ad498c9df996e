"""The names that a config from a tracking store may build, and those that it may not.

Read in the sources of Keras 3.15. tests/trust/test_gate.py looks through the Keras that is installed for layers that
read files or run code, and for callbacks, that are on no list.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from hydra.utils import get_object

from pipeline.config import DOTTED
from pipeline.errors import ConfigError

BUILDERS = frozenset(
    {
        "pipeline.augmentation.Flip",
        "pipeline.augmentation.Shift",
        "pipeline.dataset.digits",
        "pipeline.dataset.from_tfds",
        "pipeline.model.cnn",
        "pipeline.model.mlp",
        "pipeline.optimizer.InverseSquareRoot",
        "pipeline.optimizer.constant",
    }
)

# Public namespace of Keras → what everything in it that is built must derive from.
BASES = {
    "keras.layers": "keras.layers.Layer",
    "keras.optimizers": "keras.optimizers.Optimizer",
    "keras.optimizers.schedules": "keras.optimizers.schedules.LearningRateSchedule",
    "keras.losses": "keras.losses.Loss",
    "keras.metrics": "keras.metrics.Metric",
    "keras.callbacks": "keras.callbacks.Callback",
    "keras.regularizers": "keras.regularizers.Regularizer",
    "keras.initializers": "keras.initializers.Initializer",
    "keras.constraints": "keras.constraints.Constraint",
}
# Also functions, each defined in a module under one of these and not in the namespace itself, as `get` is.
FUNCTIONS = {
    "keras.applications": ("keras.src.applications.",),
    "keras.losses": ("keras.src.losses.",),
    "keras.metrics": ("keras.src.losses.", "keras.src.metrics."),
}
LAYERS_BY_ANOTHER_NAME = frozenset({"keras.Input", "keras.layers.Input", "keras.Sequential", "keras.models.Sequential"})

_CODE = "must not carry code or load it from a file"
REFUSED = {
    "keras.layers.FlaxLayer": _CODE,
    "keras.layers.JaxLayer": _CODE,
    "keras.layers.Lambda": _CODE,
    "keras.layers.TFSMLayer": _CODE,
    "keras.layers.TorchModuleWrapper": _CODE,
    "keras.callbacks.LambdaCallback": _CODE,
    "keras.callbacks.RemoteMonitor": "must not send anything over the network",
}
# Callbacks are listed, since most others write: what Keras adds is refused until somebody has read it.
_QUIET = ("EarlyStopping", "History", "LearningRateScheduler", "ProgbarLogger", "ReduceLROnPlateau")
CALLBACKS = {f"keras.callbacks.{name}" for name in (*_QUIET, "SwapEMAWeights", "TerminateOnNaN")}
_WRITING = ("BackupAndRestore", "CSVLogger", "ModelCheckpoint", "OrbaxCheckpoint", "TensorBoard")
WRITERS = {f"keras.callbacks.{name}" for name in _WRITING}
REFUSED |= dict.fromkeys(WRITERS, "must not write files unless you allow it")
# Target → the argument that is a path where it is text.
READERS = {
    "keras.layers.IntegerLookup": "vocabulary",
    "keras.layers.StringLookup": "vocabulary",
    "keras.layers.TextVectorization": "vocabulary",
    "pipeline.dataset.digits": "data_dir",
    "pipeline.dataset.from_tfds": "data_dir",
}


def check_name(target: str, key: str, allowed: Sequence[str]) -> None:
    """Refuse a target that may not be imported at all, by its text alone.

    Raises:
        ConfigError: it is on no list, and under none of the prefixes `allowed`.
    """
    namespace, _, name = target.rpartition(".")
    if not DOTTED.fullmatch(target) or any(part.startswith("__") for part in target.split(".")):
        raise ConfigError(key, "must be a plain dotted name", target)
    if is_under(target, allowed) or target in BUILDERS | CALLBACKS | LAYERS_BY_ANOTHER_NAME:
        return
    if target in REFUSED:
        raise ConfigError(key, f"of a config from a tracking store {REFUSED[target]}", target)
    if namespace == "keras.applications":
        known = name[0].isupper()
    else:
        known = namespace in BASES and name[0] != "_" and name not in ("get", "serialize", "deserialize")
    if not known or namespace == "keras.callbacks":
        rule = "of a config from a tracking store must be a builder of this package, a public Keras layer, optimizer, "
        rule += "schedule, loss, metric, callback, regularizer, initializer, constraint or application, or lie under "
        raise ConfigError(key, f"{rule}a prefix that you allow", target)


def is_of_keras(target: str, found: Any) -> bool:
    """Return whether what an accepted name led to is what its namespace is for."""
    namespace = target.rpartition(".")[0]
    if target in LAYERS_BY_ANOTHER_NAME:
        return str(found.__module__).startswith("keras.src.")
    if inspect.isfunction(found):
        return found.__module__.startswith(FUNCTIONS.get(namespace, ()))
    return namespace in BASES and inspect.isclass(found) and issubclass(found, get_object(BASES[namespace]))


def is_under(name: str, prefixes: Sequence[str]) -> bool:
    """Return whether a dotted name is one of `prefixes`, or beneath one."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
