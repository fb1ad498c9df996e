"""Sizes and horizons: effective = micro × factor × replicas. What the command line names outranks the defaults."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pipeline.common.errors import ConfigError
from pipeline.config.stages import EFFECTIVE as EFFECTIVE

FACTOR = "accumulation.factor"
MICRO = "accumulation.micro_batch_size"
REPLICAS = "hardware.replicas"
HORIZONS = ("epochs", "updates", "examples")
SIZES = ("effective_batch_size", "factor", "micro_batch_size")
SEARCHED = (
    "auto",
    "auto_fastest",
)  # a micro-batch size that is searched for on the machine
BATCHED = "dataset.batched"


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


@dataclass(frozen=True)
class Batching:
    """How one effective batch is cut: the sizes of the config, and how many copies of the model share it."""

    effective_batch_size: int
    micro_batch_size: int
    factor: int
    replicas: int = 1

    @property
    def share(self) -> int:
        """Examples of an effective batch that each replica gets: the largest micro-batch that there can be."""
        return ceil_div(self.effective_batch_size, self.replicas)

    def of(self, micro_batch_size: int) -> Batching:
        """Return the same effective batch on as many replicas, cut into micro-batches of this size."""
        return replace(
            self,
            micro_batch_size=micro_batch_size,
            factor=ceil_div(self.share, micro_batch_size),
        )

    def at(self, effective_batch_size: int) -> Batching:
        """Return how an effective batch of another size is cut into micro-batches of the same size."""
        return replace(self, effective_batch_size=effective_batch_size).of(
            self.micro_batch_size
        )

    def __str__(self) -> str:
        replicas = f"{self.replicas} replica" + "s" * (self.replicas > 1)
        rounded_up = self.micro_batch_size * self.factor * self.replicas
        text = f"effective batch {self.effective_batch_size} = {self.micro_batch_size} × {self.factor} × {replicas}"
        smaller = f" (rounded up: {rounded_up}; the last micro-batch is smaller)"
        return text + (smaller if rounded_up != self.effective_batch_size else "")


def derive(
    effective: int | None,
    factor: int | None,
    micro: int | None,
    replicas: int = 1,
    most: int = 0,
) -> Batching:
    """Derive the third size from any two; three have to agree. Later effective batches have up to `most` examples."""
    given: dict[str, Any] = {EFFECTIVE: effective, FACTOR: factor, MICRO: micro}
    for key, value in {**given, REPLICAS: replicas}.items():
        if value is not None and value < 1:
            raise ConfigError(key, "must be at least 1", value)
    if sum(value is not None for value in given.values()) < 2:
        raise ConfigError(
            "accumulation",
            "must give two of effective_batch_size, factor, micro_batch_size",
            given,
        )
    if effective is None:
        effective = int(given[MICRO] * given[FACTOR] * replicas)
    if effective < replicas:
        raise ConfigError(
            EFFECTIVE, f"must be at least the number of replicas, {replicas}", effective
        )
    share = ceil_div(effective, replicas)
    if micro is None:
        micro = ceil_div(share, given[FACTOR])
    if micro > (limit := ceil_div(max(effective, most), replicas)):
        of = f"the {limit} examples that each replica gets of the effective batch of {max(effective, most)}"
        raise ConfigError(MICRO, f"must be at most {of}", micro)
    needed = ceil_div(share, micro)
    if factor is not None and factor != needed:
        if given[MICRO] is None:
            fits = sorted(
                {ceil_div(share, size) for size in range(1, share + 1)},
                key=lambda f: abs(f - factor),
            )[:3]
            raise ConfigError(
                FACTOR,
                f"must cut {share} examples into equal micro-batches",
                factor,
                sorted(fits),
            )
        rule = f"must agree with effective batch {effective} and micro-batch {micro} on {replicas} replica(s)"
        raise ConfigError(FACTOR, rule, factor, [needed])
    return Batching(effective, micro, needed, replicas)


class Horizon(NamedTuple):
    """The length of a run: `unit` is one of `HORIZONS`."""

    unit: str
    length: int


def horizon_of(training: Mapping[str, Any], named: Container[str] = ()) -> Horizon:
    """Return the one horizon that is set, a positive one; those that `named` keys set outrank the others."""
    given: dict[str, int | None] = {unit: training[unit] for unit in HORIZONS}
    explicit = {unit for unit in HORIZONS if f"training.{unit}" in named}
    if any(given[unit] is not None for unit in explicit):
        given = {unit: given[unit] if unit in explicit else None for unit in HORIZONS}
    counting = [
        Horizon(unit, length) for unit, length in given.items() if length is not None
    ]
    if len(counting) != 1:
        raise ConfigError(
            "training", "must set exactly one of epochs, updates, examples", given
        )
    (horizon,) = counting
    if horizon.length < 1:
        raise ConfigError(
            f"training.{horizon.unit}", "must be at least 1", horizon.length
        )
    return horizon


def sizes_in_force(
    accumulation: Mapping[str, Any], named: Container[str] = ()
) -> dict[str, Any]:
    """Return the sizes of `accumulation` with null for the defaults that the `named` ones outrank."""
    given = {name: accumulation[name] for name in SIZES}
    present = [name for name in SIZES if given[name] is not None]
    explicit = [name for name in present if f"accumulation.{name}" in named]
    if not explicit:
        return given
    defaults = [name for name in present if name not in explicit]
    # Defaults fill up to two, the effective batch before the factor.
    return {**given, **dict.fromkeys(defaults[max(0, 2 - len(explicit)) :])}


def of_batches(
    asked: Mapping[str, Any], scaled: bool, replicas: int, named: Container[str] = ()
) -> dict[str, Any]:
    """Return the sizes in force with `dataset.batched`, where the factor alone counts; refuse the others by name."""
    rule = f"must be left out with {BATCHED}=true, whose batches and {FACTOR} give it"
    if EFFECTIVE in named and asked["effective_batch_size"] is not None:
        raise ConfigError(EFFECTIVE, rule, asked["effective_batch_size"])
    if scaled:
        raise ConfigError(
            "scaling.rule",
            f"must be none with {BATCHED}=true: the effective batch is not known before",
        )
    if replicas != 1:
        raise ConfigError(
            REPLICAS,
            f"must be 1, of one worker, with {BATCHED}=true: no batch is divided",
            replicas,
        )
    if asked["micro_batch_size"] in SEARCHED:
        rule = f"must be null or a number with {BATCHED}=true: the largest batch is not known before"
        raise ConfigError(MICRO, rule, asked["micro_batch_size"])
    if asked["factor"] is None or asked["factor"] < 1:
        rule = (
            f"must be at least 1 with {BATCHED}=true: that many batches are an update"
        )
        raise ConfigError(FACTOR, rule, asked["factor"])
    return {**{name: asked[name] for name in SIZES}, "effective_batch_size": None}


def batching(
    sizes: Mapping[str, Any],
    replicas: int,
    named: Container[str] = (),
    batched: bool = False,
    most: int = 0,
) -> Batching:
    """Return how an effective batch, the first of up to `most` examples, is cut on the `replicas` of all workers.

    A micro-batch size that is yet to be searched for is replaced by the largest there can be: the share of a replica.
    If the data are `batched`, the sizes are as of batches of that size, or of one example, until the first is read.
    """
    effective, factor, micro = (sizes[name] for name in SIZES)
    if batched:
        return derive(None, factor, 1 if micro is None else micro, replicas)
    if micro in SEARCHED:
        if factor is not None and (FACTOR in named or effective is not None):
            rule = f"must be null with {MICRO}={micro}, else the effective batch would depend on the machine"
            raise ConfigError(FACTOR, rule, factor)
        if effective is None:
            raise ConfigError(EFFECTIVE, f"must be given with {MICRO}={micro}")
        factor, micro = 1, None
    return derive(effective, factor, micro, replicas, most)
