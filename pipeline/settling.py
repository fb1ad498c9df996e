"""Which horizon and which sizes count: those that the command line names outrank the defaults.

`named` holds the keys of the command line's overrides.
"""

from __future__ import annotations

from omegaconf import DictConfig

from pipeline import batching
from pipeline.errors import ConfigError


def horizon(config: DictConfig, named: set[str]) -> tuple[str, int]:
    """`epochs`, `updates` or `examples`, and how many; those that do not count are set to null in `config`.

    Raises:
        ConfigError: not exactly one is left, or it is not positive.
    """
    training = config.training
    if any(f"training.{name}" in named and training[name] is not None for name in batching.HORIZONS):
        for name in batching.HORIZONS:
            if f"training.{name}" not in named:
                training[name] = None
    given = {name: training[name] for name in batching.HORIZONS if training[name] is not None}
    if len(given) != 1:
        received = {name: training[name] for name in batching.HORIZONS}
        raise ConfigError("training", "must set exactly one of epochs, updates, examples", received)
    ((name, length),) = given.items()
    if length < 1:
        raise ConfigError(f"training.{name}", "must be at least 1", length)
    return name, length


def sizes(config: DictConfig, named: set[str]) -> batching.Batching:
    """How an effective batch is cut; a size that does not count is set to null in `config`.

    Raises:
        ConfigError: the sizes that count do not give one cut.
    """
    given = config.accumulation
    # What the command line names counts first; defaults fill up to two, the effective batch before the factor.
    order = sorted(
        (name for name in ("effective_batch_size", "factor", "micro_batch_size") if given[name] is not None),
        key=lambda name: f"accumulation.{name}" not in named,
    )
    explicit = sum(f"accumulation.{name}" in named for name in order)
    if explicit:
        for name in order[max(2, explicit) :]:
            given[name] = None
    return batching.derive(given.effective_batch_size, given.factor, given.micro_batch_size, config.hardware.replicas)
