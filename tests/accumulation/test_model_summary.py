"""The summary of an `AccumulatingModel` is that of the model which it wraps."""

import keras

from pipeline.accumulation import AccumulatingModel


def network():
    layers = [keras.Input((4,)), keras.layers.Dense(3, name="dense")]
    return keras.Sequential(layers, name="small")


def printed(model):
    lines = []
    model.summary(print_fn=lambda line, **_: lines.append(line))
    return lines


def test_it_shows_the_layers_and_the_parameters_of_the_optimizer():
    plain = network()
    wrapped = AccumulatingModel(network(), micro_batch_size=2)
    assert printed(wrapped) == printed(plain)
    assert "dense (Dense)" in "".join(printed(wrapped))

    for model in (plain, wrapped):
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    assert printed(wrapped) == printed(plain)
    assert "Optimizer params" in "".join(printed(wrapped))
