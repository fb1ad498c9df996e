"""Model FLOPs: what the matrix products and convolutions of a network need, counted from the shapes of its layers.

A multiply-add counts 2. Forward and backward together count three times the forward pass: the backward pass multiplies
twice as often, once for the gradient of the inputs and once for that of the weights. Norms, activations, sums and
look-ups count nothing. So a dense network needs 6 FLOPs for each weight and example, as in Kaplan et al. 2020, «Scaling
Laws for Neural Language Models», section 2.1. Attention needs 4 × length × width more for each token in the forward
pass, for queries times keys and scores times values, as in appendix B of Chowdhery et al. 2022, «PaLM»: of a causal
mask the whole square counts, as it is computed.
"""

from __future__ import annotations

import math

import keras

from benchmarks.networks import Positions

LOOKED_UP = (keras.layers.Embedding, Positions)


def of_training(model: keras.Model) -> int:
    """Return the FLOPs of one example, forward and backward."""
    return 3 * of_forward(model)


def of_forward(model: keras.Model) -> int:
    """Return the FLOPs of one example in the forward pass of a functional model, each layer of which is called once.

    Raises:
        TypeError: a layer has a matrix of weights, and how often it multiplies is not known here.
    """
    return 2 * sum(_multiply_adds(layer) for layer in model.layers)


def _multiply_adds(layer: keras.Layer) -> int:
    if isinstance(layer, keras.Model):
        return of_forward(layer) // 2
    if isinstance(layer, keras.layers.Dense):
        return _size(layer.output) * layer.kernel.shape[0]
    if isinstance(layer, keras.layers.Conv2D):
        return _size(layer.output) * math.prod(layer.kernel.shape[:3])  # height × width × inputs of a group
    if isinstance(layer, keras.layers.EinsumDense):
        given, _, made = layer.equation.partition("->")
        labels = zip(given.split(",")[1], layer.kernel.shape, strict=True)
        return _size(layer.output) * math.prod(size for label, size in labels if label not in made)
    if isinstance(layer, keras.layers.MultiHeadAttention):
        return _attention(layer)
    if any(len(weight.shape) > 1 for weight in layer.weights) and not isinstance(layer, LOOKED_UP):
        raise TypeError(f"no FLOPs are known for a layer of the kind {type(layer).__name__}: {layer.name}")
    return 0


def _attention(layer: keras.layers.MultiHeadAttention) -> int:
    query, value, *key = layer.input if isinstance(layer.input, list | tuple) else [layer.input] * 2
    length, others = query.shape[1], value.shape[1]  # (examples, length, width)
    assert not key or key[0].shape[1] == others
    of_queries = math.prod(layer.query_dense.kernel.shape) + math.prod(layer.output_dense.kernel.shape)
    of_others = math.prod(layer.key_dense.kernel.shape) + math.prod(layer.value_dense.kernel.shape)
    products = layer.num_heads * length * others * (layer.key_dim + layer.value_dim)
    return length * of_queries + others * of_others + products


def _size(tensor: keras.KerasTensor) -> int:
    return math.prod(tensor.shape[1:])
