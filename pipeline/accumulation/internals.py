"""The names of this package that other packages of this project use.

These names may change, except those that docs/accumulation.md describes, such as
`Objective`. Some names are here only because `pipeline.accumulation` used to export
them: imports from there still work, with a warning.
"""

from .batch import (
    Batches,
    BatchTotals,
    Share,
    batch_totals,
    examples_in,
    is_absent,
    parts_of,
    slice_of,
    slice_specs,
    spread,
)
from .cuda_libraries import load_cuda_libraries
from .dense import transposed_gradients, wide_layers
from .evaluation import Prediction
from .forward_effects import (
    Forward,
    batch_dependent_layers,
    differences_from_large_batch,
    trace_forward,
    unsupported,
    untracked_variables,
)
from .fused_attention import why_attention_is_not_fused
from .keras_internals import (
    MODEL_CHECKPOINT_KEEPS,
    TENSORBOARD_KEEPS,
    calling,
    global_seed,
    layers_of,
    logits_of,
    mask_of,
    replaced,
    with_mask_and_logits,
)
from .loss_sums import LossValues, losses_from_add_loss, weighted_sum
from .moving_statistics import assign_moving_statistics, normalizing_layers
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
from .padding import padded_parts, with_position_weights
from .padding_checks import check_noise, prepared_for_tokens
from .same_noise import draw_noise_seeds, noise_by_position, noisy_layers
from .token_cut import TokenLimit, cut_by_tokens
from .token_cut_for_xla import cut_for_xla
from .xla import compiled_by_xla, shapes_compiled

__all__ = [
    "MODEL_CHECKPOINT_KEEPS",
    "TENSORBOARD_KEEPS",
    "BatchTotals",
    "Batches",
    "Forward",
    "LossValues",
    "Losses",
    "Metrics",
    "Objective",
    "Prediction",
    "Share",
    "Term",
    "TokenLimit",
    "assign_moving_statistics",
    "batch_dependent_layers",
    "batch_totals",
    "by_name",
    "calling",
    "check_noise",
    "compiled_by_xla",
    "couples_examples",
    "cut_by_tokens",
    "cut_for_xla",
    "differences_from_large_batch",
    "draw_noise_seeds",
    "examples_in",
    "global_seed",
    "is_absent",
    "labels_by_name",
    "layers_of",
    "load_cuda_libraries",
    "logits_of",
    "losses_from_add_loss",
    "mask_of",
    "noise_by_position",
    "noisy_layers",
    "normalizing_layers",
    "not_supported",
    "padded_parts",
    "parts_of",
    "prepared_for_tokens",
    "replaced",
    "shapes_compiled",
    "slice_of",
    "slice_specs",
    "spread",
    "trace_forward",
    "transposed_gradients",
    "unsupported",
    "untracked_variables",
    "weighted_sum",
    "why_attention_is_not_fused",
    "wide_layers",
    "with_mask_and_logits",
    "with_position_weights",
]
