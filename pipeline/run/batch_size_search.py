"""`accumulation.micro_batch_size=auto`: search for the largest micro-batch that fits into memory, or for the fastest.

    share of a replica ─► powers of two ─► sizes between ─► [powers below, timed] ─► cached

Imports no TensorFlow: each trial is a process of its own, whose death means that the size does not fit.
"""

import bisect
import hashlib
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pipeline.common import disk_cache, imports, memory_budget, nvidia
from pipeline.common.errors import ConfigError, say
from pipeline.common.memory_budget import MARGIN
from pipeline.common.secrets import mask
from pipeline.config import key_kinds
from pipeline.config.plain import leaves
from pipeline.config.resolve import RunSpec
from pipeline.config.schema import Kind
from pipeline.config.sizes import MICRO
from pipeline.tracking import provenance

ALIKE = 0.98  # of the best speed counts as equal: the smaller micro-batch is taken
SLOWER = 0.9  # of the best speed, twice in a row: smaller ones are not timed
SILENCE = 5.0  # seconds of waiting for another process until a line says so
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
_ENTRY = {"micro_batch_size": int, "how": str, "tries": [list]}  # of the cache
TAG = "micro_batch_size.found"


def search(spec: RunSpec) -> tuple[RunSpec, dict[str, Any]]:
    """Search for the micro-batch size of a run, or recall it; of processes that search for the same, one does.

    Where the effective batch changes, it is searched for the largest one. Return the spec with the size, and how it was
    found: `how` in words, and `tries` with a row of `COLUMNS` for each trial.
    """
    run, spec = spec, spec.at_largest()
    memory = spec.config.hardware.memory
    resident = (
        memory_budget.limit() // spec.workers_on_machine
        if memory is None
        else memory_budget.parsed(memory)
    )
    budget = {"resident": resident, "address_space": memory_budget.address_space()}
    file = disk_cache.place(
        "micro_batch_size", json.dumps(_identity(spec, budget), sort_keys=True)
    )
    with _locked(file):
        entry = disk_cache.recall(file, _ENTRY)
        rows = all(len(row) == len(COLUMNS) for row in entry.get("tries", ()))
        if rows and 1 <= entry.get("micro_batch_size", 0) <= spec.batching.share:
            say(
                f"{MICRO} {entry['micro_batch_size']}: {entry['how']}, as was found before ({file})"
            )
        else:
            disk_cache.remember(file, entry := _found(spec, budget))
    return run.with_micro_batch(entry["micro_batch_size"]), entry


def _locked(file: Path) -> AbstractContextManager[Any]:
    """Return a lock that was taken, so that no two processes search for the same at once, if one can be written."""
    lock = FileLock(f"{file}.lock")
    with suppress(OSError, NotImplementedError):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            return lock.acquire(timeout=SILENCE)
        except Timeout:
            say(f"{MICRO}: another process looks for the same: waiting for it")
            return lock.acquire()
    return nullcontext()


def _found(spec: RunSpec, budget: dict[str, Any]) -> dict[str, Any]:
    cut, asked, memory = (
        spec.batching,
        spec.config.accumulation.micro_batch_size,
        spec.config.hardware.memory,
    )
    limit = min(filter(None, budget.values()))
    say(
        f"{MICRO}={asked}: trying what fits into {MARGIN:.0%} of {memory_budget.readable(limit)}, or into the GPU"
    )
    tries: list[list[Any]] = []
    answers: list[dict[str, Any]] = []
    with _trials(
        spec, {name: value and MARGIN * value for name, value in budget.items()}
    ) as trial:

        def attempt(size: int, timed: bool) -> dict[str, Any]:
            answers.append(answer := trial(size, timed))
            fits, seconds = "why" not in answer, answer.get("update") if timed else None
            why = mask(answer.get("why", ""))
            factor, rate = (
                cut.of(size).factor,
                cut.effective_batch_size / seconds if seconds else None,
            )
            tries.append([size, factor, fits, answer.get("peak"), seconds, rate, why])
            what = (
                f"fits: {memory_budget.readable(answer['peak'])}"
                if fits
                else f"does not fit: {why}"
            )
            speed = f", {rate:.4g} examples/s" if rate else ""
            say(f"  micro-batch of {size} {what}{speed} ({answer['took']:.1f} s)")
            return {**answer, "rate": rate}

        size = largest(cut.share, lambda size: "why" not in attempt(size, False))
        if size is None and answers[-1].get(
            "failed"
        ):  # the smallest, so that it is no matter of memory
            raise ConfigError(
                MICRO,
                f"must be a number, as the update that is tried fails ({tries[-1][-1]})",
            )
        if size is None:
            key, rule = (
                ("hardware.memory", "must be enough for")
                if memory
                else (MICRO, "must find room for")
            )
            rule = f"{rule} a micro-batch of one example, which does not fit ({tries[-1][-1]})"
            raise ConfigError(key, rule, memory or asked)
        how = f"the largest of at most {cut.share} that fits"
        if asked == "auto_fastest":
            size, how = (
                fastest(size, cut.share, lambda size: attempt(size, True)),
                "the fastest that fits",
            )
    return {"micro_batch_size": size, "how": how, "tries": tries}


