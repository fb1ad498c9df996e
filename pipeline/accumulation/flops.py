"""Model FLOPs: the products of a forward and backward pass, counted in the graph that TensorFlow traces.

A multiply-add of a matrix product or a convolution counts 2; norms, activations, sums and look-ups count nothing, as in
appendix B of Chowdhery et al. 2022, «PaLM». The graph has no gradient by frozen layers or by the inputs of the first
one (grouped convolutions and cuDNN's RNNs compute it), the whole square of a causal mask, the padding at borders, and
twice what is rematerialized.
"""

import math
import re
import string

import keras
import tensorflow as tf

from .batch import Nest, batch_totals, examples_in, parts_of
from .keras_internals import function_graph
from .loss_sums import micro_batch_losses
from .objective import Losses, Objective, by_name

_GATES = {b"lstm": 4, b"gru": 3}
_CONVOLUTION = re.compile(
    r"(Conv[23]D|DepthwiseConv2dNative)(?:Backprop(Input|Filter)(?:V2)?)?"
)
_PRODUCT = re.compile(  # operations that multiply matrices, or may: how often is unknown without a formula here
    r".*(MatMul|Conv[23]?D|Einsum|RNN|LSTM|GRU|FFT|Cholesky|Svd|Qr|Eig|PyFunc|XlaCall|CustomCall).*"
    r"|(Log)?Matrix(Inverse|Solve.*|Triangular.*|Determinant|Exponential|SquareRoot|Logarithm)"
)


def training_flops(
    model: keras.Model, loss: Losses | Objective, batch: Nest
) -> tuple[float, list[str]]:
    """Return the model FLOPs of an example, and the kinds of operations that could not be counted.

    The arguments are as for `accumulate_gradients`, with a batch of a few examples. Tracing does not change the model.
    """
    parts, goal = parts_of(batch), Objective.of(loss)

    @tf.function(autograph=False)
    def gradients() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            outputs = by_name(model, model(parts[0], training=True))
            *_, minimised = micro_batch_losses(
                model, goal, outputs, parts, batch_totals(parts)
            )
            total = tf.add_n([tf.cast(part.total, tf.float32) for part in minimised])
        found = tape.gradient(
            total, [variable.value for variable in model.trainable_variables]
        )
        return [gradient for gradient in found if gradient is not None]

    graph, unknown = gradients.get_concrete_function().graph, set[str]()
    return _of_graph(graph, unknown) / int(examples_in(parts)), sorted(unknown)


def _of_graph(graph: tf.Graph, unknown: set[str]) -> int:
    """Count what the outputs of a traced function need."""
    total, left, seen = 0, [output.op for output in graph.outputs], set[str]()
    while left:
        operation = left.pop()
        if operation.name not in seen:
            seen.add(operation.name)
            left += [each.op for each in operation.inputs]
            try:
                total += _of_operation(operation, unknown)
            except (TypeError, ValueError):  # a size is unknown while it is traced
                unknown.add(operation.type)
    return total


def _of_operation(operation: tf.Operation, unknown: set[str]) -> int:
    kind, inputs, outputs = operation.type, operation.inputs, operation.outputs
    plain = kind.removeprefix("Stateful").removeprefix("Stateless")
    if functions := {
        "PartitionedCall": ["f"],
        "While": ["body"],
        "If": ["then_branch", "else_branch"],
    }.get(plain):
        inside = max(
            _of_graph(function_graph(operation, name), unknown) for name in functions
        )
        return (
            inside * _iterations(operation)
            if inside and functions == ["body"]
            else inside
        )
    if kind in ("MatMul", "BatchMatMulV2", "BatchMatMulV3"):
        transposed = operation.get_attr("transpose_a" if kind == "MatMul" else "adj_x")
        return (
            2 * math.prod(outputs[0].shape) * inputs[0].shape[-2 if transposed else -1]
        )
    if kind == "Einsum":
        return _of_einsum(
            operation.get_attr("equation").decode(),
            [each.shape.as_list() for each in inputs],
        )
    if found := _CONVOLUTION.fullmatch(kind):
        made, kernel = (
            inputs[2] if found[2] else outputs[0],
            outputs[0] if found[2] == "Filter" else inputs[1],
        )
        return (
            2
            * math.prod(made.shape)
            * math.prod(kernel.shape[: 2 if found[1].startswith("D") else -1])
        )
    if kind.startswith("CudnnRNN") and (
        gates := _GATES.get(operation.get_attr("rnn_mode"))
    ):
        (steps, examples, width), (layers, _, units) = inputs[0].shape, inputs[1].shape
        if layers == 1:
            return (
                (4 if "Backprop" in kind else 2)
                * steps
                * examples
                * gates
                * units
                * (width + units)
            )
    if _PRODUCT.fullmatch(kind):
        unknown.add(kind)
    return 0


def _of_einsum(equation: str, shapes: list[list[int]]) -> int:
    """Count a multiply-add for each combination of the indices of two inputs; those of `...` meet from the last one."""
    sizes: dict[str, int] = {}
    for labels, shape in zip(
        equation.partition("->")[0].split(","), shapes, strict=True
    ):
        dots = string.digits[
            len(string.digits) + len(labels) - len("...") - len(shape) :
        ]
        for label, size in zip(labels.replace("...", dots), shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    return 2 * math.prod(sizes.values()) if len(shapes) > 1 else 0


def _iterations(loop: tf.Operation) -> int:
    """Return the `maximum_iterations` of a loop or of the loop whose gradient it is; raise if they are unknown."""
    count = loop.inputs[1]
    if (
        count.op.type == "Max" and count.op.inputs[0].shape.rank == 0
    ):  # as the loop of Keras' RNNs has it
        count = count.op.inputs[0]
    known = tf.get_static_value(count)
    if known is None or known < 0:
        raise ValueError("a loop without a known end")
    return int(known)
