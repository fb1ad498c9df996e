"""Decides for which lengths XLA compiles a cut by tokens (`hardware.xla_lengths`)."""

from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipeline.accumulation import choose_xla_lengths, internals
from pipeline.components.devices import Devices
from pipeline.config.resolve import XLA_LENGTHS, RunSpec
from pipeline.dataset.splits import Data

MOST_ON_GPU = 4
MOST_ON_CPU = 16
# Number of examples of a stream whose lengths are read. A split in memory is read
# whole.
_MOST_OF_STREAM = 16_384
# Number of effective batches to cut, to find out how much padding the lengths cost.
_BATCHES_CUT = 16


def decide(
    spec: RunSpec, run_devices: Devices, data: Data, model: keras.Model, batch_spec: Any
) -> tuple[RunSpec, Devices]:
    """Decide for which lengths XLA compiles, and store the decision in the spec.

    Args:
        spec: the spec, with a list, null or `auto` for `hardware.xla_lengths`.
        run_devices: the devices of the run.
        data: the data of the run.
        model: a built model.
        batch_spec: the spec of an effective batch.

    Returns:
        The spec and the devices. In the spec, `auto` is replaced by lengths, or by null
        if XLA does not compile the cut by tokens. The description of the devices names
        the lengths and, if they were chosen here, their cost in padding. With
        `hardware.xla=fastest`, both are returned unchanged.
    """
    lengths = spec.config.hardware.xla_lengths
    if spec.times_xla:
        # `xla_choice` calls this for each of the variants that it times.
        return spec, run_devices
    if not _is_compiled(spec, run_devices, model, batch_spec):
        if lengths == "auto":
            spec = spec.changed({XLA_LENGTHS: None})
        return spec, run_devices
    cost = ""
    if lengths == "auto":
        sample = _Sample.of(spec, data)
        most = MOST_ON_GPU if run_devices.on_gpu else MOST_ON_CPU
        multiple = spec.dataset.pad["multiple"]
        lengths = choose_xla_lengths(sample.longest, most, multiple)
        spec = spec.changed({XLA_LENGTHS: list(lengths)})
        cost = f" ({100 * sample.cost(spec, lengths):.0f}% more positions)"
    names = ", ".join(map(str, lengths))
    line = f", XLA at lengths {names}{cost}"
    return spec, replace(run_devices, description=run_devices.description + line)


def _is_compiled(
    spec: RunSpec, run_devices: Devices, model: keras.Model, batch_spec: Any
) -> bool:
    """Return whether XLA compiles the micro-steps of a cut by tokens."""
    hardware = spec.config.hardware
    if not spec.cuts_by_tokens or hardware.xla_lengths is None:
        return False
    limit = internals.TokenLimit(1, xla_lengths=(1,))
    compiled = []

    def note(batch: Any) -> None:
        compiled.append(internals.compiled_by_xla(hardware.xla, model, batch, limit))

    # Under a strategy, `hardware.xla=auto` compiles nothing.
    with run_devices.strategy.scope():
        tf.function(note, autograph=False).get_concrete_function(batch_spec)
    return run_devices.agree(all(compiled))


class _Sample:
    """The lengths of training examples.

    Attributes:
        lengths: the lengths of the parts of unequal length, (examples, parts).
        inputs: how many of the parts are inputs; they come first.
    """

    def __init__(self, lengths: np.ndarray, inputs: int):
        self.lengths = lengths
        self.inputs = inputs

    @classmethod
    def of(cls, spec: RunSpec, data: Data) -> "_Sample":
        """Return the lengths of all training examples, or of a stream's first ones."""
        split = data.train
        if not spec.dataset.get("in_memory", True):
            split = split.take(_MOST_OF_STREAM)

        def lengths_of(*example: Any) -> tf.Tensor:
            return tf.stack([tf.shape(leaf)[0] for leaf in _varying(example)])

        batches = split.map(lengths_of).batch(1024).as_numpy_iterator()
        inputs = len(_varying(split.element_spec[:1]))
        return cls(np.concatenate(list(batches)), inputs)

    @property
    def longest(self) -> np.ndarray:
        """The length of the longest part of each example."""
        return self.lengths.max(axis=1)

    def cost(self, spec: RunSpec, xla_lengths: tuple[int, ...]) -> float:
        """Return how many more positions XLA's cut has, relative to the other cut."""
        limit = internals.TokenLimit(
            spec.batching.micro_batch_tokens or 1,
            spec.config.accumulation.micro_batch_size,
            spec.dataset.pad["multiple"],
            xla_lengths,
        )
        inputs = self.inputs

        @tf.function(
            input_signature=[tf.TensorSpec([None, self.lengths.shape[1]], tf.int64)],
            autograph=False,
        )
        def positions(lengths: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            parts = _parts_of(lengths)
            x = parts[:inputs]
            others = parts[inputs:]
            with_xla = internals.cut_for_xla((x, others), limit)
            without = internals.cut_by_tokens(x, limit)
            return with_xla.counts.positions, without.counts.positions

        examples = len(self.lengths)
        size = min(spec.batching.share, examples)
        random = np.random.default_rng(0)
        total_with_xla = 0
        total_without = 0
        for _ in range(_BATCHES_CUT):
            chosen = random.choice(examples, size, replace=False)
            with tf.device("CPU:0"):
                with_xla, without = positions(self.lengths[chosen].astype(np.int64))
            total_with_xla += int(with_xla)
            total_without += int(without)
        return total_with_xla / max(total_without, 1) - 1


def _parts_of(lengths: tf.Tensor) -> list[tf.RaggedTensor]:
    """Return ragged parts with these lengths, which are (examples, parts)."""
    parts = []
    for lengths_of_part in tf.unstack(lengths, axis=1):
        values = tf.zeros([tf.reduce_sum(lengths_of_part)], tf.int8)
        parts.append(tf.RaggedTensor.from_row_lengths(values, lengths_of_part))
    return parts


def _varying(nest: Any) -> list[Any]:
    """Return the parts of an example, or their specs, that have no fixed length."""
    varying = []
    for leaf in tf.nest.flatten(nest):
        if leaf.shape.rank and leaf.shape[0] is None:
            varying.append(leaf)
    return varying
