"""`_target_` → object: the one place where a config turns into code that runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig

from pipeline.errors import ConfigError


def build(node: DictConfig, key: str, **arguments: Any) -> Any:
    """Builds what `node._target_` names from the other entries of `node`.

    Args:
        node: a config node with a `_target_`; nested nodes with one are built first.
        key: dotted name of the node, for the error.
        arguments: further keyword arguments; they outrank those of the node.

    Raises:
        ConfigError: the target does not exist, is not callable, or refuses its arguments.
    """
    target = locate(node, key)
    try:
        return instantiate(node, _convert_="all", **arguments)
    except HydraException as error:
        cause = error.__cause__ or error
        if isinstance(cause, ConfigError):
            raise cause from None
        said = f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
        raise ConfigError(key, f"must fit {name_of(target)}, which raised {said}", _arguments(node)) from error


def locate(node: DictConfig, key: str) -> Callable[..., Any]:
    """What `node._target_` names.

    Raises:
        ConfigError: it does not exist or cannot be called.
    """
    target = node.get("_target_")
    if not isinstance(target, str):
        raise ConfigError(f"{key}._target_", "must be the dotted name of what builds it", target)
    try:
        found = get_object(target)
    except Exception as error:
        said = str(error.__cause__ or error).splitlines()[0]
        raise ConfigError(f"{key}._target_", f"must name something that exists ({said})", target) from error
    if not callable(found):
        raise ConfigError(f"{key}._target_", "must name something that can be called", target)
    return found


def accepted(target: Callable[..., Any], node: DictConfig, **offers: Any) -> dict[str, Any]:
    """Those of `offers` that `target` has a parameter for and `node` does not give a value."""
    parameters = inspect.signature(target).parameters
    return {name: offer for name, offer in offers.items() if name in parameters and node.get(name) is None}


def name_of(target: Callable[..., Any]) -> str:
    return f"{target.__module__}.{getattr(target, '__qualname__', type(target).__name__)}"


def _arguments(node: DictConfig) -> dict[str, Any]:
    return {str(key): value for key, value in node.items() if key != "_target_"}
