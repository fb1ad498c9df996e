"""Gradient accumulation with exactly the same result as one large batch.

Every update is tracked in MLflow.
"""

from typing import Any

__version__ = "0.2.0"


def log(name: str, value: float) -> None:
    """Log a value as `train/NAME` of the run that trains in this process.

    A callback may call it, or the host code of a layer. The value belongs to the update
    that is computed, or else to the last one; of several values of a name for one
    update, the first counts. Outside a run, in an evaluation, and on a worker other
    than the chief nothing is logged.

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
