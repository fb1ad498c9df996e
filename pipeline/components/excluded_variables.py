"""Resolves the patterns that exclude variables from a part of the optimizer's step.

    optimizer.exclude_from_decay   variables whose weights do not decay
    optimizer.exclude_layers       variables that take Adam's step in place of Muon's

A pattern is a regular expression that is searched in the path of a variable, such as
`dense_1/bias`, as Keras does for `exclude_layers`. A plain word is found wherever it
occurs in a path.
"""

import re
from collections.abc import Sequence

import keras

from pipeline.common.errors import ConfigError
from pipeline.components.scaling import weight_decays

# The name of this package's own key in the `optimizer` group.
FROM_DECAY = "exclude_from_decay"
# An error shows this many paths that a pattern could have matched.
_SHOWN_PATHS = 6


def exclude_from_decay(
    optimizer: keras.optimizers.Optimizer,
    patterns: Sequence[str],
    variables: Sequence[keras.Variable],
) -> None:
    """Exclude the variables that match a pattern from the optimizer's weight decay.

    Args:
        optimizer: the optimizer, not built, without a `LossScaleOptimizer` around it.
        patterns: the value of `optimizer.exclude_from_decay`.
        variables: the trainable variables of the model.

    Raises:
        ConfigError: the optimizer has no weight decay, or a pattern matches nothing.
    """
    if not patterns:
        return
    key = f"optimizer.{FROM_DECAY}"
    if not weight_decays(optimizer):
        name = type(optimizer).__name__
        rule = f"must be [] if optimizer.weight_decay is null, as for this {name}"
        raise ConfigError(key, rule, list(patterns))
    excluded = _matching(key, patterns, variables)
    optimizer.exclude_from_weight_decay(var_list=excluded)


def check_layers_without_muon(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    """Raise a ConfigError if a pattern in Muon's `exclude_layers` matches nothing.

    Keras would ignore such a pattern. Other optimizers are accepted.
    """
    if isinstance(optimizer, keras.optimizers.Muon):
        _matching("optimizer.exclude_layers", optimizer.exclude_layers, variables)


def _matching(
    key: str, patterns: Sequence[str], variables: Sequence[keras.Variable]
) -> list[keras.Variable]:
    """Return the variables whose paths match one of the patterns.

    Raises:
        ConfigError: a pattern matches no path.
    """
    for pattern in patterns:
        if not any(re.search(pattern, variable.path) for variable in variables):
            raise _no_match(key, pattern, [variable.path for variable in variables])

    matching = []
    for variable in variables:
        if any(re.search(pattern, variable.path) for pattern in patterns):
            matching.append(variable)
    return matching


def _no_match(key: str, pattern: str, paths: Sequence[str]) -> ConfigError:
    examples = ", ".join(paths[:_SHOWN_PATHS])
    more = len(paths) - _SHOWN_PATHS
    if more > 0:
        examples += f", and {more} more"
    rule = f"must match the path of a trainable variable ({examples})"
    return ConfigError(key, rule, pattern)
