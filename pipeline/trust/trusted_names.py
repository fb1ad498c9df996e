"""Lists of the names that a config from a tracking store may or may not build.

The user can allow further names; `config.trust_entries` parses them.

The lists were compiled from the sources of Keras 3.15. tests/trust/test_gate.py
searches the installed Keras for callbacks, and for layers that read files or run code,
that are missing from the lists.
"""

import inspect
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from hydra.utils import get_object

from pipeline.common.errors import ConfigError, first_line
from pipeline.config.trust_entries import DOTTED

# Silence Hydra's logger, since it repeats each raised error in several lines.
logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)

BUILDERS = {
    "pipeline.dataset.augmentation.Flip",
    "pipeline.dataset.augmentation.Shift",
    "pipeline.dataset.breast_cancer",
    "pipeline.dataset.diabetes",
    "pipeline.dataset.digits",
    "pipeline.dataset.from_tfds",
    "pipeline.dataset.text_files",
    "pipeline.dataset.topics",
    "pipeline.components.model.application",
    "pipeline.components.model.cnn",
    "pipeline.components.model.decoder",
    "pipeline.components.model.mlp",
    "pipeline.components.model.tabular",
    "pipeline.components.metrics.BitsPerToken",
    "pipeline.components.optimizer.InverseSquareRoot",
    "pipeline.components.optimizer.WarmupStableDecay",
    "pipeline.components.optimizer.constant",
}

# Public namespace of Keras → the base class of its accepted classes.
BASES = {
    "keras.layers": "keras.layers.Layer",
    "keras.optimizers": "keras.optimizers.Optimizer",
    "keras.optimizers.schedules": "keras.optimizers.schedules.LearningRateSchedule",
    "keras.losses": "keras.losses.Loss",
    "keras.metrics": "keras.metrics.Metric",
    "keras.regularizers": "keras.regularizers.Regularizer",
    "keras.initializers": "keras.initializers.Initializer",
    "keras.constraints": "keras.constraints.Constraint",
}
APPLICATIONS = "keras.applications."
# Prefixes of the modules whose functions are accepted. Functions such as `get` are
# defined in other modules, and are rejected.
_FUNCTIONS = ("keras.src.applications.", "keras.src.losses.", "keras.src.metrics.")

# The callbacks that are accepted. Most callbacks write files, so a callback is rejected
# unless it is listed here, even if a later version of Keras adds it.
CALLBACKS = {
    "keras.callbacks.EarlyStopping",
    "keras.callbacks.History",
    "keras.callbacks.LearningRateScheduler",
    "keras.callbacks.ProgbarLogger",
    "keras.callbacks.ReduceLROnPlateau",
    "keras.callbacks.SwapEMAWeights",
    "keras.callbacks.TerminateOnNaN",
}
_LISTED = CALLBACKS | {
    "keras.Input",
    "keras.layers.Input",
    "keras.Sequential",
    "keras.models.Sequential",
}

WRITERS = {
    "keras.callbacks.BackupAndRestore",
    "keras.callbacks.CSVLogger",
    "keras.callbacks.ModelCheckpoint",
    "keras.callbacks.OrbaxCheckpoint",
    "keras.callbacks.TensorBoard",
}
_CODE_CARRIERS = (
    "keras.layers.FlaxLayer",
    "keras.layers.JaxLayer",
    "keras.layers.Lambda",
    "keras.layers.TFSMLayer",
    "keras.layers.TorchModuleWrapper",
)
# Target → the rule that it breaks.
REJECTED = {
    **dict.fromkeys(WRITERS, "must not write files unless you allow it"),
    **dict.fromkeys(_CODE_CARRIERS, "must not carry code or load it from a file"),
    "keras.callbacks.LambdaCallback": "must not carry code",
    "keras.callbacks.RemoteMonitor": "must not send anything over the network",
}

# Target → the arguments that are paths if they are text.
READERS = {
    "keras.layers.IntegerLookup": ["vocabulary"],
    "keras.layers.StringLookup": ["vocabulary"],
    "keras.layers.TextVectorization": ["vocabulary"],
    "pipeline.dataset.digits": ["data_dir"],
    "pipeline.dataset.from_tfds": ["data_dir"],
    "pipeline.dataset.text_files": ["data_dir", "token_cache"],
    "pipeline.dataset.topics": ["data_dir"],
    "pipeline.components.model.application": ["weights"],
}
# Target → the arguments that are patterns of files, or lists of patterns, if they are
# text.
PATTERN_READERS = {
    "pipeline.dataset.text_files": ["files", "validation_split", "test_split"],
}


