"""The process that tries micro-batch sizes: it imports TensorFlow once, and each try is a fork of it, which may die.

It reads a line of JSON with the config and the budget, then one for each try, which it answers with a line.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from omegaconf import DictConfig, OmegaConf

from pipeline.common import imports
from pipeline.common.errors import ConfigError, cause, described
from pipeline.common.memory_budget import MARGIN
from pipeline.config import validate as configuration
from pipeline.config.schema import Config
from pipeline.config.sizes import Batching

with imports.without_chatter():
    import keras
    import tensorflow as tf

    from pipeline.accumulation import layers_of
    from pipeline.components import assembly, devices
    from pipeline.dataset import longest_batch
    from pipeline.tracking import tracker  # noqa: F401
    from pipeline.training import loop, recorder  # noqa: F401  what a run has loaded
    from pipeline.training.evaluator import evaluator

POLL = 0.01  # seconds between two looks at the memory of a try
STILL = 300.0  # seconds in which a try that lives does something
LEAST, SECONDS = 3, 1.0  # updates that are timed, and for how long, at least


def main() -> None:
    """Answer until nothing more is asked."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the user's code prints is no answer
    sys.path.append(os.getcwd())  # the user's own modules, as for the run
    configuration.register()
    opening = json.loads(sys.stdin.readline())
    config: Any = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(opening["config"]))
    for line in sys.stdin:
        asked = json.loads(line)
        found = _tried(config, Batching(**asked["cut"]), asked["timed"], **opening["budget"])
        print(json.dumps(found), file=answers, flush=True)


def _tried(
    config: DictConfig, cut: Batching, timed: bool, resident: float, address_space: float | None
) -> dict[str, Any]:
    """Try a cut in a fork of this process; return what it has found, with `why` where it does not fit.

    Args:
        config: of the run.
        cut: that is tried.
        timed: whether whole updates are timed too.
        resident: bytes that may be resident, and
        address_space: bytes of address space that may be had, if there is a limit: where it computes on a CPU.
    """
    began, parent = time.monotonic(), os.getppid()
    answers, theirs = multiprocessing.Pipe(duplex=False)
    process: Any = multiprocessing.get_context("fork").Process(target=_try, args=(config, cut, timed, theirs))
    process.start()
    theirs.close()
    # The libraries that a new process would have loaded count for a fork only once it has used them.
    unused = max(0, psutil.Process().memory_info().rss - psutil.Process(process.pid).memory_info().rss)
    found: dict[str, Any] = {}
    done, at = 0.0, began
    while not found.keys() & {"peak", "why", "refused"}:
        try:
            if answers.poll(POLL):
                found |= json.loads(answers.recv_bytes())
            elif found.get("on_gpu") is False and psutil.Process(process.pid).memory_info().rss + unused > resident:
                process.kill()
                found["why"] = "the memory"
            elif (now := sum(psutil.Process(process.pid).cpu_times()[:2])) > done + 0.1:
                done, at = now, time.monotonic()
            elif time.monotonic() > at + STILL:
                process.kill()
                found["why"] = f"it stood still for {STILL:.0f} s"
        except psutil.Error:
            pass  # it has just ended: what it has said is still to be read
        except EOFError:  # it is dead
            process.join()
            status = process.exitcode
            found["why"] = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        if os.getppid() != parent:  # who asked is dead
            process.kill()
            sys.exit(1)
    process.join()
    if "peak" in found and not found["on_gpu"]:
        found["peak"] += unused
        if found["peak"] > resident or (address_space is not None and found["address_space"] > address_space):
            found["why"] = "the memory"
    return {**found, "took": time.monotonic() - began}


def _try(config: DictConfig, cut: Batching, timed: bool, answers: Connection) -> None:
    """Be the process that tries a cut."""
    try:
        answers.send_bytes(json.dumps({"on_gpu": devices.uses_gpu(config.hardware)}).encode())
        found = _measured(config, cut, timed)
    except BaseException as error:
        found = _told(error)
    answers.send_bytes(json.dumps(found).encode())
    os._exit(0)  # nothing that this process has begun is waited for


def _measured(config: DictConfig, cut: Batching, timed: bool) -> dict[str, Any]:
    """Do what a run does that takes memory, with the longest examples; return its peak, and the seconds of an update.

    What is not timed is not done to its end: two micro-batches on each replica take as much memory as more do, but for
    the sparse gradients of an embedding, which grow with the rows that are looked up.
    """
    parts = assembly.assemble(config, cut)
    update, count = parts.update(), cut.effective_batch_size
    sparse = any(isinstance(layer, keras.layers.Embedding) for layer in layers_of(parts.model))
    some = count if timed or sparse else 2 * cut.micro_batch_size * cut.replicas
    batches = iter(longest_batch.of_update(config, parts.data, count))
    step = tf.function(update, autograph=False, reduce_retracing=True)
    copies: list[Any] = []
    seconds: list[float] = []
    while len(seconds) < (LEAST if timed else 1) or (timed and sum(seconds) < SECONDS):
        whole = next(batches)  # the one before is held meanwhile, for another try
        began = time.monotonic()
        batch = tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[:some], whole)
        step(batch)["loss"].numpy()
        if copies:  # the first update was traced
            seconds.append(time.monotonic() - began)
            continue
        for name in parts.data.splits.keys() - {"train"}:
            evaluated = longest_batch.of_evaluation(config, parts.data.splits[name], count)
            evaluator(parts.evaluation(), evaluated, name, _does_not_fit)()
        variables = (*parts.model.variables, *update.optimizer.variables)
        copies += [np.array(variable) for variable in variables * 2]  # a checkpoint, which is read back once written
    peak = devices.peak_memory(parts.machine)
    if parts.machine.on_gpu:  # whose budget only TensorFlow knows: once more, with the margin taken
        margins = []
        for gpu in tf.config.list_logical_devices("GPU"):
            with tf.device(gpu.name):
                margins.append(tf.zeros([int(peak * (1 / MARGIN - 1))], tf.uint8))
        step(batch)["loss"].numpy()
    return {"peak": peak, "address_space": _address_space(), "update": min(seconds)}


def _does_not_fit(name: str, size: int) -> None:
    raise MemoryError(f"the {name} split")


def _told(error: BaseException) -> dict[str, Any]:
    """Return why a cut does not fit; or what is wrong with the config, whatever the cut."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, MemoryError | tf.errors.ResourceExhaustedError):
            return {"why": cause(behind)}
        behind = behind.__cause__ or behind.__context__
    if not isinstance(error, ConfigError):
        rule = f"must be a number, as the update that is tried fails ({described(error)})"
        error = ConfigError("accumulation.micro_batch_size", rule)
    return {"refused": vars(error)}


def _address_space() -> int:
    found = re.search(r"^VmPeak:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 0 if found is None else int(found[1]) * 1024


if __name__ == "__main__":
    main()
