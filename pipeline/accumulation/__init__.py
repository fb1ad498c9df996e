"""The update: an effective batch in, one optimizer step out.

In: a Keras model, a loss, an optimizer and a batch `(x, y)` or `(x, y, sample_weight)`.
Out: gradient sums, divided once by the weight of the update, and what is logged of it:
loss, learning rate, gradient norm. Nothing else of `pipeline` is imported here, so this
folder can be copied into any project. `accumulate` has the algorithm.
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

__all__ = [
    "AccumulatingModel",
    "AccumulatingOptimizer",
    "Evaluation",
    "GradientAccumulator",
    "GradientSums",
    "NoiseScale",
    "Update",
    "accumulate_gradients",
    "fused_adam",
    "training_flops",
]

cuda_libraries.load_cuda_libraries()


def __getattr__(name: str) -> Any:
    """Return a former export, with a warning that names its new place."""
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
