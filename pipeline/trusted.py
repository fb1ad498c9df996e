"""What a config that came out of a tracking store may name: the lists that `trust` goes by.

Read in the sources of Keras 3.15. tests/test_trust.py looks through the Keras that is installed for layers that read
files or run code, and for callbacks, that are on no list.
"""

from __future__ import annotations

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
# Target → the argument that says where it writes, and how that must end: no callback overwrites the run's own record.
WRITERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "keras.callbacks.BackupAndRestore": ("backup_dir", ()),
    "keras.callbacks.CSVLogger": ("filename", (".csv", ".tsv", ".txt", ".log")),
    "keras.callbacks.ModelCheckpoint": ("filepath", (".keras", ".h5")),
    "keras.callbacks.TensorBoard": ("log_dir", ()),
}
# Target → the argument that is a path where it is text.
READERS = {
    "keras.layers.IntegerLookup": "vocabulary",
    "keras.layers.StringLookup": "vocabulary",
    "keras.layers.TextVectorization": "vocabulary",
    "pipeline.dataset.digits": "data_dir",
    "pipeline.dataset.from_tfds": "data_dir",
}
