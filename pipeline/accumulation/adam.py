"""Adam's step as one TensorFlow operation per variable.

Keras runs a dozen operations instead, each of which is a pass over memory.

    m += (g − m)·(1 − β₁);   v += (g² − v)·(1 − β₂)
    w −= rate·√(1 − β₂ᵗ)/(1 − β₁ᵗ) · m/(√v + ε)

Keras' own `apply` does the rest: clipping, weight decay, constraints, weight averaging,
loss scaling and counting the updates.

In float32, the operation and Keras compute slightly different values of d = 1 − β.
Keras rounds the difference to float32. The operation rounds β first, so that its d is
smaller by a relative 1.3e-5 for β = 0.999. After t updates with a constant gradient, a
moment is 1 − (1 − d)ᵗ times its limit. The operation's learning rate and ε are adjusted
so that the ratio between its moments and those of Keras cancels: see `_scalars`. An
error remains if gradients are not constant: at most half of 1.3e-5 of a step, for a
first gradient after thousands of updates. In float64, there is no difference.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from .keras_internals import adam_moments, constant_rate, replaced

# Methods of Keras whose work the operation does.
REPLACED = ("update_step", "assign_add", "assign_sub")

# The operation takes β in float32. It replaces Keras' step only if the rounding changes
# 1 − β by at most this fraction. The change is 1.3e-5 for β = 0.999, and 1.7e-4 for
# 0.9999.
TOLERANCE = 2e-5

# On a CPU, variables with fewer elements keep Keras' step, because threads would take
# longer to start than to compute. The speedup on two cores is 0.7 at 16,000 elements,
# 1.2 to 1.4 at this size, and 2.7 at a million.
SMALL = 1 << 16


@contextmanager
def fused_adam(optimizer: keras.optimizers.Optimizer) -> Iterator[Any]:
    """Make `optimizer.apply` take Adam's step as one operation per variable.

    This applies inside the `with` block, to `Adam` and `AdamW`, including those inside
    a `LossScaleOptimizer`. Keras' own step remains in use for other optimizers,
    `amsgrad`, subclasses that override the step, variables in half precision, small
    variables on a CPU, and, in float32, a β such as 0.9999, whose rounding would matter.

    Rows of an embedding's gradient (`tf.IndexedSlices`) that have the same index are
    summed first, as in the dense gradient, even for small variables. Keras' own step
    would add the square of each row to the second moment.

    Yields:
        The learning rate of the optimizer, which is computed once. The block yields it
        for other optimizers, too.
    """
    adam = getattr(optimizer, "inner_optimizer", optimizer)
    fuses = takes_keras_step(adam)
    with constant_rate(adam) as rate:
        changes = [(adam, "update_step", _fused_step(adam))] if fuses else []
        with replaced(changes):
            yield rate


def _fused_step(adam: keras.optimizers.Adam) -> Callable[..., None]:
    # Compute the scalars once for all variables. Keras calls `update_step` later, in a
    # branch of the graph or on each device.
    scalars = {}
    for dtype in (tf.float32, tf.float64):
        if _is_exact_enough(adam, dtype):
            scalars[dtype] = _scalars(adam, dtype)

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        gradient = tf.convert_to_tensor(gradient)
        is_large = variable.shape.num_elements() >= SMALL
        worth_it = is_large or "GPU" in variable.device
        if variable.dtype not in scalars or not worth_it:
            type(adam).update_step(adam, gradient, variable, learning_rate)
            return
        momentum, velocity = adam_moments(adam, variable)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=momentum.handle,
            v=velocity.handle,
            grad=tf.cast(gradient, variable.dtype),
            **scalars[variable.dtype],
        )

    return update_step


def takes_keras_step(optimizer: Any) -> bool:
    """Return whether an optimizer is an Adam with the step of Keras' class."""
    kind = keras.optimizers.Adam
    if not isinstance(optimizer, kind) or optimizer.amsgrad:
        return False
    for name in REPLACED:
        if name in vars(optimizer):
            return False
        if getattr(type(optimizer), name) is not getattr(kind, name):
            return False
    return True


def _is_exact_enough(adam: keras.optimizers.Adam, dtype: tf.DType) -> bool:
    for beta in (adam.beta_1, adam.beta_2):
        if not isinstance(beta, (float, int)) or not 0 <= beta < 1:
            return False
        ours, theirs = _differences(beta, dtype)
        if abs(ours - theirs) > TOLERANCE * theirs:
            return False
    return isinstance(adam.epsilon, (float, int))


def _scalars(adam: keras.optimizers.Adam, dtype: tf.DType) -> dict[str, tf.Tensor]:
    """Return the scalar arguments of the operation.

    The operation's first moment is `a` times Keras' first moment, and its second moment
    is `b` times Keras' second moment: see `_moment_ratio`. If the rate is multiplied by
    √b/a and ε by √b, both factors cancel:

        rate·√b/a · a·m/(√(b·v) + ε·√b) = rate · m/(√v + ε)
    """

    def cast(value: Any) -> tf.Tensor:
        """Cast to `dtype` as Keras does, which rounds Python numbers to float32."""
        return keras.ops.cast(value, dtype.name)

    count = adam.iterations + 1
    first_ratio = _moment_ratio(adam.beta_1, dtype, tf.cast(count, tf.float64))
    second_ratio = _moment_ratio(adam.beta_2, dtype, tf.cast(count, tf.float64))
    rate = tf.cast(cast(adam.learning_rate), tf.float64)
    return {
        "lr": tf.cast(rate * tf.sqrt(second_ratio) / first_ratio, dtype),
        "epsilon": tf.cast(adam.epsilon * tf.sqrt(second_ratio), dtype),
        "beta1": tf.constant(adam.beta_1, dtype),
        "beta2": tf.constant(adam.beta_2, dtype),
        "beta1_power": tf.pow(cast(adam.beta_1), cast(count)),
        "beta2_power": tf.pow(cast(adam.beta_2), cast(count)),
    }


def _moment_ratio(beta: float, dtype: tf.DType, count: tf.Tensor) -> tf.Tensor:
    """Return the operation's moment ÷ Keras' moment, after a constant gradient.

    The gradient was constant for `count` updates. The ratio is a scalar of float64.
    """
    ours, theirs = _differences(beta, dtype)
    if ours == theirs:
        return tf.ones((), tf.float64)

    def moment(difference: float) -> tf.Tensor:
        return 1 - tf.pow(tf.constant(1 - difference, tf.float64), count)

    return moment(ours) / moment(theirs)


def _differences(beta: float, dtype: tf.DType) -> tuple[float, float]:
    """Return 1 − β as the operation computes it, and as Keras does."""
    number = dtype.as_numpy_dtype
    return float(number(1) - number(beta)), float(number(1 - beta))
