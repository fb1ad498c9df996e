"""`_target_` → object: the one place where a config turns into code that runs."""

import difflib
import inspect
import re
import sys
from collections.abc import Callable, Collection
from typing import Any

from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from pipeline.common.errors import ConfigError, described
from pipeline.trust import gate

# Config key → the group of its files.
_GROUPS = {key: key for key in ("dataset", "model", "optimizer", "schedule")} | {
    "training.loss": "objective"
}
_OF_HYDRA = (
    "_target_",
    "_partial_",
    "_args_",
    "_recursive_",
    "_convert_",
)  # all else is the target's argument


def build(node: DictConfig, key: str, **arguments: Any) -> Any:
    """Build what `node._target_` names from the other entries of `node`, whose dotted name is `key`.

    Nested nodes with a `_target_` are built first. Further `arguments` by keyword outrank those of the node. A
    `ConfigError` says that the target does not exist, is not callable, or refuses its arguments.
    """
    _check_arguments(locate(node, key), node, key, arguments)
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
        rule = f"must be what {inner.get('_target_')} takes ({described(cause)})"
        raise ConfigError(
            f"{key}.{path}".rstrip("."), rule, _arguments(inner)
        ) from error


def locate(node: DictConfig, key: str) -> Callable[..., Any]:
    """Return what `node._target_` names; a `ConfigError` says that it does not exist or cannot be called."""
    gate.check(node, key)
    key, target = f"{key}._target_", node.get("_target_")
    if not isinstance(target, str):
        raise ConfigError(key, "must be the dotted name of what builds it", target)
    try:
        found = get_object(target)
    except Exception as error:
        parent, _, name = target.rpartition(".")
        close = difflib.get_close_matches(name, dir(sys.modules.get(parent)), n=1)
        rule = (
            f"must name something that exists ({described(error.__cause__ or error)})"
        )
        raise ConfigError(
            key, rule, target, similar=[f"{parent}.{known}" for known in close]
        ) from error
    if not callable(found):
        raise ConfigError(key, "must name something that can be called", target)
    return found


def accepted(
    target: Callable[..., Any], node: DictConfig, **offers: Any
) -> dict[str, Any]:
    """Return those of `offers` that `target` has a parameter for and `node` gives no value."""
    parameters = _parameters(target) or {}
    return {
        name: offer
        for name, offer in offers.items()
        if name in parameters and node.get(name) is None
    }


def _check_arguments(
    target: Callable[..., Any], node: DictConfig, key: str, others: Collection[str]
) -> None:
    """Refuse unknown and missing arguments, and text or a number for a flag: Python takes most of them as true."""
    parameters, given = _parameters(target), _arguments(node)
    open_ended = {
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.POSITIONAL_ONLY,
    }
    known = parameters is not None and not open_ended & {
        each.kind for each in parameters.values()
    }
    parameters = parameters or {}
    if known and "_args_" not in node:
        for name in given:
            if name not in parameters:
                rule = f"must be an argument of {node._target_}"
                if key in _GROUPS and not str(node._target_).startswith(
                    "pipeline."
                ):  # named on the command line alone
                    group, article = (
                        _GROUPS[key],
                        "an" if _GROUPS[key].startswith("o") else "a",
                    )
                    rule += f"; {article} {group} of your own stands whole in a file, conf/{group}/NAME.yaml, and is "
                    rule += f"taken with --config-dir conf {group}=NAME"
                raise ConfigError(f"{key}.{name}", rule, name, parameters)
        for name, parameter in parameters.items():
            missing = (
                name not in given and name not in others and not node.get("_partial_")
            )
            if parameter.default is parameter.empty and missing:
                rule = f"must be given: {node._target_} has no default for it"
                if key.startswith("training.") and not inspect.isclass(target):
                    rule += (
                        f"; where the function itself is meant, {key}._partial_ is true"
                    )
                raise ConfigError(f"{key}.{name}", rule)
    for name, value in (
        (name, value) for name, value in given.items() if name in parameters
    ):
        parameter = parameters[name]
        flag = (
            isinstance(parameter.default, bool)
            if parameter.annotation is parameter.empty
            else parameter.annotation
        )
        if (
            flag in (True, bool, "bool")
            and isinstance(value, str | int | float)
            and not isinstance(value, bool)
        ):
            raise ConfigError(f"{key}.{name}", "must be true or false", value)


def _parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    try:
        return dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # it cannot be read
        return None


def _arguments(node: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(node, resolve=True)
    return {str(key): value for key, value in plain.items() if key not in _OF_HYDRA}
