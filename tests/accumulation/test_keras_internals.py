"""What `pipeline/accumulation/keras_internals.py` takes from Keras and TensorFlow.

It is private there, and still is what it was read as.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from pipeline.accumulation import keras_internals

WHERE = "see pipeline/accumulation/keras_internals.py"


def test_a_mask_stays_on_the_output():
    masked = layers.Embedding(3, 2, mask_zero=True)(np.array([[1, 0]]))
    mask = keras_internals.mask_of(masked)
    assert np.array(mask).tolist() == [[True, False]], WHERE

    without_mask = layers.Dense(2)(np.ones((1, 2)))
    assert keras_internals.mask_of(without_mask) is None


def test_the_logits_stay_on_the_output():
    dense = layers.Dense(2, use_bias=False, kernel_initializer="ones")
    for activation in ("softmax", "sigmoid"):
        dense.activation = keras.activations.get(activation)
        outputs = dense(np.ones((1, 3)))
        logits = keras_internals.logits_of(outputs)
        assert np.array(logits).tolist() == [[3, 3]], WHERE


def test_layers_inside_of_layers_are_found():
    inside = layers.Dense(2, name="inside")
    inner = keras.Sequential([inside, layers.Dense(1)])
    model = keras.Sequential([keras.Input((2,)), inner])
    layers_of_model = keras_internals.layers_of(model)
    assert inside in layers_of_model, WHERE
    assert model not in layers_of_model, WHERE


def test_the_metrics_of_an_inner_model_are_where_its_own_would_be():
    class Measured(keras.Sequential):
        def __init__(self):
            super().__init__([layers.Dense(1), layers.Dense(1)])
            self.size = keras.metrics.Mean(name="size")
            self.layers[0].seen = keras.metrics.Mean(name="seen")

    inner = Measured()
    inner.compile(loss="mse", metrics=["mae"])
    expected = [metric.name for metric in inner.metrics]
    assert expected == ["loss", "compile_metrics", "size", "seen"]

    wrapper = keras.Sequential([inner])
    wrapper.compile(loss="mse", metrics=["mae"])
    metrics = keras_internals.metrics_of_wrapper(wrapper.metrics, wrapper, inner)
    assert [metric.name for metric in metrics] == expected, WHERE


def test_the_global_seed_is_what_draws_without_a_seed_move():
    keras.utils.set_random_seed(0)
    assert keras_internals.global_seed() is None, WHERE
    keras_internals.global_seed(make=True)
    before = keras_internals.global_seed().numpy()
    drawn = keras.random.normal((2,))
    after = keras_internals.global_seed().numpy()
    assert (after != before).any(), WHERE

    keras_internals.global_seed().assign(before)
    drawn_again = keras.random.normal((2,))
    np.testing.assert_array_equal(drawn_again, drawn)


def test_a_model_checkpoint_counts_in_these():
    callback = keras.callbacks.ModelCheckpoint(
        "{epoch}.weights.h5", save_weights_only=True, save_freq=2
    )
    callback.on_epoch_begin(3)
    private = {name for name in vars(callback) if name.startswith("_")}
    kept = private - {"_model", "_save_on_batch_end"}
    assert set(keras_internals.MODEL_CHECKPOINT_KEEPS) <= kept, WHERE
    assert not callback._should_save_on_batch(0)
    assert callback._should_save_on_batch(1)


def test_a_tensorboard_counts_in_these():
    board = keras.callbacks.TensorBoard("there", write_graph=False)

    def counts():
        return [getattr(board, name) for name in keras_internals.TENSORBOARD_KEEPS]

    assert counts() == [0, 0], WHERE
    board.on_train_batch_begin(0)
    board.on_test_batch_begin(0)
    assert counts() == [1, 1], WHERE


def two_outputs():
    inputs = keras.Input((2,))
    outputs = [layers.Dense(1, name="a")(inputs), layers.Dense(1, name="b")(inputs)]
    return keras.Model(inputs, outputs)


# A batch of two examples for it.
X_OF_TWO = np.ones((2, 2))
Y_OF_TWO = [np.ones((2, 1)), np.ones((2, 1))]


def test_what_compile_makes_of_the_arguments_of_each_output():
    model = two_outputs()
    model.compile(
        loss=["mse", None],
        loss_weights=[0.5, None],
        metrics=[["mae"], []],
        weighted_metrics=[None, ["mse"]],
    )
    assert keras_internals.loss_mean(model) is model.metrics[0], WHERE
    outputs = model(X_OF_TWO)
    model.compute_loss(X_OF_TWO, Y_OF_TWO, outputs)
    model.compute_metrics(X_OF_TWO, Y_OF_TWO, outputs)

    ((path, loss, scale, mean),) = keras_internals.compiled_losses(model)
    assert path == (0,), WHERE
    assert loss.name == "mse", WHERE
    assert scale == 0.5, WHERE
    assert mean is None, WHERE
    metrics, weighted = keras_internals.compiled_metrics(model, ["a", "b"])
    assert [metric.name for metric in metrics["a"]] == ["mae"], WHERE
    assert [metric.name for metric in weighted["b"]] == ["mse"], WHERE


def test_what_compile_makes_of_one_loss_for_both_outputs():
    model = two_outputs()
    assert keras_internals.compiled_losses(model) == []
    model.compile(loss="mse")
    model.compute_loss(X_OF_TWO, Y_OF_TWO, model(X_OF_TWO))
    means = [mean.name for *_, mean in keras_internals.compiled_losses(model)]
    assert means == ["a_loss", "b_loss"], WHERE
    assert keras_internals.compiled_metrics(model, ["a", "b"]) == ({}, {})


def test_adam_keeps_its_moments_by_variable():
    first = keras.Variable(np.zeros(2))
    second = keras.Variable(np.zeros(3))
    adam = keras.optimizers.Adam(beta_1=0.5, beta_2=0.75)
    adam.build([first, second])
    gradients = [np.full(2, 2.0, "float32"), np.full(3, 4.0, "float32")]
    adam.apply(gradients, [first, second])

    def moments_of(variable):
        moments = keras_internals.adam_moments(adam, variable.value)
        return [moment.numpy().tolist() for moment in moments]

    assert moments_of(first) == [[1.0] * 2, [1.0] * 2], WHERE
    assert moments_of(second) == [[2.0] * 3, [4.0] * 3], WHERE


def test_a_rate_that_is_a_function_is_called_once():
    calls = []

    def rate_of_call():
        calls.append(0)
        return len(calls)

    optimizer = keras.optimizers.SGD(rate_of_call)
    with keras_internals.constant_rate(optimizer) as rate:
        assert int(rate) == 1, WHERE
        assert int(optimizer.learning_rate) == 1, WHERE
        assert len(calls) == 1, WHERE
    assert optimizer.learning_rate == 2, WHERE


def test_tensorflow_tells_of_derivatives_and_takes_a_declared_gradient():
    x = tf.constant(3.0)
    assert not keras_internals.pack_tangents([x]).tangents, WHERE
    with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)):
        assert keras_internals.pack_tangents([x]).tangents, WHERE
    with tf.GradientTape() as tape:
        tape.watch(x)
        with keras_internals.stop_recording():
            y = x * x
        keras_internals.record_operation("Square", [y], [x], lambda dy: (7 * dy,))
    assert float(tape.gradient(y, x)) == 7, WHERE
