"""`fit` of an `AccumulatingModel` against a plain `fit` of its inner model on the same large batches."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

from pipeline.accumulation import AccumulatingModel
from tests.parameters import mostly_slow

EXACT = 1e-12  # of float64: some tens of updates of 1e-15 each, at rates that do not amplify

pytestmark = pytest.mark.usefixtures("float64")


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def labels(*shape):
    return np.random.default_rng(1).integers(0, 3, size=shape)


def cross_entropy(**arguments):
    return losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def dense(**arguments):
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "tanh", **arguments),
            layers.Dense(3, **arguments),
        ]
    )


def masked():
    tokens = keras.Input((5,), dtype="int64")
    hidden = layers.Embedding(7, 4, mask_zero=True)(tokens)
    return keras.Model(tokens, layers.Dense(3)(layers.Dense(8, "tanh")(hidden)))


def two_heads(wrap=list):
    inputs = keras.Input((6,))
    hidden = layers.Dense(8, "tanh")(inputs)
    heads = {
        "kind": layers.Dense(3, name="kind")(hidden),
        "size": layers.Dense(1, name="size")(hidden),
    }
    return keras.Model(inputs, list(heads.values()) if wrap is list else heads)


class Penalty(layers.Layer):
    """Adds a loss of the batch and measures it."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.size = keras.metrics.Mean(name="penalty")

    def call(self, x):
        each = tf.reduce_mean(tf.square(x), -1)
        self.size.update_state(each)
        self.add_loss(0.1 * tf.reduce_mean(each))
        return x


