"""What this package uses of Keras' private parts; read in Keras 3.15.

_keras_mask       on an output: which of its elements count; the loss and the metrics of `fit` read it there too
_keras_logits     on a softmax's or a sigmoid's output: what a cross-entropy with `from_logits=False` is computed from
_flatten_layers   all layers of a model, those inside of others and in lists too; `layers` has the outermost alone
global_seed_generator     where `keras.random` without a seed draws from; made by its first draw, and no layer has it
_batches_seen_since_last_saving, _last_batch_seen, _current_epoch   of `ModelCheckpoint`: when it saves, and under which
                  epoch
_compile_loss, _flat_losses, _compile_metrics, _flat_metrics, _flat_weighted_metrics, _loss_tracker   what `compile` has
                  made of its arguments, names such as "accuracy" resolved: the keys of the history are theirs, and
                  `EarlyStopping` looks for its metric there
_momentums, _velocities, _get_variable_index   of `Adam`: its moments, and which of them are a variable's; without them
                  an update of a model with many weights takes up to 2.5 times as long
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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


class CompiledLoss(NamedTuple):
    """What `compile` makes of one entry of `loss`."""

    path: tuple[Any, ...]  # of the output, in the nest of the outputs
    loss: keras.losses.Loss
    scale: float | None  # of `loss_weights`
    mean: keras.metrics.Mean | None  # over an epoch, as the history shows it; None for a single loss


def compiled_losses(model: keras.Model) -> list[CompiledLoss]:
    """Return the losses of a model after a `compute_loss`; none where it was compiled without."""
    made = model._compile_loss
    if made is None:
        return []
    means = made.metrics or [None] * len(made._flat_losses)
    return [
        CompiledLoss(path, loss, scale, mean)
        for (path, loss, scale, _), mean in zip(made._flat_losses, means, strict=True)
    ]


def compiled_metrics(
    model: keras.Model, names: Sequence[str]
) -> tuple[dict[str, list[keras.metrics.Metric]], dict[str, list[keras.metrics.Metric]]]:
    """Return `metrics` and `weighted_metrics` of a model by output, after a `compute_metrics`.

    Args:
        names: of the outputs in their order, for those that have no name in Keras.
    """

    def by_output(found: Sequence[Any]) -> dict[str, list[keras.metrics.Metric]]:
        of_outputs = zip(names, found, strict=True)
        return {listed.output_name or name: listed.metrics for name, listed in of_outputs if listed is not None}

    made = model._compile_metrics
    return ({}, {}) if made is None else (by_output(made._flat_metrics), by_output(made._flat_weighted_metrics))


def loss_mean(model: keras.Model) -> keras.metrics.Mean:
    """Return the mean of the loss over an epoch, as the history of a compiled model shows it."""
    return model._loss_tracker


def adam_moments(adam: keras.optimizers.Adam, variable: tf.Variable) -> tuple[tf.Variable, tf.Variable]:
    """Return the means of the gradients of a variable and of their squares."""
    index = adam._get_variable_index(variable)
    return adam._momentums[index].value, adam._velocities[index].value
