"""Sizes and horizons: effective = micro × factor × replicas; epochs and examples → updates.

Sizes and horizons that the command line names outrank the defaults. Everything is integer arithmetic on the number of
examples, so it can be checked by hand, and imports no TensorFlow, so that a wrong size is refused in under a second.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from pipeline.common.errors import ConfigError

EFFECTIVE = "accumulation.effective_batch_size"
FACTOR = "accumulation.factor"
MICRO = "accumulation.micro_batch_size"
REPLICAS = "hardware.replicas"
HORIZONS = ("epochs", "updates", "examples")
SEARCHED = ("auto", "auto_fastest")  # a micro-batch size that is found on the machine


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
        factor = _ceil(self.share, micro_batch_size)
        return Batching(self.effective_batch_size, micro_batch_size, factor, self.replicas)

    def __str__(self) -> str:
        replicas = f"{self.replicas} replica" + ("s" if self.replicas > 1 else "")
        text = f"effective batch {self.effective_batch_size} = {self.micro_batch_size} × {self.factor} × {replicas}"
        whole = self.micro_batch_size * self.factor * self.replicas
        if whole != self.effective_batch_size:
            text += f" (rounded up: {whole}; the last micro-batch is smaller)"
        return text


def derive(effective: int | None, factor: int | None, micro: int | None, replicas: int = 1) -> Batching:
    """Derive the third size from any two; all three are accepted when they agree.

    Raises:
        ConfigError: fewer than two are given, one is not positive, or they contradict each other.
    """
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
        """Return the plan of a run that from after `update` on is cut into other micro-batches.

        Updates that are done again keep the count that their rows have.
        """
        update = max([update, *(last for last, _ in self.before)])
        before = (*self.before, (update, self.batching))
        return replace(self, batching=self.batching.of(micro_batch_size), before=before)

    @property
    def cuts(self) -> str:
        """Which micro-batches were in force when, for `after`."""
        sizes = [f"{cut.micro_batch_size} up to update {last}" for last, cut in self.before]
        return ", ".join([*sizes, f"{self.batching.micro_batch_size} then"])

    def after(self, cuts: str, update: int) -> Plan:
        """Return the plan of a run that up to `update` was cut as the `cuts` of its plan say, and then as this one."""
        *sizes, now = (int(each.split()[0]) for each in cuts.split(", "))
        last = [int(each.split()[-1]) for each in cuts.split(", ")[:-1]]
        before = zip([*last, max([update, *last])], [*sizes, now], strict=True)
        return replace(self, before=tuple((until, self.batching.of(size)) for until, size in before))

    @property
    def updates_per_epoch(self) -> int:
        return _ceil(self.examples, self.batching.effective_batch_size)

    @property
    def epochs(self) -> int:
        """Epochs begun; the last one may be cut short by the horizon."""
        return _ceil(self.updates, self.updates_per_epoch)

    def batch_size(self, update: int) -> int:
        """Return the examples in update `update`, which counts from 1: the last one of an epoch is the tail."""
        first = ((update - 1) % self.updates_per_epoch) * self.batching.effective_batch_size
        return min(self.batching.effective_batch_size, self.examples - first)

    def examples_seen(self, update: int) -> int:
        """Return the examples that went into the first `update` updates."""
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
        share = _ceil(self.batch_size(self.updates_per_epoch), cut.replicas)
        tail = _ceil(share, cut.micro_batch_size)
        return epochs * ((self.updates_per_epoch - 1) * cut.factor + tail) + rest * cut.factor

    def epoch(self, update: int) -> float:
        """Return the passes over the training split after `update` updates; a whole number at the end of an epoch."""
        return self.examples_seen(update) / self.examples

    def ends_epoch(self, update: int) -> bool:
        return update % self.updates_per_epoch == 0

    def __str__(self) -> str:
        tail = self.batch_size(self.updates_per_epoch)
        last = "" if tail == self.batching.effective_batch_size else f" (last one {tail})"
        per_epoch = f"{self.examples} examples → {self.updates_per_epoch} updates per epoch{last}"
        return f"{self.batching}; {per_epoch}, {self.updates} in all"


def plan(batching: Batching, examples: int, horizon: str, length: int) -> Plan:
    """Convert the horizon to updates, once, at the edge; examples are rounded up to whole updates.

    Raises:
        ConfigError: the effective batch is larger than the training split.
    """
    size = batching.effective_batch_size
    if size > examples:
        raise ConfigError(EFFECTIVE, f"must be at most the {examples} examples of the training split", size)
    per_epoch = _ceil(examples, size)
    epochs, rest = divmod(length, examples)
    updates = {"epochs": length * per_epoch, "updates": length, "examples": epochs * per_epoch + _ceil(rest, size)}
    return Plan(batching, examples, updates[horizon])


def settle_horizon(training: DictConfig, named: Container[str] = ()) -> tuple[str, int]:
    """Return `epochs`, `updates` or `examples`, and how many; set those that do not count to null in `training`.

    Raises:
        ConfigError: not exactly one is left, or it is not positive.
    """
    chosen = {name for name in HORIZONS if f"training.{name}" in named}
    if any(training[name] is not None for name in chosen):
        training.update(dict.fromkeys(set(HORIZONS) - chosen))
    given = {name: training[name] for name in HORIZONS}
    counting = [(name, length) for name, length in given.items() if length is not None]
    if len(counting) != 1:
        raise ConfigError("training", "must set exactly one of epochs, updates, examples", given)
    ((name, length),) = counting
    if length < 1:
        raise ConfigError(f"training.{name}", "must be at least 1", length)
    return name, length


def settle_sizes(config: DictConfig, named: Container[str] = ()) -> Batching:
    """Return how an effective batch is cut; set a size that does not count to null in `config`.

    A micro-batch size that is still to be found is taken for the whole of what a replica gets.

    Raises:
        ConfigError: the sizes that count do not give one cut.
    """
    sizes = config.accumulation
    replicas = config.hardware.replicas
    if replicas > 0:  # else it is refused below
        replicas *= config.hardware.workers
    given = [name for name in ("effective_batch_size", "factor", "micro_batch_size") if sizes[name] is not None]
    explicit = [name for name in given if f"accumulation.{name}" in named]
    if explicit:  # defaults fill up to two, the effective batch before the factor
        defaults = [name for name in given if name not in explicit]
        sizes.update(dict.fromkeys(defaults[max(0, 2 - len(explicit)) :]))
    if (micro := sizes.micro_batch_size) in SEARCHED:
        if sizes.factor is not None and (FACTOR in named or sizes.effective_batch_size is not None):
            rule = f"must be null with {MICRO}={micro}, else the effective batch would depend on the machine"
            raise ConfigError(FACTOR, rule, sizes.factor)
        if sizes.effective_batch_size is None:
            raise ConfigError(EFFECTIVE, f"must be given with {MICRO}={micro}")
        return derive(sizes.effective_batch_size, 1, None, replicas)
    return derive(sizes.effective_batch_size, sizes.factor, sizes.micro_batch_size, replicas)
