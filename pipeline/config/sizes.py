"""The sizes of batches and the length of a run.

Effective batch size = micro-batch size × factor × replicas, up to rounding. Values from
the command line outrank the defaults.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pipeline.common.errors import ConfigError, count

# Upper limit of all counts, as TensorFlow counts the examples in a batch with 32 bits.
LARGEST = 2**31 - 1
EFFECTIVE = "accumulation.effective_batch_size"
FACTOR = "accumulation.factor"
MICRO = "accumulation.micro_batch_size"
TOKENS = "accumulation.micro_batch_tokens"
REPLICAS = "hardware.replicas"
HORIZONS = ("epochs", "updates", "examples")
SIZES = ("effective_batch_size", "factor", "micro_batch_size")
# Values of the micro-batch size that start a search for a size on the machine.
SEARCHED = ("auto", "auto_fastest")
BATCHED = "dataset.batched"


def ceil_div(numerator: int, denominator: int) -> int:
    """Return `numerator / denominator`, rounded up."""
    return -(-numerator // denominator)


@dataclass(frozen=True)
class Batching:
    """How one effective batch is cut into micro-batches on each replica.

    Attributes:
        effective_batch_size: number of examples per update, over all replicas.
        micro_batch_size: maximum number of examples per forward and backward pass on a
            replica.
        factor: number of micro-batches per update on each replica. In a cut by tokens,
            it is the smallest possible number.
        replicas: number of copies of the model, over all workers.
        micro_batch_tokens: maximum number of tokens, padding included, per forward and
            backward pass on a replica; None unless batches are cut by tokens.
    """

    effective_batch_size: int
    micro_batch_size: int
    factor: int
    replicas: int = 1
    micro_batch_tokens: int | None = None

    @property
    def share(self) -> int:
        """The maximum number of examples per effective batch on one replica.

        A micro-batch cannot be larger.
        """
        return ceil_div(self.effective_batch_size, self.replicas)

    @property
    def is_cut(self) -> bool:
        """Whether an effective batch may be computed in several micro-batches."""
        return self.micro_batch_tokens is not None or self.factor * self.replicas > 1

    @property
    def limit(self) -> int:
        """A micro-batch's limit: in tokens in a cut by tokens, else in examples."""
        if self.micro_batch_tokens is not None:
            return self.micro_batch_tokens
        return self.micro_batch_size

    def with_limit(self, limit: int) -> Batching:
        """Return the batching with another `limit`, in the same unit."""
        if self.micro_batch_tokens is not None:
            return replace(self, micro_batch_tokens=limit)
        return self.with_micro_batch_size(limit)

    def with_micro_batch_size(self, micro_batch_size: int) -> Batching:
        """Return the batching with another micro-batch size and the matching factor."""
        factor = ceil_div(self.share, micro_batch_size)
        return replace(self, micro_batch_size=micro_batch_size, factor=factor)

    def with_effective_batch_size(self, size: int) -> Batching:
        """Return the batching of `size` examples with the same micro-batch size.

        If a cut by tokens has no limit of examples, the result has none either.
        """
        resized = replace(self, effective_batch_size=size)
        micro_batch_size = self.micro_batch_size
        if self.micro_batch_tokens is not None and micro_batch_size == self.share:
            micro_batch_size = resized.share
        return resized.with_micro_batch_size(micro_batch_size)

    def __str__(self) -> str:
        replicas = count(self.replicas, "replica")
        if self.micro_batch_tokens is not None:
            limit = count(self.micro_batch_tokens, "token")
            if self.micro_batch_size < self.share:
                limit += f" and {count(self.micro_batch_size, 'example')}"
            return (
                f"effective batch {self.effective_batch_size} in micro-batches of at "
                f"most {limit}, padding included, on {replicas}"
            )
        text = (
            f"effective batch {self.effective_batch_size} = "
            f"{self.micro_batch_size} × {self.factor} × {replicas}"
        )
        rounded_up = self.micro_batch_size * self.factor * self.replicas
        if rounded_up != self.effective_batch_size:
            text += f" (rounded up: {rounded_up}; the last micro-batch is smaller)"
        return text


