"""python -m docs.mean_of_means: draw how the mean of micro-batch means trains.

It trains the model of `experiment=text` in float64 with an effective batch of 32 texts
of unequal length: as one large batch, accumulated in 16 micro-batches, and with the
mean of the micro-batches' mean gradients. It writes docs/mean_of_means.png and takes a
few minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import matplotlib
import tensorflow as tf
from omegaconf import OmegaConf

from pipeline.accumulation import accumulate_gradients
from pipeline.components import model
from pipeline.config.stages import Slice
from pipeline.dataset import batches as batching
from pipeline.dataset import topics

EFFECTIVE = 32
MICRO = 2
UPDATES = 200
SMALLEST = 1e-17  # difference that is drawn; an axis of logarithms has no zero

# Return the gradients of a model, by its loss and a batch.
Gradients = Callable[[keras.Model, keras.losses.Loss, Any], list[tf.Tensor]]


def main() -> None:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    large_batch = train(gradients_of_large_batch)
    accumulated = train(accumulated_gradients)
    averaged = train(mean_of_means)
    draw(large_batch, accumulated, averaged)

    print("largest difference from the loss of the large batch:")
    print(f"  accumulated: {max(differences(accumulated, large_batch)):.2g}")
    print(f"  mean of means: {max(differences(averaged, large_batch)):.2g}")


def gradients_of_large_batch(
    network: keras.Model, loss: keras.losses.Loss, batch: Any
) -> list[tf.Tensor]:
    """Return the gradients of the batch in one piece."""
    return accumulate_gradients(network, loss, batch, EFFECTIVE).gradients()


def accumulated_gradients(
    network: keras.Model, loss: keras.losses.Loss, batch: Any
) -> list[tf.Tensor]:
    """Return the gradients of the batch, accumulated over its micro-batches."""
    return accumulate_gradients(network, loss, batch, MICRO).gradients()


def mean_of_means(
    network: keras.Model, loss: keras.losses.Loss, batch: Any
) -> list[tf.Tensor]:
    """Return the mean of the micro-batches' mean gradients, as most recipes do."""
    means = []
    for start in range(0, EFFECTIVE, MICRO):
        micro_batch = tuple(array[start : start + MICRO] for array in batch)
        sums = accumulate_gradients(network, loss, micro_batch, MICRO)
        means.append(sums.gradients())

    gradients = []
    for means_of_variable in zip(*means, strict=True):
        dense = [tf.convert_to_tensor(mean) for mean in means_of_variable]
        gradients.append(tf.add_n(dense) / len(dense))
    return gradients


def train(gradients: Gradients) -> list[float]:
    """Return the loss of each effective batch before its update."""
    keras.utils.set_random_seed(0)
    data = topics()
    node = OmegaConf.create({"in_memory": True, "pad": {"multiple": 16, "value": 0}})
    batches = batching.effective_batches(node, data, [Slice(EFFECTIVE, 10)], seed=0)
    network = model.decoder(classes=data.classes or 0, length=128)
    optimizer = keras.optimizers.AdamW(0.003)
    optimizer.build(network.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )

    @tf.function(autograph=False, reduce_retracing=True)
    def update(*batch: Any) -> tf.Tensor:
        before = accumulate_gradients(network, loss, batch, EFFECTIVE).mean_loss()
        with tf.control_dependencies([before]):
            optimizer.apply(
                gradients(network, loss, batch), network.trainable_variables
            )
        return before

    losses: list[float] = []
    for batch in batches:
        # The tail of an epoch is no full effective batch.
        if len(batch[0]) == EFFECTIVE:
            losses.append(float(update(*batch)))
        if len(losses) == UPDATES:
            break
    return losses


def differences(losses: list[float], expected: list[float]) -> list[float]:
    """Return the absolute differences, update by update."""
    return [abs(loss - other) for loss, other in zip(losses, expected, strict=True)]


def draw(
    large_batch: list[float], accumulated: list[float], averaged: list[float]
) -> None:
    """Draw the losses, and beside them how far each is from the large batch's."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 3.6), layout="constrained"
    )
    updates = range(1, len(large_batch) + 1)
    for name, color, losses in (
        ("mean of micro-batch means", "#d62728", averaged),
        ("accumulated", "#1f77b4", accumulated),
    ):
        style = {"color": color, "label": name, "linewidth": 1}
        left.plot(updates, losses, **style)
        distances = [
            max(distance, SMALLEST) for distance in differences(losses, large_batch)
        ]
        right.semilogy(updates, distances, **style)
    left.plot(
        updates,
        large_batch,
        color="black",
        linestyle=":",
        label="one large batch",
        linewidth=1,
    )
    left.set(
        xlabel="update",
        ylabel="loss (nats a byte)",
        title="experiment=text, 16 micro-batches of 2 texts",
    )
    right.set(xlabel="update", title="|loss − loss of one large batch|, float64")
    left.legend()
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
