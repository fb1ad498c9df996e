"""Metrics that are missing in Keras."""

import math
from typing import Any

import keras


@keras.saving.register_keras_serializable("pipeline")
class BitsPerToken(keras.metrics.SparseCategoricalCrossentropy):
    """Cross-entropy in bits per token, computed from logits.

    Padding is left out if its sample weights are 0. If tokens are bytes, the unit is
    bits per byte.
    """

    def __init__(self, name: str = "bits_per_token", dtype: Any = None):
        super().__init__(name=name, dtype=dtype, from_logits=True)

    def result(self) -> Any:
        """Return Σ wᵢ·lossᵢ / (ln 2 · Σ wᵢ) over all tokens i, with losses in nats."""
        return super().result() / math.log(2)

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype}