def derive(
    effective: int | None,
    factor: int | None,
    micro: int | None,
    replicas: int = 1,
    largest: int = 0,
) -> Batching:
    """Derive the missing size from the other two; three given sizes must agree.

    Args:
        effective: effective batch size.
        factor: accumulation factor.
        micro: micro-batch size.
        replicas: number of replicas, over all workers.
        largest: largest effective batch size of the run, if it changes later.

    Raises:
        ConfigError: fewer than two sizes are given, a size is below 1, or the sizes do
            not fit together.
    """
    sizes: dict[str, Any] = {EFFECTIVE: effective, FACTOR: factor, MICRO: micro}
    for key, value in {**sizes, REPLICAS: replicas}.items():
        if value is not None and value < 1:
            raise ConfigError(key, "must be at least 1", value)
    known = [value for value in sizes.values() if value is not None]
    if len(known) < 2:
        rule = "must give two of effective_batch_size, factor, micro_batch_size"
        raise ConfigError("accumulation", rule, sizes)

    if effective is None:
        effective = int(sizes[MICRO] * sizes[FACTOR] * replicas)
    if effective < replicas:
        rule = f"must be at least the number of replicas, {replicas}"
        raise ConfigError(EFFECTIVE, rule, effective)
    share = ceil_div(effective, replicas)

    if micro is None:
        micro = ceil_div(share, sizes[FACTOR])
    largest = max(effective, largest)
    limit = ceil_div(largest, replicas)
    if micro > limit:
        rule = (
            f"must be at most the {limit} examples that each replica gets "
            f"of the effective batch of {largest}"
        )
        raise ConfigError(MICRO, rule, micro)

    needed = ceil_div(share, micro)
    if factor is not None and factor != needed:
        if sizes[MICRO] is None:
            rule = (
                f"must be a number of micro-batches that {share} examples can be cut "
                "into, all of one size except for a smaller last one"
            )
            raise ConfigError(FACTOR, rule, factor, _nearest_factors(share, factor))
        rule = (
            f"must agree with effective batch {effective} and micro-batch {micro} "
            f"on {count(replicas, 'replica')}; set one of the three sizes to null to "
            "derive it from the others"
        )
        raise ConfigError(FACTOR, rule, factor, [needed])
    return Batching(effective, micro, needed, replicas)


def _nearest_factors(share: int, factor: int) -> list[int]:
    """Return up to three valid factors for `share` examples, nearest to `factor`.

    A factor is valid if it is ⌈share / size⌉ for a micro-batch size; `factor` is not.
    """
    possible: list[int] = []
    lower = factor
    while lower > 1 and len(possible) < 3:
        # The smallest size that needs fewer micro-batches.
        size = ceil_div(share, lower - 1)
        lower = ceil_div(share, size)
        possible.insert(0, lower)

    # The largest size that needs more micro-batches, and the next smaller ones.
    size = ceil_div(share, factor) - 1
    for _ in range(3):
        if size >= 1:
            higher = ceil_div(share, size)
            possible.append(higher)
            size = ceil_div(share, higher) - 1
    nearest = sorted(possible, key=lambda other: abs(other - factor))
    return sorted(nearest[:3])


# The length of a decay in a schedule: all updates after the warm-up.
REST = "rest"


class Horizon(NamedTuple):
    """The length of a run: `unit` is one of `HORIZONS`."""

    unit: str
    length: int


def horizon_of(training: Mapping[str, Any], named: Container[str] = ()) -> Horizon:
    """Return the one horizon that is set.

    Args:
        training: the config group; the keys in `HORIZONS` are read.
        named: keys that the command line sets. These outrank the other keys.

    Raises:
        ConfigError: none or several are set, or the length is below 1.
    """
    lengths: dict[str, int | None] = {unit: training[unit] for unit in HORIZONS}
    explicit = [unit for unit in HORIZONS if f"training.{unit}" in named]
    if any(lengths[unit] is not None for unit in explicit):
        for unit in HORIZONS:
            if unit not in explicit:
                lengths[unit] = None

    horizons = []
    for unit, length in lengths.items():
        if length is not None:
            horizons.append(Horizon(unit, length))
    if len(horizons) != 1:
        rule = "must set exactly one of epochs, updates, examples"
        raise ConfigError("training", rule, lengths)
    horizon = horizons[0]
    if horizon.length < 1:
        key = f"training.{horizon.unit}"
        raise ConfigError(key, "must be at least 1", horizon.length)
    return horizon


def sizes_in_force(
    accumulation: Mapping[str, Any], named: Container[str] = ()
) -> dict[str, Any]:
    """Return the sizes that apply, with None for defaults that are outranked.

    Args:
        accumulation: the config group; the keys in `SIZES` are read.
        named: keys that the command line sets.
    """
    sizes = {name: accumulation[name] for name in SIZES}
    if accumulation.get("micro_batch_tokens") is not None:
        return _sizes_by_tokens(accumulation, sizes, named)

    present = [name for name in SIZES if sizes[name] is not None]
    explicit = [name for name in present if f"accumulation.{name}" in named]
    if not explicit:
        return sizes

    # Keep only as many defaults as are needed for two sizes: the effective batch size
    # first, then the factor.
    defaults = [name for name in present if name not in explicit]
    kept = max(0, 2 - len(explicit))
    for name in defaults[kept:]:
        sizes[name] = None
    return sizes