class Late(keras.Model):
    """Has no weights before its first call."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(8, "tanh"), layers.Dense(3)

    def call(self, x):
        return self.out(self.hidden(x))


def regularised():
    model = dense(kernel_regularizer=keras.regularizers.L2(0.03))
    return keras.Sequential([keras.Input((6,)), *model.layers, Penalty()])


def padded(examples):
    tokens = np.random.default_rng(2).integers(1, 7, size=(examples, 5))
    tokens[
        np.arange(5) >= np.random.default_rng(3).integers(1, 6, size=(examples, 1))
    ] = 0
    return tokens


N = 33  # by sixteen: 16, 16 and 1, which two devices cannot share
X, Y, WEIGHTS = random(N, 6), labels(N), np.linspace(0.2, 3, N)
HEADS = {"kind": Y, "size": 3 * random(N, 1)}

# Model, data and what `compile` takes, made anew for each model.
CASES = {
    "sample_weights": (
        dense,
        (X, Y, WEIGHTS),
        lambda: {
            "optimizer": keras.optimizers.Adam(0.01, clipnorm=0.5),
            "loss": cross_entropy(reduction="mean_with_sample_weight"),
            "metrics": ["accuracy"],
            "weighted_metrics": [
                "accuracy",
                keras.metrics.SparseCategoricalCrossentropy(from_logits=True),
            ],
        },
    ),
    "names": (
        lambda: keras.Sequential([dense(), layers.Softmax()]),
        (X, np.eye(3)[Y]),
        lambda: {
            "optimizer": "sgd",
            "loss": "crossentropy",
            "metrics": ["acc", "mse", keras.metrics.AUC(name="auc")],
        },
    ),
    "masked": (
        masked,
        (padded(N), padded(N) % 3),
        lambda: {
            "optimizer": keras.optimizers.SGD(0.5),
            "loss": cross_entropy(),
            "metrics": ["accuracy"],
        },
    ),
    "regularised": (
        regularised,
        (X, Y),
        lambda: {
            "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
            "loss": cross_entropy(),
        },
    ),
    "built_late": (
        Late,
        (X, Y),
        lambda: {"optimizer": keras.optimizers.Adam(0.01), "loss": cross_entropy()},
    ),
    "two_in_a_list": (
        two_heads,
        (X, list(HEADS.values())),
        lambda: {
            "optimizer": keras.optimizers.Adam(0.01),
            "loss": [cross_entropy(), "mse"],
            "loss_weights": [0.3, 2.0],
            "metrics": [["accuracy"], ["mae"]],
        },
    ),
    "two_in_a_dict": (
        lambda: two_heads(dict),
        (X, HEADS, {"kind": WEIGHTS, "size": WEIGHTS[::-1].copy()}),
        lambda: {
            "optimizer": keras.optimizers.Adam(0.01),
            "loss": {"kind": cross_entropy(), "size": losses.Huber()},
            "metrics": {"size": "mae"},
            "weighted_metrics": {"kind": ["accuracy"], "size": ["mae"]},
        },
    ),
}


def made(make, weights=None, strategy=None):
    with (strategy or tf.distribute.get_strategy()).scope():
        keras.utils.set_random_seed(0)
        return make()


def trained(model, compiled, data, *, steps_per_execution=1, jit_compile="auto", **fit):
    """The history and the weights after a `fit` in large batches that are not shuffled."""
    with model.distribute_strategy.scope():
        model.compile(
            **compiled(),
            steps_per_execution=steps_per_execution,
            jit_compile=jit_compile,
        )
    if not isinstance(data, tf.data.Dataset):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        fit |= {
            "y": y,
            "sample_weight": sample_weight,
            "shuffle": False,
            "batch_size": fit.get("batch_size", 16),
        }
        data = x
    history = model.fit(data, epochs=fit.pop("epochs", 3), verbose=0, **fit).history
    return history, model.get_weights()


def assert_equal(ours, theirs, tolerance=EXACT):
    (our_history, our_weights), (their_history, their_weights) = ours, theirs
    assert our_history.keys() == their_history.keys()
    for key, values in their_history.items():
        np.testing.assert_allclose(
            our_history[key], values, rtol=tolerance, err_msg=key
        )
    for a, b in zip(our_weights, their_weights, strict=True):
        np.testing.assert_allclose(
            a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max())
        )


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        *mostly_slow(
            ((name, 1) for name in CASES),
            [("sample_weights", 1), ("regularised", 1)],
            [("two_in_a_dict", 1)],
        ),
        *mostly_slow(
            ((name, 2) for name in ("sample_weights", "masked", "built_late")),
            [],
            [("masked", 2)],
        ),
    ],
)
def test_fit_is_that_of_the_large_batches(name, devices):
    make, data, compiled = CASES[name]
    strategy = (
        tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) if devices == 2 else None
    )
    validation = {"validation_data": data, "validation_batch_size": N}
    theirs = trained(made(make), compiled, data, **validation)
    inner = made(make, strategy=strategy)
    ours = trained(AccumulatingModel(inner, 5), compiled, data, **validation)
    if name.startswith("two"):
        scales = compiled().get("loss_weights", [1, 1])
        means = [
            [history.pop(f"{output}_loss") for output in HEADS]
            for history, _ in (ours, theirs)
        ]
        np.testing.assert_allclose(
            np.dot(scales, means[0]), ours[0]["loss"], rtol=EXACT
        )
        # Keras weighs the batch of 1 as those of 16 there, and not in the loss.
        assert np.abs(np.dot(scales, means[1]) / theirs[0]["loss"] - 1).min() > 1e-3
    assert_equal(ours, theirs)
    assert_equal(({}, inner.get_weights()), ({}, theirs[1]))
    assert theirs[0]["loss"][-1] < theirs[0]["loss"][0]


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
    theirs = trained(made(make), compiled, data, batch_size=11, epochs=2)
    ours = trained(
        AccumulatingModel(made(make), 4), compiled, data, batch_size=11, epochs=2
    )
    assert_equal(ours, theirs)
    assert {"kind_loss", "size_loss", "kind_accuracy", "size_mae"} < ours[0].keys()


@pytest.mark.slow
def test_several_outputs_are_evaluated_as_in_keras_also_when_compiled_again():
    make, data, compiled = CASES["two_in_a_list"]
    plain = made(make)
    ours = AccumulatingModel(made(make), 4)
    for _ in range(2):
        for model in (plain, ours):
            model.compile(**compiled())
        theirs = plain.evaluate(*data, batch_size=11, verbose=0)
        np.testing.assert_allclose(
            ours.evaluate(*data, batch_size=11, verbose=0), theirs, rtol=1e-12
        )
        assert ours.metrics_names == plain.metrics_names
        assert len(ours.metrics_variables) == len(plain.metrics_variables)


def test_the_accumulation_of_keras_is_far_from_it():
    make, data, compiled = CASES["sample_weights"]
    theirs = trained(made(make), compiled, data, batch_size=15)
    ours = trained(
        AccumulatingModel(made(make), 4), compiled, data, batch_size=15
    )  # 4 + 4 + 4 + 3
    assert_equal(ours, theirs)
    adam = {
        "optimizer": keras.optimizers.Adam(
            0.01, clipnorm=0.5, gradient_accumulation_steps=4
        )
    }
    _, weights = trained(made(make), lambda: compiled() | adam, data, batch_size=4)
    assert (
        max(np.abs(a - b).max() for a, b in zip(weights, theirs[1], strict=True)) > 1e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_short_batch_in_the_middle_of_a_dataset(devices):
    make, data, compiled = CASES["regularised"]
    strategy = (
        tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) if devices == 2 else None
    )
    batches = (
        tf.data.Dataset.from_tensor_slices(data).batch(15).repeat()
    )  # of 15, 15 and 3: shares of 8 and 7
    theirs = trained(made(make), compiled, batches, steps_per_epoch=4)
    ours = trained(
        AccumulatingModel(made(make, strategy=strategy), 5),
        compiled,
        batches,
        steps_per_epoch=4,
    )
    assert_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_several_steps_an_execution(devices):
    make, data, compiled = CASES["sample_weights"]
    strategy = (
        tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) if devices == 2 else None
    )
    counts, batches = (
        Counts(),
        tf.data.Dataset.from_tensor_slices(data).batch(4),
    )  # 9: the last of 1 example
    theirs = trained(made(make), compiled, batches)
    model = AccumulatingModel(made(make, strategy=strategy), 3)
    ours = trained(model, compiled, batches, steps_per_execution=3, callbacks=[counts])
    assert_equal(ours, theirs)
    assert counts.ended == [2, 5, 8] * 3
    assert int(model.optimizer.iterations.numpy()) == 27


class Counts(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.ended, self.losses = [], []

    def on_train_batch_end(self, batch, logs):
        self.ended.append(batch)
        self.losses.append(float(logs["loss"]))


@pytest.mark.slow
def test_callbacks_see_what_they_see_in_a_plain_fit(tmp_path):
    make, data, compiled = CASES["sample_weights"]

    def fitted(model, folder):
        callbacks = [
            Counts(),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
            keras.callbacks.ModelCheckpoint(
                folder / "{epoch}.weights.h5", save_weights_only=True
            ),
            keras.callbacks.EarlyStopping(
                "val_accuracy", patience=2, baseline=1.1, restore_best_weights=True
            ),
        ]
        result = trained(
            model, compiled, data, epochs=9, validation_data=data, callbacks=callbacks
        )
        return result, callbacks[0], sorted(file.name for file in folder.iterdir())

    for folder in ("plain", "ours"):
        (tmp_path / folder).mkdir()
    theirs, their_counts, their_files = fitted(made(make), tmp_path / "plain")
    ours, our_counts, our_files = fitted(
        AccumulatingModel(made(make), 5), tmp_path / "ours"
    )
    assert_equal(ours, theirs)
    assert len(ours[0]["loss"]) == 3
    assert our_counts.ended == their_counts.ended == [0, 1, 2] * 3
    np.testing.assert_allclose(our_counts.losses, their_counts.losses, rtol=EXACT)
    assert our_files == their_files == ["1.weights.h5", "2.weights.h5", "3.weights.h5"]


@pytest.mark.slow
def test_class_weights():
    make, (x, y, _), compiled = CASES["sample_weights"]
    weights = {"class_weight": {0: 1.0, 1: 5.0, 2: 0.2}}
    theirs = trained(made(make), compiled, (x, y), **weights)
    assert_equal(
        trained(AccumulatingModel(made(make), 5), compiled, (x, y), **weights), theirs
    )
    assert (
        abs(theirs[0]["loss"][0] - trained(made(make), compiled, (x, y))[0]["loss"][0])
        > 1e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_single_batches_and_predictions(devices):
    make, data, compiled = CASES["sample_weights"]
    strategy = (
        tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) if devices == 2 else None
    )
    plain, model = made(make), AccumulatingModel(made(make, strategy=strategy), 5)
    for each in (plain, model):
        with each.distribute_strategy.scope():
            each.compile(**compiled())
    for batch in (data, [part[:1] for part in data]):
        theirs, ours = (
            each.train_on_batch(*batch, return_dict=True) for each in (plain, model)
        )
        assert ours == pytest.approx(theirs, rel=EXACT)
        theirs, ours = (
            each.test_on_batch(*batch, return_dict=True) for each in (plain, model)
        )
        assert ours == pytest.approx(theirs, rel=EXACT)
    for size in (7, N):
        np.testing.assert_allclose(
            model.predict(X, size, verbose=0),
            plain.predict(X, size, verbose=0),
            rtol=EXACT,
        )
    np.testing.assert_allclose(model(X), plain(X), rtol=EXACT)


@pytest.mark.slow
def test_a_loaded_model_goes_on_as_if_it_had_not_been_saved(tmp_path):
    make, data, compiled = CASES["sample_weights"]
    whole = trained(AccumulatingModel(made(make), 5), compiled, data)
    model = AccumulatingModel(made(make), 5)
    trained(model, compiled, data, epochs=2)
    model.save(tmp_path / "whole.keras")
    model.inner.save(tmp_path / "inner.keras")
    loaded = keras.models.load_model(tmp_path / "whole.keras")
    assert isinstance(loaded, AccumulatingModel)
    assert loaded.micro_batch_size == 5
    arguments = {
        "y": data[1],
        "sample_weight": data[2],
        "batch_size": 16,
        "shuffle": False,
        "verbose": 0,
    }
    history = loaded.fit(data[0], initial_epoch=2, epochs=3, **arguments).history
    assert_equal(
        (history, loaded.get_weights()),
        ({key: values[2:] for key, values in whole[0].items()}, whole[1]),
    )
    inner = keras.models.load_model(tmp_path / "inner.keras")
    assert type(inner) is keras.Sequential
    np.testing.assert_array_equal(inner(X), model.inner(X))


@pytest.mark.slow
def test_the_loss_scale_of_a_loaded_model_goes_on(tmp_path):
    """It doubles after every third of the updates, of which there are four in a fit."""
    scaled = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(), initial_scale=8.0, dynamic_growth_steps=3
    )
    model = AccumulatingModel(made(dense), 5)
    model.compile(scaled, cross_entropy())
    model.fit(random(32, 6), labels(32), batch_size=8, verbose=0)
    model.save(tmp_path / "scaled.keras")
    loaded = keras.models.load_model(tmp_path / "scaled.keras")
    assert float(loaded.optimizer.dynamic_scale) == 16
    loaded.fit(random(32, 6), labels(32), batch_size=8, verbose=0)
    assert float(loaded.optimizer.dynamic_scale) == 32


@pytest.mark.slow
def test_weights_that_a_callback_has_saved_load_into_the_plain_model(tmp_path):
    make, data, compiled = CASES["sample_weights"]
    model, plain, file = (
        AccumulatingModel(made(make), 5),
        made(make),
        tmp_path / "kept.weights.h5",
    )
    save = keras.callbacks.ModelCheckpoint(file, save_weights_only=True)
    trained(model, compiled, data, epochs=1, callbacks=[save])
    for other in (plain, AccumulatingModel(made(make), 5)):
        other.load_weights(file)
        assert all(map(np.array_equal, other.get_weights(), model.inner.get_weights()))


@pytest.mark.slow
def test_a_fit_that_is_backed_up_goes_on_with_its_optimizer(tmp_path):
    make, data, compiled = CASES["sample_weights"]
    model, other = AccumulatingModel(made(make), 5), AccumulatingModel(made(make), 5)
    trained(model, compiled, data, epochs=2)
    model.save_weights(tmp_path / "kept.weights.h5")
    trained(other, compiled, data, epochs=1)
    other.load_weights(tmp_path / "kept.weights.h5")
    for one, two in zip(
        other.optimizer.variables, model.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(one, two)


class Interpreted(layers.Layer):
    """Runs in Python, which XLA cannot."""

    def call(self, x):
        return tf.ensure_shape(
            tf.numpy_function(lambda value: value, [x], x.dtype), x.shape
        )


@pytest.mark.slow
def test_xla_compiles_the_micro_steps_where_it_is_asked_for():
    make, data, compiled = CASES["sample_weights"]
    theirs = trained(made(make), compiled, data, epochs=1)
    model = AccumulatingModel(made(make), 5)
    assert_equal(trained(model, compiled, data, epochs=1, jit_compile=True), theirs)
    assert model.get_compile_config()["jit_compile"] is True

    def not_for_xla():
        return AccumulatingModel(
            keras.Sequential([keras.Input((6,)), Interpreted(), layers.Dense(3)]), 5
        )

    trained(not_for_xla(), compiled, data, epochs=1)
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.UnimplementedError)):
        trained(not_for_xla(), compiled, data, epochs=1, jit_compile=True)
