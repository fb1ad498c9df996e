"""Builds the object that a `_target_` names.

This is the only module that runs code because a config names it.
"""

import difflib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from pipeline.common.errors import ConfigError, described
from pipeline.trust import gate

# Config key → the config group that sets it.
_GROUPS = {
    "dataset": "dataset",
    "model": "model",
    "optimizer": "optimizer",
    "schedule": "schedule",
    "training.loss": "objective",
}
# Hydra's own keys of a node; all others are the target's arguments.
_HYDRA_KEYS = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")


def build(node: DictConfig, key: str, **arguments: Any) -> Any:
    """Call the target of a node with the node's other entries as arguments.

    Nested nodes with a `_target_` are built first.

    Args:
        node: the node of a config.
        key: its dotted name.
        arguments: further arguments, which outrank those of the node.

    Raises:
        ConfigError: the target is not trusted, does not exist, cannot be called, or
            rejects its arguments.
    """
    target = locate(node, key)
    _check_arguments(target, node, key, arguments)
    try:
        return instantiate(
            node, _convert_="all", **{**_whole_floats(target, node), **arguments}
        )
    except HydraException as error:
        cause = error.__cause__ or error
        if isinstance(cause, ConfigError):
            raise cause from None
        path = _failed_path(error, key)
        inner = OmegaConf.select(node, path) if path else node
        rule = f"is rejected by {inner.get('_target_')} ({described(cause)})"
        failed_key = f"{key}.{path}".rstrip(".")
        raise ConfigError(failed_key, rule, _arguments(inner)) from error


def locate(node: DictConfig, key: str) -> Callable[..., Any]:
    """Return the class or function that `node._target_` names.

    Args:
        node: the node of a config.
        key: its dotted name.

    Raises:
        ConfigError: the gate rejects the node, or the target does not exist or cannot
            be called.
    """
    gate.check(node, key)
    key = f"{key}._target_"
    target = node.get("_target_")
    if not isinstance(target, str):
        rule = "must be the dotted name of the code that builds the object"
        raise ConfigError(key, rule, target)
    try:
        named = get_object(target)
    except Exception as error:
        reason = described(error.__cause__ or error)
        rule = f"must name something that exists ({reason})"
        similar = _similar_targets(target)
        raise ConfigError(key, rule, target, similar=similar) from error
    if not callable(named):
        raise ConfigError(key, "must name something that can be called", target)
    return named


def accepted(
    target: Callable[..., Any], node: DictConfig, **offers: Any
) -> dict[str, Any]:
    """Return the offered arguments that the target takes and the node lacks.

    A null in the node counts as missing.
    """
    parameters = _parameters(target) or {}
    taken = {}
    for name, offer in offers.items():
        if name in parameters and node.get(name) is None:
            taken[name] = offer
    return taken


def required(target: Callable[..., Any]) -> set[str]:
    """Return the names of the target's parameters that have no default."""
    names = set()
    for name, parameter in (_parameters(target) or {}).items():
        if parameter.default is parameter.empty:
            names.add(name)
    return names


def _failed_path(error: HydraException, key: str) -> str:
    """Return the path, below `key`, of the nested node that could not be built.

    Hydra gives the path from the root, or from the node at `key`. The result is empty
    if the node at `key` itself failed.
    """
    match = re.search(r"^full_key: (\S+)$", str(error), re.MULTILINE)
    return match[1].removeprefix(key).lstrip(".") if match else ""


def _similar_targets(target: str) -> list[str]:
    module, _, name = target.rpartition(".")
    names = difflib.get_close_matches(name, dir(sys.modules.get(module)), n=1)
    return [f"{module}.{known}" for known in names]


def _check_arguments(
    target: Callable[..., Any], node: DictConfig, key: str, others: Collection[str]
) -> None:
    """Reject unknown and missing arguments, and text or a number for a Boolean.

    Python would treat most strings and numbers as true.

    Args:
        target: the object that will be called.
        node: the node with the arguments.
        key: the dotted name of the node.
        others: the names of arguments that are passed in addition.
    """
    parameters = _parameters(target)
    arguments = _arguments(node)
    if parameters is None:
        return
    if _takes_only(parameters) and "_args_" not in node:
        for name in arguments:
            if name not in parameters:
                rule = _unknown_argument_rule(node, key)
                raise ConfigError(f"{key}.{name}", rule, name, parameters)
        if not node.get("_partial_"):
            present = {*arguments, *others}
            _check_complete(target, node, key, parameters, present)
    for name, value in arguments.items():
        if name in parameters and _is_flag(parameters[name]):
            is_text_or_number = isinstance(value, str | int | float)
            if is_text_or_number and not isinstance(value, bool):
                raise ConfigError(f"{key}.{name}", "must be true or false", value)


def _takes_only(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether a target takes these parameters by name, and no others."""
    open_ended = {
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.POSITIONAL_ONLY,
    }
    kinds = {parameter.kind for parameter in parameters.values()}
    return not open_ended & kinds


def _unknown_argument_rule(node: DictConfig, key: str) -> str:
    rule = f"must be an argument of {node._target_}"
    # Explain the likely cause: the user named only a target on the command line, and
    # the node still has the arguments of the group's default.
    if key in _GROUPS and not str(node._target_).startswith("pipeline."):
        group = _GROUPS[key]
        article = "an" if group.startswith("o") else "a"
        rule += (
            f"; {article} {group} of your own belongs in a complete file, "
            f"conf/{group}/NAME.yaml, which --config-dir conf {group}=NAME selects"
        )
    return rule


def _check_complete(
    target: Callable[..., Any],
    node: DictConfig,
    key: str,
    parameters: Mapping[str, inspect.Parameter],
    present: Collection[str],
) -> None:
    for name, parameter in parameters.items():
        if name in present or parameter.default is not parameter.empty:
            continue
        rule = f"must be given: {node._target_} has no default for it"
        is_function = key.startswith(("training.", "dataset.lengths"))
        if is_function and not inspect.isclass(target):
            rule += f"; if the function itself is meant, set {key}._partial_ to true"
        raise ConfigError(f"{key}.{name}", rule)


def _is_flag(parameter: inspect.Parameter) -> bool:
    """Return whether a parameter is a Boolean, judging by its annotation.

    A parameter without an annotation is judged by its default.
    """
    if parameter.annotation is parameter.empty:
        return isinstance(parameter.default, bool)
    return parameter.annotation in (True, bool, "bool")


def _whole_floats(target: Callable[..., Any], node: DictConfig) -> dict[str, float]:
    """Return the integer arguments whose default is a float, converted to floats.

    Keras accepts `momentum=0.0` but rejects `momentum=0`.
    """
    floats = {}
    parameters = _parameters(target) or {}
    for name, value in _arguments(node).items():
        if name not in parameters or type(value) is not int:
            continue
        if isinstance(parameters[name].default, float):
            floats[name] = float(value)
    return floats


def _parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """Return the parameters of a target, or None if it has no readable signature."""
    try:
        return dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return None


def _arguments(node: DictConfig) -> dict[str, Any]:
    container: Any = OmegaConf.to_container(node, resolve=True)
    arguments = {}
    for key, value in container.items():
        if key not in _HYDRA_KEYS:
            arguments[str(key)] = value
    return arguments
