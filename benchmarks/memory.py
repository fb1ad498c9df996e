"""Peak memory by factor at one micro-batch size, and by effective batch at factor 1: what accumulation saves.

Each is the peak of resident memory of a fresh process, after five updates of one effective batch that lies in memory.
Accumulating holds the activations of one micro-batch and one sum of gradients, so that all that may grow with the
factor is the effective batch itself.

Command:   python -m benchmarks.memory WHO WORKLOAD EFFECTIVE MICRO: one such process; WHO is `update` or `fit`
"""

from __future__ import annotations

import math
import sys

from benchmarks import processes
from benchmarks.figures import Figure
from benchmarks.workloads import SHAPES

FACTORS = (1, 2, 4, 8, 16, 32, 64)
MICRO = 32
MiB = 2**20
UPDATES = 5
ACCUMULATED, WHOLE, KERAS = "accumulated", "at factor 1", "Keras' fit, accumulated"


def measure(name: str, starts: int) -> list[Figure]:
    """Return the peaks by factor, by effective batch and of `fit`, and what grows beyond the batch's own bytes."""
    cases = {
        (ACCUMULATED, factor): ("update", MICRO * factor, MICRO) for factor in FACTORS
    }
    cases |= {
        (WHOLE, factor): ("update", MICRO * factor, MICRO * factor)
        for factor in FACTORS
    }
    cases |= {
        (KERAS, factor): ("fit", MICRO * factor, MICRO) for factor in FACTORS[1:]
    }  # it refuses one
    peaks: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for _, case in processes.in_turns(cases, starts):
        peaks[case].append(_peak(name, *cases[case]))
    figures = [
        Figure(
            "memory",
            name,
            what,
            [peak / MiB for peak in values],
            "MiB",
            over=MICRO * factor,
        )
        for (what, factor), values in peaks.items()
    ]
    least, most = peaks[ACCUMULATED, FACTORS[0]], peaks[ACCUMULATED, FACTORS[-1]]
    own = MICRO * (FACTORS[-1] - FACTORS[0]) * _bytes(name)
    growth = [
        100 * (high - low - own) / low for low, high in zip(least, most, strict=True)
    ]
    what = f"growth from factor 1 to {FACTORS[-1]} beyond the batch"
    note = f"the batch's own: {own / MiB:.1f} MiB"
    return [*figures, Figure("memory", name, what, growth, "%", at_most=1.0, note=note)]


def _bytes(name: str) -> int:
    """Return the bytes of an example and its label in `_run`."""
    return 4 * math.prod(SHAPES[name]) + 8


def _peak(name: str, who: str, effective: int, micro: int) -> int:
    command = [
        sys.executable,
        "-m",
        "benchmarks.memory",
        who,
        name,
        str(effective),
        str(micro),
    ]
    return int(processes.run(command).splitlines()[-1])


def _run(who: str, name: str, effective: int, micro: int) -> int:
    import tensorflow as tf

    from benchmarks import models, update
    from pipeline.accumulation import Update
    from pipeline.components import devices

    x = tf.random.uniform((effective, *SHAPES[name]))
    y = tf.zeros(effective, tf.int64)
    model = models.build(name)
    if who == "fit":
        model.compile(
            models.optimizer(gradient_accumulation_steps=effective // micro),
            models.loss(),
        )
        batches = tf.data.Dataset.from_tensors((x, y)).unbatch().batch(micro).repeat()
        model.fit(
            batches, steps_per_epoch=effective // micro, epochs=UPDATES, verbose=0
        )
    else:
        optimizer = models.optimizer()
        optimizer.build(model.trainable_variables)
        step = update.traced(Update(model, models.loss(), optimizer, micro), x, y)
        for _ in range(UPDATES):
            step(x, y)["loss"].numpy()
    return devices.peak_memory(devices.Devices(tf.distribute.get_strategy(), False, ""))


if __name__ == "__main__":
    print(_run(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
