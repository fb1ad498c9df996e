"""Model FLOPs: the products of a forward and backward pass, counted in a traced graph.

A multiply-add in a matrix product or a convolution counts as 2 FLOPs; norms,
activations, sums and look-ups count as 0, as in appendix B of Chowdhery et al. 2022,
"PaLM". The graph contains no gradients for frozen layers, and none for the inputs of
the first layer, except in grouped convolutions and cuDNN's RNNs. Everything else in the
graph is counted: all attention scores under a causal mask, the padding at borders, and
rematerialized operations twice.
"""

from __future__ import annotations

import math
import re
import string

import keras
import tensorflow as tf

from .batch import Nest, batch_totals, examples_in, parts_of
from .keras_internals import function_graph
from .loss_sums import micro_batch_losses
from .objective import Losses, Objective, by_name
from .over_effective_batch import GatheredBatch, batch_losses, kept

# Operations that call functions, with the attributes that name the functions. If an
# operation has several branches, only the most expensive branch is counted.
_CALLS = {
    "PartitionedCall": ["f"],
    "While": ["body"],
    "If": ["then_branch", "else_branch"],
}
_GATES = {b"lstm": 4, b"gru": 3}
_CONVOLUTION = re.compile(
    r"(?P<forward>Conv[23]D|DepthwiseConv2dNative)"
    r"(Backprop(?P<gradient_by>Input|Filter)(V2)?)?"
)
# Operations that contain or may contain matrix products. An operation for which this
# module has no formula is reported as unknown.
_PRODUCT = re.compile(
    r".*(MatMul|Conv[23]?D|Einsum|RNN|LSTM|GRU|FFT|Cholesky|Svd|Qr|Eig"
    r"|PyFunc|XlaCall|CustomCall).*"
    r"|(Log)?Matrix(Inverse|Solve.*|Triangular.*|Determinant|Exponential"
    r"|SquareRoot|Logarithm)"
)


def training_flops(
    model: keras.Model, loss: Losses | Objective, batch: Nest
) -> tuple[float, list[str]]:
    """Return the model FLOPs per example, and the operations that were not counted.

    The model is only traced, and not changed. If the losses are over the effective
    batch, the first of the two forward passes is not counted.

    Args:
        model: a built model.
        loss: see `accumulate_gradients`. Losses over the effective batch are computed
            over `batch`.
        batch: a batch of a few examples; see `accumulate_gradients`.

    Returns:
        The FLOPs per example, and the types of operations whose products could not be
        counted.
    """
    parts = parts_of(batch)
    objective = Objective.from_loss(loss)
    examples = int(examples_in(parts))

    @tf.function(autograph=False)
    def gradients() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            outputs = by_name(model, model(parts[0], training=True))
            losses = micro_batch_losses(
                model, objective, outputs, parts, batch_totals(parts)
            )
            minimized = [part.total for part in losses.minimized]
            if objective.over_batch:
                effective_batch = GatheredBatch(kept(outputs, examples), *parts[1:])
                minimized.append(batch_losses(objective, effective_batch).minimized)
            total = tf.add_n([tf.cast(loss, tf.float32) for loss in minimized])
        variables = [variable.value for variable in model.trainable_variables]
        by_variables = tape.gradient(total, variables)
        return [gradient for gradient in by_variables if gradient is not None]

    counter = FlopCounter()
    flops = counter.count_graph(gradients.get_concrete_function().graph)
    return flops / examples, sorted(counter.unknown)