def balanced(share: int, size: int) -> int:
    """Return the smallest micro-batch that cuts `share` examples into as many pieces as `size` does."""
    return -(-share // -(-share // size))


def largest(share: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest micro-batch of up to `share` examples that fits; None if not even one example does."""
    if fits(share):
        return share
    powers = sorted(
        {balanced(share, 2**power) for power in range((share - 1).bit_length())}
    )
    found = _last([size for size in powers if size < share], fits)
    if found is None:
        return None
    above = min([size for size in powers if size > found], default=share)
    between = {balanced(share, size) for size in range(found + 1, above)} - {
        found,
        above,
    }
    return _last(sorted(between), fits) or found


def _last(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the last of the ascending `sizes` that fits, by bisection."""
    fitting = bisect.bisect(sizes, False, key=lambda size: not fits(size))
    return sizes[fitting - 1] if fitting else None


def fastest(most: int, share: int, attempt: Callable[[int], dict[str, Any]]) -> int:
    """Return the fastest of `most`, which fit, and the powers of two below; the smallest of those about as fast."""
    sizes = sorted(
        {balanced(share, 2**power) for power in range(most.bit_length())} | {most},
        reverse=True,
    )
    rates: dict[int, float] = {}
    for size in (size for size in sizes if size <= most):
        if (
            rate := attempt(size)["rate"]
        ) is not None:  # timed updates may need more memory
            rates[size] = rate
        if len(rates) > 2 and all(
            rate < SLOWER * max(rates.values()) for rate in [*rates.values()][-2:]
        ):
            break
    return min(
        (size for size in rates if rates[size] >= ALIKE * max(rates.values())),
        default=most,
    )


def _identity(spec: RunSpec, budget: dict[str, Any]) -> dict[str, Any]:
    given = spec.resolved
    # Only whether they are 0 matters: without momentum there is no velocity in memory.
    numbers = {
        key: bool(value)
        for key, value in given["optimizer"].items()
        if isinstance(value, int | float)
    }
    # A trial depends on the memory and the GPUs of the machine too, but not on what the
    # run opens.
    hardware = {}
    for name, value in given["hardware"].items():
        facts = key_kinds.facts_of(f"hardware.{name}")
        if facts.kind not in (Kind.PLACE, Kind.LOG) and not facts.of_one_call:
            hardware[name] = value
    # The objective is what a resumed run may not change of the training.
    training = [
        name
        for name in given["training"]
        if key_kinds.facts_of(f"training.{name}").fixed
    ]
    surroundings = provenance.environment(Path())
    machine = ("python", "processor", "processors", "driver", "package", "packages")
    return {
        "asked": given["accumulation"]["micro_batch_size"],
        "effective_batch_size": spec.batching.effective_batch_size,
        "budget": budget,
        **{key: given[key] for key in ("dataset", "model")},
        "hardware": {
            **hardware,
            "gpus": []
            if given["hardware"]["device"] == "cpu"
            else _gpus(surroundings["gpus"]),
        },
        "optimizer": {**given["optimizer"], **numbers},
        "training": {key: given["training"][key] for key in training},
        "noise_scale_every": given["accumulation"]["noise_scale_every"],
        "machine": {key: surroundings[key] for key in machine},
        "code": _own_code(
            [value for key, value in leaves(given).items() if key.endswith("_target_")]
        ),
    }


def _gpus(names: Sequence[str]) -> Sequence[str]:
    """Return the names of the GPUs that this process may use, from the `names` of all GPUs of the machine."""
    if not names:
        return names
    known = itertools.takewhile(
        lambda gpu: not gpu.isdecimal() or int(gpu) < len(names), nvidia.visible()
    )
    return [names[int(gpu)] if gpu.isdecimal() else gpu for gpu in known]


def _own_code(targets: Sequence[str]) -> str:
    """Return a SHA-256 of the user's modules that define the `targets`, and of the other files of their folders."""
    found = hashlib.sha256()
    for name in sorted(
        {target.partition(".")[0] for target in targets}
        - {"pipeline", "keras", "tensorflow"}
    ):
        spec = importlib.util.find_spec(name)
        if spec is None or "site-packages" in str(spec.origin):  # whose version counts
            continue
        files = [
            path
            for folder in spec.submodule_search_locations or ()
            for path in Path(folder).rglob("*.py")
        ]
        if not files and spec.has_location and spec.origin:
            files = [*Path(spec.origin).parent.glob("*.py")]
        for path in sorted(files):
            found.update(path.read_bytes())
    return found.hexdigest()


@contextmanager
def _trials(
    spec: RunSpec, budget: dict[str, Any]
) -> Iterator[Callable[[int, bool], dict[str, Any]]]:
    """Yield what tries a micro-batch size; the second argument is whether its updates are timed."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as said,
        imports.started(
            "pipeline.run.batch_size_trial", stdout=subprocess.PIPE, stderr=said
        ) as process,
    ):

        def tell(what: dict[str, Any]) -> None:
            with suppress(BrokenPipeError):
                print(json.dumps(what), file=process.stdin, flush=True)

        def trial(size: int, timed: bool) -> dict[str, Any]:
            tell({"micro_batch_size": size, "timed": timed})
            if not (line := process.stdout.readline()):
                said.seek(0)
                last = next(
                    (text for text in reversed([*map(str.strip, said)]) if text), ""
                )
                raise ConfigError(
                    MICRO,
                    f"must be a number, as the process that tries sizes ended ({mask(last)})",
                )
            answer: dict[str, Any] = json.loads(line)
            if refused := answer.get("refused"):
                error = ConfigError(refused["key"], refused["rule"])
                vars(error).update(refused)
                raise error
            return answer

        try:
            tell({"spec": spec.to_text(), "budget": budget})
            yield trial
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            with suppress(OSError):  # what it has not read
                process.stdin.close()
