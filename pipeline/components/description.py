"""What the record and the first lines of a run say about its parts."""

from typing import Any

import tensorflow as tf

from pipeline.accumulation import internals
from pipeline.components.assembly import Parts


def tags(parts: Parts) -> dict[str, str]:
    """Return the tags of a run: the layers that depend on the cut, and its scaling.

    The cut is how an effective batch is divided into micro-batches.
    """
    stateful = internals.batch_dependent_layers(parts.model, parts.forward)
    noisy = parts.forward.cut_dependent_noise
    tags_of_run = {
        "model.batch_dependent_layers": ", ".join(stateful) or "none",
        "model.cut_dependent_noise": ", ".join(noisy) or "none",
    }
    if parts.record.scaling:
        tags_of_run["scaling"] = parts.record.scaling
    return tags_of_run


def first_lines(parts: Parts) -> list[str]:
    """Return the lines about its parts that a new run prints first."""
    lines = [parts.record.scaling] if parts.record.scaling else []
    return [*lines, *parts.record.notes, *differences_from_large_batch(parts)]


def differences_from_large_batch(parts: Parts) -> list[str]:
    """Return the reasons why an update differs from that of the large batch.

    Each reason is one line, with the layers that it concerns.
    """
    if parts.spec.largest.factor * parts.plan.batching.replicas == 1:
        return []
    config = parts.spec.config.accumulation
    normalizing = internals.normalizing_layers(parts.model)
    moving = internals.batch_dependent_layers(parts.model, parts.forward, normalizing)
    noisy = []
    if config.same_noise == "auto":
        noisy = parts.forward.cut_dependent_noise

    moves = "with every micro-batch"
    if config.moving_statistics.name == "effective":
        moves = "once an update"
    layers_by_reason = {
        f"normalised by each micro-batch, moving statistics {moves}": [
            layer.name for layer in normalizing if layer.trainable
        ],
        "state that moves with every micro-batch": moving,
        "noise of each micro-batch, not of the effective batch": noisy,
    }
    return [
        f"{reason}: {', '.join(layers)}"
        for reason, layers in layers_by_reason.items()
        if layers
    ]


def example_inputs(parts: Parts) -> Any:
    """Return a few inputs as NumPy arrays, for the signature of the trained model.

    Raises:
        TypeError: the inputs have no signature.
    """
    is_dense = all(map(tf.is_tensor, tf.nest.flatten(parts.inputs)))
    if not is_dense or not isinstance(parts.inputs, tf.Tensor | dict):
        what = "an input that is neither a dense tensor nor a dict of them"
        raise TypeError(f"{what} has no signature")
    return tf.nest.map_structure(lambda leaf: leaf.numpy(), parts.inputs)
