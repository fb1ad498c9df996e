"""Mistakes that are often made in accumulation: each function patches the kernel.

`python -m tests.verify.mutations NAME…` runs `pipeline verify` under each named
mutation, and without one for `none`. It prints the results of tests/one_process.py as
JSON.
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
from tests import one_process

TOKENS = np.random.default_rng(0).integers(1, 7, size=(12, 5))
TOKENS[:5, 2:] = 0
BATCH = (TOKENS, TOKENS % 3, np.linspace(0.2, 2, 12)[:, None] * np.ones((12, 5)))
TAIL = tuple(part[:5] for part in BATCH)


def examples(data_dir):
    """Return both batches as training split, and the tail as validation split."""
    training = [np.concatenate(parts) for parts in zip(BATCH, TAIL, strict=True)]
    return (
        tf.data.Dataset.from_tensor_slices(tuple(training)),
        tf.data.Dataset.from_tensor_slices(TAIL),
    )


def masked():
    """Return a model whose outputs have a mask."""
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int64"),
            layers.Embedding(7, 4, mask_zero=True),
            layers.Dense(3, kernel_regularizer="l2"),
        ]
    )


def mean_of_means(patch):
    weighted_sum = loss_sums.weighted_sum

    def means(*arguments, **options):
        total, weight, _, examples, _ = weighted_sum(*arguments, **options)
        return loss_sums.WeightedSum(
            total / weight, tf.ones_like(weight), None, examples
        )

    patch.setattr(loss_sums, "weighted_sum", means)


def lost_tail(patch, module=update, name="MicroBatchLoop"):
    loop = getattr(module, name)

    def without_tail(step, batch, size, *more):
        stop = module.examples_in(batch) // size * size
        cut = tf.nest.map_structure(lambda leaf: leaf[:stop], batch)
        return loop(step, cut, size, *more)

    patch.setattr(module, name, without_tail)


def lost_tail_of_validation(patch):
    lost_tail(patch, evaluation, "run_micro_batches")


def schedule_by_micro_step(patch):
    call = Update.__call__

    def counting(self, batch):
        results = call(self, batch)
        self.optimizer.iterations.assign_add(2)
        return results

    patch.setattr(Update, "__call__", counting)


def clip_before_the_sum(patch):
    gradients_by = update.gradients_by

    def clipped(*arguments):
        gradients = []
        for gradient in gradients_by(*arguments):
            if tf.is_tensor(gradient):
                gradient = tf.clip_by_norm(gradient, 0.05)
            gradients.append(gradient)
        return tuple(gradients)

    patch.setattr(update, "gradients_by", clipped)


def divide_by_replicas(patch):
    means = gradient_sums.means

    def halves(*arguments):
        return [loss_sums.divide(mean, tf.constant(2.0)) for mean in means(*arguments)]

    patch.setattr(gradient_sums, "means", halves)


def dropped_mask(patch):
    patch.setattr(loss_sums, "mask_of", lambda nest: None)


def dropped_weights(patch):
    weighted_sum = loss_sums.weighted_sum

    def unweighted(loss, y, outputs, weight, known, **options):
        return weighted_sum(loss, y, outputs, **options)

    patch.setattr(loss_sums, "weighted_sum", unweighted)


def doubled_regulariser(patch):
    micro_batch_losses = update.micro_batch_losses

    class Twice:
        def __init__(self, model):
            self.losses = 2 * model.losses
            self.trainable_variables = model.trainable_variables

    def doubled(model, *arguments):
        return micro_batch_losses(Twice(model), *arguments)

    patch.setattr(update, "micro_batch_losses", doubled)


def wrong_labels(patch):
    update_metrics = Objective.update_metrics

    def by_zeros(objective, y, *more):
        zeros = tf.nest.map_structure(lambda labels: 0 * labels, y)
        return update_metrics(objective, zeros, *more)

    patch.setattr(Objective, "update_metrics", by_zeros)


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


def main(names):
    """Run the command under the named mutations, and print the results."""
    mutations = [mutation for mutation in MUTATIONS if mutation.__name__ in names]
    results = {}
    if "none" in names:
        # Two replicas first: TensorFlow takes devices before its first operation alone.
        replicas = 2 if divide_by_replicas in mutations else 1
        results["none"] = one_process.run(f"{VERIFY} hardware.replicas={replicas}")
    for mutation in mutations:
        line = VERIFY
        if mutation is divide_by_replicas:
            line = f"{VERIFY} hardware.replicas=2"
        with pytest.MonkeyPatch.context() as patch:
            mutation(patch)
            results[mutation.__name__] = one_process.run(line)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
