"""Gradient accumulation: one optimizer step per effective batch.

The input is a Keras model, a loss, an optimizer and a batch `(x, y)` or
`(x, y, sample_weight)`. The gradients of the micro-batches, whose losses are divided by
the total weight of the batch, add up to one gradient, which is applied. The results to
log are the loss, the metrics, the learning rate and the gradient norm. This package
imports nothing else from `pipeline`, so the folder can be copied into any project. The
docstring of `accumulate` describes the algorithm.
"""

import warnings
from typing import Any

from . import cuda_libraries, internals
from .accumulate import accumulate_gradients
from .accumulating_model import AccumulatingModel
from .accumulating_optimizer import AccumulatingOptimizer
from .adam import fused_adam
from .evaluation import Evaluation
from .flops import training_flops
from .gradient_accumulator import GradientAccumulator
from .gradient_sums import GradientSums
from .noise_scale import NoiseScale
from .update import Update
from .xla_lengths import choose_xla_lengths

__all__ = [
    "AccumulatingModel",
    "AccumulatingOptimizer",
    "Evaluation",
    "GradientAccumulator",
    "GradientSums",
    "NoiseScale",
    "Update",
    "accumulate_gradients",
    "choose_xla_lengths",
    "fused_adam",
    "training_flops",
]

cuda_libraries.load_cuda_libraries()


def __getattr__(name: str) -> Any:
    """Return a former export of this package; warn that it moved to `internals`."""
    if name not in internals.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{__name__}.{name} is deprecated: import it from {internals.__name__}",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(internals, name)


def __dir__() -> list[str]:
    return __all__
