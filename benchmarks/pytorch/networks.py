"""The workloads in PyTorch, weight for weight those of `benchmarks.models`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.workloads import CLASSES, ROWS, TRANSFORMER

IMAGES = ("cnn", "resnet18")
CHANNELS_LAST = (
    "cnn",
)  # the faster of both layouts: for `cnn` by far, for `resnet18` slower by a tenth


def build(name: str) -> nn.Module:
    """Build the model of a workload."""
    model = {
        "mlp": lambda: dense(64, 128, 128),
        "wide": lambda: dense(256, 2048, 2048, 2048),
        "cnn": cnn,
        "embedding": Embedded,
        "resnet18": resnet18,
        "transformer10m": lambda: Transformer(**TRANSFORMER),
    }[name]()
    return (
        model.to(memory_format=torch.channels_last) if name in CHANNELS_LAST else model
    )


def dense(inputs: int, *units: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in zip((inputs, *units), units, strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(units[-1], CLASSES))


def cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)
    )


class Embedded(nn.Module):
    """The mean of the rows that an example reads, and one dense layer; the gradient holds these rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 64, sparse=True)
        self.logits = nn.Linear(64, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        return self.logits(self.table(rows).mean(1))


class Basic(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.first, self.second = (
            _convolved(before, after, 3, stride),
            _convolved(after, after, 3),
        )
        same = stride == 1 and before == after
        self.shortcut = nn.Identity() if same else _convolved(before, after, 1, stride)

    def forward(self, hidden: Tensor) -> Tensor:
        made = self.second(functional.relu(self.first(hidden)))
        return functional.relu(made + self.shortcut(hidden))


def resnet18() -> nn.Module:
    layers: list[nn.Module] = [_convolved(3, 64, 3), nn.ReLU()]
    before = 64
    for stage in range(4):
        after = 64 * 2**stage
        layers += [Basic(before, after, 2 if stage else 1), Basic(after, after, 1)]
        before = after
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES)
    )


class Block(nn.Module):
    """Causal attention and two dense layers, each with its norm before it."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        mixed = self.inputs(self.norms[0](hidden)).view(
            batch, length, 3, self.heads, width // self.heads
        )
        query, key, value = mixed.permute(
            2, 0, 3, 1, 4
        )  # each (batch, heads, length, width of a head)
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        hidden = hidden + self.outputs(
            attended.transpose(1, 2).reshape(batch, length, width)
        )
        return hidden + self.dense(self.norms[1](hidden))


class Transformer(nn.Module):
    """Tokens (batch, length) → logits (batch, vocabulary, length), as PyTorch's cross-entropy wants them."""

    def __init__(
        self, layers: int, width: int, heads: int, vocabulary: int, length: int
    ):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.05 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.blocks(self.tokens(tokens) + self.positions)
        return self.logits(self.norm(hidden)).transpose(1, 2)


def _convolved(before: int, after: int, size: int, stride: int = 1) -> nn.Module:
    convolution = nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after))
