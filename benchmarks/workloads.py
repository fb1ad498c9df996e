"""The workloads that all parts share: their sizes and their examples. Imports neither TensorFlow nor PyTorch.

mlp             64-128-128-10
wide            256-2048-2048-2048-10, 9 M weights
cnn             three convolutions on images of 32×32×3
embedding       a table of 1,000,000 × 64 of which an example reads 16 rows, and one dense layer
resnet18        He et al. 2015 for images of 32×32×3, 11 M weights
transformer10m  six causal blocks of width 384 over 64 bytes, 11 M weights
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Sizes(NamedTuple):
    """How one effective batch is cut."""

    micro: int
    factor: int

    @property
    def effective(self) -> int:
        return self.micro * self.factor


SHAPES = {
    "mlp": (64,),
    "wide": (256,),
    "cnn": (32, 32, 3),
    "embedding": (16,),
    "resnet18": (32, 32, 3),
    "transformer10m": (64,),
}
NAMES = tuple(SHAPES)
LARGE = {
    "resnet18": Sizes(8, 4),
    "transformer10m": Sizes(8, 4),
}  # so that an update takes seconds on two cores
CLASSES = 10
ROWS, BYTES = 1_000_000, 256  # of the two embeddings
INTEGERS = {
    "embedding": ROWS,
    "transformer10m": BYTES,
}  # what the inputs of these are less than
TRANSFORMER = {"layers": 6, "width": 384, "heads": 6, "vocabulary": BYTES, "length": 64}
RATE = 1e-4  # of Adam
EPOCH = 32  # effective batches


def sizes(name: str) -> Sizes:
    return LARGE.get(name, Sizes(32, 8))


def examples(name: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise with labels: what it is does not change how long it takes."""
    generator = np.random.default_rng(0)
    if name in INTEGERS:
        x = generator.integers(0, INTEGERS[name], (count, *SHAPES[name]), np.int32)
    else:
        x = generator.random((count, *SHAPES[name]), np.float32)
    most, shape = (BYTES, x.shape) if name == "transformer10m" else (CLASSES, (count,))
    return x, generator.integers(0, most, shape)
