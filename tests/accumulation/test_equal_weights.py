"""`AccumulatingOptimizer` in `fit` counts all batches alike.

It says so where their weights may differ.
"""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from pipeline.accumulation import AccumulatingModel, AccumulatingOptimizer
from tests.parameters import mostly_slow

STEPS = 5
BATCH = 4
FACTOR = 4


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.5)


def accumulating() -> AccumulatingOptimizer:
    return AccumulatingOptimizer(sgd(), FACTOR)


def fitted(
    optimizer: keras.optimizers.Optimizer,
    batch: int,
    *,
    masked: bool = False,
    weighted: bool = False,
    reduction: str = "sum_over_batch_size",
    micro: int | None = None,
    run_eagerly: bool = False,
) -> np.ndarray:
    """Return the weights after an epoch of sequences of very different lengths."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((STEPS, 2))])
    if masked:
        model.add(layers.Masking())
    model.add(layers.Dense(1))
    if micro:
        model = AccumulatingModel(model, micro)
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    model.compile(optimizer, loss, run_eagerly=run_eagerly)

    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(2 * FACTOR * BATCH, STEPS, 2))
    lengths = np.arange(len(x)) // BATCH % FACTOR + 1
    x[np.arange(STEPS) >= lengths[:, None]] = 0
    y = numbers.normal(size=(len(x), STEPS, 1))
    sample_weight = None
    if weighted:
        sample_weight = np.repeat(lengths[:, None].astype(float), STEPS, axis=1)
    model.fit(x, y, batch, shuffle=False, verbose=0, sample_weight=sample_weight)
    return np.concatenate([np.ravel(values) for values in model.get_weights()])


def by_keras(**options: Any) -> np.ndarray:
    """Return the weights after a plain epoch of large batches, which is not traced."""
    return fitted(sgd(), FACTOR * BATCH, run_eagerly=True, **options)


UNEQUAL = {
    "an output has a mask": {"masked": True},
    "a loss divides by a sum of sample weights": {
        "weighted": True,
        "reduction": "mean_with_sample_weight",
    },
    "a loss is a sum": {"reduction": "sum"},
}


@pytest.mark.parametrize("reason", mostly_slow(UNEQUAL, ["an output has a mask"]))
def test_weights_that_may_differ_are_named_once(float64, reason):
    options = UNEQUAL[reason]
    optimizer = accumulating()
    pattern = f"gives all batches of fit the same weight, but {reason}.*Model do not"
    with pytest.warns(UserWarning, match=pattern) as warned:
        found = fitted(optimizer, BATCH, **options)
    assert len(warned) == 1

    expected = by_keras(**options)
    far = np.max(np.abs(expected - by_keras()))
    assert far > 0
    assert np.max(np.abs(found - expected)) > 1e-3  # so the warning is right
    exact = fitted(sgd(), FACTOR * BATCH, micro=BATCH, **options)
    np.testing.assert_allclose(exact, expected, rtol=1e-12)


@pytest.mark.parametrize(
    "options", mostly_slow([{}, {"weighted": True}], [{"weighted": True}]), ids=str
)
def test_equal_weights_are_exact_without_a_word(float64, options):
    """A loss that divides by the number of examples has equal batches."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fitted(accumulating(), BATCH, **options)
    expected = by_keras(**options)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
