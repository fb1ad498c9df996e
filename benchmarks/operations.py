"""How many operations a device starts in an update, by what XLA compiles.

The host of a GPU starts each operation by itself, and small ones take longer to start
than to compute. A compiled program is one operation here. On a GPU it has several
kernels, which the program starts.

Command:   python -m benchmarks.operations [--models NAME …]
Run time:  about seven minutes on two CPU cores.
Expect:    a micro-batch has the fewest operations with `step` and an update with
           `apply`; with `update` both are one program.

No GPU is needed: the update is placed on a second logical CPU device, and the operations
that TensorFlow executes there are counted. Control flow, constants, reads of variables,
shapes and transfers are left out. TensorFlow optimizes graphs for a GPU differently, so
the numbers differ there in a few operations.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.workloads import WORKLOADS, Workload, on_gpu

DEVICE = "CPU:1"
# With as many micro-batches as an update of a small model has, in 64 MiB.
RESNET = dataclasses.replace(
    on_gpu("resnet50"), input_shape=(64, 64, 3), micro=2, factor=4
)
MODELS = {
    "mlp": WORKLOADS["mlp"],
    "cnn": WORKLOADS["cnn"],
    "embedding": WORKLOADS["embedding"],
    "small_transformer": WORKLOADS["small_transformer"],
    "resnet50": RESNET,
}
# `hardware.xla_scope`, or None without XLA.
SCOPES = (None, "step", "apply", "update")
# What starts nothing on a GPU.
NOT_STARTED = {
    "Const",
    "Enter",
    "Exit",
    "ExpandDims",
    "Identity",
    "IdentityN",
    "LoopCond",
    "Merge",
    "NextIteration",
    "NoOp",
    "ReadVariableOp",
    "Reshape",
    "Shape",
    "Squeeze",
    "Switch",
    "_Arg",
    "_DeviceArg",
    "_DeviceRetval",
    "_Recv",
    "_Retval",
    "_Send",
}


@dataclasses.dataclass(frozen=True)
class Operations:
    """The operations of an update.

    Attributes:
        of_a_micro_batch: those in the loop over the micro-batches.
        of_an_update: those outside of it.
    """

    of_a_micro_batch: int
    of_an_update: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        name, scope = json.loads(options.one)
        print(json.dumps(dataclasses.asdict(count(MODELS[name], scope))))
        return

    ways = ["without XLA", *(str(scope) for scope in SCOPES[1:])]
    print(f"| operations of a micro-batch + of an update | {' | '.join(ways)} |")
    print(f"| --- |{' --- |' * len(ways)}")
    for name in options.models:
        cells = [name]
        for scope in SCOPES:
            counted = _in_a_process(name, scope)
            cells.append(f"{counted.of_a_micro_batch} + {counted.of_an_update}")
        print(f"| {' | '.join(cells)} |", flush=True)


def _in_a_process(name: str, scope: str | None) -> Operations:
    """Count in a new process: what was traced before changes TensorFlow's names."""
    command = [sys.executable, "-m", "benchmarks.operations"]
    printed = processes.run([*command, "--one", json.dumps([name, scope])])
    return Operations(**json.loads(printed.splitlines()[-1]))


def count(workload: Workload, scope: str | None) -> Operations:
    """Run an update on a second logical device of this process, and count.

    Args:
        workload: the model, and how its effective batch is cut.
        scope: what XLA compiles, as in `hardware.xla_scope`; None for nothing.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    (cpu, *_) = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)

    from benchmarks import keras_models
    from pipeline.accumulation import Update

    xla_scope = "step" if scope is None else scope  # not used without XLA
    with tf.device(DEVICE):
        model = keras_models.build(workload)
        optimizer = keras_models.optimizer_of_update()
        optimizer.build(model.trainable_variables)
        update = Update(
            model,
            keras_models.loss(),
            optimizer,
            workload.micro,
            jit_compile=scope is not None,
            xla_scope=xla_scope,
        )
        with tf.device("CPU:0"):
            x, y = map(tf.constant, workload.examples(workload.effective))
        return _count(tf.function(update, autograph=False), (x, y), workload.factor)


def _count(function: Any, batch: Any, factor: int) -> Operations:
    """Call a function twice, and count what its second call executes on the device."""
    # TensorFlow has no other way to the graphs that it runs.
    from tensorflow.python.eager import context

    context.context().enable_run_metadata()
    function(batch)
    metadata = context.context().export_run_metadata()
    context.context().disable_run_metadata()
    on_device = set()
    for graphs in metadata.function_graphs:
        for graph in graphs.partition_graphs:
            for node in graph.node:
                if node.device.endswith(DEVICE) and node.op not in NOT_STARTED:
                    on_device.add(f"{node.name}:{node.op}")

    in_the_loop = 0
    once = 0
    for name, times in _executed(lambda: function(batch)).items():
        if name not in on_device:
            continue
        if times >= factor:
            in_the_loop += times
        else:
            once += times
    return Operations(round(in_the_loop / factor), once)


def _executed(call: Callable[[], object]) -> Counter[str]:
    """Return how often each operation, as `NAME:KIND`, is executed in a call."""
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    with tempfile.TemporaryDirectory() as folder:
        # Level 3 has all operations of TensorFlow.
        tf.profiler.experimental.start(
            folder, tf.profiler.experimental.ProfilerOptions(host_tracer_level=3)
        )
        call()
        tf.profiler.experimental.stop()
        (trace,) = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(trace.read_bytes())

    times: Counter[str] = Counter()
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                times[plane.event_metadata[event.metadata_id].name] += 1
    return times


if __name__ == "__main__":
    main()
