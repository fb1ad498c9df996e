"""Keras' own catalogue: updates in micro-batches against Keras on effective batches.

`N` is the number of examples of an epoch, `E` of which are an update; the rest are its
tail.
"""

from __future__ import annotations

import fnmatch
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import Update
from pipeline.accumulation.internals import Objective
from pipeline.verify import engine
from tests.parameters import mostly_slow

EXACT = 1e-12
E = 12
TAIL = 5
N = E + TAIL
# 5 + 5 + 2; how else an update may be cut is in tests/accumulation/test_matrix.py
CUTS = [pytest.param(5, id="ragged")]
KINDS = ("losses", "metrics", "optimizers", "regularizers", "constraints", "layers")

pytestmark = pytest.mark.usefixtures("float64")


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def classes(*shape, count=3, seed=0):
    return np.random.default_rng([seed, *shape]).integers(0, count, size=shape)


@dataclass
class Case:
    """A model with what `compile` takes and data of N examples."""

    model: Callable[[], keras.Model]
    x: Any
    y: Any = None
    weights: Any = None
    compiled: Callable[[], dict[str, Any]] = lambda: {
        "loss": keras.losses.MeanSquaredError()
    }
    optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(0.05, momentum=0.9)
    verified: bool = True  # whether also by the engine of `pipeline verify`


class EachUpdate(keras.callbacks.Callback):
    """Keeps the loss and the metrics of each update alone.

    `fit` gives them over the epoch so far.
    """

    def __init__(self):
        super().__init__()
        self.results: list[dict[str, float]] = []

    def on_train_batch_begin(self, batch, logs=None):
        self.model.reset_metrics()

    def on_train_batch_end(self, batch, logs=None):
        self.results.append(dict(logs))


def check(case: Case, micro_batch_size: int) -> None:
    """Compare three updates, the last one of fewer examples, with Keras' `fit`."""
    theirs = case.model()
    ours = case.model()
    parts = tuple(part for part in (case.x, case.y, case.weights) if part is not None)

    def cut(start, stop):
        return tf.nest.map_structure(lambda array: array[start:stop], parts)

    batches = [cut(0, E), cut(0, E), cut(E, N)]
    for model in (theirs, ours):
        if not model.built or not model.weights:
            model(batches[0][0])
    ours.set_weights(theirs.get_weights())
    start = theirs.get_weights()
    for model in (theirs, ours):
        model.compile(case.optimizer(), **case.compiled())
        # In `fit`, ScheduleFreeAdamW is built without its start.
        model.optimizer.build(model.trainable_variables)
    update = update_of(ours, case.compiled(), micro_batch_size)
    if case.verified:
        (findings,) = engine.compare(update, batches[:1])
        assert [finding for finding in findings if not finding.holds] == []

    epoch = tf.nest.map_structure(lambda *leaves: tf.concat(leaves, 0), *batches)
    expected = results_of_fit(theirs, epoch)
    tensors = [tf.nest.map_structure(tf.convert_to_tensor, batch) for batch in batches]
    specs = tf.nest.map_structure(
        lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), tensors[0]
    )
    step = tf.function(update, input_signature=[specs], autograph=False)
    for batch, by_keras in zip(tensors, expected, strict=True):
        results = step(batch)
        reached = {name: float(results[name]) for name in by_keras}
        of_keras = {name: float(value) for name, value in by_keras.items()}
        assert reached == pytest.approx(of_keras, rel=EXACT, abs=EXACT)
    ours.optimizer.finalize_variable_values(ours.trainable_variables)  # as `fit` ends

    assert largest_step(start, theirs.get_weights()) > 1e-4
    for variable, weight, by_keras in zip(
        ours.weights, ours.get_weights(), theirs.get_weights(), strict=True
    ):
        if weight.dtype.kind == "f":
            np.testing.assert_allclose(
                weight,
                by_keras,
                rtol=0,
                atol=EXACT * max(1.0, np.abs(by_keras).max()),
                err_msg=variable.path,
            )


def update_of(
    model: keras.Model, compiled: dict[str, Any], micro_batch_size: int
) -> Update:
    """Return the update of a model; `compiled` is what `compile` took."""
    layer_metrics = []
    for layer in model.layers:
        layer_metrics += layer.metrics
    loss = compiled.pop("loss", None)
    objective = Objective(loss, layer_metrics=layer_metrics, **compiled)
    return Update(model, objective, model.optimizer, micro_batch_size)


