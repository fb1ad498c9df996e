"""`_target_` → object: the one place where a config turns into code that runs."""

from __future__ import annotations

import difflib
import inspect
import logging
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from pipeline.errors import ConfigError, first_line
from pipeline.trust import gate

logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # it logs what it raises, in several lines

_OF_HYDRA = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")  # all else is the target's argument


def build(node: DictConfig, key: str, **arguments: Any) -> Any:
    """Build what `node._target_` names from the other entries of `node`.

    Args:
        node: a config node with a `_target_`; nested nodes with one are built first.
        key: dotted name of the node, for the error.
        arguments: further keyword arguments; they outrank those of the node.

    Raises:
        ConfigError: the target does not exist, is not callable, or refuses its arguments.
    """
    target = locate(node, key)
    _check_names(target, node, key, set(arguments))
    _check_flags(target, node, key)
    try:
        return instantiate(node, _convert_="all", **arguments)
    except HydraException as error:
        cause = error.__cause__ or error
        if isinstance(cause, ConfigError):
            raise cause from None
        # A nested node may be the one that failed: Hydra names it, from the root on or from this node on.
        named = re.search(r"^full_key: (\S+)$", str(error), re.MULTILINE)
        path = named[1].removeprefix(key).lstrip(".") if named else ""
        inner = OmegaConf.select(node, path) if path else node
        where = f"{key}.{path}".rstrip(".")
        rule = f"must be what {inner.get('_target_')} takes ({type(cause).__name__}: {first_line(cause)})"
        raise ConfigError(where, rule, _arguments(inner)) from error


def locate(node: DictConfig, key: str) -> Callable[..., Any]:
    """Return what `node._target_` names.

    Raises:
        ConfigError: it does not exist or cannot be called.
    """
    gate.check(node, key)
    key, target = f"{key}._target_", node.get("_target_")
    if not isinstance(target, str):
        raise ConfigError(key, "must be the dotted name of what builds it", target)
    first, *rest = target.split(".")
    found: Any = None
    parent, name = "", first
    try:
        found = import_module(first)
        for part in rest:
            parent, name = name, f"{name}.{part}"
            if not hasattr(found, part) and inspect.ismodule(found):
                import_module(name)
            found = getattr(found, part)
    except Exception as error:
        close = difflib.get_close_matches(name.rpartition(".")[2], dir(found), n=1) if found is not None else []
        similar = [f"{parent}.{known}" for known in close]
        cause = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(key, f"must name something that exists ({cause})", target, similar=similar) from error
    if not callable(found):
        raise ConfigError(key, "must name something that can be called", target)
    return found


def accepted(target: Callable[..., Any], node: DictConfig, **offers: Any) -> dict[str, Any]:
    """Return those of `offers` that `target` has a parameter for and `node` gives no value."""
    parameters = _parameters(target)
    return {name: offer for name, offer in offers.items() if name in parameters and node.get(name) is None}


def _check_names(target: Callable[..., Any], node: DictConfig, key: str, others: set[str]) -> None:
    """Refuse an unknown argument and a missing one, as far as the signature shows them."""
    parameters = _parameters(target)
    open_ended = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}
    if not parameters or open_ended & {parameter.kind for parameter in parameters.values()} or "_args_" in node:
        return
    names = [name for name in _arguments(node) if name not in parameters]
    for name in names:
        raise ConfigError(f"{key}.{name}", f"must be an argument of {node._target_}", name, parameters)
    for name, parameter in parameters.items():
        given = name in node or name in others or node.get("_partial_")
        if parameter.default is inspect.Parameter.empty and not given:
            raise ConfigError(f"{key}.{name}", f"must be given: {node._target_} has no default for it")


def _check_flags(target: Callable[..., Any], node: DictConfig, key: str) -> None:
    """Refuse text and numbers for a parameter that is true or false: Python takes most of them as true."""
    parameters = _parameters(target)
    for name, value in _arguments(node).items():
        parameter = parameters.get(name)
        if parameter is None or isinstance(value, bool) or not isinstance(value, str | int | float):
            continue
        annotation = parameter.annotation
        flag = isinstance(parameter.default, bool) if annotation is inspect.Parameter.empty else annotation
        if flag in (True, bool, "bool"):
            raise ConfigError(f"{key}.{name}", "must be true or false", value)


def _parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of the signature; none where it cannot be read."""
    try:
        return dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return {}


def _arguments(node: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(node, resolve=True)
    return {str(key): value for key, value in plain.items() if key not in _OF_HYDRA}
