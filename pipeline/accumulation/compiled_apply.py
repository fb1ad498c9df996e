"""The norm of the gradient and the optimizer's step as one program, compiled by XLA.

    counts, learning rate   # read on the host, without waiting for this update
    program(sums):          # on the device
        gradients = sums.gradients()
        norm = |gradients|
        optimizer.apply(gradients)
    counts += 1             # on the host

The program may also contain the loop over the micro-batches that computes the sums. An
update is then a single program.

Without XLA, a step runs several operations per variable, and a GPU waits while the host
launches them. XLA compiles them to about one operation per variable, and updates
weights and moments in place. XLA rejects a variable on a device other than the
program's. With a GPU, the step counts and the learning rate are such variables, as they
stay on the host. The program therefore gets their values, and the counts are advanced
outside of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from .adam import takes_keras_step
from .gradient_sums import Gradients, GradientSums
from .keras_internals import constant_counts, constant_rate, counting_optimizers


class Applied(NamedTuple):
    """The results of a program.

    Attributes:
        norm: global L2 norm of the gradient before clipping, without the loss scale;
            scalar.
        loss_scale: the factor by which the losses were multiplied, scalar.
        finite: whether the gradient was finite, scalar. If not, a `LossScaleOptimizer`
            has not applied it. None for other optimizers, which apply any gradient.
        sums: the sums over the effective batch, without the gradients. None for a
            program that does not compute them.
    """

    norm: tf.Tensor
    loss_scale: tf.Tensor
    finite: tf.Tensor | None = None
    sums: GradientSums | None = None


def dense_sums(
    optimizer: keras.optimizers.Optimizer, sums: Sequence[Gradients]
) -> tuple[Gradients, ...] | None:
    """Return the sums of gradients as dense tensors, or None if that may be slow.

    XLA would compile the step again for each number of rows in an embedding's gradient.
    Keras' `Adam` makes such a gradient dense anyway. Any other optimizer may update
    only these rows: for it, the result is None if there is such a gradient.
    """
    leaves = tf.nest.flatten(tuple(sums))
    has_rows = any(isinstance(leaf, tf.IndexedSlices) for leaf in leaves)
    if has_rows and not makes_dense(optimizer):
        return None
    return tf.nest.map_structure(tf.convert_to_tensor, tuple(sums))


def makes_dense(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether an optimizer makes the gradient of an embedding dense."""
    return takes_keras_step(getattr(optimizer, "inner_optimizer", optimizer))


@dataclass(frozen=True)
class ApplyProgram:
    """A traced step of an optimizer, or a whole update, to be compiled by XLA.

    Attributes:
        device: the device of all variables that the program uses.
        learning_rate: the learning rate of the step, scalar.
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
            optimizer: the optimizer. While the step is traced, reading its counts and
                its learning rate gives values that the host has read.
            apply: applies the gradient with the optimizer. It may also compute the
                gradient.

        Returns:
            The program, or None if its variables are not all on one device.
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
        """Run the program on its device."""
        with tf.device(self.device):
            return self._program()

    def advance_counts(self, finite: tf.Tensor | None) -> None:
        """Add 1 to the optimizer's step counts, unless `finite` is false.

        If `finite` is None, this does not wait for the device.
        """
        for counter in self._counters:
            number = tf.ones((), counter.dtype)
            if finite is not None:
                number = tf.cast(finite, counter.dtype)
            counter.assign_add(number)