class FlopCounter:
    """Counts the FLOPs of graphs.

    Attributes:
        unknown: types of operations whose products could not be counted.
    """

    def __init__(self) -> None:
        self.unknown: set[str] = set()

    def count_graph(self, graph: tf.Graph) -> int:
        """Return the FLOPs that the outputs of a traced function need."""
        total = 0
        seen = set[str]()
        remaining = [output.op for output in graph.outputs]
        while remaining:
            operation = remaining.pop()
            if operation.name in seen:
                continue
            seen.add(operation.name)
            remaining += [tensor.op for tensor in operation.inputs]
            try:
                total += self.count(operation)
            except (TypeError, ValueError):  # a size was unknown during tracing
                self.unknown.add(operation.type)
        return total

    def count(self, operation: tf.Operation) -> int:
        """Return the FLOPs of an operation and of the functions that it calls."""
        kind = operation.type
        plain = kind.removeprefix("Stateful").removeprefix("Stateless")
        if plain in _CALLS:
            return self._count_call(operation, _CALLS[plain])
        if kind in ("MatMul", "BatchMatMulV2", "BatchMatMulV3"):
            return _count_matrix_product(operation)
        if kind == "Einsum":
            return _count_einsum(operation)
        if _CONVOLUTION.fullmatch(kind):
            return _count_convolution(operation)
        if _is_countable_rnn(operation):
            return _count_rnn(operation)
        if _PRODUCT.fullmatch(kind):
            self.unknown.add(kind)
        return 0

    def _count_call(self, operation: tf.Operation, attributes: list[str]) -> int:
        inside = 0
        for attribute in attributes:
            flops = self.count_graph(function_graph(operation, attribute))
            inside = max(inside, flops)
        if attributes == ["body"] and inside:
            return inside * _iterations(operation)
        return inside


def _count_matrix_product(operation: tf.Operation) -> int:
    attribute = "transpose_a" if operation.type == "MatMul" else "adj_x"
    transposed = operation.get_attr(attribute)
    left = operation.inputs[0]
    summed = left.shape[-2] if transposed else left.shape[-1]
    return 2 * math.prod(operation.outputs[0].shape) * summed


def _count_einsum(operation: tf.Operation) -> int:
    """Return the FLOPs of an einsum: 2 per combination of the indices of its inputs.

    The axes that `...` stands for are matched from the last axis backwards.
    """
    if len(operation.inputs) == 1:
        return 0
    sizes: dict[str, int] = {}
    equation = operation.get_attr("equation").decode()
    labels_of_inputs = equation.partition("->")[0].split(",")
    for labels, tensor in zip(labels_of_inputs, operation.inputs, strict=True):
        shape = tensor.shape.as_list()
        axes_in_dots = len(shape) - len(labels.replace("...", ""))
        dots = string.digits[len(string.digits) - axes_in_dots :]
        for label, size in zip(labels.replace("...", dots), shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    return 2 * math.prod(sizes.values())


def _count_convolution(operation: tf.Operation) -> int:
    """Return the FLOPs of a convolution: 2 per output element and weight of its filter.

    Each gradient of a convolution needs as many FLOPs as the convolution.
    """
    match = _CONVOLUTION.fullmatch(operation.type)
    assert match is not None
    # `convolved` has the shape that the forward pass returns.
    if match["gradient_by"] is None:
        convolved = operation.outputs[0]
        kernel = operation.inputs[1]
    elif match["gradient_by"] == "Input":
        convolved = operation.inputs[2]
        kernel = operation.inputs[1]
    else:
        convolved = operation.inputs[2]
        kernel = operation.outputs[0]
    if match["forward"] == "DepthwiseConv2dNative":
        weights_per_output = math.prod(kernel.shape[:2])
    else:
        weights_per_output = math.prod(kernel.shape[:-1])
    return 2 * math.prod(convolved.shape) * weights_per_output


def _is_countable_rnn(operation: tf.Operation) -> bool:
    """Return whether an operation is cuDNN's LSTM or GRU with a single layer."""
    if not operation.type.startswith("CudnnRNN"):
        return False
    if operation.get_attr("rnn_mode") not in _GATES:
        return False
    layers, _, _ = operation.inputs[1].shape
    return layers == 1


def _count_rnn(operation: tf.Operation) -> int:
    gates = _GATES[operation.get_attr("rnn_mode")]
    steps, examples, width = operation.inputs[0].shape
    _, _, units = operation.inputs[1].shape
    forward = 2 * steps * examples * gates * units * (width + units)
    return 2 * forward if "Backprop" in operation.type else forward


def _iterations(loop: tf.Operation) -> int:
    """Return the `maximum_iterations` of a loop, or of the loop of its forward pass.

    Raises:
        ValueError: the number of iterations is unknown.
    """
    count = loop.inputs[1]
    # In the loops of Keras' RNNs, it is the output of a maximum over a scalar.
    if count.op.type == "Max" and count.op.inputs[0].shape.rank == 0:
        count = count.op.inputs[0]
    iterations = tf.get_static_value(count)
    if iterations is None or iterations < 0:
        raise ValueError("a loop without a known end")
    return int(iterations)
