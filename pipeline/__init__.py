"""Gradient accumulation with exactly the same result as one large batch.

Every update is tracked in MLflow.
"""

from typing import Any

__version__ = "0.2.0"


def log(name: str, value: float) -> None:
    """Log a value as `train/NAME` in the run that trains in this process.

    A callback, or the host code of a layer, may call this function. The value belongs
    to the update that is being computed, or between updates to the last one; if a name
    gets several values in one update, only the first counts. Nothing is logged outside
    a run, in an evaluation, or on a worker other than the chief.

    Args:
        name: the metric's name, without `train/`.
        value: one number.

    Raises:
        ValueError: MLflow does not take the name, the run itself logs a metric of that
            name, or the value is not a number.
    """
    from pipeline.tracking import user_metrics

    user_metrics.log(name, value)


def __getattr__(name: str) -> Any:
    """Return the module that had this name in earlier versions.

    This is needed because Hydra looks up some names in a config before this package has
    replaced former names there.
    """
    from importlib import import_module

    from pipeline.config.former_names import MODULES

    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{MODULES[name]}")
