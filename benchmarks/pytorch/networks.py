"""The workloads in PyTorch, weight for weight those of `benchmarks.keras_models`."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.workloads import (
    Convolutions,
    Dense,
    Embedding,
    ResNet,
    Transformer,
    Workload,
)

# The faster of both layouts: for `cnn` by far, for `resnet18` slower by a tenth.
CHANNELS_LAST = ("cnn",)
EPSILON = 1e-3  # in the norms of layers, as Keras has it


def build(workload: Workload) -> nn.Module:
    """Build the model of a workload."""
    network = workload.network
    if isinstance(network, Transformer):
        return TransformerModel(network, workload.classes, workload.input_shape[0])
    if isinstance(network, Embedding):
        return EmbeddingModel(network, workload.classes)
    if isinstance(network, Dense):
        return dense_model(network, workload.input_shape[0], workload.classes)

    if isinstance(network, ResNet):
        model = resnet18(workload.classes)
    else:
        model = convolutional_model(network, workload.classes)
    if workload.name in CHANNELS_LAST:
        model = model.to(memory_format=torch.channels_last)
    return model


def takes_images(workload: Workload) -> bool:
    """Return whether examples are images, whose channels PyTorch has first."""
    return isinstance(workload.network, Convolutions | ResNet)


def dense_model(network: Dense, inputs: int, classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise([inputs, *network.units]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(network.units[-1], classes))


def convolutional_model(network: Convolutions, classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise([3, *network.filters]):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers.pop()  # the last one is not pooled
    logits = nn.Linear(network.filters[-1], classes)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), logits)


class EmbeddingModel(nn.Module):
    """The mean of the rows that an example looks up, and one dense layer.

    The gradient of the table consists of these rows alone.
    """

    def __init__(self, network: Embedding, classes: int) -> None:
        super().__init__()
        self.table = nn.Embedding(network.rows, network.width, sparse=True)
        self.logits = nn.Linear(network.width, classes)

    def forward(self, rows: Tensor) -> Tensor:
        return self.logits(self.table(rows).mean(1))


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.first = _normed_convolution(before, after, 3, stride)
        self.second = _normed_convolution(after, after, 3)
        if stride == 1 and before == after:
            self.shortcut: nn.Module = nn.Identity()
        else:
            self.shortcut = _normed_convolution(before, after, 1, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(functional.relu(self.first(inputs)))
        return functional.relu(hidden + self.shortcut(inputs))


def resnet18(classes: int) -> nn.Module:
    layers: list[nn.Module] = [_normed_convolution(3, 64, 3), nn.ReLU()]
    before = 64
    for stage in range(4):
        after = 64 * 2**stage
        stride = 2 if stage > 0 else 1
        layers += [BasicBlock(before, after, stride), BasicBlock(after, after, 1)]
        before = after
    logits = nn.Linear(before, classes)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), logits)


class TransformerBlock(nn.Module):
    """Causal attention and two dense layers, each with its norm before it."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, EPSILON)
        self.dense_norm = nn.LayerNorm(width, EPSILON)
        self.inputs = nn.Linear(width, 3 * width)
        self.outputs = nn.Linear(width, width)
        self.dense = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attended(self.attention_norm(hidden))
        return hidden + self.dense(self.dense_norm(hidden))

    def _attended(self, normed: Tensor) -> Tensor:
        batch, length, width = normed.shape
        projected = self.inputs(normed)
        projected = projected.view(batch, length, 3, self.heads, width // self.heads)
        # Each is (batch, heads, length, width of a head).
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        return self.outputs(attended.transpose(1, 2).reshape(batch, length, width))


class TransformerModel(nn.Module):
    """Maps tokens (batch, length) to logits (batch, vocabulary, length).

    PyTorch's cross-entropy needs this order. The argument `length` is the maximum.
    """

    def __init__(self, network: Transformer, vocabulary: int, length: int):
        super().__init__()
        width = network.width
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.05 * torch.randn(length, width))
        blocks = [TransformerBlock(width, network.heads) for _ in range(network.layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width, EPSILON)
        self.logits = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.positions[: tokens.shape[1]]
        hidden = self.blocks(self.tokens(tokens) + positions)
        return self.logits(self.norm(hidden)).transpose(1, 2)


def _normed_convolution(
    before: int, after: int, size: int, stride: int = 1
) -> nn.Module:
    convolution = nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after))
