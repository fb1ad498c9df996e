"""Keras' `fit` with `gradient_accumulation_steps`."""

from __future__ import annotations

import dataclasses

import keras

from benchmarks.conformance import in_keras
from benchmarks.conformance.cases import (
    FACTOR,
    MICRO,
    Arrays,
    Case,
    effective_batches,
    examples,
)
from benchmarks.conformance.outcome import Outcome, Way, by_log, by_weights

prepare = in_keras.prepare


def fit(case: Case) -> Outcome:
    weights, losses = in_keras.large(case, list(effective_batches(case)))
    logged: list[float] = []
    watching = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: logged.append(logs["loss"])
    )
    trained = _trained(case, watching)
    if case.logged:
        note = "what callbacks get at the end of each batch, and MLflow's logs: the mean over the epoch so far"
        return by_log(logged[FACTOR - 1 :: FACTOR], len(logged), losses, note)
    if case.decay == 1:
        return by_weights(trained, weights)
    slower = dataclasses.replace(case, decay=case.decay ** (1 / FACTOR))
    adjusted = by_weights(_trained(slower), weights).error
    note = f"it counts micro-batches, as its documentation says; with a schedule four times as long: {adjusted:.2g}"
    return by_weights(trained, weights, note)


def _trained(case: Case, *callbacks: keras.callbacks.Callback) -> Arrays:
    with in_keras.strategy(case).scope():
        model = in_keras.network(case)
        model.compile(in_keras.optimizer(case, FACTOR), in_keras.loss(case))
    x, y, *weight = examples(case)
    model.fit(
        x,
        y,
        sample_weight=weight[0] if weight else None,
        batch_size=MICRO,
        epochs=case.epochs,
        shuffle=False,  # the order of the large batches
        callbacks=list(callbacks),
        verbose=0,
    )
    return tuple(model.get_weights())


WAYS: dict[str, Way] = {"fit": fit}
