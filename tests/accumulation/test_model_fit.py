"""`fit` of an `AccumulatingModel` against a plain `fit` of its inner model.

Both see the same large batches: those of `fitting.py`.
"""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import AccumulatingModel
from tests.accumulation import reference
from tests.accumulation.fitting import (
    CASES,
    EXACT,
    SIZES,
    Fitted,
    N,
    X,
    Y,
    assert_equal,
    assert_equal_weights,
    build,
    cross_entropy,
    dense,
    labels,
    random,
    trained,
)
from tests.parameters import mostly_slow

pytestmark = pytest.mark.usefixtures("float64")


def eager(compiled):
    """Have `compile` take what `compiled` returns, for a fit that is not traced."""
    return lambda: compiled() | {"run_eagerly": True}


@functools.cache
def fitted_by_keras(name):
    """Return a plain fit, which also validates."""
    make, data, compiled = CASES[name]
    validation = {"validation_data": data, "validation_batch_size": N}
    # Keras weighs the losses of several outputs in another way if it runs eagerly.
    if not name.startswith("two"):
        compiled = eager(compiled)
    return trained(build(make), compiled, data, **validation)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        *mostly_slow(
            [(name, 1) for name in CASES],
            [("sample_weights", 1), ("own_metric", 1)],
            [("regularised", 1), ("two_in_a_dict", 1)],
        ),
        *mostly_slow(
            [
                ("sample_weights", 2),
                ("masked", 2),
                ("built_late", 2),
                ("own_metric", 2),
            ],
            [],
            [("masked", 2)],
        ),
    ],
)
def test_fit_is_that_of_the_large_batches(name, devices):
    make, data, compiled = CASES[name]
    validation = {"validation_data": data, "validation_batch_size": N}
    theirs = fitted_by_keras(name)
    inner = build(make, devices)
    model = AccumulatingModel(inner, 5)
    ours = trained(model, compiled, data, **validation)

    if name.startswith("two"):
        scales = compiled().get("loss_weights", [1, 1])
        our_total = np.dot(scales, pop_output_losses(ours))
        np.testing.assert_allclose(our_total, ours.history["loss"], rtol=EXACT)
        # Keras weighs the batch of 1 as those of 16 there, and not in the loss.
        their_total = np.dot(scales, pop_output_losses(theirs))
        relative = their_total / theirs.history["loss"] - 1
        assert np.abs(relative).min() > 1e-3

    assert_equal(ours, theirs)
    assert_equal_weights(inner.get_weights(), theirs.weights)
    # It does learn.
    first_loss, *_, last_loss = theirs.history["loss"]
    assert last_loss < first_loss


class AdamOfDenseGradients(keras.optimizers.Adam):
    """An Adam that gets the gradient of an embedding as a dense tensor."""

    def apply(self, grads, trainable_variables=None):
        grads = reference.dense(grads)
        return super().apply(grads, trainable_variables)


def test_fit_with_an_embedding_and_adam_is_that_of_the_dense_gradient():
    """Keras' own step squares each gradient of a row that was looked up twice."""
    make, data, _ = CASES["masked"]

    def compiled_with(optimizer):
        return lambda: {"optimizer": optimizer(0.05), "loss": cross_entropy()}

    adam = compiled_with(keras.optimizers.Adam)
    ours = trained(AccumulatingModel(build(make), 5), adam, data)
    dense_adam = compiled_with(AdamOfDenseGradients)
    assert_equal(ours, trained(build(make), eager(dense_adam), data))

    # The negative control.
    by_keras = trained(build(make), eager(adam), data)
    table, *_ = ours.weights
    keras_table, *_ = by_keras.weights
    assert np.abs(table - keras_table).max() > 0.05


class AddsSum(layers.Layer):
    """Adds a sum over the batch to the loss, which a sum of squares often is."""

    def call(self, x):
        self.add_loss(1e-2 * keras.ops.sum(keras.ops.square(x)))
        return x


def test_a_layer_that_adds_a_sum_is_that_of_the_large_batch_if_this_is_said():
    def adding():
        return keras.Sequential([keras.Input((6,)), AddsSum(), *dense().layers])

    def compiled():
        return {"optimizer": keras.optimizers.Adam(0.01), "loss": cross_entropy()}

    _, data, _ = CASES["sample_weights"]
    theirs = trained(build(adding), eager(compiled), data[:2])
    model = AccumulatingModel(build(adding), 5, added_losses="sum")
    assert_equal(trained(model, compiled, data[:2]), theirs)
    config = model.get_config()
    copy = AccumulatingModel.from_config(config, {"AddsSum": AddsSum})
    assert copy.added_losses == "sum"

    # The negative control.
    as_mean = trained(AccumulatingModel(build(adding), 5), compiled, data[:2])
    assert as_mean.history["loss"][0] < theirs.history["loss"][0] - 0.1


