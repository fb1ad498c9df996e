"""The update: an effective batch in, one optimizer step out.

In: a Keras model, a loss, an optimizer and a batch `(x, y)` or `(x, y, sample_weight)`. Out: gradient sums, divided
once by the weight of the whole update. Nothing else of `pipeline` is imported here, so this folder can be copied into
any project.
"""

from .evaluation import Evaluation
from .noise_scale import NoiseScale
from .update import GradientSums, Update, accumulate_gradients, update_metrics
from .weighting import weighted_sum

__all__ = [
    "Evaluation",
    "GradientSums",
    "NoiseScale",
    "Update",
    "accumulate_gradients",
    "update_metrics",
    "weighted_sum",
]
