"""Searches for a micro-batch size, for `accumulation.micro_batch_size`.

`auto` finds the largest size that fits into memory, `auto_fastest` the fastest one.

    share of a replica ─► powers of two ─► sizes between ─► [powers below, timed] ─► cached

Each trial runs in its own process; if the process dies, the size does not fit. This
module does not import TensorFlow.
"""

import bisect
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.common import disk_cache, imports, memory_budget
from pipeline.common.errors import ConfigError, say
from pipeline.common.memory_budget import MARGIN
from pipeline.common.secrets import mask
from pipeline.config.resolve import RunSpec
from pipeline.config.sizes import MICRO, Batching
from pipeline.run import measured_once

# Sizes that reach this share of the best speed count as equally fast. The smallest of
# them is used, since it leaves the most memory free.
ALIKE = 0.98
# Once two sizes in a row reach less than this share of the best speed, smaller sizes
# are not timed.
SLOWER = 0.9
# Columns of the table of trials, which the run logs as the artifact `TABLE`.
COLUMNS = (
    "micro_batch_size",
    "factor",
    "fits",
    "peak_memory_bytes",
    "update_seconds",
    "examples_per_second",
    "why",
)
TABLE = "micro_batch_sizes.json"
TAG = "micro_batch_size.found"  # tag of a run: how the size was chosen
# The types of the fields of `Found`, which are also those of a cache entry.
_ENTRY = {"micro_batch_size": int, "how": str, "tries": [list]}

# Tries a micro-batch size. The second argument is whether to time its updates, and the
# result is an answer of `pipeline.run.batch_size_trial`.
Trial = Callable[[int, bool], dict[str, Any]]


@dataclass(frozen=True)
class Found:
    """The result of a search for a micro-batch size.

    Attributes:
        micro_batch_size: examples per forward and backward pass on one replica.
        how: how the size was chosen, such as `the largest of at most 128 that fits`.
        tries: a row of `COLUMNS` for each trial.
    """

    micro_batch_size: int
    how: str
    tries: list[list[Any]]


@dataclass(frozen=True)
class _Attempt:
    """The outcome of a trial of a micro-batch size.

    Attributes:
        size: number of examples per micro-batch.
        factor: micro-batches per update.
        peak: peak memory in bytes, or None if the trial ended before it was measured.
        update_seconds: time per update, or None if no update was timed.
        examples_per_second: training speed, or None if no update was timed.
        why: why the size does not fit, or "" if it fits.
        failed: whether the trial failed with an error that may have another cause than
            a lack of memory.
        seconds: duration of the trial.
    """

    size: int
    factor: int
    peak: int | None
    update_seconds: float | None
    examples_per_second: float | None
    why: str
    failed: bool
    seconds: float

    @property
    def fits(self) -> bool:
        return not self.why

    def row(self) -> list[Any]:
        """Return the values of `COLUMNS`."""
        return [
            self.size,
            self.factor,
            self.fits,
            self.peak,
            self.update_seconds,
            self.examples_per_second,
            self.why,
        ]

    def __str__(self) -> str:
        line = f"micro-batch of {self.size} "
        if self.fits and self.peak is not None:
            line += f"fits: {memory_budget.readable(self.peak)}"
        else:
            line += f"does not fit: {self.why}"
        if self.examples_per_second:
            line += f", {self.examples_per_second:.4g} examples/s"
        return f"{line} ({self.seconds:.1f} s)"


def search(spec: RunSpec) -> tuple[RunSpec, Found]:
    """Find the micro-batch size of a run, in a cache or by a search.

    If several processes need the same size, one searches and the others wait. If the
    effective batch size changes during the run, the search uses the largest one. With
    `hardware.xla=fastest`, the trials do not use XLA.

    Returns:
        The spec with the size, and the result of the search.

    Raises:
        ConfigError: no size fits, the update fails at any size, or the process that
            tries sizes has ended.
    """
    largest_spec = spec.at_largest()
    if spec.times_xla:
        # Whether XLA is faster is measured later, at the size that is found.
        largest_spec = largest_spec.with_xla(False)
    budget = {
        "resident": _resident_budget(spec),
        "address_space": memory_budget.address_space(),
    }
    file = _cache_file(largest_spec, budget)
    with measured_once.locked(file, MICRO):
        found = _recalled(file, most=largest_spec.batching.share)
        if found is not None:
            size = found.micro_batch_size
            say(f"{MICRO} {size}: {found.how}, as found before ({file})")
        else:
            found = _search(largest_spec, budget)
            disk_cache.remember(file, asdict(found))
    return spec.with_micro_batch(found.micro_batch_size), found


