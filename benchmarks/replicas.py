"""The training loop under MirroredStrategy with 1, 2 and 4 logical CPU devices, each in a process of its own.

All of them share the processor: the figure says what the strategy costs where nothing is gained.

Command:   python -m benchmarks.replicas REPLICAS WORKLOAD UPDATES: one of the contenders, see `child.Child`
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
from benchmarks.workloads import sizes

COUNTS = (1, 2, 4)
NAMES = ("mlp", "cnn")


def measure(name: str, rounds: int, seconds: float) -> list[Figure]:
    """Return the speed with several replicas ÷ that with one, at the same effective batch and micro-batch."""
    updates = fit.updates_within(name, seconds)
    turns: dict[str, Process] = {}
    with ExitStack() as opened:
        for count in COUNTS:
            command = [
                sys.executable,
                "-m",
                "benchmarks.replicas",
                str(count),
                name,
                str(updates),
            ]
            turns[str(count)] = opened.enter_context(closing(Process(command, 1)))
        alternate(turns, 2)
        times = alternate(turns, rounds)
    rate = sizes(name).effective * updates
    figures = []
    for count in COUNTS[1:]:
        best = {
            f"{each} replicas": rate / min(times[str(each)])
            for each in (COUNTS[0], count)
        }
        over = ratios(times[str(COUNTS[0])], times[str(count)])
        figures.append(
            Figure(
                "replicas",
                name,
                f"speed of {count} logical ÷ 1",
                over,
                "",
                best,
                "examples/s",
            )
        )
    return figures


def main() -> None:
    count, name, updates = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    child = Child()
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    )
    strategy = tf.distribute.MirroredStrategy(
        [f"/CPU:{index}" for index in range(count)]
    )
    child.ready(replicas=strategy.num_replicas_in_sync)
    fit.ours(name, updates, strategy=strategy)(child.updated)


if __name__ == "__main__":
    main()
