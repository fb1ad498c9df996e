"""The process that tries micro-batch sizes: it imports TensorFlow once, and each trial is a fork of it, which may die.

It reads a line of JSON with the spec and the budget, then a line for each trial, which it answers with a line.
"""

import json
import multiprocessing
import os
import re
import signal
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil

from pipeline.common import imports, memory_budget
from pipeline.common.errors import ConfigError, cause, described
from pipeline.config import resolve
from pipeline.config.resolve import RunSpec

with imports.without_chatter():
    import keras
    import tensorflow as tf

    from pipeline.accumulation.internals import layers_of
    from pipeline.components import assembly, devices, fitting  # noqa: F401  what a run has loaded
    from pipeline.dataset import longest_batch
    from pipeline.training.evaluator import Evaluator

POLL = 0.01  # seconds between two measurements of the memory of a trial
STILL = 300.0  # seconds without CPU time after which a trial counts as stuck
# What kernels on a GPU say if they get no memory for a convolution, and of tensors of more than 2^31 elements.
UNSAID = re.compile(r"No algorithm worked|int32|32-bit|2\^31|too large|overflow")
LEAST, SECONDS = (
    3,
    1.0,
)  # the least number of updates that are timed, and for how long at least


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the user's code prints is not an answer
    sys.path.append(os.getcwd())  # the user's own modules, as for the run
    opening = json.loads(sys.stdin.readline())
    spec = resolve.from_text(opening["spec"])
    for asked in map(json.loads, sys.stdin):
        of_size = replace(spec, batching=spec.batching.of(asked["micro_batch_size"]))
        print(
            json.dumps(_run_fork(of_size, asked["timed"], **opening["budget"])),
            file=answers,
            flush=True,
        )


def _run_fork(
    spec: RunSpec, timed: bool, resident: float, address_space: float | None
) -> dict[str, Any]:
    """Try a cut in a fork of this process; return what it measures, with `why` if it does not fit into these bytes."""
    began, parent = time.monotonic(), os.getppid()
    answers, theirs = multiprocessing.Pipe(duplex=False)
    process: Any = multiprocessing.get_context("fork").Process(
        target=_try, args=(spec, timed, theirs)
    )
    process.start()
    theirs.close()
    # A new process would have loaded all libraries; in a fork they count only once it has used them.
    unused = max(
        0,
        psutil.Process().memory_info().rss
        - psutil.Process(process.pid).memory_info().rss,
    )
    found: dict[str, Any] = {}
    done, at = 0.0, began
    while not found.keys() & {"peak", "why", "refused"}:
        try:
            if answers.poll(POLL):
                found |= json.loads(answers.recv_bytes())
            elif (
                found.get("on_gpu") is False
                and psutil.Process(process.pid).memory_info().rss + unused > resident
            ):
                process.kill()
                found["why"] = "the memory"
            elif (now := sum(psutil.Process(process.pid).cpu_times()[:2])) > done + 0.1:
                done, at = now, time.monotonic()
            elif time.monotonic() > at + STILL:
                process.kill()
                found["why"] = f"it stood still for {STILL:.0f} s"
        except psutil.Error:
            pass  # it has just ended: its answer is still to be read
        except EOFError:  # it has died
            process.join()
            status = process.exitcode
            found["why"] = (
                f"killed by {signal.Signals(-status).name}"
                if status < 0
                else f"exit status {status}"
            )
        if os.getppid() != parent:  # the process that asks is dead
            process.kill()
            sys.exit(1)
    process.join()
    if "peak" in found and not found["on_gpu"]:
        found["peak"] += unused
        if found["peak"] > resident or (
            address_space is not None and found["address_space"] > address_space
        ):
            found["why"] = "the memory"
    return {**found, "took": time.monotonic() - began}


def _try(spec: RunSpec, timed: bool, answers: Connection) -> None:
    try:
        answers.send_bytes(
            json.dumps({"on_gpu": devices.uses_gpu(spec.config.hardware)}).encode()
        )
        found = _measured(spec, timed)
    except BaseException as error:
        found = _failure(error)
    answers.send_bytes(json.dumps(found).encode())
    os._exit(0)  # without waiting for its threads


def _measured(spec: RunSpec, timed: bool) -> dict[str, Any]:
    """Do all that takes memory in a run, with the longest examples; return the peak, and the seconds of an update.

    An update that is not timed is shortened: two micro-batches on each replica take as much memory as more do, except
    for the sparse gradients of an embedding, which grow with the rows that are looked up.
    """
    parts, cut = assembly.assemble(spec), spec.batching
    update, count = parts.update(), cut.effective_batch_size
    sparse = any(
        isinstance(layer, keras.layers.Embedding) for layer in layers_of(parts.model)
    )
    some = (
        count
        if timed or sparse or update.objective.over_batch
        else 2 * cut.micro_batch_size * cut.replicas
    )
    batches = iter(longest_batch.of_update(parts.spec, parts.data, count))
    step = tf.function(update, autograph=False, reduce_retracing=True)
    copies: list[Any] = []
    seconds: list[float] = []
    while len(seconds) < (LEAST if timed else 1) or (timed and sum(seconds) < SECONDS):
        full = next(
            batches
        )  # while the one before is still held, as a run holds it for a retry
        began = time.monotonic()
        batch = tf.nest.map_structure(
            lambda leaf: None if leaf is None else leaf[:some], full
        )
        step(batch)["loss"].numpy()
        if copies:  # the first update was traced
            seconds.append(time.monotonic() - began)
            continue
        for name in parts.data.splits.keys() - {"train"}:
            evaluated = longest_batch.of_evaluation(
                parts.spec, parts.data.splits[name], count
            )
            Evaluator(parts.evaluation(), evaluated, name, _does_not_fit)()
        variables = (*parts.model.variables, *update.optimizer.variables)
        copies += [
            np.array(variable) for variable in variables * 2
        ]  # a checkpoint, which is read back once written
    peak = devices.peak_memory(parts.devices)
    if (
        parts.devices.on_gpu
    ):  # its budget only TensorFlow knows: try again with the margin allocated
        margins = []
        for gpu in tf.config.list_logical_devices("GPU"):
            with tf.device(gpu.name):
                margins.append(
                    tf.zeros([int(peak * (1 / memory_budget.MARGIN - 1))], tf.uint8)
                )
        step(batch)["loss"].numpy()
    return {
        "peak": peak,
        "address_space": devices.status_bytes("VmPeak") or 0,
        "update": min(seconds),
    }


def _does_not_fit(name: str, size: int) -> None:
    raise MemoryError(f"the {name} split")


def _failure(error: BaseException) -> dict[str, Any]:
    """Return why a cut does not fit, `failed` where that is likely alone; or what is wrong with the config for any."""
    links = [error]
    while (link := links[-1].__cause__ or links[-1].__context__) is not None:
        links.append(link)
    for link in links:
        if isinstance(link, MemoryError | tf.errors.ResourceExhaustedError):
            return {"why": cause(link)}
    for link in links:
        unsaid = isinstance(link, tf.errors.InternalError | tf.errors.UnknownError)
        if unsaid or (isinstance(link, tf.errors.OpError) and UNSAID.search(str(link))):
            return {"why": f"{type(link).__name__}: {cause(link)}", "failed": True}
    if not isinstance(error, ConfigError):
        rule = (
            f"must be a number, as the update that is tried fails ({described(error)})"
        )
        error = ConfigError("accumulation.micro_batch_size", rule)
    return {"refused": vars(error)}


if __name__ == "__main__":
    main()
