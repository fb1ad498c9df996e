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
# Examples of a stream whose lengths are looked at. Of a split in memory, all are.
_MOST_OF_STREAM = 16_384
# Effective batches that are cut to find out how much padding the lengths cost.
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
        The spec, in which lengths replace `auto`, or null if XLA compiles no cut by
        tokens. The devices, whose description names the lengths and their cost in
        padding. With `hardware.xla=fastest`, both are returned unchanged.
    """
    lengths = spec.config.hardware.xla_lengths
    if spec.times_xla:
        # `xla_choice` decides for each way that it times.
        return spec, run_devices
    if not _is_compiled(spec, run_devices, model, batch_spec):
        if lengths == "auto":
            spec = spec.changed({XLA_LENGTHS: None})
        return spec, run_devices

    sample = _Sample.of(spec, data)
    if lengths == "auto":
        most = MOST_ON_GPU if run_devices.on_gpu else MOST_ON_CPU
        multiple = spec.dataset.pad["multiple"]
        lengths = choose_xla_lengths(sample.longest, most, multiple)
    spec = spec.changed({XLA_LENGTHS: list(lengths)})
    line = _line(lengths, sample.cost(spec, tuple(lengths)))
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
        """Return the lengths of the training examples, or of the first of a stream."""
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
        """Return by what share of the positions XLA's cut exceeds the other one."""
        limit = internals.TokenLimit(
            spec.batching.micro_batch_tokens or 1,
            spec.config.accumulation.micro_batch_size,
            spec.dataset.pad["multiple"],
            xla_lengths,
        )
        examples = len(self.lengths)
        size = min(spec.batching.share, examples)
        random = np.random.default_rng(0)
        with_xla = 0
        without = 0
        for _ in range(_BATCHES_CUT):
            chosen = random.choice(examples, size, replace=False)
            parts = self._parts(self.lengths[chosen])
            with_xla += int(internals.cut_for_xla(parts, limit).counts.positions)
            without += int(internals.cut_by_tokens(parts[0], limit).counts.positions)
        return with_xla / max(without, 1) - 1

    def _parts(self, lengths: np.ndarray) -> tuple[Any, Any]:
        """Return inputs and labels of these lengths."""
        parts = []
        for lengths_of_part in lengths.T:
            values = tf.zeros(lengths_of_part.sum(), tf.int8)
            parts.append(tf.RaggedTensor.from_row_lengths(values, lengths_of_part))
        return parts[: self.inputs], parts[self.inputs :]


def _varying(nest: Any) -> list[Any]:
    """Return the parts of an example, or their specs, that have no fixed length."""
    varying = []
    for leaf in tf.nest.flatten(nest):
        if leaf.shape.rank and leaf.shape[0] is None:
            varying.append(leaf)
    return varying


def _line(lengths: Any, cost: float) -> str:
    """Return what is added to the description of the devices."""
    names = ", ".join(map(str, lengths))
    return f", XLA at lengths {names} ({100 * cost:.0f}% more positions)"
