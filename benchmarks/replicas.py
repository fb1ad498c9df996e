"""The training loop under MirroredStrategy with 1, 2 and 4 logical CPU devices.

Each is in a process of its own. All of them share the processor: the figure says what
the strategy costs if nothing is gained.

Command:   python -m benchmarks.replicas REPLICAS WORKLOAD UPDATES
           is one of the contenders, see `child.Child`
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing

import tensorflow as tf

from benchmarks import fit
from benchmarks.child import Child
from benchmarks.figures import Figure, ratios
from benchmarks.processes import Process
from benchmarks.turns import alternate
from benchmarks.workloads import WORKLOADS, Workload

COUNTS = (1, 2, 4)
NAMES = ("mlp", "cnn")


def measure(workload: Workload, rounds: int, seconds: float) -> list[Figure]:
    """Return the speed with several replicas ÷ that with one.

    Effective batch and micro-batch are the same.
    """
    updates = fit.updates_within(workload, seconds)
    turns: dict[str, Process] = {}
    with ExitStack() as contenders:
        for count in COUNTS:
            command = [sys.executable, "-m", "benchmarks.replicas"]
            command += [str(count), workload.name, str(updates)]
            process = Process(command, 1)
            turns[str(count)] = contenders.enter_context(closing(process))
        alternate(turns, 2)
        times = alternate(turns, rounds)

    examples = workload.effective * updates
    figures = []
    for count in COUNTS[1:]:
        best = {}
        for compared in (COUNTS[0], count):
            best[f"{compared} replicas"] = examples / min(times[str(compared)])
        figures.append(
            Figure(
                "replicas",
                workload.name,
                f"speed with {count} logical devices ÷ with 1",
                ratios(times[str(COUNTS[0])], times[str(count)]),
                best=best,
                best_unit="examples/s",
            )
        )
    return figures


def main() -> None:
    count = int(sys.argv[1])
    workload = WORKLOADS[sys.argv[2]]
    updates = int(sys.argv[3])

    child = Child()
    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    tf.config.set_logical_device_configuration(cpu, logical)
    names = [f"/CPU:{index}" for index in range(count)]
    strategy = tf.distribute.MirroredStrategy(names)
    child.ready(replicas=strategy.num_replicas_in_sync)
    fit.ours(workload, updates, strategy=strategy)(child.updated)


if __name__ == "__main__":
    main()
