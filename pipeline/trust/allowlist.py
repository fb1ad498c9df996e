"""The names that a config from a tracking store may build, and those that it may not.

Compiled from the sources of Keras 3.15. tests/trust/test_gate.py searches the installed Keras for layers that read
files or run code, and for callbacks, that are missing here.
"""

import inspect
import logging
from collections.abc import Sequence

from hydra.utils import get_object

from pipeline.common.errors import ConfigError, first_line
from pipeline.config.allow_list import DOTTED

logging.getLogger("hydra.utils").setLevel(
    logging.CRITICAL
)  # it logs what it raises, in several lines

_DATASETS = (
    "augmentation.Flip",
    "augmentation.Shift",
    "breast_cancer",
    "diabetes",
    "digits",
    "from_tfds",
    "topics",
)
BUILDERS = {
    *(f"pipeline.dataset.{name}" for name in _DATASETS),
    *(
        f"pipeline.components.model.{name}"
        for name in ("application", "cnn", "decoder", "mlp", "tabular")
    ),
    *(
        f"pipeline.components.{name}"
        for name in ("metrics.BitsPerToken", "optimizer.InverseSquareRoot")
    ),
    "pipeline.components.optimizer.constant",
}

# Public namespace of Keras → what its classes must derive from.
_CLASSES = (
    *(
        "layers.Layer",
        "optimizers.Optimizer",
        "optimizers.schedules.LearningRateSchedule",
        "losses.Loss",
    ),
    *(
        "metrics.Metric",
        "regularizers.Regularizer",
        "initializers.Initializer",
        "constraints.Constraint",
    ),
)
BASES = {f"keras.{name.rpartition('.')[0]}": f"keras.{name}" for name in _CLASSES}
APPLICATIONS = "keras.applications."
# Functions are accepted from the modules under these; `get` and the like are defined in the namespaces themselves.
_FUNCTIONS = ("keras.src.applications.", "keras.src.losses.", "keras.src.metrics.")

# Callbacks are listed, since most others write: a new one of Keras is refused until it is listed here.
_QUIET = (
    "EarlyStopping",
    "History",
    "LearningRateScheduler",
    "ProgbarLogger",
    "ReduceLROnPlateau",
)
CALLBACKS = {
    f"keras.callbacks.{name}" for name in (*_QUIET, "SwapEMAWeights", "TerminateOnNaN")
}
_LISTED = CALLBACKS | {
    "keras.Input",
    "keras.layers.Input",
    "keras.Sequential",
    "keras.models.Sequential",
}

_WRITING = (
    "BackupAndRestore",
    "CSVLogger",
    "ModelCheckpoint",
    "OrbaxCheckpoint",
    "TensorBoard",
)
WRITERS = {f"keras.callbacks.{name}" for name in _WRITING}
_RUNNING = (
    "layers.FlaxLayer",
    "layers.JaxLayer",
    "layers.Lambda",
    "layers.TFSMLayer",
    "layers.TorchModuleWrapper",
)
REFUSED = {
    **dict.fromkeys(WRITERS, "must not write files unless you allow it"),
    **{
        f"keras.{name}": "must not carry code or load it from a file"
        for name in _RUNNING
    },
    "keras.callbacks.LambdaCallback": "must not carry code",
    "keras.callbacks.RemoteMonitor": "must not send anything over the network",
}
# Target → the argument that is a path if it is text.
READERS = {
    **{
        f"keras.layers.{name}": "vocabulary"
        for name in ("IntegerLookup", "StringLookup", "TextVectorization")
    },
    **{
        f"pipeline.dataset.{name}": "data_dir"
        for name in ("digits", "from_tfds", "topics")
    },
    "pipeline.components.model.application": "weights",
}


def check_name(target: str, key: str, allowed: Sequence[str]) -> None:
    """Refuse, by its name alone, a target that is on no list and under none of the prefixes `allowed`."""
    namespace, _, name = target.rpartition(".")
    if not DOTTED.fullmatch(target) or any(
        part.startswith("__") for part in target.split(".")
    ):
        raise ConfigError(key, "must be a plain dotted name", target)
    if is_under(target, allowed) or target in BUILDERS | _LISTED:
        return
    if target in REFUSED:
        raise ConfigError(
            key, f"of a config from a tracking store {REFUSED[target]}", target
        )
    public = (
        namespace in BASES
        and name[0] != "_"
        and name not in ("get", "serialize", "deserialize")
    )
    if not public and not (f"{namespace}." == APPLICATIONS and name[0].isupper()):
        rule = "of a config from a tracking store must be a builder of this package, a public Keras layer, optimizer, "
        rule += "schedule, loss, metric, callback, regularizer, initializer, constraint or application, or lie under "
        raise ConfigError(key, f"{rule}a prefix that you allow", target)


def check_object(target: str, key: str, allowed: Sequence[str]) -> None:
    """Import a target that `check_name` accepted, and refuse it if it is not what its name says."""
    if target in BUILDERS:
        return
    try:
        found = get_object(target)
    except Exception as error:
        rule = (
            f"must name something that exists ({first_line(error.__cause__ or error)})"
        )
        raise ConfigError(key, rule, target) from error
    namespace = target.rpartition(".")[0]
    module = str(getattr(found, "__module__", None) or type(found).__module__)
    if is_under(target, allowed):
        if target not in allowed and not is_under(module, allowed):
            rule = (
                f"must be defined under a prefix that you allow ({', '.join(allowed)})"
            )
            raise ConfigError(key, f"{rule}, not only be reachable through one", target)
        return
    if target in _LISTED:
        known = module.startswith("keras.src.")
    elif inspect.isfunction(found):
        known = module.startswith(_FUNCTIONS)
    else:
        known = (
            namespace in BASES
            and inspect.isclass(found)
            and issubclass(found, get_object(BASES[namespace]))
        )
    if not known:
        raise ConfigError(key, f"must be what {namespace} is for", target)


def is_under(name: str, prefixes: Sequence[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