def results_of_fit(
    model: keras.Model, epoch: tuple[Any, ...]
) -> list[dict[str, float]]:
    """Train a compiled model for an epoch; return the results of each update."""
    arguments = dict(zip(("x", "y", "sample_weight"), epoch, strict=False))
    each_update = EachUpdate()
    model.fit(
        **arguments, batch_size=E, shuffle=False, verbose=0, callbacks=[each_update]
    )
    return each_update.results


def largest_step(before: list[np.ndarray], after: list[np.ndarray]) -> float:
    """Return by how much any weight was changed."""
    steps = []
    for old, new in zip(before, after, strict=True):
        if old.size and old.dtype.kind == "f":
            steps.append(np.abs(old - new).max())
    return max(steps)


# Losses: an output for each

ONE_HOT = np.eye(3)[classes(N)]
PROBABILITIES = np.abs(random(N, 3)) + 0.1
PROBABILITIES /= PROBABILITIES.sum(-1, keepdims=True)
SIGNS = np.sign(random(N, 3))
# The name of the class → its arguments, the activation of its output, its labels.
LOSSES: dict[str, tuple[dict[str, Any], str | None, Any]] = {
    "BinaryCrossentropy": ({}, "sigmoid", ONE_HOT),
    "BinaryFocalCrossentropy": ({"from_logits": True}, None, ONE_HOT),
    "CategoricalCrossentropy": ({"label_smoothing": 0.1}, "softmax", ONE_HOT),
    "CategoricalFocalCrossentropy": ({}, "softmax", ONE_HOT),
    "CategoricalGeneralizedCrossEntropy": ({}, "softmax", classes(N)),
    "CategoricalHinge": ({}, None, ONE_HOT),
    "CosineSimilarity": ({}, None, random(N, 3)),
    "Dice": ({"axis": 1}, "sigmoid", ONE_HOT),
    "Hinge": ({}, None, SIGNS),
    "Huber": ({}, None, random(N, 3)),
    "KLDivergence": ({}, "softmax", PROBABILITIES),
    "LogCosh": ({"reduction": "sum"}, None, random(N, 3)),
    "MeanAbsoluteError": ({}, None, random(N, 3)),
    "MeanAbsolutePercentageError": ({}, None, 1 + np.abs(random(N, 3))),
    "MeanSquaredError": ({"reduction": "mean_with_sample_weight"}, None, random(N, 3)),
    "MeanSquaredLogarithmicError": ({}, "softplus", np.abs(random(N, 3))),
    "Poisson": ({}, "softplus", np.abs(random(N, 3))),
    "SparseCategoricalCrossentropy": ({}, "softmax", classes(N)),
    "SquaredHinge": ({}, None, SIGNS),
    "Tversky": ({"axis": 1}, "sigmoid", ONE_HOT),
}


def heads(entries: dict[str, str | None]) -> keras.Model:
    inputs = keras.Input((6,))
    hidden = layers.Dense(7, "tanh")(inputs)
    return keras.Model(
        inputs,
        {
            name: layers.Dense(3, activation, name=name)(hidden)
            for name, activation in entries.items()
        },
    )


# In `make test`, each is in tests/accumulation/test_weighting_and_slicing.py.
@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", CUTS)
def test_every_loss(micro_batch_size):
    activations = {}
    weights = {}
    y = {}
    for name, (_, activation, labels) in LOSSES.items():
        activations[name] = activation
        weights[name] = np.random.default_rng(1).uniform(0.1, 2, N)
        y[name] = labels

    def compiled():
        losses = {}
        for name, (arguments, _, _) in LOSSES.items():
            losses[name] = getattr(keras.losses, name)(**arguments)
        return {"loss": losses}

    case = Case(
        lambda: heads(activations), random(N, 6), y, weights, compiled, verified=False
    )
    check(case, micro_batch_size)


# Metrics, by what their labels and outputs are

