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
    large = in_keras.large(case, list(effective_batches(case)))
    logged: list[float] = []
    log = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: logged.append(logs["loss"])
    )
    weights = _trained(case, log)
    if case.logged:
        note = (
            "what callbacks get at the end of each batch, and what MLflow logs, is "
            "the mean over the epoch so far"
        )
        after_updates = logged[FACTOR - 1 :: FACTOR]
        return by_log(after_updates, len(logged), large.losses, note)
    if case.decay == 1:
        return by_weights(weights, large.weights)

    slower = dataclasses.replace(case, decay=case.decay ** (1 / FACTOR))
    adjusted = by_weights(_trained(slower), large.weights).error
    note = (
        "the schedule counts micro-batches, as the documentation says; "
        f"with a schedule four times as long, the error is {adjusted:.2g}"
    )
    return by_weights(weights, large.weights, note)


def _trained(case: Case, *callbacks: keras.callbacks.Callback) -> Arrays:
    with in_keras.strategy(case).scope():
        model = in_keras.network(case)
        model.compile(in_keras.optimizer(case, FACTOR), in_keras.loss(case))
    in_keras.fit(model, examples(case), MICRO, case.epochs, callbacks)
    return tuple(model.get_weights())


WAYS: dict[str, Way] = {"fit": fit}
