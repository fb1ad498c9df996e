"""The training loop under MirroredStrategy with 1, 2 and 4 logical CPU devices, each in a process of its own.

All of them share the processor: the figure says what the strategy costs where nothing is gained.

Command:   python -m benchmarks.replicas REPLICAS WORKLOAD UPDATES: one of the contenders, see `child.Child`
"""

from __future__ import annotations

import sys

import tensorflow as tf

from benchmarks import fit
from benchmarks.child import Child
from benchmarks.figures import Figure, ratios
from benchmarks.processes import Process
from benchmarks.turns import Coroutine, alternate, repeats
from benchmarks.workloads import sizes

COUNTS = (1, 2, 4)
NAMES = ("mlp", "cnn")


def measure(name: str, rounds: int, seconds: float) -> list[Figure]:
    """Return the speed with several replicas ÷ that with one, at the same effective batch and micro-batch."""
    warm = Coroutine(fit.ours(name, 1))
    updates = repeats(warm, seconds)
    warm.close()
    contenders: dict[int, Process] = {}
    try:
        for count in COUNTS:
            command = [sys.executable, "-m", "benchmarks.replicas", str(count), name, str(updates)]
            contenders[count] = Process(command, 1)
        turns = {str(count): contender for count, contender in contenders.items()}
        alternate(turns, 2)
        times = alternate(turns, rounds)
    finally:
        for contender in contenders.values():
            contender.close()
    rate = sizes(name).effective * updates
    figures = []
    for count in COUNTS[1:]:
        best = {f"{each} replicas": rate / min(times[str(each)]) for each in (COUNTS[0], count)}
        over = ratios(times[str(COUNTS[0])], times[str(count)])
        figures.append(Figure("replicas", name, f"speed of {count} logical ÷ 1", over, "", best, "examples/s"))
    return figures


def main() -> None:
    count, name, updates = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    child = Child()
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)])
    strategy = tf.distribute.MirroredStrategy([f"/CPU:{index}" for index in range(count)])
    child.ready(replicas=strategy.num_replicas_in_sync)
    fit.ours(name, updates, strategy=strategy)(child.updated)


if __name__ == "__main__":
    main()