# By the kind of labels and outputs: the name of the class → its arguments, of which
# "_" is the first one.
METRICS: dict[str, dict[str, dict[str, Any]]] = {
    "binary": {
        "AUC": {},
        "BinaryAccuracy": {},
        "BinaryCrossentropy": {},
        "FalseNegatives": {},
        "FalsePositives": {},
        "Precision": {},
        "Recall": {},
        "TrueNegatives": {},
        "TruePositives": {},
        "SensitivityAtSpecificity": {"_": 0.5},
        "SpecificityAtSensitivity": {"_": 0.5},
        "PrecisionAtRecall": {"_": 0.5},
        "RecallAtPrecision": {"_": 0.5},
        "BinaryIoU": {"target_class_ids": [0, 1]},
        "Accuracy": {},
    },
    "one_hot": {
        "CategoricalAccuracy": {},
        "CategoricalCrossentropy": {},
        "KLDivergence": {},
        "F1Score": {"average": "macro"},
        "FBetaScore": {"average": "micro"},
        "OneHotIoU": {"num_classes": 3, "target_class_ids": [0, 2]},
        "OneHotMeanIoU": {"num_classes": 3},
    },
    "sparse": {
        "SparseCategoricalAccuracy": {},
        "SparseCategoricalCrossentropy": {},
        "IoU": {"num_classes": 3, "target_class_ids": [0], "sparse_y_pred": False},
        "MeanIoU": {"num_classes": 3, "sparse_y_pred": False},
    },
    "number": {
        "CosineSimilarity": {},
        "LogCoshError": {},
        "MeanAbsoluteError": {},
        "MeanAbsolutePercentageError": {},
        "MeanSquaredError": {},
        "MeanSquaredLogarithmicError": {},
        "Poisson": {},
        "RootMeanSquaredError": {},
        "PearsonCorrelation": {},
        "ConcordanceCorrelation": {},
        "R2Score": {},
    },
    "sign": {"Hinge": {}, "SquaredHinge": {}, "CategoricalHinge": {}},
}
ACTIVATIONS = {
    "binary": "sigmoid",
    "one_hot": "softmax",
    "sparse": "softmax",
    "number": "softplus",
    "sign": None,
}
LABELS = {
    "binary": ONE_HOT,
    "one_hot": ONE_HOT,
    "sparse": classes(N),
    "number": 1 + np.abs(random(N, 3)),
    "sign": SIGNS,
}


def metrics_of(kind: str) -> list[keras.metrics.Metric]:
    metrics = []
    for name, arguments in METRICS[kind].items():
        options = dict(arguments)
        positional = []
        if "_" in options:
            positional.append(options.pop("_"))
        make = getattr(keras.metrics, name)
        metrics.append(make(*positional, **options, name=name))
    return metrics


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", CUTS)
@pytest.mark.parametrize(
    "kinds", [("sparse", "sign"), ("binary", "one_hot", "number")], ids=str
)
def test_every_metric(kinds, micro_batch_size):
    def compiled():
        losses = {kind: keras.losses.MeanSquaredError() for kind in kinds}
        if "sparse" in kinds:
            losses["sparse"] = keras.losses.SparseCategoricalCrossentropy()
        arguments = {
            "loss": losses,
            "metrics": {kind: metrics_of(kind) for kind in kinds},
        }
        if "binary" in kinds:
            weighted = [
                keras.metrics.AUC(name="weighted"),
                keras.metrics.Recall(name="recalled"),
            ]
            arguments["weighted_metrics"] = {"binary": weighted}
        return arguments

    activations = {kind: ACTIVATIONS[kind] for kind in kinds}
    y = {kind: LABELS[kind] for kind in kinds}
    weights = np.random.default_rng(1).uniform(0.1, 2, N)
    case = Case(
        lambda: heads(activations), random(N, 6), y, weights, compiled, verified=False
    )
    check(case, micro_batch_size)


# Optimizers, regularisers and constraints