def balanced(share: int, size: int) -> int:
    """Return the smallest micro-batch size that cuts into no more pieces than `size`.

    Args:
        share: number of examples to cut into pieces.
        size: a micro-batch size.
    """
    pieces = -(-share // size)  # rounded up
    return -(-share // pieces)


def largest(share: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest micro-batch size that fits, or None if no size fits.

    If `share` itself does not fit, bisect the powers of two, then the sizes between the
    largest power that fits and the next one. Each size is made even by `balanced`.

    Args:
        share: number of examples per update on one replica: the largest possible size.
        fits: returns whether a size fits.
    """
    if fits(share):
        return share
    exponents = range((share - 1).bit_length())
    powers = sorted({balanced(share, 2**exponent) for exponent in exponents})
    fitting = _last([size for size in powers if size < share], fits)
    if fitting is None:
        return None
    next_power = min([size for size in powers if size > fitting], default=share)
    sizes_between = {balanced(share, size) for size in range(fitting + 1, next_power)}
    sizes_between -= {fitting, next_power}
    return _last(sorted(sizes_between), fits) or fitting


def fastest(most: int, share: int, rate_of: Callable[[int], float | None]) -> int:
    """Return the smallest micro-batch size that is about as fast as the fastest one.

    Time `most` and the powers of two below it, each made even by `balanced`, from large
    to small. Stop after two sizes in a row that are clearly slower than the best one.

    Args:
        most: the largest size that fits.
        share: number of examples that are cut into micro-batches.
        rate_of: returns the speed at a size in examples per second, or None if the size
            does not fit: a timed update may need more memory than one without timing.
    """
    exponents = range(most.bit_length())
    sizes = {balanced(share, 2**exponent) for exponent in exponents}

    rates: dict[int, float] = {}
    slower_in_succession = 0
    for size in sorted(sizes | {most}, reverse=True):
        rate = rate_of(size)
        if rate is None:
            continue
        rates[size] = rate
        if rate < SLOWER * max(rates.values()):
            slower_in_succession += 1
        else:
            slower_in_succession = 0
        if slower_in_succession == 2:
            break
    if not rates:
        return most
    fast_enough = ALIKE * max(rates.values())
    return min(size for size, rate in rates.items() if rate >= fast_enough)


def _last(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest of the ascending `sizes` that fits, or None if none fits.

    The size is found by bisection.
    """
    count = bisect.bisect(sizes, False, key=lambda size: not fits(size))
    return sizes[count - 1] if count else None


def _resident_budget(spec: RunSpec) -> int | None:
    """Return the limit of this worker's resident memory in bytes."""
    memory = spec.config.hardware.memory
    if memory is None:
        return memory_budget.limit() // spec.workers_on_machine
    return memory_budget.parsed(memory)


def _cache_file(spec: RunSpec, budget: dict[str, Any]) -> Path:
    """Return the file of the cache entry for a search."""
    identity = measured_once.identity(spec)
    identity["asked"] = spec.config.accumulation.micro_batch_size
    identity["budget"] = budget
    return disk_cache.place("micro_batch_size", json.dumps(identity, sort_keys=True))


def _recalled(file: Path, most: int) -> Found | None:
    """Return the result in the cache, or None if it is missing or invalid.

    A size above `most` is invalid.
    """
    entry = disk_cache.recall(file, _ENTRY)
    if not entry:
        return None
    found = Found(**{name: entry[name] for name in _ENTRY})
    complete = all(len(row) == len(COLUMNS) for row in found.tries)
    return found if complete and 1 <= found.micro_batch_size <= most else None


def _search(spec: RunSpec, budget: dict[str, Any]) -> Found:
    mode = spec.config.accumulation.micro_batch_size  # auto or auto_fastest
    share = spec.batching.share
    least = min(limit for limit in budget.values() if limit is not None)
    say(
        f"{MICRO}={mode}: trying what fits into {MARGIN:.0%} of "
        f"{memory_budget.readable(least)}, or into the GPU"
    )
    with_margin = {}
    for name, limit in budget.items():
        with_margin[name] = None if limit is None else MARGIN * limit

    attempts: list[_Attempt] = []
    with _trials(spec, with_margin) as trial:

        def attempt(size: int, *, timed: bool) -> _Attempt:
            answer = trial(size, timed)
            attempts.append(
                _attempt(spec.batching.with_micro_batch_size(size), timed, answer)
            )
            say(f"  {attempts[-1]}")
            return attempts[-1]

        def rate_of(size: int) -> float | None:
            timed = attempt(size, timed=True)
            return timed.examples_per_second if timed.fits else None

        size = largest(share, lambda size: attempt(size, timed=False).fits)
        if size is None:
            raise _nothing_fits(spec, attempts[-1])
        how = f"the largest of at most {share} that fits"
        if mode == "auto_fastest":
            size = fastest(size, share, rate_of)
            how = "the fastest that fits"
    return Found(size, how, [attempt.row() for attempt in attempts])


def _attempt(cut: Batching, timed: bool, answer: dict[str, Any]) -> _Attempt:
    update_seconds = answer.get("update") if timed else None
    examples_per_second = None
    if update_seconds:
        examples_per_second = cut.effective_batch_size / update_seconds
    return _Attempt(
        size=cut.micro_batch_size,
        factor=cut.factor,
        peak=answer.get("peak"),
        update_seconds=update_seconds,
        examples_per_second=examples_per_second,
        why=mask(answer.get("why", "")),
        failed=answer.get("failed", False),
        seconds=answer["took"],
    )


def _nothing_fits(spec: RunSpec, smallest: _Attempt) -> ConfigError:
    """Return the error for a search in which not even one example fit."""
    if smallest.failed:
        # Even the smallest size fails, so memory is not the cause of the error.
        rule = (
            f"must be a number, since the update that was tried fails ({smallest.why})"
        )
        return ConfigError(MICRO, rule)
    example = f"a micro-batch of one example, which does not fit ({smallest.why})"
    memory = spec.config.hardware.memory
    if memory:
        return ConfigError("hardware.memory", f"must be enough for {example}", memory)
    mode = spec.config.accumulation.micro_batch_size
    return ConfigError(MICRO, f"must have memory for {example}", mode)


@contextmanager
def _trials(spec: RunSpec, budget: dict[str, Any]) -> Iterator[Trial]:
    """Start a process that tries sizes; yield the function that requests a trial.

    The process is killed when the block ends. The function raises a `ConfigError` if
    the process has ended, or if a trial fails for a reason other than the size.
    """
    with (
        tempfile.TemporaryFile("w+", errors="replace") as stderr,
        imports.started(
            "pipeline.run.batch_size_trial", stdout=subprocess.PIPE, stderr=stderr
        ) as process,
    ):

        def send(request: dict[str, Any]) -> None:
            with suppress(BrokenPipeError):
                print(json.dumps(request), file=process.stdin, flush=True)

        def trial(size: int, timed: bool) -> dict[str, Any]:
            send({"micro_batch_size": size, "timed": timed})
            line = process.stdout.readline()
            if not line:
                last_line = mask(_last_line(stderr))
                rule = (
                    "must be a number, since the process that tries sizes ended "
                    f"({last_line})"
                )
                raise ConfigError(MICRO, rule)
            answer: dict[str, Any] = json.loads(line)
            if "refused" in answer:
                raise _config_error(answer["refused"])
            return answer

        try:
            send({"spec": spec.to_text(), "budget": budget})
            yield trial
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            with suppress(OSError):  # Closing flushes unread requests, which fails.
                process.stdin.close()


def _last_line(file: Any) -> str:
    """Return the last non-blank line of an open text file, or "" if there is none."""
    file.seek(0)
    last = ""
    for line in file:
        if line.strip():
            last = line.strip()
    return last


def _config_error(attributes: dict[str, Any]) -> ConfigError:
    """Rebuild a ConfigError from the attributes that the trial process has sent."""
    error = ConfigError(attributes["key"], attributes["rule"])
    vars(error).update(attributes)
    return error
