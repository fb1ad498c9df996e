"""What this package uses of Keras' private parts; read in Keras 3.15.

_keras_mask       on an output: which of its elements count; the loss and the metrics of `fit` read it there too
_keras_logits     on a softmax's or a sigmoid's output: what a cross-entropy with `from_logits=False` is computed from
_flatten_layers   all layers of a model, those inside of others and in lists too; `layers` has the outermost alone
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


def mask_of(output: Any) -> tf.Tensor | None:
    """Return the mask that Keras keeps on a layer's output; None where there is none."""
    return getattr(output, "_keras_mask", None)


def logits_of(output: Any) -> tf.Tensor | None:
    """Return the logits that an output was computed from; None where Keras keeps none."""
    return getattr(output, "_keras_logits", None)


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """Return the layers of a model and those inside of them, without the model itself."""
    return list(model._flatten_layers(include_self=False))