def pop_output_losses(fitted):
    """Return the losses of both outputs in training, and take them from the history."""
    return [fitted.history.pop("kind_loss"), fitted.history.pop("size_loss")]


def test_the_model_is_traced_once_for_a_fit():
    """Tracing takes most of the time of the first step."""
    traced = []

    class Noting(layers.Layer):
        def call(self, x, training=False):
            traced.append(training)
            return x

    model = keras.Sequential([keras.Input((6,)), Noting(), layers.Dense(3)])
    ours = AccumulatingModel(model, 3)
    ours.compile("adam", cross_entropy(), metrics=["accuracy"])
    traced.clear()
    ours.fit(random(14, 6), labels(14), batch_size=8, verbose=0)
    assert traced.count(True) == 1


@pytest.mark.slow
def test_the_loss_of_each_output():
    make, data, compiled = CASES["two_in_a_list"]
    options = {"batch_size": 11, "epochs": 2}
    theirs = trained(build(make), compiled, data, **options)
    ours = trained(AccumulatingModel(build(make), 4), compiled, data, **options)
    assert_equal(ours, theirs)
    names = {"kind_loss", "size_loss", "kind_accuracy", "size_mae"}
    assert names < ours.history.keys()


@pytest.mark.slow
def one_head_twice():
    """Return a model with two outputs of the same layer, and so of the same name."""
    inputs = keras.Input((6,))
    size = layers.Dense(1, name="size")
    return keras.Model(inputs, [size(inputs), size(-inputs)])


def test_two_outputs_of_one_layer():
    data = (X, (SIZES, 2 * SIZES))
    options = {"loss": ["mse", "mae"], "metrics": [["mae"], ["mse"]]}
    # Keras weighs each batch equally in the loss of an output: there is one batch.
    ours = trained(
        AccumulatingModel(build(one_head_twice), 5), options.copy, data, batch_size=N
    )
    theirs = trained(build(one_head_twice), options.copy, data, batch_size=N)
    assert {"size_mae", "size_mse"} < theirs.history.keys()
    assert_equal(ours, theirs)


class WithOptional(layers.Layer):
    """Adds its inputs, of which either may be missing."""

    def call(self, inputs):
        return sum(part for part in inputs if part is not None)


def with_optional_inputs():
    inputs = [keras.Input((6,), optional=True) for _ in range(2)]
    hidden = WithOptional()(inputs)
    return keras.Model(inputs, layers.Dense(3)(hidden))


@pytest.mark.parametrize("x", [[None, X], [X, None]], ids=["first", "last"])
def test_an_input_may_be_missing(x):
    options = {"loss": cross_entropy()}
    model = AccumulatingModel(build(with_optional_inputs), 5)
    ours = trained(model, options.copy, (x, Y))
    assert_equal(ours, trained(build(with_optional_inputs), options.copy, (x, Y)))
    predicted = model.predict(x, verbose=0)
    np.testing.assert_allclose(predicted, model.inner.predict(x, verbose=0))


def test_several_outputs_are_evaluated_as_in_keras_also_when_compiled_again():
    make, data, compiled = CASES["two_in_a_list"]
    plain = build(make)
    ours = AccumulatingModel(build(make), 4)
    for _ in range(2):
        plain.compile(**compiled())
        ours.compile(**compiled())
        expected = plain.evaluate(*data, batch_size=11, verbose=0)
        values = ours.evaluate(*data, batch_size=11, verbose=0)
        np.testing.assert_allclose(values, expected, rtol=1e-12)
        assert ours.metrics_names == plain.metrics_names
        assert len(ours.metrics_variables) == len(plain.metrics_variables)


def test_the_accumulation_of_keras_is_far_from_it():
    make, data, compiled = CASES["sample_weights"]
    theirs = fitted_by_keras("sample_weights")
    adam = keras.optimizers.Adam(0.01, clipnorm=0.5, gradient_accumulation_steps=4)

    def compiled_with_adam():
        return compiled() | {"optimizer": adam}

    by_keras = trained(build(make), eager(compiled_with_adam), data, batch_size=4)
    distances = []
    for value, expected in zip(by_keras.weights, theirs.weights, strict=True):
        distances.append(np.abs(value - expected).max())
    assert max(distances) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_short_batch_in_the_middle_of_a_dataset(devices):
    make, data, compiled = CASES["regularised"]
    # Of 15, 15 and 3 examples: shares of 8 and 7.
    batches = tf.data.Dataset.from_tensor_slices(data).batch(15).repeat()
    theirs = trained(build(make), compiled, batches, steps_per_epoch=4)
    model = AccumulatingModel(build(make, devices), 5)
    ours = trained(model, compiled, batches, steps_per_epoch=4)
    assert_equal(ours, theirs)