_MOST_PACKAGES = 10  # in a message


def check_name(
    target: str, key: str, allowed: Sequence[str], packages: Sequence[str] = ()
) -> None:
    """Check a target by its name alone, without importing it.

    Args:
        target: the dotted name of the object to build.
        key: the dotted key of the target in the config.
        allowed: prefixes that the user trusts.
        packages: what the whole config needs, for the message; see
            `packages_to_allow`. If it is empty, only the target's package is named.

    Raises:
        ConfigError: the target is not a plain dotted name, or is neither accepted by
            the lists nor under one of the prefixes.
    """
    if not _is_plain(target):
        raise ConfigError(key, "must be a plain dotted name", target)
    if is_under(target, allowed) or target in BUILDERS or target in _LISTED:
        return
    if target in REJECTED:
        rule = f"of a config from a tracking store {REJECTED[target]}"
        raise ConfigError(key, rule, target)
    if not _is_in_keras(target):
        options = [f"--allow {package}" for package in packages or [_package(target)]]
        rule = (
            "of a config from a tracking store must be a builder of this package, "
            "a public Keras layer, optimizer, schedule, loss, metric, callback, "
            "regularizer, initializer, constraint or application, or lie under "
            "a prefix that you allow by --allow or trust.allow; if the code is your "
            f"own, trust it with {' '.join(options)}"
        )
        raise ConfigError(key, rule, target)


def packages_to_allow(targets: Iterable[str], allowed: Sequence[str]) -> list[str]:
    """Return the prefixes without which `check_name` rejects some of the targets.

    A prefix is the package of the target, or the whole target if it is in Keras or in
    this package. Left out are targets in `REJECTED`, and prefixes after the tenth.
    """
    packages: dict[str, None] = {}
    for target in targets:
        if not _is_plain(target) or target in REJECTED:
            continue
        try:
            check_name(target, "", allowed)
        except ConfigError:
            packages[_package(target)] = None
    return list(packages)[:_MOST_PACKAGES]


def _is_plain(target: str) -> bool:
    """Return whether a target is a dotted name without dunder names."""
    if any(part.startswith("__") for part in target.split(".")):
        return False
    return DOTTED.fullmatch(target) is not None


def _package(target: str) -> str:
    """Return the package of a target; the whole target if it is in a trusted package."""
    package = target.partition(".")[0]
    if package in ("keras", "pipeline"):
        return target
    return package


def _is_in_keras(target: str) -> bool:
    """Return whether a target is a public name in an accepted namespace of Keras."""
    namespace, _, name = target.rpartition(".")
    if namespace in BASES:
        converters = ("get", "serialize", "deserialize")
        return name[0] != "_" and name not in converters
    return f"{namespace}." == APPLICATIONS and name[0].isupper()


def check_object(target: str, key: str, allowed: Sequence[str]) -> None:
    """Import a target that `check_name` accepted, and check the object.

    Raises:
        ConfigError: the object does not exist, is not defined under an allowed prefix,
            or is not of the kind that its Keras namespace is for.
    """
    if target in BUILDERS:
        return
    try:
        named = get_object(target)
    except Exception as error:
        reason = first_line(error.__cause__ or error)
        rule = f"must name something that exists ({reason})"
        raise ConfigError(key, rule, target) from error

    module = str(getattr(named, "__module__", None) or type(named).__module__)
    if is_under(target, allowed):
        if target not in allowed and not is_under(module, allowed):
            prefixes = ", ".join(allowed)
            rule = (
                f"must be defined under a prefix that you allow ({prefixes}), "
                f"not only be reachable through one; it is defined in {module}"
            )
            raise ConfigError(key, rule, target)
        return
    if not _is_expected(target, named, module):
        namespace = target.rpartition(".")[0]
        rule = f"must be of the kind that belongs in {namespace}"
        raise ConfigError(key, rule, target)


def _is_expected(target: str, named: Any, module: str) -> bool:
    """Return whether an object is of the kind that its Keras namespace is for."""
    if target in _LISTED:
        return module.startswith("keras.src.")
    if inspect.isfunction(named):
        return module.startswith(_FUNCTIONS)
    base = BASES.get(target.rpartition(".")[0])
    if base is None or not inspect.isclass(named):
        return False
    return issubclass(named, get_object(base))


def is_under(name: str, prefixes: Sequence[str]) -> bool:
    """Return whether a dotted name is one of the prefixes, or begins with one."""
    for prefix in prefixes:
        if name == prefix or name.startswith(f"{prefix}."):
            return True
    return False
