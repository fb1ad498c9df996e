"""Peak memory by factor at one micro-batch size, and by effective batch at factor 1.

The difference is what accumulation saves. Each peak is that of the resident memory of a
fresh process, after five updates of one effective batch that lies in memory.
Accumulating holds the activations of one micro-batch and one sum of gradients, so only
the effective batch itself may grow with the factor.

Command:   python -m benchmarks.memory WHO WORKLOAD EFFECTIVE MICRO
           runs one such process; WHO is `update` or `fit`
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks import processes
from benchmarks.figures import Figure
from benchmarks.workloads import WORKLOADS, Workload

FACTORS = (1, 2, 4, 8, 16, 32, 64)
MICRO = 32
MiB = 2**20
UPDATES = 5
ACCUMULATED = "accumulated"
ONE_BATCH = "at factor 1"
KERAS = "Keras' fit, accumulated"


@dataclass(frozen=True)
class Case:
    """What one process trains.

    Attributes:
        what: one of `ACCUMULATED`, `ONE_BATCH` and `KERAS`.
        who: `update` or `fit`.
        effective: examples of the effective batch.
        micro: examples of a micro-batch.
    """

    what: str
    who: str
    effective: int
    micro: int


def measure(workload: Workload, starts: int) -> list[Figure]:
    """Return the peaks, and what grows beyond the bytes of the batch itself."""
    peaks: dict[Case, list[float]] = {case: [] for case in _cases()}
    for _, case in processes.in_turns(peaks, starts):
        peaks[case].append(_peak(workload, case))

    figures = []
    for case, values in peaks.items():
        figures.append(
            Figure(
                "memory",
                workload.name,
                case.what,
                [peak / MiB for peak in values],
                unit="MiB",
                over=case.effective,
            )
        )
    return [*figures, _growth(workload, peaks)]


def _cases() -> Iterator[Case]:
    for factor in FACTORS:
        yield Case(ACCUMULATED, "update", MICRO * factor, MICRO)
    for factor in FACTORS:
        yield Case(ONE_BATCH, "update", MICRO * factor, MICRO * factor)
    for factor in FACTORS[1:]:  # Keras rejects a factor of 1
        yield Case(KERAS, "fit", MICRO * factor, MICRO)


def _growth(workload: Workload, peaks: dict[Case, list[float]]) -> Figure:
    lowest = peaks[Case(ACCUMULATED, "update", MICRO * FACTORS[0], MICRO)]
    highest = peaks[Case(ACCUMULATED, "update", MICRO * FACTORS[-1], MICRO)]
    added_examples = MICRO * (FACTORS[-1] - FACTORS[0])
    batch_growth = added_examples * _bytes_of_example(workload)
    growth = []
    for low, high in zip(lowest, highest, strict=True):
        growth.append(100 * (high - low - batch_growth) / low)
    return Figure(
        "memory",
        workload.name,
        f"growth from factor 1 to {FACTORS[-1]} beyond the batch",
        growth,
        unit="%",
        at_most=1.0,
        note=f"the batch's own: {batch_growth / MiB:.1f} MiB",
    )


def _bytes_of_example(workload: Workload) -> int:
    """Return the bytes of an example and its label in `_train`."""
    return 4 * math.prod(workload.input_shape) + 8


def _peak(workload: Workload, case: Case) -> int:
    command = [sys.executable, "-m", "benchmarks.memory"]
    command += [case.who, workload.name, str(case.effective), str(case.micro)]
    return int(processes.run(command).splitlines()[-1])


def _train(who: str, name: str, effective: int, micro: int) -> int:
    """Train in this process, and return its peak."""
    import tensorflow as tf

    from benchmarks import keras_models, update
    from pipeline.accumulation import Update
    from pipeline.components import devices

    workload = WORKLOADS[name]
    x = tf.random.uniform((effective, *workload.input_shape))
    y = tf.zeros(effective, tf.int64)
    model = keras_models.build(workload)
    if who == "fit":
        factor = effective // micro
        model.compile(
            keras_models.optimizer(gradient_accumulation_steps=factor),
            keras_models.loss(),
        )
        batches = tf.data.Dataset.from_tensors((x, y)).unbatch().batch(micro).repeat()
        model.fit(batches, steps_per_epoch=factor, epochs=UPDATES, verbose=0)
    else:
        optimizer = keras_models.optimizer_of_update()
        optimizer.build(model.trainable_variables)
        step = update.traced(Update(model, keras_models.loss(), optimizer, micro), x, y)
        for _ in range(UPDATES):
            step(x, y)["loss"].numpy()
    return devices.peak_memory(devices.Devices(tf.distribute.get_strategy(), False, ""))


def main() -> None:
    who, name, effective, micro = sys.argv[1:]
    print(_train(who, name, int(effective), int(micro)))


if __name__ == "__main__":
    main()
