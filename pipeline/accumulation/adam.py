"""Adam's step by one operation of TensorFlow, where Keras takes a dozen, each of them a pass over memory.

    m += (g − m)·(1 − β₁);   v += (g² − v)·(1 − β₂);   w −= rate·√(1 − β₂ᵗ)/(1 − β₁ᵗ) · m/(√v + ε)

Keras' own `apply` does the rest: clipping, weight decay, constraints, averages of weights, the loss scale, the count.

In float32 the two have 1 − β apart. Keras rounds the difference; the operation takes it from a β that is rounded, which
for 0.999 gives 1.3e-5 less. After t updates a moment holds 1 − (1 − d)ᵗ of an even gradient, where d is its 1 − β. The
rate and ε make up for the quotient of what the two hold: that of v under the root, that of m. What is left shows where
gradients are not even: at most half of 1.3e-5 of a step, for a weight that gets its first one after thousands of
updates. In float64 nothing is apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from .keras_internals import adam_moments

OF_KERAS = ("update_step", "assign_add", "assign_sub")  # what the operation takes the place of
APART = 2e-5  # how far apart both 1 − β may be, relative: 1.3e-5 with 0.999, 1.7e-4 with 0.9999
# Elements of a variable. Of a smaller one a CPU's threads take longer to begin than to compute: 0.7 times the speed at
# 16,000 on two cores, 1.2 to 1.4 times at this size, 2.7 at a million.
SMALL = 1 << 16


@contextmanager
def fused_adam(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Have one `optimizer.apply` take Adam's step by one operation for each variable.

    It does so for `Adam` and `AdamW`, also inside a `LossScaleOptimizer`. All else applies as ever: other optimizers,
    `amsgrad`, a subclass with a step of its own, variables in half precision, small ones on a CPU, and a β of whose
    1 − β float32 leaves too little, such as 0.9999.
    """
    adam = getattr(optimizer, "inner_optimizer", optimizer)
    if not _steps_as_keras(adam):
        yield
        return
    # Once for all variables, and here: Keras applies in a branch of the graph, or on each device.
    scalars = {dtype: _scalars(adam, dtype) for dtype in (tf.float32, tf.float64) if _near(adam, dtype)}

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        if variable.dtype not in scalars or not _worth_it(variable):
            type(adam).update_step(adam, gradient, variable, learning_rate)
            return
        momentum, velocity = adam_moments(adam, variable)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=momentum.handle,
            v=velocity.handle,
            grad=tf.cast(tf.convert_to_tensor(gradient), variable.dtype),
            **scalars[variable.dtype],
        )

    object.__setattr__(adam, "update_step", update_step)  # past the optimizer's own, which tracks what it is given
    try:
        yield
    finally:
        object.__delattr__(adam, "update_step")


def _steps_as_keras(optimizer: Any) -> bool:
    kind = keras.optimizers.Adam
    return (
        isinstance(optimizer, kind)
        and not optimizer.amsgrad
        and all(getattr(type(optimizer), name) is getattr(kind, name) for name in OF_KERAS)
        and vars(optimizer).keys().isdisjoint(OF_KERAS)
    )


def _worth_it(variable: Any) -> bool:
    return variable.shape.num_elements() >= SMALL or "GPU" in variable.device


def _near(adam: keras.optimizers.Adam, dtype: tf.DType) -> bool:
    """Return whether the operation's 1 − β are near enough to Keras'."""
    for beta in (adam.beta_1, adam.beta_2):
        if not isinstance(beta, (float, int)) or not 0 <= beta < 1:
            return False
        ours, theirs = _differences(beta, dtype)
        if abs(ours - theirs) > APART * theirs:
            return False
    return isinstance(adam.epsilon, (float, int))


def _scalars(adam: keras.optimizers.Adam, dtype: tf.DType) -> dict[str, tf.Tensor]:
    """Return what the operation takes beside variables and a gradient."""

    def cast(value: Any) -> tf.Tensor:  # as Keras does: of a Python number through float32
        return keras.ops.cast(value, dtype.name)

    count = adam.iterations + 1
    mean, square = (_quotient(beta, dtype, tf.cast(count, tf.float64)) for beta in (adam.beta_1, adam.beta_2))
    rate = tf.cast(cast(adam.learning_rate), tf.float64)
    return {
        "lr": tf.cast(rate * tf.sqrt(square) / mean, dtype),
        "epsilon": tf.cast(adam.epsilon * tf.sqrt(square), dtype),
        "beta1": tf.constant(adam.beta_1, dtype),
        "beta2": tf.constant(adam.beta_2, dtype),
        "beta1_power": tf.pow(cast(adam.beta_1), cast(count)),
        "beta2_power": tf.pow(cast(adam.beta_2), cast(count)),
    }


def _quotient(beta: float, dtype: tf.DType, count: tf.Tensor) -> tf.Tensor:
    """Return what the operation's moment holds of an even gradient ÷ what Keras' holds; scalar, float64."""
    ours, theirs = _differences(beta, dtype)
    if ours == theirs:
        return tf.ones((), tf.float64)
    held = [1 - tf.pow(tf.constant(1 - difference, tf.float64), count) for difference in (ours, theirs)]
    return held[0] / held[1]


def _differences(beta: float, dtype: tf.DType) -> tuple[float, float]:
    """Return 1 − β as the operation has it and as Keras has it."""
    number = dtype.as_numpy_dtype
    return float(number(1) - number(beta)), float(number(1 - beta))
