"""What a device can do at most, measured: products of square matrices, and copies.

A product of side n counts 2n³ FLOPs. A copy on the device is a negation, which reads each byte once and writes one: its
bandwidth counts both. TensorFlow computes products of float32 in TF32 on GPUs that have it, unless that is off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import tensorflow as tf

from benchmarks.figures import Figure
from benchmarks.gpu_workloads import setup
from benchmarks.turns import alternate, repeats

ROUNDS = 5
SECONDS = 0.05  # of a turn, at least


def measure(tiny: bool) -> Iterator[Figure]:
    """Yield TFLOP/s of each precision and GB/s of each copy."""
    on_gpu = setup("float32").on_gpu
    for precision in ("float32", "bfloat16", "float16"):
        tf.config.experimental.enable_tensor_float_32_execution(False)
        subject = (
            "float32, TF32 off" if precision == "float32" and on_gpu else precision
        )
        yield _products(subject, precision, tiny)
    if on_gpu:
        tf.config.experimental.enable_tensor_float_32_execution(True)
        yield _products("float32, TF32 on", "float32", tiny)
    yield Figure(
        "peak",
        "copy on the device",
        "read and written",
        [rate / 1e9 for rate in copies(tiny)],
        "GB/s",
    )
    if on_gpu:
        with tf.device("CPU:0"):
            host = tf.Variable(tf.random.normal([2**26]))

        @tf.function  # outside of one TensorFlow keeps the copy of a tensor, and makes no other
        def to_device() -> tf.Tensor:
            with tf.device("CPU:0"):
                values = host.read_value()
            with tf.device("GPU:0"):
                return tf.negative(values)

        rates = [4 * 2**26 / seconds / 1e9 for seconds in _seconds(to_device)]
        yield Figure("peak", "copy from the host", "one way", rates, "GB/s")


def products(precision: str, tiny: bool) -> list[float]:
    """Return FLOP/s of a product of two matrices in each round."""
    side = 256 if tiny else 8192
    left, right = (tf.cast(tf.random.normal([side, side]), precision) for _ in range(2))
    return [
        2 * side**3 / seconds for seconds in _seconds(lambda: tf.matmul(left, right))
    ]


def copies(tiny: bool) -> list[float]:
    """Return bytes read and written a second by a copy on the device in each round."""
    values = tf.random.normal([2 ** (20 if tiny else 28)])
    return [
        8 * len(values) / seconds for seconds in _seconds(lambda: tf.negative(values))
    ]


def _products(subject: str, precision: str, tiny: bool) -> Figure:
    side = 256 if tiny else 8192
    rates = [rate / 1e12 for rate in products(precision, tiny)]
    return Figure(
        "peak", subject, "matrix product", rates, "TFLOP/s", note=f"of side {side}"
    )


def _seconds(call: Callable[[], tf.Tensor]) -> list[float]:
    """Return the seconds of one call in each round."""
    count = repeats(call, SECONDS)

    def turn() -> None:
        for _ in range(count):
            call()

    return [seconds / count for seconds in alternate({"": turn}, ROUNDS)[""]]