OPTIMIZERS = {
    "Adadelta": {"learning_rate": 5.0},
    "Adafactor": {"learning_rate": 0.05},
    "Adagrad": {"learning_rate": 0.05},
    "Adam": {"learning_rate": 0.01, "amsgrad": True, "global_clipnorm": 0.5},
    "AdamW": {
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "use_ema": True,
        "ema_momentum": 0.9,
    },
    "Adamax": {"learning_rate": 0.01, "clipnorm": 0.1},
    "Ftrl": {"learning_rate": 0.05},
    "Lamb": {"learning_rate": 0.01},
    "Lion": {"learning_rate": 0.01},
    "Muon": {"learning_rate": 0.01},
    "Nadam": {"learning_rate": 0.01, "clipvalue": 0.05},
    "RMSprop": {"learning_rate": 0.01, "momentum": 0.9, "centered": True},
    "SGD": {
        "learning_rate": 0.1,
        "momentum": 0.9,
        "nesterov": True,
        "loss_scale_factor": 8.0,
    },
    "ScheduleFreeAdamW": {"learning_rate": 0.01},
}


@pytest.mark.parametrize("micro_batch_size", CUTS)
@pytest.mark.parametrize(  # for `make test`: tests/accumulation/test_embeddings.py
    "name", mostly_slow(OPTIMIZERS, [], ["AdamW", "Adafactor", "Lamb", "Muon"])
)
def test_every_optimizer(name, micro_batch_size):
    def model():
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [keras.Input((6,)), layers.Dense(7, "tanh"), layers.Dense(1)]
        )

    def optimizer():
        return getattr(keras.optimizers, name)(**OPTIMIZERS[name])

    case = Case(model, random(N, 6), random(N, 1), optimizer=optimizer, verified=False)
    check(case, micro_batch_size)


