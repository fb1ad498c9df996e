"""Decides by timed updates whether XLA compiles a run (`hardware.xla=fastest`).

parts ─► [cached?] ─► with XLA and without, timed in turns ─► parts of the faster way
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.common import disk_cache
from pipeline.common.errors import say
from pipeline.common.secrets import mask
from pipeline.components.assembly import Parts
from pipeline.config.resolve import XLA
from pipeline.run import measured_once
from pipeline.training import xla_timing
from pipeline.training.xla_timing import Clock, Timing


@dataclass(frozen=True)
class Choice:
    """Whether XLA compiles the micro-steps, and why.

    Attributes:
        compiles: whether XLA compiles them.
        why: the times of an update, such as `2.1 ms an update, 3.2 ms without`.
    """

    compiles: bool
    why: str

    def __str__(self) -> str:
        state = "on" if self.compiles else "off"
        return f"XLA {state} ({self.why})"


# The types of the fields of `Choice`, which are also those of a cache entry.
_ENTRY = {"compiles": bool, "why": str}


def decide(parts: Parts) -> tuple[Parts, Choice]:
    """Choose the faster way, by a cached choice or by timed updates.

    If several processes need the same choice, one times updates and the others wait.

    Returns:
        The parts with XLA on or off, and the choice. The first line that the parts
        print states the choice.
    """
    identity = measured_once.identity(parts.spec)
    identity["micro_batch_size"] = parts.plan.micro_batch_size
    file = disk_cache.place("xla", json.dumps(identity, sort_keys=True))
    with measured_once.locked(file, XLA):
        choice = _recalled(file)
        if choice is not None:
            say(f"{choice}, as found before ({file})")
        else:
            say(f"{XLA}=fastest: timing updates with XLA and without")
            choice = timed(parts)
            if choice is None:
                # Both ways fail. The run reports the error of the simpler one, without
                # XLA.
                return parts.with_xla(False), Choice(False, "no update runs")
            disk_cache.remember(file, asdict(choice))
    return parts.with_xla(choice.compiles, f", {choice}"), choice


def timed(parts: Parts, clock: Clock = time.monotonic) -> Choice | None:
    """Time updates with XLA and without; return None if neither update runs."""
    updates = [parts.with_xla(compiles).update() for compiles in (True, False)]
    with_xla, without = xla_timing.time_updates(updates, parts.batches, clock)
    return choice_of(with_xla, without)


def choice_of(with_xla: Timing, without: Timing) -> Choice | None:
    """Return the faster way, or the only one that runs; None if neither runs."""
    if not with_xla.runs and not without.runs:
        return None
    if not with_xla.runs:
        return Choice(False, f"an update with it fails: {mask(with_xla.why)}")
    if not without.runs:
        return Choice(True, f"an update without it fails: {mask(without.why)}")
    assert with_xla.seconds is not None
    assert without.seconds is not None
    compiled = _milliseconds(with_xla.seconds)
    plain = _milliseconds(without.seconds)
    if with_xla.seconds < without.seconds:
        return Choice(True, f"{compiled} an update, {plain} without")
    return Choice(False, f"{plain} an update, {compiled} with it")


def _recalled(file: Path) -> Choice | None:
    """Return the choice in the cache, or None if it is missing or invalid."""
    entry = disk_cache.recall(file, _ENTRY)
    if not entry:
        return None
    return Choice(entry["compiles"], entry["why"])


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
