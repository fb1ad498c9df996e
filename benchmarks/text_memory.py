"""Peak memory of updates of texts, cut by tokens, whose lengths vary by 50.

Each peak is that of the resident memory of a fresh process, minus what is resident
before the first of them. A model that is linear in length, dense layers alone, needs as
much for many short texts as for few long ones. With attention, a micro-batch of longer
texts needs more, and a run of texts of all lengths as much as one of the longest alone.

Command:   python -m benchmarks.text_memory MODEL LENGTH [LENGTH …]
           runs one such process: an update of texts of each length, and one of texts of
           all these lengths. MODEL is `dense` or `attention`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks import processes
from benchmarks.figures import Figure

if TYPE_CHECKING:
    import keras

LENGTHS = (10, 30, 100, 300, 500)
TOKENS = 8192  # of a micro-batch; 819 texts of length 10, or 16 of length 500
EFFECTIVE = 2 * TOKENS  # tokens of an effective batch
WIDTH = 64
CLASSES = 257
MiB = 2**20
DENSE = "dense"
ATTENTION = "attention"
# Larger buffers go back to the system when they are freed: what is resident is in use.
M_MMAP_THRESHOLD = -3


def measure(starts: int) -> list[Figure]:
    """Return the peak for each model: of each length alone, and of all of them."""
    runs: dict[str, Sequence[int]] = {f"{LENGTHS[0]} to {LENGTHS[-1]}": LENGTHS}
    for length in LENGTHS:
        runs[str(length)] = [length]
    figures = []
    for model in (DENSE, ATTENTION):
        peaks: dict[str, list[float]] = {name: [] for name in runs}
        for _, name in processes.in_turns(runs, starts):
            peaks[name].append(_peak(model, runs[name]) / MiB)
        for name, values in peaks.items():
            what = f"peak memory, texts of {name} tokens"
            figures.append(Figure("text", model, what, values, unit="MiB"))
    return figures


def _peak(model: str, lengths: Sequence[int]) -> int:
    command = [sys.executable, "-m", "benchmarks.text_memory", model]
    output = processes.run([*command, *map(str, lengths)])
    return int(output.splitlines()[-1])


def _added_by(name: str, lengths: Sequence[int]) -> int:
    """Train in this process, and return the bytes that its peak has added."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1_000_000)
    import keras
    import tensorflow as tf

    from pipeline.accumulation import Update
    from pipeline.components import devices

    tf.config.set_visible_devices([], "GPU")
    model = _built(name, max(lengths))
    optimizer = keras.optimizers.SGD()
    optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    update = Update(model, loss, optimizer, micro_batch_tokens=TOKENS)
    tokens = tf.RaggedTensorSpec([None, None], tf.int32)

    @tf.function(autograph=False, input_signature=[tokens])
    def step(texts: tf.RaggedTensor) -> tf.Tensor:
        return update((texts, texts))["loss"]

    def texts(parts: Sequence[int]) -> tf.RaggedTensor:
        """Return an effective batch with as many tokens of each length."""
        row_lengths = []
        for length in parts:
            row_lengths += [length] * (EFFECTIVE // len(parts) // length)
        values = tf.ones([sum(row_lengths)], tf.int32)
        return tf.RaggedTensor.from_row_lengths(values, row_lengths)

    step(tf.ragged.constant([[1]], tf.int32))  # traces
    before = devices.status_bytes("VmRSS")
    for length in lengths:
        step(texts([length])).numpy()
    step(texts(lengths)).numpy()
    peak = devices.status_bytes("VmHWM")
    assert before is not None
    assert peak is not None
    return peak - before


def _built(name: str, longest: int) -> keras.Model:
    import keras
    from keras import layers

    from pipeline.components.model import decoder

    if name == ATTENTION:
        return decoder(CLASSES, longest, WIDTH)
    hidden = [layers.Embedding(CLASSES, WIDTH)]
    for _ in range(4):
        hidden.append(layers.Dense(4 * WIDTH, activation="gelu"))
        hidden.append(layers.Dense(WIDTH))
    tokens = keras.Input((None,), dtype="int32")
    return keras.Sequential([tokens, *hidden, layers.Dense(CLASSES)])


def main() -> None:
    name, *lengths = sys.argv[1:]
    print(_added_by(name, [int(length) for length in lengths]))


if __name__ == "__main__":
    main()