class Counts(keras.callbacks.Callback):
    """Notes the batches whose end it has seen, and their losses."""

    def __init__(self):
        super().__init__()
        self.ended = []
        self.losses = []

    def on_train_batch_end(self, batch, logs):
        self.ended.append(batch)
        self.losses.append(float(logs["loss"]))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_several_steps_an_execution(devices):
    make, data, compiled = CASES["sample_weights"]
    # 9 batches: the last of 1 example.
    batches = tf.data.Dataset.from_tensor_slices(data).batch(4)
    theirs = trained(build(make), compiled, batches)
    counts = Counts()
    model = AccumulatingModel(build(make, devices), 3)
    ours = trained(model, compiled, batches, steps_per_execution=3, callbacks=[counts])
    assert_equal(ours, theirs)
    assert counts.ended == [2, 5, 8] * 3
    assert int(model.optimizer.iterations.numpy()) == 27


@pytest.mark.slow
def test_callbacks_see_what_they_see_in_a_plain_fit(tmp_path):
    make, data, compiled = CASES["sample_weights"]

    def fitted(model, counts, folder):
        folder.mkdir()
        halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        save = keras.callbacks.ModelCheckpoint(
            folder / "{epoch}.weights.h5", save_weights_only=True
        )
        # No accuracy is above the baseline, so it stops as early as it can.
        stop = keras.callbacks.EarlyStopping(
            "val_accuracy", patience=2, baseline=1.1, restore_best_weights=True
        )
        callbacks = [counts, halve, save, stop]
        return trained(
            model, compiled, data, epochs=9, validation_data=data, callbacks=callbacks
        )

    their_counts = Counts()
    our_counts = Counts()
    theirs = fitted(build(make), their_counts, tmp_path / "plain")
    ours = fitted(AccumulatingModel(build(make), 5), our_counts, tmp_path / "ours")
    assert_equal(ours, theirs)
    assert len(ours.history["loss"]) == 3
    assert our_counts.ended == their_counts.ended == [0, 1, 2] * 3
    np.testing.assert_allclose(our_counts.losses, their_counts.losses, rtol=EXACT)
    for folder in ("plain", "ours"):
        files = sorted(file.name for file in (tmp_path / folder).iterdir())
        assert files == ["1.weights.h5", "2.weights.h5", "3.weights.h5"]


@pytest.mark.slow
def test_class_weights():
    make, (x, y, _), compiled = CASES["sample_weights"]
    weights = {0: 1.0, 1: 5.0, 2: 0.2}
    theirs = trained(build(make), compiled, (x, y), class_weight=weights)
    model = AccumulatingModel(build(make), 5)
    ours = trained(model, compiled, (x, y), class_weight=weights)
    assert_equal(ours, theirs)

    # The control: without them the loss is another one.
    unweighted = trained(build(make), compiled, (x, y))
    first_loss = theirs.history["loss"][0]
    first_unweighted_loss = unweighted.history["loss"][0]
    assert abs(first_loss - first_unweighted_loss) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_single_batches_and_predictions(devices):
    make, data, compiled = CASES["sample_weights"]
    plain = build(make)
    plain.compile(**compiled())
    model = AccumulatingModel(build(make, devices), 5)
    with model.distribute_strategy.scope():
        model.compile(**compiled())

    one_example = [part[:1] for part in data]
    for batch in (data, one_example):
        expected = plain.train_on_batch(*batch, return_dict=True)
        results = model.train_on_batch(*batch, return_dict=True)
        assert results == pytest.approx(expected, rel=EXACT)
        expected = plain.test_on_batch(*batch, return_dict=True)
        results = model.test_on_batch(*batch, return_dict=True)
        assert results == pytest.approx(expected, rel=EXACT)
    for size in (7, N):
        expected = plain.predict(X, size, verbose=0)
        outputs = model.predict(X, size, verbose=0)
        np.testing.assert_allclose(outputs, expected, rtol=EXACT)
    np.testing.assert_allclose(model(X), plain(X), rtol=EXACT)