def _sizes_by_tokens(
    accumulation: Mapping[str, Any], sizes: Mapping[str, Any], named: Container[str]
) -> dict[str, Any]:
    """Return the sizes that apply if the config has a limit of tokens.

    A factor on the command line outranks a limit of tokens that comes from elsewhere;
    the limit is then None. Otherwise, the factor is None, as it differs between
    updates.

    Args:
        accumulation: the config group, which has a limit of tokens.
        sizes: the values of the keys in `SIZES`.
        named: keys that the command line sets.

    Raises:
        ConfigError: the factor is set, too, or the effective batch size is not, or the
            micro-batch size is to be searched for.
    """
    factor = sizes["factor"]
    micro = sizes["micro_batch_size"]
    if FACTOR in named and factor is not None:
        if TOKENS in named:
            rule = f"must be left out with {TOKENS}, which determines the factor"
            raise ConfigError(FACTOR, rule, factor)
        without = {**accumulation, "micro_batch_tokens": None}
        return {**sizes_in_force(without, named), "micro_batch_tokens": None}
    if micro in SEARCHED:
        rule = (
            f"cannot be searched for with {TOKENS}: set it to a number of examples or "
            f"to null, or set {TOKENS} to null"
        )
        raise ConfigError(MICRO, rule, micro)
    if sizes["effective_batch_size"] is None:
        raise ConfigError(EFFECTIVE, f"must be given with {TOKENS}")
    return {**sizes, "factor": None}


def of_batches(
    accumulation: Mapping[str, Any],
    scaled: bool,
    replicas: int,
    named: Container[str] = (),
) -> dict[str, Any]:
    """Return the sizes that apply if the dataset yields batches (`dataset.batched`).

    The effective batch size is None, as it follows from the batches that are read.

    Args:
        accumulation: the config group; the keys in `SIZES` are read.
        scaled: whether the learning rate follows the effective batch size.
        replicas: number of replicas, over all workers.
        named: keys that the command line sets.

    Raises:
        ConfigError: the factor is missing or below 1, there are several replicas, or
            another value sets or requires an effective batch size that is known before
            the data is read.
    """
    effective = accumulation["effective_batch_size"]
    factor = accumulation["factor"]
    micro = accumulation["micro_batch_size"]
    if EFFECTIVE in named and effective is not None:
        rule = (
            f"must be left out with {BATCHED}=true: the batches and {FACTOR} determine "
            "it"
        )
        raise ConfigError(EFFECTIVE, rule, effective)
    if scaled:
        rule = (
            f"must be none with {BATCHED}=true: the effective batch is not known in "
            "advance"
        )
        raise ConfigError("scaling.rule", rule)
    if replicas != 1:
        rule = (
            f"must be 1, like hardware.workers, with {BATCHED}=true: batches are not "
            "divided among replicas"
        )
        raise ConfigError(REPLICAS, rule, replicas)
    if micro in SEARCHED:
        rule = (
            f"cannot be searched for with {BATCHED}=true, as the largest batch is not "
            "known in advance: set a number, or null"
        )
        raise ConfigError(MICRO, rule, micro)
    tokens = accumulation.get("micro_batch_tokens")
    if tokens is not None:
        rule = f"must be null with {BATCHED}=true, whose batches are padded already"
        raise ConfigError(TOKENS, rule, tokens)
    if factor is None or factor < 1:
        rule = (
            f"must be at least 1 with {BATCHED}=true: it is the number of batches per "
            "update"
        )
        raise ConfigError(FACTOR, rule, factor)
    return {
        "effective_batch_size": None,
        "factor": factor,
        "micro_batch_size": micro,
    }


def batching(
    sizes: Mapping[str, Any],
    replicas: int,
    named: Container[str] = (),
    batched: bool = False,
    largest: int = 0,
) -> Batching:
    """Return the cut of the first effective batch of a run.

    If the micro-batch size must still be searched for, the largest possible size is
    assumed, which is the share of one replica.

    Args:
        sizes: the sizes that apply, by their names in `SIZES`, and the limit of tokens
            if there is one.
        replicas: number of replicas, over all workers.
        named: keys that the command line sets.
        batched: whether an element of the dataset is a batch. Until the first batch is
            read, its size is assumed to be the micro-batch size, or 1 if that is None.
        largest: largest effective batch size of the run, if it changes later.

    Raises:
        ConfigError: the sizes do not fit together.
    """
    effective, factor, micro = [sizes[name] for name in SIZES]
    if batched:
        if micro is None:
            micro = 1
        return derive(None, factor, micro, replicas)
    tokens = sizes.get("micro_batch_tokens")
    if tokens is not None:
        factor = None if micro is not None else 1
        cut = derive(effective, factor, micro, replicas, largest)
        return replace(cut, micro_batch_tokens=tokens)
    if micro in SEARCHED:
        if factor is not None and (FACTOR in named or effective is not None):
            rule = (
                f"cannot be set with {MICRO}={micro}, as the effective batch would "
                f"depend on the machine: set {EFFECTIVE}, and this key to null"
            )
            raise ConfigError(FACTOR, rule, factor)
        if effective is None:
            raise ConfigError(EFFECTIVE, f"must be given with {MICRO}={micro}")
        return derive(effective, 1, None, replicas, largest)
    return derive(effective, factor, micro, replicas, largest)