REGULARIZERS = {"L1": {}, "L2": {}, "L1L2": {"l1": 0.01, "l2": 0.02}}
CONSTRAINTS = {
    "MaxNorm": {"max_value": 0.4},
    "MinMaxNorm": {"min_value": 0.2, "max_value": 0.4},
    "NonNeg": {},
    "UnitNorm": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", CUTS)
def test_every_regularizer_and_constraint(micro_batch_size):
    def model():
        inputs = keras.Input((6,))
        branches = []
        for place in ("kernel_regularizer", "activity_regularizer"):
            for name, arguments in REGULARIZERS.items():
                regularizer = getattr(keras.regularizers, name)(**arguments)
                branches.append(layers.Dense(3, **{place: regularizer})(inputs))
        for name, arguments in CONSTRAINTS.items():
            constraint = getattr(keras.constraints, name)(**arguments)
            branches.append(layers.Dense(3, kernel_constraint=constraint)(inputs))
        return keras.Model(inputs, layers.Add()(branches))

    check(Case(model, random(N, 6), random(N, 3), verified=False), micro_batch_size)


# Layers: a branch for each, of every kind of input

CONVOLUTION = {"filters": 2, "kernel_size": 2}
IMAGES: dict[str, dict[str, Any]] = {
    "Conv2D": CONVOLUTION,
    "Conv2DTranspose": CONVOLUTION,
    "SeparableConv2D": CONVOLUTION,
    "DepthwiseConv2D": {"kernel_size": 2},
    "AveragePooling2D": {"pool_size": 2},
    "MaxPooling2D": {"pool_size": 2},
    "GlobalAveragePooling2D": {},
    "GlobalMaxPooling2D": {},
    "AdaptiveAveragePooling2D": {"output_size": 2},
    "AdaptiveMaxPooling2D": {"output_size": 2},
    "Cropping2D": {"cropping": 1},
    "UpSampling2D": {},
    "ZeroPadding2D": {},
}
NOT_OF_VOLUMES = re.compile("Separ|Depth|.*Pooling")


def stacked_cells():
    return layers.StackedRNNCells([getattr(layers, name)(2) for name in INSIDE[:3]])


# The shape of the input → the name of the class → its arguments; a function makes one.
LAYERS: dict[tuple[int, ...], dict[str, dict[str, Any]]] = {
    (6,): {
        "Dense": {"units": 2},
        "EinsumDense": {"equation": "ab,bc->ac", "output_shape": 2},
        "PReLU": {},
        "ELU": {},
        "LeakyReLU": {},
        "ReLU": {},
        "Softmax": {},
        "Activation": {"activation": "gelu"},
        "Identity": {},
        "Flatten": {},
        "LayerNormalization": {},
        "RMSNormalization": {},
        "GroupNormalization": {"groups": 2},
        "UnitNormalization": {},
        "Normalization": {"mean": 0.1, "variance": 2.0},
        "Rescaling": {"scale": 0.5},
        "RepeatVector": {"n": 2},
        "Reshape": {"target_shape": (2, 3)},
        "ActivityRegularization": {"l2": 0.01},
    },
    (5, 4): {
        **{name.replace("2D", "1D"): arguments for name, arguments in IMAGES.items()},
        "GRU": {"units": 3},
        "LSTM": {"units": 3},
        "SimpleRNN": {"units": 3},
        "Masking": {},
        "Permute": {"dims": (2, 1)},
        "TimeDistributed": {"layer": lambda: layers.Dense(2)},
        "Bidirectional": {"layer": lambda: layers.LSTM(2)},
        "RNN": {"cell": stacked_cells},
    },
    (6, 6, 2): {**IMAGES, "ConvLSTM1D": CONVOLUTION},
    (5, 5, 5, 2): {
        **{
            name.replace("2D", "3D"): arguments
            for name, arguments in IMAGES.items()
            if not NOT_OF_VOLUMES.match(name)
        },
        "ConvLSTM2D": CONVOLUTION,
        "GlobalMaxPooling3D": {},
        "GlobalAveragePooling3D": {},
    },
    (3, 4, 4, 4, 2): {"ConvLSTM3D": CONVOLUTION},
}
FAST_SHAPES = [(6,)]
SLOW_SHAPES = [(5, 4), (6, 6, 2)]
MERGING = (
    "Add",
    "Average",
    "Concatenate",
    "Dot",
    "Maximum",
    "Minimum",
    "Multiply",
    "Subtract",
)
OF_SEQUENCES = (
    "Attention",
    "AdditiveAttention",
    "MultiHeadAttention",
    "GroupQueryAttention",
)
OF_TOKENS = ("Embedding", "ReversibleEmbedding")
INSIDE = ("GRUCell", "LSTMCell", "SimpleRNNCell", "StackedRNNCells")


def layer(name, arguments):
    options = {}
    for key, value in arguments.items():
        options[key] = value() if callable(value) else value
    return getattr(layers, name)(**options)


def shapes():
    parameters = []
    for shape in LAYERS:
        if shape in FAST_SHAPES:
            marks = []
        elif shape in SLOW_SHAPES:
            marks = [pytest.mark.slow]
        else:
            marks = [pytest.mark.soak]
        parameters.append(pytest.param(shape, marks=marks))
    return parameters


def numbers_of(outputs):
    """Return a number for each example from each output, side by side in one output.

    So there is one loss to trace, and the weights of each branch still depend on what
    its layer returns alone.
    """
    numbers = []
    for name, output in outputs.items():
        number = layers.Dense(1, name=name)(layers.Flatten()(output))
        numbers.append(number)
    if len(numbers) == 1:
        return numbers[0]
    return layers.Concatenate()(numbers)


def case_of_numbers(model, x, count):
    """Return the case of a model of `numbers_of` so many outputs.

    A weight goes as far as if each number had a loss of its own.
    """
    return Case(
        model,
        x,
        random(N, count),
        optimizer=lambda: keras.optimizers.SGD(0.05 * count, momentum=0.9),
        verified=False,
    )


@pytest.mark.parametrize("micro_batch_size", CUTS)
@pytest.mark.parametrize("shape", shapes(), ids=str)
def test_every_layer(shape, micro_batch_size):
    def model():
        inputs = keras.Input(shape)
        outputs = {}
        for name, arguments in LAYERS[shape].items():
            outputs[name] = layer(name, arguments)(inputs)
        return keras.Model(inputs, numbers_of(outputs))

    case = case_of_numbers(model, random(N, *shape), len(LAYERS[shape]))
    check(case, micro_batch_size)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", CUTS)
def test_every_merging_and_attending_layer(micro_batch_size):
    def model():
        left = keras.Input((4, 3), name="left")
        right = keras.Input((4, 3), name="right")
        tokens = keras.Input((4,), dtype="int64", name="tokens")
        both = [layers.Dense(3)(left), layers.Dense(3)(right)]
        outputs = {}
        for name in MERGING:
            options = {"axes": -1} if name == "Dot" else {}
            outputs[name] = getattr(layers, name)(**options)(both)
        for name in ("Attention", "AdditiveAttention"):
            outputs[name] = getattr(layers, name)()(both)
        outputs["MultiHeadAttention"] = layers.MultiHeadAttention(2, 2)(*both)
        outputs["GroupQueryAttention"] = layers.GroupQueryAttention(2, 2, 1)(*both)
        for name in OF_TOKENS:
            outputs[name] = getattr(layers, name)(7, 3)(tokens)
        inputs = {"left": left, "right": right, "tokens": tokens}
        return keras.Model(inputs, numbers_of(outputs))

    x = {
        "left": random(N, 4, 3),
        "right": random(N, 4, 3, seed=1),
        "tokens": classes(N, 4, count=7),
    }
    names = (*MERGING, *OF_SEQUENCES, *OF_TOKENS)
    check(case_of_numbers(model, x, len(names)), micro_batch_size)


# Shapes of models


class Residual(keras.Model):
    """Subclassed and unbuilt, with a layer that is never called."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(6, "tanh")
        self.second = layers.Dense(1)
        self.unused = layers.Dense(2)

    def call(self, x, training=False):
        return self.second(x + self.first(x))


class Tied(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(7, 4)
        self.mix = layers.Dense(4)

    def build(self, shape):
        self.embedding.build(shape)
        self.mix.build((*shape, 4))

    def call(self, x):
        hidden = self.mix(self.embedding(x))
        return keras.ops.matmul(hidden, keras.ops.transpose(self.embedding.embeddings))


@keras.saving.register_keras_serializable()
class Penalised(layers.Layer):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.seen = keras.metrics.Mean(name="size_of_outputs")

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        self.seen.update_state(keras.ops.mean(keras.ops.abs(x), axis=-1))
        return x


def sequential(*stack, shape=(6,), **options):
    return lambda: keras.Sequential(
        [keras.Input(shape, **options), *(make() for make in stack)]
    )


def dense(units=1, activation=None, **options):
    return lambda: layers.Dense(units, activation, **options)


def shared():
    left = keras.Input((6,), name="left")
    right = keras.Input((6,), name="right")
    tower = keras.Sequential([layers.Dense(5, "tanh"), layers.Dense(4)])
    return keras.Model([left, right], layers.Dot(-1)([tower(left), tower(right)]))


def frozen():
    model = sequential(dense(5, "tanh", name="base"), dense())()
    model.get_layer("base").trainable = False
    return model


def of_texts():
    words = layers.StringLookup(vocabulary=["a", "b", "c"])
    return sequential(
        lambda: words,
        lambda: layers.Embedding(4, 3),
        lambda: layers.Flatten(),
        dense(),
        shape=(2,),
        dtype="string",
    )()


def token_loss():
    return {
        "loss": keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        )
    }


TOKENS = classes(N, 5, count=7)
TOKENS[: E // 2, 3:] = 0


def plain():
    model = sequential(dense(5, "tanh"), dense())
    return Case(model, random(N, 6), random(N, 1))


def two_inputs():
    return Case(shared, [random(N, 6), random(N, 6, seed=1)], random(N, 1))


def two_outputs():
    def compiled():
        loss = {
            "a": keras.losses.Huber(),
            "b": keras.losses.SparseCategoricalCrossentropy(),
        }
        return {"loss": loss, "loss_weights": {"a": 0.5, "b": 2.0}}

    return Case(
        lambda: heads({"a": None, "b": "softmax"}),
        random(N, 6),
        {"a": random(N, 3), "b": classes(N)},
        {"a": np.linspace(0, 2, N), "b": np.linspace(1, 0.5, N)},
        compiled,
    )


def recurrent():
    model = sequential(
        lambda: layers.Embedding(7, 4, mask_zero=True),
        lambda: layers.LSTM(3, return_sequences=True),
        dense(7),
        shape=(5,),
        dtype="int64",
    )
    weights = np.linspace(0.1, 2, N)[:, None] * np.ones((N, 5))
    return Case(model, TOKENS, classes(N, 5, count=7), weights, token_loss)


def texts():
    words = tf.constant([["a", "b"], ["c", "d"]] * 9)[:N]
    return Case(of_texts, words, random(N, 1))


def normalised():
    model = sequential(
        dense(8),
        lambda: layers.LayerNormalization(),
        lambda: layers.GroupNormalization(2),
        dense(),
    )
    return Case(model, random(N, 6), random(N, 1))


def segmentation():
    def compiled():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return {"loss": loss}

    model = sequential(
        lambda: layers.Conv2D(3, 3, padding="same", activation="relu"),
        lambda: layers.Conv2D(2, 1),
        shape=(6, 6, 1),
    )
    y = classes(N, 6, 6, count=2)
    return Case(model, random(N, 6, 6, 1), y, compiled=compiled)


def nested():
    model = sequential(sequential(dense(5, "relu"), dense(4)), dense())
    return Case(model, random(N, 6), random(N, 1))


def adding():
    model = sequential(dense(4), Penalised, dense())
    return Case(model, random(N, 6), random(N, 1))


SHAPES = {
    "plain": plain,
    "two inputs, a shared tower": two_inputs,
    "two outputs": two_outputs,
    "frozen": lambda: Case(frozen, random(N, 6), random(N, 1)),
    "tied embedding": lambda: Case(
        Tied, TOKENS, classes(N, 5, count=7), compiled=token_loss
    ),
    "recurrent with mask": recurrent,
    "texts": texts,
    "adds a loss and a metric": adding,
    "subclassed and unbuilt": lambda: Case(Residual, random(N, 6), random(N, 1)),
    "layer and group normalisation": normalised,
    "convolutional segmentation": segmentation,
    "nested": nested,
}


@pytest.mark.parametrize("micro_batch_size", CUTS)
@pytest.mark.parametrize("name", mostly_slow(SHAPES, [], list(SHAPES)[::2]))
def test_every_shape_of_model(name, micro_batch_size):
    check(SHAPES[name](), micro_batch_size)


def patterns_of_exceptions() -> list[str]:
    """Return the names in the first column of the table in the documentation."""
    page = Path(__file__).resolve().parents[2] / "docs" / "exact.md"
    names = []
    for row in re.findall(
        r"^\| (`.+?) \|", page.read_text(encoding="utf-8"), re.MULTILINE
    ):
        names += re.findall(r"`([\w.*]+)`", row)
    return names


def covered_entries() -> set[str]:
    names = {
        "losses": list(LOSSES),
        "metrics": [],
        "optimizers": list(OPTIMIZERS),
        "regularizers": list(REGULARIZERS),
        "constraints": list(CONSTRAINTS),
        "layers": [*MERGING, *OF_SEQUENCES, *OF_TOKENS, *INSIDE],
    }
    for entries in METRICS.values():
        names["metrics"] += entries
    for entries in LAYERS.values():
        names["layers"] += entries

    covered = set()
    for kind in KINDS:
        covered.update(f"{kind}.{name}" for name in names[kind])
    return covered


def public_entries() -> set[str]:
    """Return the classes of Keras' catalogue, each under one name."""
    public = set()
    for kind in KINDS:
        module = getattr(keras, kind)
        for name, cls in vars(module).items():
            if inspect.isclass(cls) and issubclass(cls, base_class(kind)):
                if hasattr(module, cls.__name__):
                    name = cls.__name__  # the others are aliases
                public.add(f"{kind}.{name}")
    return public


def base_class(kind: str) -> type:
    if kind == "layers":
        return keras.layers.Layer
    names = {"losses": "Loss", "metrics": "Metric", "optimizers": "Optimizer"}
    name = names.get(kind) or kind[:-1].capitalize()
    return getattr(getattr(keras, kind), name)


def test_the_catalogue_is_complete():
    covered = covered_entries()
    public = public_entries()
    excepted = set()
    for pattern in patterns_of_exceptions():
        excepted.update(fnmatch.filter(public, pattern))
    assert public - covered - excepted == set()  # what Keras adds has to be classed
    assert covered - public == set()
    print(
        f"{len(public)} entries: {len(public & covered)} equal, "
        f"{len(excepted - covered)} in the table of exceptions"
    )


@pytest.mark.slow
def test_an_exception_is_one():
    """This is a negative control: batch normalisation is in the table."""
    model = sequential(dense(5), lambda: layers.BatchNormalization(), dense())
    with pytest.raises(AssertionError):
        check(Case(model, random(N, 6), random(N, 1)), 4)
