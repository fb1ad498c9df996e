"""The process that tries micro-batch sizes.

The process imports TensorFlow once and forks itself for each trial, so that it
continues if a trial dies.

Its input is lines of JSON. The first line has the `spec` and the `budget`: `resident`
and `address_space` in bytes. Each further line is a request. It has a
`micro_batch_size`, and the Boolean `timed`: whether to time updates. The answer to a
request is a line of JSON with some of these keys:

    took            the duration of the trial, in seconds
    on_gpu          whether the trial computed on a GPU
    peak            the peak memory, in bytes
    address_space   the peak size of the address space, in bytes
    update          the shortest time of an update, in seconds
    why             the reason why the size does not fit
    failed          true if the error may have another cause than a lack of memory
    refused         the attributes of a ConfigError, if the size is not the cause
"""

import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil

from pipeline.common import imports, memory_budget
from pipeline.common.errors import ConfigError, described, first_line
from pipeline.config import resolve
from pipeline.config.resolve import RunSpec

with imports.without_chatter():
    import keras
    import tensorflow as tf

    from pipeline.accumulation.internals import layers_of
    from pipeline.components import assembly, devices, fitting  # noqa: F401  loaded as in a run
    from pipeline.dataset import longest_batch
    from pipeline.training.evaluator import SplitEvaluator

POLL_SECONDS = 0.01  # interval between measurements of a trial's memory
STUCK_SECONDS = 300.0  # time without CPU use after which a trial counts as stuck
# Messages of GPU kernels that fail for lack of memory in a convolution, or because a
# tensor has more than 2^31 elements.
UNCLEAR_ERRORS = re.compile(
    r"No algorithm worked|int32|32-bit|2\^31|too large|overflow"
)
LEAST_UPDATES = 3  # minimum number of updates to time
LEAST_SECONDS = 1.0  # minimum total time of these updates


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Send the output of the user's code to stderr, apart from answers.
    sys.path.append(os.getcwd())  # the user's own modules, as for the run
    opening = json.loads(sys.stdin.readline())
    spec = resolve.from_text(opening["spec"])
    for line in sys.stdin:
        request = json.loads(line)
        cut = spec.batching.with_micro_batch_size(request["micro_batch_size"])
        budget = opening["budget"]
        answer = _run_fork(replace(spec, batching=cut), request["timed"], **budget)
        print(json.dumps(answer), file=answers, flush=True)


def _run_fork(
    spec: RunSpec, timed: bool, resident: float, address_space: float | None
) -> dict[str, Any]:
    """Try the batching of `spec` in a fork of this process; return the answer.

    Args:
        spec: the spec of the run, with the micro-batch size to try.
        timed: whether to time updates.
        resident: maximum resident memory in bytes.
        address_space: maximum size of the address space in bytes, or None if there is
            no limit.
    """
    began = time.monotonic()
    parent_id = os.getppid()
    answers, sender = multiprocessing.Pipe(duplex=False)
    process: Any = multiprocessing.get_context("fork").Process(
        target=_try, args=(spec, timed, sender)
    )
    process.start()
    sender.close()
    # Add the memory of loaded libraries that the fork has not touched yet. It is part
    # of the resident memory of a real run.
    unused = max(0, _resident_bytes() - _resident_bytes(process.pid))

    answer: dict[str, Any] = {}
    stuck = _StuckClock()
    while not answer.keys() & {"peak", "why", "refused"}:
        try:
            if answers.poll(POLL_SECONDS):
                answer |= json.loads(answers.recv_bytes())
            else:
                # Watch the memory only of trials on CPUs: this process cannot see GPU
                # memory.
                watches_memory = answer.get("on_gpu") is False
                memory = _resident_bytes(process.pid) + unused
                if watches_memory and memory > resident:
                    process.kill()
                    answer["why"] = "it needs too much memory"
                elif stuck.seconds(process.pid) > STUCK_SECONDS:
                    process.kill()
                    answer["why"] = f"it made no progress for {STUCK_SECONDS:.0f} s"
        except psutil.Error:
            pass  # The trial has just ended. Read its answer in the next iteration.
        except EOFError:
            process.join()
            answer["why"] = _why_it_died(process.exitcode)
        if os.getppid() != parent_id:  # The process that sends requests has died.
            process.kill()
            sys.exit(1)
    process.join()

    if "peak" in answer and not answer["on_gpu"]:
        answer["peak"] += unused
        too_large = answer["peak"] > resident
        if address_space is not None and answer["address_space"] > address_space:
            too_large = True
        if too_large:
            answer["why"] = "it needs too much memory"
    return {**answer, "took": time.monotonic() - began}


class _StuckClock:
    """Measures for how long a process has used no CPU time."""

    def __init__(self) -> None:
        self._cpu_seconds = 0.0
        self._last_progress = time.monotonic()

    def seconds(self, process_id: int) -> float:
        """Return the seconds without progress. 0.1 s of CPU time counts as progress."""
        times = psutil.Process(process_id).cpu_times()
        cpu_seconds = times.user + times.system
        if cpu_seconds > self._cpu_seconds + 0.1:
            self._cpu_seconds = cpu_seconds
            self._last_progress = time.monotonic()
        return time.monotonic() - self._last_progress


def _resident_bytes(process_id: int | None = None) -> int:
    """Return the resident memory of a process, by default of this one."""
    resident: int = psutil.Process(process_id).memory_info().rss
    return resident


