"""Gradient accumulation with exactly the same result as one large batch.

Every update is tracked in MLflow.
"""

from typing import Any

__version__ = "0.1.0"


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