@pytest.mark.slow
def test_a_loaded_model_goes_on_as_if_it_had_not_been_saved(tmp_path):
    make, data, compiled = CASES["sample_weights"]
    uninterrupted = trained(AccumulatingModel(build(make), 5), compiled, data)

    # Two epochs, then one by the loaded model, which is not compiled again.
    model = AccumulatingModel(build(make), 5)
    trained(model, compiled, data, epochs=2)
    model.save(tmp_path / "whole.keras")
    model.inner.save(tmp_path / "inner.keras")
    loaded = keras.models.load_model(tmp_path / "whole.keras")
    assert isinstance(loaded, AccumulatingModel)
    assert loaded.micro_batch_size == 5
    x, y, sample_weight = data
    history = loaded.fit(
        x,
        y,
        sample_weight=sample_weight,
        batch_size=16,
        initial_epoch=2,
        epochs=3,
        shuffle=False,
        verbose=0,
    ).history
    last_epoch = {key: values[2:] for key, values in uninterrupted.history.items()}
    expected = Fitted(last_epoch, uninterrupted.weights)
    resumed = Fitted(history, loaded.get_weights())
    assert_equal(resumed, expected)

    inner = keras.models.load_model(tmp_path / "inner.keras")
    assert type(inner) is keras.Sequential
    np.testing.assert_array_equal(inner(X), model.inner(X))


@pytest.mark.slow
def test_an_exported_model_is_the_inner_one(tmp_path):
    make, data, compiled = CASES["sample_weights"]
    model = AccumulatingModel(build(make), 5)
    trained(model, compiled, data, epochs=1)
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(exported.serve(X), model.inner(X), rtol=EXACT)


@pytest.mark.slow
def test_the_loss_scale_of_a_loaded_model_goes_on(tmp_path):
    """It doubles after every third of the updates, of which there are four in a fit."""
    x = random(32, 6)
    y = labels(32)
    scaled = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(), initial_scale=8.0, dynamic_growth_steps=3
    )
    model = AccumulatingModel(build(dense), 5)
    model.compile(scaled, cross_entropy())
    model.fit(x, y, batch_size=8, verbose=0)
    model.save(tmp_path / "scaled.keras")

    loaded = keras.models.load_model(tmp_path / "scaled.keras")
    assert float(loaded.optimizer.dynamic_scale) == 16
    loaded.fit(x, y, batch_size=8, verbose=0)
    assert float(loaded.optimizer.dynamic_scale) == 32


@pytest.mark.slow
def test_weights_that_a_callback_has_saved_load_into_the_plain_model(tmp_path):
    make, data, compiled = CASES["sample_weights"]
    file = tmp_path / "kept.weights.h5"
    save = keras.callbacks.ModelCheckpoint(file, save_weights_only=True)
    model = AccumulatingModel(build(make), 5)
    trained(model, compiled, data, epochs=1, callbacks=[save])
    expected = model.inner.get_weights()
    for other in (build(make), AccumulatingModel(build(make), 5)):
        other.load_weights(file)
        for weight, expected_weight in zip(other.get_weights(), expected, strict=True):
            np.testing.assert_array_equal(weight, expected_weight)


@pytest.mark.slow
def test_a_fit_that_is_backed_up_goes_on_with_its_optimizer(tmp_path):
    make, data, compiled = CASES["sample_weights"]
    file = tmp_path / "kept.weights.h5"
    model = AccumulatingModel(build(make), 5)
    other = AccumulatingModel(build(make), 5)
    trained(model, compiled, data, epochs=2)
    model.save_weights(file)
    trained(other, compiled, data, epochs=1)
    other.load_weights(file)
    pairs = zip(other.optimizer.variables, model.optimizer.variables, strict=True)
    for variable, expected in pairs:
        np.testing.assert_array_equal(variable, expected)


class Interpreted(layers.Layer):
    """Runs in Python, which XLA cannot."""

    def call(self, x):
        outputs = tf.numpy_function(lambda value: value, [x], x.dtype)
        return tf.ensure_shape(outputs, x.shape)


@pytest.mark.slow
def test_xla_compiles_the_micro_steps_where_it_is_asked_for():
    make, data, compiled = CASES["sample_weights"]
    theirs = trained(build(make), compiled, data, epochs=1)
    model = AccumulatingModel(build(make), 5)
    ours = trained(model, compiled, data, epochs=1, jit_compile=True)
    assert_equal(ours, theirs)
    assert model.get_compile_config()["jit_compile"] is True

    def not_for_xla():
        inner = keras.Sequential([keras.Input((6,)), Interpreted(), layers.Dense(3)])
        return AccumulatingModel(inner, 5)

    trained(not_for_xla(), compiled, data, epochs=1)
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.UnimplementedError)):
        trained(not_for_xla(), compiled, data, epochs=1, jit_compile=True)
