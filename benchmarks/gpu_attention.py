"""A piece of `benchmarks/gpu.py`: attention by cuDNN beside Keras'.

On a CPU, where cuDNN is not, its formula is computed in its place: a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from benchmarks.figures import Figure, ratios
from benchmarks.gpu_device import setup
from benchmarks.turns import alternate_repeated, repeats
from pipeline.accumulation.fused_attention import fused, reference
from pipeline.accumulation.xla_internals import Attention

ROUNDS = 9
# (batch, time, heads, width) of the queries, keys and values.
SHAPE = (32, 512, 16, 64)
CHECKED_SHAPE = (4, 512, 16, 64)  # in float64, too
TINY_SHAPE = (2, 16, 2, 8)
NAMES = ("output", "dQ", "dK", "dV")
# As far from float64 as Keras', whose probabilities are rounded to half precision.
MOST_ERROR = 1.5

AttentionFunction = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]
# The output and the gradients of an attention.
Results = Callable[..., list[tf.Tensor]]


def attention(tiny: bool) -> Iterator[Figure]:
    """Yield errors, elements that differ from run to run, and times, in bfloat16."""
    on_gpu = setup("bfloat16").on_gpu
    shape = TINY_SHAPE if tiny else SHAPE
    checked_shape = TINY_SHAPE if tiny else CHECKED_SHAPE
    turn_seconds = 0.01 if tiny else 0.3
    for subject, causal in (("causal", True), ("no mask", False)):
        by_cudnn = _results(_cudnn_attention(causal, on_gpu), xla=True)
        by_keras = _results(_keras_attention(causal), xla=True)
        yield from _errors(subject, by_cudnn, by_keras, causal, checked_shape)

        inputs = _inputs(shape)
        yield from _differences(subject, by_cudnn, inputs)
        yield _times(subject, by_cudnn, by_keras, inputs, turn_seconds)


def _errors(
    subject: str, by_cudnn: Results, by_keras: Results, causal: bool, shape: tuple
) -> Iterator[Figure]:
    """Yield ‖cuDNN − float64‖ ÷ ‖Keras − float64‖ of the output and the gradients."""
    inputs = _inputs(shape)
    exact_inputs = [tf.cast(tensor, tf.float64) for tensor in inputs]
    exact = _results(_keras_attention(causal), xla=False)(*exact_inputs)
    results = zip(NAMES, by_cudnn(*inputs), by_keras(*inputs), exact, strict=True)
    for name, ours, theirs, expected in results:
        error = _error(ours, expected)
        error_of_keras = _error(theirs, expected)
        yield Figure(
            "attention",
            subject,
            f"error of {name} ÷ that of Keras",
            [error / error_of_keras],
            at_most=MOST_ERROR,
            note=f"{error:.2g} and {error_of_keras:.2g} from float64",
        )


def _differences(
    subject: str, by_cudnn: Results, inputs: list[tf.Tensor]
) -> Iterator[Figure]:
    """Yield how many elements of each result differ in another run."""
    first = by_cudnn(*inputs)
    second = by_cudnn(*inputs)
    for name, result, repeated in zip(NAMES, first, second, strict=True):
        count = int(tf.math.count_nonzero(result != repeated))
        what = f"elements of {name} that differ in a second run"
        yield Figure("attention", subject, what, [count], note=f"of {tf.size(result)}")


def _times(
    subject: str,
    by_cudnn: Results,
    by_keras: Results,
    inputs: list[tf.Tensor],
    turn_seconds: float,
) -> Figure:
    """Return the time of forward and backward, relative to Keras' under XLA."""
    calls = {"cuDNN": lambda: by_cudnn(*inputs), "Keras": lambda: by_keras(*inputs)}
    count = repeats(calls["Keras"], turn_seconds)
    turns = alternate_repeated(calls, count, ROUNDS)
    best = {name: min(seconds) / count * 1e3 for name, seconds in turns.items()}
    return Figure(
        "attention",
        subject,
        "forward and backward, cuDNN ÷ Keras",
        ratios(turns["cuDNN"], turns["Keras"]),
        best=best,
        best_unit="ms",
        note=" × ".join(map(str, inputs[0].shape)),
    )


def _cudnn_attention(causal: bool, on_gpu: bool) -> AttentionFunction:
    compute = fused if on_gpu else reference

    def attend(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        scale = query.shape[-1] ** -0.5
        return compute(Attention(query, key, value, scale, causal))

    return attend


def _keras_attention(causal: bool) -> AttentionFunction:
    def attend(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        return keras.ops.dot_product_attention(query, key, value, is_causal=causal)

    return attend


def _results(attend: AttentionFunction, xla: bool) -> Results:
    """Return a function of query, key, value and the gradient by the output."""

    @tf.function(autograph=False, jit_compile=xla)
    def results(
        query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, by_output: tf.Tensor
    ) -> list[tf.Tensor]:
        inputs = [query, key, value]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output = attend(*inputs)
        return [output, *tape.gradient(output, inputs, by_output)]

    return results


def _inputs(shape: tuple[int, ...]) -> list[tf.Tensor]:
    """Return query, key, value and the gradient by the output, in bfloat16."""
    generator = np.random.default_rng(0)
    arrays = [generator.normal(size=shape) for _ in range(4)]
    return [tf.constant(array, tf.bfloat16) for array in arrays]


def _error(result: tf.Tensor, exact: tf.Tensor) -> float:
    difference = tf.norm(tf.cast(result, tf.float64) - exact)
    return float(difference / tf.norm(exact))