def _why_it_died(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"


def _try(spec: RunSpec, timed: bool, answers: Connection) -> None:
    try:
        on_gpu = devices.uses_gpu(spec.config.hardware)
        answers.send_bytes(json.dumps({"on_gpu": on_gpu}).encode())
        answer = _measured(spec, timed)
    except BaseException as error:
        answer = _failure(error)
    answers.send_bytes(json.dumps(answer).encode())
    os._exit(0)  # Do not wait for threads.


def _measured(spec: RunSpec, timed: bool) -> dict[str, Any]:
    """Measure the steps of a run that need the most memory; return the answer.

    These are an update and evaluations with the longest examples, and copies of the
    variables as for a checkpoint.
    """
    parts = assembly.assemble(spec)
    update = parts.update()
    effective_batch_size = spec.batching.effective_batch_size
    examples = effective_batch_size
    if not timed and not _memory_grows_with_factor(parts, update):
        # Measure two micro-batches per replica: more would need the same memory.
        examples = 2 * spec.batching.micro_batch_size * spec.batching.replicas
    step = tf.function(update, autograph=False, reduce_retracing=True)

    batches = iter(
        longest_batch.for_update(parts.spec, parts.data, effective_batch_size)
    )
    full = next(batches)
    batch = _first_examples(full, examples)
    step(batch)["loss"].numpy()  # Trace the update, untimed.
    _evaluate_splits(parts, effective_batch_size)
    # Allocate two copies of the variables, as a checkpoint does: it is written, then
    # read back.
    variables = [*parts.model.variables, *update.optimizer.variables]
    copies = [np.array(variable) for variable in [*variables, *variables]]

    seconds: list[float] = []
    while not _timed_enough(seconds, timed):
        # Keep the previous batch alive meanwhile, as a run keeps it for a retry.
        full = next(batches)
        began = time.monotonic()
        batch = _first_examples(full, examples)
        step(batch)["loss"].numpy()
        seconds.append(time.monotonic() - began)
    del copies  # Keep the copies alive until here.

    peak = devices.peak_memory(parts.devices)
    if parts.devices.on_gpu:
        _update_with_margin_allocated(step, batch, peak)
    return {
        "peak": peak,
        "address_space": devices.status_bytes("VmPeak") or 0,
        "update": min(seconds),
    }


def _memory_grows_with_factor(parts: Any, update: Any) -> bool:
    """Return whether an update with more micro-batches needs more memory.

    This holds for an embedding, whose sparse gradient grows with the number of rows
    that are looked up, and for a loss over the effective batch, for which the outputs
    of all examples are kept.
    """
    if update.objective.over_batch:
        return True
    layers = layers_of(parts.model)
    return any(isinstance(layer, keras.layers.Embedding) for layer in layers)


def _first_examples(batch: Any, count: int) -> Any:
    def first(leaf: Any) -> Any:
        return None if leaf is None else leaf[:count]

    return tf.nest.map_structure(first, batch)


def _timed_enough(seconds: list[float], timed: bool) -> bool:
    if not timed:
        return len(seconds) >= 1
    return len(seconds) >= LEAST_UPDATES and sum(seconds) >= LEAST_SECONDS


def _evaluate_splits(parts: Any, effective_batch_size: int) -> None:
    for name, split in parts.data.splits.items():
        if name != "train":
            batches = longest_batch.for_evaluation(
                parts.spec, split, effective_batch_size
            )
            SplitEvaluator(parts.evaluation(), batches, name, _does_not_fit)()


def _does_not_fit(name: str, size: int) -> None:
    raise MemoryError(f"the evaluation of the {name} split")


def _update_with_margin_allocated(step: Any, batch: Any, peak: int) -> None:
    """Run an update while a margin of free memory is allocated on each GPU.

    The update fails if the margin is not available. This replaces a comparison with the
    memory limit of the GPU, which TensorFlow does not report.
    """
    margin = int(peak * (1 / memory_budget.MARGIN - 1))
    tensors = []
    for gpu in tf.config.list_logical_devices("GPU"):
        with tf.device(gpu.name):
            tensors.append(tf.zeros([margin], tf.uint8))
    step(batch)["loss"].numpy()


def _failure(error: BaseException) -> dict[str, Any]:
    """Return the answer for a trial that raised an error."""
    chain = list(_causes(error))
    for link in chain:
        if isinstance(link, MemoryError | tf.errors.ResourceExhaustedError):
            return {"why": first_line(link)}
    for link in chain:
        if _suggests_memory(link):
            why = f"{type(link).__name__}: {first_line(link)}"
            return {"why": why, "failed": True}
    if not isinstance(error, ConfigError):
        reason = described(error)
        rule = f"must be a number, since the update that was tried fails ({reason})"
        error = ConfigError("accumulation.micro_batch_size", rule)
    return {"refused": vars(error)}


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then its chain of causes or contexts."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def _suggests_memory(error: BaseException) -> bool:
    """Return whether GPU libraries also raise this kind of error for lack of memory."""
    if isinstance(error, tf.errors.InternalError | tf.errors.UnknownError):
        return True
    is_unclear = UNCLEAR_ERRORS.search(str(error)) is not None
    return isinstance(error, tf.errors.OpError) and is_unclear


if __name__ == "__main__":
    main()
