"""What everyone who accumulates gets wrong, put into the kernel: each function takes a monkeypatch and changes it.

`python -m tests.verify.mutations NAME…` runs `pipeline verify` under each that is named, for `none` without any, and
prints, as JSON, what tests/refused.py says.
"""

from __future__ import annotations

import json
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import Update, evaluation, gradient_sums, loss_sums
from pipeline.accumulation import accumulate as update
from pipeline.accumulation.internals import Objective
from tests import refused

TOKENS = np.random.default_rng(0).integers(1, 7, size=(12, 5))
TOKENS[:5, 2:] = 0
BATCH = (TOKENS, TOKENS % 3, np.linspace(0.2, 2, 12)[:, None] * np.ones((12, 5)))
TAIL = tuple(part[:5] for part in BATCH)


def examples(data_dir):
    """The examples of both batches, as a dataset for the command, and the second again for its validation."""
    both = tuple(map(np.concatenate, zip(BATCH, TAIL, strict=True)))
    return tf.data.Dataset.from_tensor_slices(both), tf.data.Dataset.from_tensor_slices(
        TAIL
    )


def masked():
    hidden = layers.Embedding(7, 4, mask_zero=True)
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int64"),
            hidden,
            layers.Dense(3, kernel_regularizer="l2"),
        ]
    )


def mean_of_means(patch):
    whole = loss_sums.weighted_sum

    def means(*arguments):
        total, weight, _, examples = whole(*arguments)
        return loss_sums.WeightedSum(
            total / weight, tf.ones_like(weight), None, examples
        )

    patch.setattr(loss_sums, "weighted_sum", means)


def lost_tail(patch, module=update):
    whole = module.sum_over_micro_batches

    def without_tail(step, batch, size, *more):
        stop = module.examples_in(batch) // size * size
        return whole(
            step, tf.nest.map_structure(lambda leaf: leaf[:stop], batch), size, *more
        )

    patch.setattr(module, "sum_over_micro_batches", without_tail)


def lost_tail_of_validation(patch):
    lost_tail(patch, evaluation)


def schedule_by_micro_step(patch):
    call = Update.__call__

    def counting(self, batch):
        results = call(self, batch)
        self.optimizer.iterations.assign_add(2)
        return results

    patch.setattr(Update, "__call__", counting)


def clip_before_the_sum(patch):
    gradients = update.gradients_by

    def clipped(*arguments):
        return tuple(
            tf.clip_by_norm(g, 0.05) if tf.is_tensor(g) else g
            for g in gradients(*arguments)
        )

    patch.setattr(update, "gradients_by", clipped)


def divide_by_replicas(patch):
    means = gradient_sums.means
    patch.setattr(
        gradient_sums,
        "means",
        lambda *given: [
            loss_sums.divide(each, tf.constant(2.0)) for each in means(*given)
        ],
    )


def dropped_mask(patch):
    patch.setattr(loss_sums, "mask_of", lambda nest: None)


def dropped_weights(patch):
    whole = loss_sums.weighted_sum
    patch.setattr(
        loss_sums,
        "weighted_sum",
        lambda loss, y, outputs, weight, known: whole(loss, y, outputs),
    )


def doubled_regulariser(patch):
    whole = update.micro_batch_losses

    class Twice:
        def __init__(self, model):
            self.losses, self.trainable_variables = (
                2 * model.losses,
                model.trainable_variables,
            )

    patch.setattr(
        update, "micro_batch_losses", lambda model, *given: whole(Twice(model), *given)
    )


def wrong_labels(patch):
    whole = Objective.update_metrics
    zeros = lambda y: tf.nest.map_structure(lambda labels: 0 * labels, y)  # noqa: E731
    patch.setattr(
        Objective, "update_metrics", lambda goal, y, *more: whole(goal, zeros(y), *more)
    )


def stale_metric(patch):
    call = Update.__call__

    def not_reset(self, batch):
        for metric in self.measured.values():
            metric.reset_state = lambda: None
        try:
            return call(self, batch)
        finally:
            for metric in self.measured.values():
                del metric.reset_state

    patch.setattr(Update, "__call__", not_reset)


# Each mutation, and the kinds of findings that show it.
MUTATIONS = {
    mean_of_means: {"loss", "gradient"},
    lost_tail: {"loss", "gradient"},
    lost_tail_of_validation: {"val/loss"},
    schedule_by_micro_step: {"count"},
    clip_before_the_sum: {"gradient"},
    divide_by_replicas: {"gradient"},
    dropped_mask: {"loss", "gradient"},
    dropped_weights: {"loss", "gradient"},
    doubled_regulariser: {"loss", "gradient"},
    stale_metric: {"metric"},
    wrong_labels: {"metric"},
}

VERIFY = (
    "verify dataset._target_=tests.verify.mutations.examples "
    "objective=language_model optimizer=sgd "
    "~model.filters ~model.kernel_size ~model.hidden ~model.dropout ~model.l2 "
    "model._target_=tests.verify.mutations.masked optimizer.global_clipnorm=0.1 "
    "accumulation.effective_batch_size=12 accumulation.micro_batch_size=4"
)

if __name__ == "__main__":
    asked = [mutation for mutation in MUTATIONS if mutation.__name__ in sys.argv[1:]]
    # Two replicas first: TensorFlow takes devices before its first operation alone.
    said = {}
    if "none" in sys.argv[1:]:
        said["none"] = refused.run(
            f"{VERIFY} hardware.replicas={1 + (divide_by_replicas in asked)}"
        )
    for mutation in asked:
        with pytest.MonkeyPatch.context() as patch:
            mutation(patch)
            line = (
                f"{VERIFY} hardware.replicas=2"
                if mutation is divide_by_replicas
                else VERIFY
            )
            said[mutation.__name__] = refused.run(line)
    print(json.dumps(said))
