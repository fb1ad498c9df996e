"""Measurements that one process makes, and the others on this machine reuse.

The result is in a cache on disk; see `pipeline.common.disk_cache`. This module does not
import TensorFlow.
"""

import hashlib
import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pipeline.common import nvidia
from pipeline.common.errors import say
from pipeline.config import key_kinds
from pipeline.config.plain import leaves
from pipeline.config.resolve import RunSpec
from pipeline.config.schema import Kind
from pipeline.tracking import provenance

SILENCE = 5.0  # seconds of waiting for another process before a message is printed


def locked(file: Path, key: str) -> AbstractContextManager[Any]:
    """Acquire the lock that lets only one process measure at a time; return it.

    If the lock file cannot be written, return a context that does nothing.

    Args:
        file: the file of the cache entry.
        key: the config key whose value is measured, for the message.
    """
    lock = FileLock(f"{file}.lock")
    with suppress(OSError, NotImplementedError):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            return lock.acquire(timeout=SILENCE)
        except Timeout:
            say(f"{key}: waiting for another process that is measuring the same value")
            # Set no time limit: `Timeout` is an `OSError`, which is suppressed here.
            return lock.acquire()
    return nullcontext()


def identity(spec: RunSpec) -> dict[str, Any]:
    """Return everything in a config and a machine that can affect a measurement.

    The micro-batch size and the memory are left out.
    """
    config = spec.resolved
    # Replace each number by whether it is 0: for example, the memory depends on whether
    # there is momentum, but not on its value.
    optimizer = dict(config["optimizer"])
    for key, value in optimizer.items():
        if isinstance(value, int | float):
            optimizer[key] = bool(value)
    hardware: dict[str, Any] = {}
    # Leave out paths, ports and settings of logging, which do not affect a trial.
    for key, value in config["hardware"].items():
        facts = key_kinds.facts_of(f"hardware.{key}")
        if facts.kind not in (Kind.PLACE, Kind.LOG) and not facts.of_one_call:
            hardware[key] = value
    environment = provenance.environment(Path())
    hardware["gpus"] = []
    if config["hardware"]["device"] != "cpu":
        hardware["gpus"] = _gpus(environment["gpus"])

    # Keep the keys that define the objective: those that a resumed run may not change.
    training = {}
    for key, value in config["training"].items():
        if key_kinds.facts_of(f"training.{key}").fixed:
            training[key] = value
    machine = ("python", "processor", "processors", "driver", "package", "packages")
    targets = []
    for key, value in leaves(config).items():
        if key.endswith("_target_"):
            targets.append(value)
    return {
        "effective_batch_size": spec.batching.effective_batch_size,
        "dataset": config["dataset"],
        "model": config["model"],
        "hardware": hardware,
        "optimizer": optimizer,
        "training": training,
        "same_noise": config["accumulation"]["same_noise"],
        "moving_statistics": config["accumulation"]["moving_statistics"],
        "noise_scale_every": config["accumulation"]["noise_scale_every"],
        "machine": {key: environment[key] for key in machine},
        "code": _code_hash(targets),
    }


def _gpus(names: Sequence[str]) -> Sequence[str]:
    """Return the names of the GPUs that this process may use.

    In `CUDA_VISIBLE_DEVICES`, CUDA ignores all entries after an invalid index, and so
    does this function. A GPU listed by its UUID is returned by its UUID.

    Args:
        names: names of all GPUs of the machine.
    """
    if not names:
        return names
    chosen = []
    for gpu in nvidia.visible():
        if not gpu.isdecimal():
            chosen.append(gpu)  # the UUID of a GPU
        elif int(gpu) < len(names):
            chosen.append(names[int(gpu)])
        else:
            break
    return chosen


def _code_hash(targets: Sequence[str]) -> str:
    """Return a SHA-256 of the user's own code in the packages of `targets`.

    The hash covers all Python files of a target's package, or all those in the folder
    of a module that is not in a package.
    """
    tops = {target.partition(".")[0] for target in targets}
    digest = hashlib.sha256()
    for name in sorted(tops - {"pipeline", "keras", "tensorflow"}):
        spec = importlib.util.find_spec(name)
        # Skip installed packages: their versions are in the cache key already.
        if spec is None or "site-packages" in str(spec.origin):
            continue
        files: list[Path] = []
        for folder in spec.submodule_search_locations or ():
            files += Path(folder).rglob("*.py")
        if not files and spec.has_location and spec.origin:
            files += Path(spec.origin).parent.glob("*.py")
        for path in sorted(files):
            digest.update(path.read_bytes())
    return digest.hexdigest()
