"""Sizes and horizons: effective = micro × factor × replicas; epochs and examples → updates.

Sizes and horizons that the command line names outrank the defaults.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pipeline.common.errors import ConfigError

EFFECTIVE = "accumulation.effective_batch_size"
FACTOR = "accumulation.factor"
MICRO = "accumulation.micro_batch_size"
REPLICAS = "hardware.replicas"
HORIZONS = ("epochs", "updates", "examples")
SIZES = ("effective_batch_size", "factor", "micro_batch_size")
SEARCHED = ("auto", "auto_fastest")  # a micro-batch size that is searched for on the machine
HALVED = "micro_batch_size.halved"  # the tag, in prose, of a run whose micro-batches were halved
BATCHED = "dataset.batched"
CUTS = f"{HALVED}.json"  # the same as JSON: [[micro-batch size, last update], …], the last one without an end


def _ceil(numerator: int, denominator: int) -> int:
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
        return _ceil(self.effective_batch_size, self.replicas)

    def of(self, micro_batch_size: int) -> Batching:
        """Return the same effective batch on as many replicas, cut into micro-batches of this size."""
        return replace(self, micro_batch_size=micro_batch_size, factor=_ceil(self.share, micro_batch_size))

    def __str__(self) -> str:
        replicas = f"{self.replicas} replica" + "s" * (self.replicas > 1)
        rounded_up = self.micro_batch_size * self.factor * self.replicas
        text = f"effective batch {self.effective_batch_size} = {self.micro_batch_size} × {self.factor} × {replicas}"
        smaller = f" (rounded up: {rounded_up}; the last micro-batch is smaller)"
        return text + (smaller if rounded_up != self.effective_batch_size else "")


def derive(effective: int | None, factor: int | None, micro: int | None, replicas: int = 1) -> Batching:
    """Derive the third size from any two; all three are accepted when they agree, else a ConfigError is raised."""
    given: dict[str, Any] = {EFFECTIVE: effective, FACTOR: factor, MICRO: micro}
    for key, value in {**given, REPLICAS: replicas}.items():
        if value is not None and value < 1:
            raise ConfigError(key, "must be at least 1", value)
    if sum(value is not None for value in given.values()) < 2:
        raise ConfigError("accumulation", "must give two of effective_batch_size, factor, micro_batch_size", given)
    if effective is None:
        effective = int(given[MICRO] * given[FACTOR] * replicas)
    if effective < replicas:
        raise ConfigError(EFFECTIVE, f"must be at least the number of replicas, {replicas}", effective)
    share = _ceil(effective, replicas)
    if micro is None:
        micro = _ceil(share, given[FACTOR])
    if micro > share:
        of = f"the {share} examples that each replica gets of the effective batch of {effective}"
        raise ConfigError(MICRO, f"must be at most {of}", micro)
    needed = _ceil(share, micro)
    if factor is not None and factor != needed:
        if given[MICRO] is None:
            fits = sorted({_ceil(share, size) for size in range(1, share + 1)}, key=lambda f: abs(f - factor))[:3]
            raise ConfigError(FACTOR, f"must cut {share} examples into equal micro-batches", factor, sorted(fits))
        rule = f"must agree with effective batch {effective} and micro-batch {micro} on {replicas} replica(s)"
        raise ConfigError(FACTOR, rule, factor, [needed])
    return Batching(effective, micro, needed, replicas)


@dataclass(frozen=True)
class Plan:
    """A run counted in updates."""

    batching: Batching
    examples: int  # in one epoch
    updates: int  # in the whole run
    before: tuple[tuple[int, Batching], ...] = ()  # up to which update another cut was in force, the earliest first

    def halved(self, update: int, micro_batch_size: int) -> Plan:
        """Return the plan of a run that from after `update` on is cut into other micro-batches."""
        update = max([update, *(last for last, _ in self.before)])  # updates that are done again keep their counts
        before = (*self.before, (update, self.batching))
        return replace(self, batching=self.batching.of(micro_batch_size), before=before)

    @property
    def tags(self) -> dict[str, str]:
        """Return the tags of a run whose micro-batches were halved, in prose and as JSON; see `recorded_cuts`."""
        cuts = [(cut.micro_batch_size, last) for last, cut in self.before]
        sizes, now = [f"{size} up to update {last}" for size, last in cuts], self.batching.micro_batch_size
        return {HALVED: ", ".join([*sizes, f"{now} then"]), CUTS: json.dumps([*cuts, (now, None)])}

    def after(self, cuts: Sequence[tuple[int, int | None]], update: int) -> Plan:
        """Return the plan of a run that was cut by the recorded `cuts` up to `update`, then by this one."""
        end = max([update, *(last for _, last in cuts if last is not None)])
        before = ((end if last is None else last, self.batching.of(size)) for size, last in cuts)
        return replace(self, before=tuple(before))

    @property
    def updates_per_epoch(self) -> int:
        return _ceil(self.examples, self.batching.effective_batch_size)

    @property
    def epochs(self) -> int:
        return _ceil(self.updates, self.updates_per_epoch)

    def ended(self, update: int) -> bool:
        """Return whether the run ends with `update`."""
        return update >= self.updates

    def place(self, done: int) -> tuple[int, int]:
        """Return the epoch of the update after `done` ones, and which of its updates that is, both from 0 on."""
        return divmod(done, self.updates_per_epoch)

    @property
    def micro_batch_size(self) -> int:
        """Return the most examples of a micro-batch."""
        return self.batching.micro_batch_size

    def digest(self, update: int) -> int | None:
        """Return a checksum of the batch of `update` where its content does not follow from the config."""
        return None

    def batch_size(self, update: int) -> int:
        """Return the examples in update `update`, which counts from 1: the last one of an epoch is the tail."""
        first = ((update - 1) % self.updates_per_epoch) * self.batching.effective_batch_size
        return min(self.batching.effective_batch_size, self.examples - first)

    def examples_seen(self, update: int) -> int:
        epochs, rest = divmod(update, self.updates_per_epoch)
        return epochs * self.examples + rest * self.batching.effective_batch_size

    def micro_steps(self, update: int) -> int:
        """Return the micro-steps on each replica in the first `update` updates."""
        steps, done = 0, 0
        for last, cut in (*self.before, (update, self.batching)):
            steps += self._micro_steps(min(last, update), cut) - self._micro_steps(done, cut)
            done = min(last, update)
        return steps

    def _micro_steps(self, update: int, cut: Batching) -> int:
        epochs, rest = divmod(update, self.updates_per_epoch)
        tail = _ceil(_ceil(self.batch_size(self.updates_per_epoch), cut.replicas), cut.micro_batch_size)
        return epochs * ((self.updates_per_epoch - 1) * cut.factor + tail) + rest * cut.factor

    def epoch(self, update: int) -> float:
        return self.examples_seen(update) / self.examples

    def ends_epoch(self, update: int) -> bool:
        return update % self.updates_per_epoch == 0

    def __str__(self) -> str:
        tail = self.batch_size(self.updates_per_epoch)
        last = "" if tail == self.batching.effective_batch_size else f" (last one {tail})"
        per_epoch = f"{self.examples} examples → {self.updates_per_epoch} updates per epoch{last}"
        return f"{self.batching}; {per_epoch}, {self.updates} in all"


def recorded_cuts(tags: Mapping[str, str]) -> list[tuple[int, int | None]]:
    """Return the micro-batch sizes of a recorded run with the last update of each; empty if they were never halved.

    Runs recorded before there was JSON have the prose alone: `32 up to update 40, 16 then`.
    """
    if CUTS in tags:
        return [(size, last) for size, last in json.loads(tags[CUTS])]
    if HALVED not in tags:
        return []
    words = [text.split() for text in tags[HALVED].split(", ")]
    return [(int(first), int(last) if last.isdecimal() else None) for first, *_, last in words]


def plan(batching: Batching, examples: int, horizon: Horizon) -> Plan:
    """Convert the horizon to updates, once, at the edge; examples are rounded up to whole updates."""
    size = batching.effective_batch_size
    if size > examples:
        raise ConfigError(EFFECTIVE, f"must be at most the {examples} examples of the training split", size)
    per_epoch, (epochs, rest) = _ceil(examples, size), divmod(horizon.length, examples)
    in_examples = epochs * per_epoch + _ceil(rest, size)
    updates = {"epochs": horizon.length * per_epoch, "updates": horizon.length, "examples": in_examples}
    return Plan(batching, examples, updates[horizon.unit])


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
    counting = [Horizon(unit, length) for unit, length in given.items() if length is not None]
    if len(counting) != 1:
        raise ConfigError("training", "must set exactly one of epochs, updates, examples", given)
    (horizon,) = counting
    if horizon.length < 1:
        raise ConfigError(f"training.{horizon.unit}", "must be at least 1", horizon.length)
    return horizon


def sizes_in_force(accumulation: Mapping[str, Any], named: Container[str] = ()) -> dict[str, Any]:
    """Return the sizes of `accumulation` with null for the defaults that the `named` ones outrank."""
    given = {name: accumulation[name] for name in SIZES}
    present = [name for name in SIZES if given[name] is not None]
    explicit = [name for name in present if f"accumulation.{name}" in named]
    if not explicit:
        return given
    defaults = [name for name in present if name not in explicit]
    # Defaults fill up to two, the effective batch before the factor.
    return {**given, **dict.fromkeys(defaults[max(0, 2 - len(explicit)) :])}


def of_batches(asked: Mapping[str, Any], scaled: bool, replicas: int, named: Container[str] = ()) -> dict[str, Any]:
    """Return the sizes in force with `dataset.batched`, where the factor alone counts; refuse the others by name."""
    rule = f"must be left out with {BATCHED}=true, whose batches and {FACTOR} give it"
    if EFFECTIVE in named and asked["effective_batch_size"] is not None:
        raise ConfigError(EFFECTIVE, rule, asked["effective_batch_size"])
    if scaled:
        raise ConfigError("scaling.rule", f"must be none with {BATCHED}=true: the effective batch is not known before")
    if replicas != 1:
        raise ConfigError(REPLICAS, f"must be 1, of one worker, with {BATCHED}=true: no batch is divided", replicas)
    if asked["micro_batch_size"] in SEARCHED:
        rule = f"must be null or a number with {BATCHED}=true: the largest batch is not known before"
        raise ConfigError(MICRO, rule, asked["micro_batch_size"])
    if asked["factor"] is None or asked["factor"] < 1:
        raise ConfigError(
            FACTOR, f"must be at least 1 with {BATCHED}=true: that many batches are an update", asked["factor"]
        )
    return {**{name: asked[name] for name in SIZES}, "effective_batch_size": None}


def batching(sizes: Mapping[str, Any], replicas: int, named: Container[str] = (), batched: bool = False) -> Batching:
    """Return how an effective batch is cut by the sizes in force, on the `replicas` of all workers.

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
    return derive(effective, factor, micro, replicas)
