"""The norm of the gradient and the optimizer's step as one program, compiled by XLA.

    counts, learning rate   # read on the host; they wait for nothing of this update
    program(sums):          # on the device
        gradients = sums.gradients()
        norm = |gradients|
        optimizer.apply(gradients)
    counts += 1             # on the host

Without XLA, a step runs several operations for each variable, and a GPU waits while the
host launches them. XLA makes about one of them, and updates weights and moments where
they are. It rejects variables of another device than that of the program: so the counts
and the rate, which a GPU's host holds, enter as values, and are assigned outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from .adam import takes_keras_step
from .gradient_sums import Gradients
from .keras_internals import constant_counts, constant_rate, counting_optimizers


class Applied(NamedTuple):
    """What a program returns; scalars.

    Attributes:
        norm: global L2 norm of the gradient before clipping, without the loss scale.
        loss_scale: what the losses were multiplied by.
        finite: whether the gradient was, so that it was applied; None without a
            `LossScaleOptimizer`, which applies any gradient.
    """

    norm: tf.Tensor
    loss_scale: tf.Tensor
    finite: tf.Tensor | None = None


def dense_sums(
    optimizer: keras.optimizers.Optimizer, sums: Sequence[Gradients]
) -> tuple[Gradients, ...] | None:
    """Return sums of gradients of which XLA knows the shapes; None if that costs much.

    XLA would compile anew for each number of rows that an embedding's gradient has.
    Adam makes such a gradient dense anyway; another optimizer may touch the rows alone.
    """
    leaves = tf.nest.flatten(tuple(sums))
    has_rows = any(isinstance(leaf, tf.IndexedSlices) for leaf in leaves)
    adam = getattr(optimizer, "inner_optimizer", optimizer)
    if has_rows and not takes_keras_step(adam):
        return None
    return tf.nest.map_structure(tf.convert_to_tensor, tuple(sums))


@dataclass(frozen=True)
class ApplyProgram:
    """A traced step of an optimizer, to be compiled by XLA.

    Attributes:
        device: the device of all variables that the step reads.
        learning_rate: of the step, scalar.
    """

    device: str
    learning_rate: tf.Tensor
    _program: Callable[[], Applied]
    _counters: Sequence[tf.Variable]

    @classmethod
    def traced(
        cls, optimizer: keras.optimizers.Optimizer, apply: Callable[[], Applied]
    ) -> ApplyProgram | None:
        """Trace a step, without running it.

        Args:
            optimizer: whose counts and rates become values in the block.
            apply: applies a gradient by the optimizer.

        Returns:
            The program; None if its variables are on several devices.
        """
        counters: list[tf.Variable] = []

        def advance(counter: tf.Variable, number: Any) -> None:
            assert number == 1
            counters.append(counter)

        program = tf.function(apply, autograph=False, jit_compile=True)
        with ExitStack() as constants:
            rates = []
            for counting in counting_optimizers(optimizer):
                rates.append(constants.enter_context(constant_rate(counting)))
            constants.enter_context(constant_counts(optimizer, advance))
            traced = program.get_concrete_function()
        devices = {variable.device for variable in traced.variables}
        if len(devices) != 1:
            return None
        return cls(devices.pop(), rates[0], traced, counters)

    def run(self) -> Applied:
        """Run the program."""
        with tf.device(self.device):
            return self._program()

    def advance_counts(self, finite: tf.Tensor | None) -> None:
        """Count the step, if the gradient was finite.

        Without a `finite` the counts wait for nothing on the device.
        """
        for counter in self._counters:
            number = tf.ones((), counter.dtype)
            if finite is not None:
                number = tf.cast(finite, counter.dtype)
            counter.assign_add(number)
