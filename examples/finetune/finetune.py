r"""A network that our own run trained learns other digits: frozen layers, and LoRA.

Command:   cd examples/finetune && pipeline train --config-dir conf experiment=base
Run time:  about 20 seconds on two CPU cores, and as long for each of the other two
Expect:    val/accuracy above 0.97 on the digits 0 to 4

RUN is the ID that this run prints. Train from its newest checkpoint, with the hidden
layers frozen, on 100 examples of the digits 5 to 9 (val/accuracy above 0.85):

    pipeline train --config-dir conf experiment=frozen start.run=RUN \
        start.weights_only=true

Train from the model that the run logged, whose file MLflow downloads, with LoRA in the
hidden layers and a new last layer (val/accuracy above 0.9):

    export MLFLOW_TRACKING_URI=sqlite:///mlruns/mlflow.db
    mlflow artifacts download --run-id RUN --artifact-path model --dst-path base
    pipeline train --config-dir conf experiment=lora
    pipeline verify --config-dir conf experiment=lora
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from pipeline.dataset import Data

HIDDEN = ("hidden_1", "hidden_2")


def digits(first, training):
    x, y = load_digits(return_X_y=True)
    chosen = (y >= first) & (y < first + 5)
    images = (x[chosen] / 16).astype("float32")
    order = np.random.default_rng(0).permutation(len(images))
    examples = tf.data.Dataset.from_tensor_slices(
        (images[order], y[chosen][order] - first)
    )
    validation = examples.skip(training)
    return Data(examples.take(training), validation, classes=5, name="digits")


def network(input_shape, classes, units):
    inputs = keras.Input(input_shape)
    hidden = inputs
    for name in HIDDEN:
        hidden = keras.layers.Dense(units, "relu", name=name)(hidden)
    return keras.Model(inputs, keras.layers.Dense(classes, name="logits")(hidden))


def frozen(input_shape, classes, units):
    # Layers of the same names and shapes: `start.run` loads their weights.
    model = network(input_shape, classes, units)
    for name in HIDDEN:
        model.get_layer(name).trainable = False
    return model


def lora(input_shape, classes, units, weights, rank):
    # Build the layers anew, so that they have the precision of this run. The last one
    # keeps its initial weights, and may have another number of classes.
    model = network(input_shape, classes, units)
    trained = keras.models.load_model(weights, compile=False)
    for name in HIDDEN:
        layer = model.get_layer(name)
        layer.set_weights(trained.get_layer(name).get_weights())
        layer.enable_lora(rank)  # the kernel is frozen: kernel + lora_a @ lora_b
    return model
