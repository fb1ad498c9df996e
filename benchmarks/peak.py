"""What a device can do at most, measured: products of square matrices, and copies.

A product of side `n` counts 2n³ FLOPs. A copy on the device is a negation, which reads
each byte once and writes one: its bandwidth counts both. TensorFlow computes products
of float32 in TF32 on GPUs that have it, unless that is off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import tensorflow as tf

from benchmarks.figures import Figure
from benchmarks.gpu_device import setup
from benchmarks.turns import alternate, repeats

ROUNDS = 5
SECONDS = 0.05  # of a turn, at least
COPIED = 2**26  # numbers of float32 in a copy from the host


def measure(tiny: bool) -> Iterator[Figure]:
    """Yield TFLOP/s of each precision and GB/s of each copy."""
    on_gpu = setup("float32").on_gpu
    for precision in ("float32", "bfloat16", "float16"):
        tf.config.experimental.enable_tensor_float_32_execution(False)
        subject = precision
        if precision == "float32" and on_gpu:
            subject = "float32, TF32 off"
        yield _product_figure(subject, precision, tiny)
    if on_gpu:
        tf.config.experimental.enable_tensor_float_32_execution(True)
        yield _product_figure("float32, TF32 on", "float32", tiny)

    yield Figure(
        "peak",
        "copy on the device",
        "read and written",
        [rate / 1e9 for rate in copies(tiny)],
        unit="GB/s",
    )
    if on_gpu:
        rates = [rate / 1e9 for rate in _copies_from_host()]
        yield Figure("peak", "copy from the host", "one way", rates, unit="GB/s")


def products(precision: str, tiny: bool) -> list[float]:
    """Return FLOP/s of a product of two matrices in each round."""
    side = _side(tiny)
    left = tf.cast(tf.random.normal([side, side]), precision)
    right = tf.cast(tf.random.normal([side, side]), precision)
    times = _seconds(lambda: tf.matmul(left, right))
    return [2 * side**3 / seconds for seconds in times]


def copies(tiny: bool) -> list[float]:
    """Return bytes read and written a second by a copy on the device in each round."""
    count = 2**20 if tiny else 2**28
    values = tf.random.normal([count])
    times = _seconds(lambda: tf.negative(values))
    return [8 * count / seconds for seconds in times]


def _copies_from_host() -> list[float]:
    """Return bytes a second of a copy from the host to the GPU in each round."""
    with tf.device("CPU:0"):
        host = tf.Variable(tf.random.normal([COPIED]))

    # Eagerly, TensorFlow keeps the copy of a tensor and makes no other.
    @tf.function
    def to_device() -> tf.Tensor:
        with tf.device("CPU:0"):
            values = host.read_value()
        with tf.device("GPU:0"):
            return tf.negative(values)

    return [4 * COPIED / seconds for seconds in _seconds(to_device)]


def _product_figure(subject: str, precision: str, tiny: bool) -> Figure:
    rates = [rate / 1e12 for rate in products(precision, tiny)]
    note = f"of side {_side(tiny)}"
    return Figure("peak", subject, "matrix product", rates, unit="TFLOP/s", note=note)


def _side(tiny: bool) -> int:
    return 256 if tiny else 8192


def _seconds(call: Callable[[], tf.Tensor]) -> list[float]:
    """Return the seconds of one call in each round."""
    count = repeats(call, SECONDS)

    def turn() -> None:
        for _ in range(count):
            call()

    return [seconds / count for seconds in alternate({"": turn}, ROUNDS)[""]]
