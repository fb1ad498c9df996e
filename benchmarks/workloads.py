"""The workloads: the network, the input and the batch of each.

A network is described by its sizes. `benchmarks.keras_models` builds it in Keras and
`benchmarks.pytorch.networks` in PyTorch; this module imports neither.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

LEARNING_RATE = 1e-4  # of Adam
EPOCH = 32  # effective batches


@dataclass(frozen=True)
class Dense:
    """Dense layers with ReLU, and one for the logits."""

    units: tuple[int, ...]


@dataclass(frozen=True)
class Convolutions:
    """Convolutions of 3×3 with ReLU, the mean over the image, and one dense layer.

    Max-pooling follows each convolution except the last.
    """

    filters: tuple[int, ...]


@dataclass(frozen=True)
class Embedding:
    """The mean of the rows that an example looks up in a table, and one dense layer."""

    rows: int
    width: int


@dataclass(frozen=True)
class ResNet:
    """A ResNet of He et al. 2015."""

    depth: int


@dataclass(frozen=True)
class Transformer:
    """Causal blocks with the norms first, and one dense layer; a label for each token.

    The vocabulary is `Workload.classes`, the length is that of the input.
    """

    layers: int
    width: int
    heads: int


Network = Dense | Convolutions | Embedding | ResNet | Transformer


@dataclass(frozen=True)
class Workload:
    """A network, its input, and how an effective batch is cut.

    Attributes:
        name: in the tables.
        network: its sizes.
        input_shape: of an example.
        classes: labels are less than this.
        micro: examples of a micro-batch.
        factor: micro-batches of an effective batch.
        integers_below: inputs are integers less than this; None for real inputs.
        label_dtype: of the labels.
        is_large: an update takes about a second on two cores.
    """

    name: str
    network: Network
    input_shape: tuple[int, ...]
    classes: int
    micro: int
    factor: int
    integers_below: int | None = None
    label_dtype: str = "int64"
    is_large: bool = False

    @property
    def effective(self) -> int:
        """The examples of an effective batch."""
        return self.micro * self.factor

    @property
    def tokens(self) -> int:
        """The tokens of an example that have labels; 0 if the example has one label."""
        if isinstance(self.network, Transformer):
            return self.input_shape[0]
        return 0

    def examples(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return noise with labels: training takes as long as on any other values."""
        generator = np.random.default_rng(0)
        shape = (count, *self.input_shape)
        if self.integers_below is None:
            x = generator.random(shape, np.float32)
        else:
            x = generator.integers(0, self.integers_below, shape, np.int32)

        label_shape = x.shape if self.tokens else (count,)
        y = generator.integers(0, self.classes, label_shape, self.label_dtype)
        return x, y


# Measured by `python -m benchmarks`.
_ON_A_CPU = (
    Workload(
        name="mlp",
        network=Dense((128, 128)),
        input_shape=(64,),
        classes=10,
        micro=32,
        factor=8,
    ),
    # 9 million weights.
    Workload(
        name="wide",
        network=Dense((2048, 2048, 2048)),
        input_shape=(256,),
        classes=10,
        micro=32,
        factor=8,
    ),
    Workload(
        name="cnn",
        network=Convolutions((32, 64, 64)),
        input_shape=(32, 32, 3),
        classes=10,
        micro=32,
        factor=8,
    ),
    Workload(
        name="embedding",
        network=Embedding(rows=1_000_000, width=64),
        input_shape=(16,),
        classes=10,
        micro=32,
        factor=8,
        integers_below=1_000_000,
    ),
    # 11 million weights.
    Workload(
        name="resnet18",
        network=ResNet(18),
        input_shape=(32, 32, 3),
        classes=10,
        micro=8,
        factor=4,
        is_large=True,
    ),
    # Half a million weights; the tokens are bytes.
    Workload(
        name="small_transformer",
        network=Transformer(layers=2, width=128, heads=4),
        input_shape=(64,),
        classes=256,
        micro=32,
        factor=4,
        integers_below=256,
    ),
    # 11 million weights; the tokens are bytes.
    Workload(
        name="transformer10m",
        network=Transformer(layers=6, width=384, heads=6),
        input_shape=(64,),
        classes=256,
        micro=8,
        factor=4,
        integers_below=256,
        is_large=True,
    ),
)
WORKLOADS = {workload.name: workload for workload in _ON_A_CPU}
NAMES = tuple(WORKLOADS)

# Trained by `benchmarks/gpu.py`. The micro-batches of the large ones fit into 40 GB in
# float32; if one does not fit, it is halved.
_ON_A_GPU = (
    Workload(
        name="resnet18",
        network=ResNet(18),
        input_shape=(16, 16, 3),
        classes=10,
        micro=32,
        factor=4,
        label_dtype="int32",
    ),
    Workload(
        name="resnet50",
        network=ResNet(50),
        input_shape=(224, 224, 3),
        classes=1000,
        micro=128,
        factor=4,
        label_dtype="int32",
    ),
    Workload(
        name="transformer",
        network=Transformer(layers=2, width=64, heads=4),
        input_shape=(64,),
        classes=256,
        micro=32,
        factor=4,
        integers_below=256,
        label_dtype="int32",
    ),
    # 10.6 million weights.
    Workload(
        name="transformer10m",
        network=Transformer(layers=8, width=256, heads=4),
        input_shape=(256,),
        classes=8192,
        micro=64,
        factor=4,
        integers_below=8192,
        label_dtype="int32",
    ),
    # 353 million weights.
    Workload(
        name="transformer350m",
        network=Transformer(layers=24, width=1024, heads=16),
        input_shape=(512,),
        classes=24576,
        micro=8,
        factor=4,
        integers_below=24576,
        label_dtype="int32",
    ),
)
_GPU_WORKLOADS = {workload.name: workload for workload in _ON_A_GPU}


def on_gpu(name: str, tiny: bool = False) -> Workload:
    """Return a workload of `benchmarks/gpu.py`; with `tiny` one for a test on a CPU."""
    workload = _GPU_WORKLOADS[name]
    if not tiny:
        return workload
    if isinstance(workload.network, ResNet):
        return dataclasses.replace(
            workload,
            network=ResNet(10),
            input_shape=(8, 8, 3),
            classes=10,
            micro=2,
        )
    return dataclasses.replace(
        workload,
        network=Transformer(layers=1, width=16, heads=2),
        input_shape=(8,),
        classes=32,
        micro=2,
        integers_below=32,
    )
