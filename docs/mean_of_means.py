"""python -m docs.mean_of_means — writes docs/mean_of_means.png: how the mean of micro-batch means changes training.

It trains the model of `experiment=text` in float64 with an effective batch of 32 texts of unequal length: as one large
batch, accumulated in 16 micro-batches, and with the mean of the micro-batches' mean gradients. Takes a few minutes.
"""

from __future__ import annotations

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
from pipeline.dataset import load

EFFECTIVE, MICRO, UPDATES = 32, 2, 200


def main() -> None:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    whole = losses(
        lambda network, loss, batch: accumulate_gradients(
            network, loss, batch, EFFECTIVE
        ).gradients()
    )
    exact = losses(
        lambda network, loss, batch: accumulate_gradients(
            network, loss, batch, MICRO
        ).gradients()
    )
    wrong = losses(mean_of_means)
    draw(whole, exact, wrong)
    print("largest difference from the loss of the large batch:")
    for name, found in (("accumulated", exact), ("mean of means", wrong)):
        print(
            f"  {name}: {max(abs(a - b) for a, b in zip(found, whole, strict=True)):.2g}"
        )


def mean_of_means(
    network: keras.Model, loss: keras.losses.Loss, batch: Any
) -> list[tf.Tensor]:
    """Return the mean of the micro-batches' mean gradients, as most recipes compute it."""
    parts = range(0, EFFECTIVE, MICRO)
    means = [
        accumulate_gradients(
            network, loss, tuple(each[at : at + MICRO] for each in batch), MICRO
        ).gradients()
        for at in parts
    ]
    return [
        tf.add_n([tf.convert_to_tensor(each) for each in of_one]) / len(parts)
        for of_one in zip(*means, strict=True)
    ]


def losses(gradients_of: Any) -> list[float]:
    """Return the loss of each effective batch before its update."""
    keras.utils.set_random_seed(0)
    data = load.topics()
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
                gradients_of(network, loss, batch), network.trainable_variables
            )
        return before

    full = (batch for batch in batches if len(batch[0]) == EFFECTIVE)
    return [
        float(update(*batch)) for batch, _ in zip(full, range(UPDATES), strict=False)
    ]


def draw(whole: list[float], exact: list[float], wrong: list[float]) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 3.6), layout="constrained"
    )
    updates = range(1, len(whole) + 1)
    colours = {
        "mean of micro-batch means": ("#d62728", wrong),
        "accumulated": ("#1f77b4", exact),
    }
    for name, (colour, found) in colours.items():
        left.plot(updates, found, color=colour, label=name, linewidth=1)
        differences = [
            max(abs(a - b), 1e-17) for a, b in zip(found, whole, strict=True)
        ]
        right.semilogy(updates, differences, color=colour, label=name, linewidth=1)
    left.plot(
        updates,
        whole,
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
