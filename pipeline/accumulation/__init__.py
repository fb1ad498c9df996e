"""The update: an effective batch in, one optimizer step out.

In: a Keras model, a loss, an optimizer and a batch `(x, y)` or `(x, y, sample_weight)`. Out: gradient sums, divided
once by the weight of the whole update, and what is logged of it: loss, learning rate, gradient norm. Nothing else of
`pipeline` is imported here, so this folder can be copied into any project.
"""

from .accumulating_model import AccumulatingModel
from .accumulating_optimizer import AccumulatingOptimizer
from .adam import fused_adam
from .batch import (
    Batches,
    BatchTotals,
    Share,
    batch_totals,
    examples_in,
    parts_of,
    slice_of,
    slice_specs,
    spread,
)
from .cuda_libraries import load_cuda_libraries
from .dense import transposed_gradients, wide_layers
from .evaluation import Evaluation
from .flops import training_flops
from .forward_effects import (
    Forward,
    batch_dependent_layers,
    trace_forward,
    unknown_to_keras,
    unsupported,
)
from .gradient_accumulator import GradientAccumulator
from .gradient_sums import GradientSums
from .keras_internals import (
    MODEL_CHECKPOINT_KEEPS,
    calling,
    global_seed,
    layers_of,
    logits_of,
    mask_of,
    replaced,
)
from .loss_sums import added_losses, weighted_sum
from .moving_statistics import assign_moving_statistics, normalising_layers
from .noise_scale import NoiseScale
from .objective import (
    Losses,
    Metrics,
    Objective,
    Term,
    by_name,
    couples_examples,
    labels_by_name,
)
from .over_effective_batch import not_supported
from .same_noise import drawn, keys_of, noisy_layers
from .update import Update, accumulate_gradients
from .xla import compiled_by_xla, shapes_compiled

__all__ = [
    "MODEL_CHECKPOINT_KEEPS", "AccumulatingModel", "AccumulatingOptimizer", "BatchTotals", "Batches", "Evaluation",
    "Forward", "GradientAccumulator", "GradientSums", "Losses", "Metrics", "NoiseScale", "Objective", "Share", "Term",
    "Update", "accumulate_gradients", "added_losses", "assign_moving_statistics", "batch_dependent_layers",
    "batch_totals", "by_name", "calling", "compiled_by_xla", "couples_examples", "drawn", "examples_in", "fused_adam",
    "global_seed", "keys_of", "labels_by_name", "layers_of", "load_cuda_libraries", "logits_of", "mask_of",
    "noisy_layers", "normalising_layers", "not_supported", "parts_of", "replaced", "shapes_compiled", "slice_of",
    "slice_specs", "spread", "trace_forward", "training_flops", "transposed_gradients", "unknown_to_keras",
    "unsupported", "weighted_sum", "wide_layers",
]  # fmt: skip

load_cuda_libraries()


def __dir__() -> list[str]:
    return __all__
