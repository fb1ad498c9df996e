"""What this package uses of Keras' private parts; read in Keras 3.15.

_keras_mask       on an output: which of its elements count; the loss and the metrics of `fit` read it there too
_keras_logits     on a softmax's or a sigmoid's output: what a cross-entropy with `from_logits=False` is computed from
_flatten_layers   all layers of a model, those inside of others and in lists too; `layers` has the outermost alone
global_seed_generator     where `keras.random` without a seed draws from; made by its first draw, and no layer has it
_batches_seen_since_last_saving, _last_batch_seen, _current_epoch   of `ModelCheckpoint`: when it saves, and under which
                  epoch
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

MODEL_CHECKPOINT_KEEPS = ("_batches_seen_since_last_saving", "_last_batch_seen", "_current_epoch")


def mask_of(output: Any) -> tf.Tensor | None:
    """Return the mask that Keras keeps on a layer's output; None where there is none."""
    return getattr(output, "_keras_mask", None)


def logits_of(output: Any) -> tf.Tensor | None:
    """Return the logits that an output was computed from; None where Keras keeps none."""
    return getattr(output, "_keras_logits", None)


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """Return the layers of a model and those inside of them, without the model itself."""
    return list(model._flatten_layers(include_self=False))


def global_seed() -> keras.Variable | None:
    """Return the state of Keras' global seed generator; None where nothing has drawn from it."""
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state


def make_global_seed() -> None:
    """Make the global seed generator as its first draw does, and draw nothing."""
    seed_generator.global_seed_generator()
