"""Keras' own catalogue: one update and one epoch of each entry, in pieces, against Keras on the whole batch."""

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
E, TAIL = 12, 5  # examples of an update, and of the epoch's last one
CUTS = [
    pytest.param(5, id="ragged")
]  # 5 + 5 + 2; how else an update may be cut is in tests/accumulation/test_matrix.py
KINDS = ("losses", "metrics", "optimizers", "regularizers", "constraints", "layers")


pytestmark = pytest.mark.usefixtures("float64")


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def classes(*shape, of=3, seed=0):
    return np.random.default_rng([seed, *shape]).integers(0, of, size=shape)


@dataclass
class Case:
    """A model with what `compile` takes and data of E + TAIL examples."""

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
    """Appends to `found` the loss and the metrics of each update alone, which `fit` gives over the epoch so far."""

    def __init__(self, found: list[dict[str, float]]):
        super().__init__()
        self.found = found

    def on_train_batch_begin(self, batch, logs=None):
        self.model.reset_metrics()

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(dict(logs))


def check(case: Case, micro_batch_size: int) -> None:
    """Three updates, the last one of fewer examples, beside Keras' `fit` on whole batches."""
    theirs, ours = case.model(), case.model()
    parts = [part for part in (case.x, case.y, case.weights) if part is not None]

    def cut(start, stop):
        return tuple(
            tf.nest.map_structure(lambda a: a[start:stop], part) for part in parts
        )

    batches = [cut(0, E), cut(0, E), cut(E, E + TAIL)]
    for model in (theirs, ours):
        if not model.built or not model.weights:
            model(batches[0][0])
    ours.set_weights(theirs.get_weights())
    start = theirs.get_weights()
    for model in (theirs, ours):
        model.compile(case.optimizer(), **case.compiled())
        model.optimizer.build(
            model.trainable_variables
        )  # in `fit` ScheduleFreeAdamW is built without its start
    given = case.compiled()
    own = [metric for layer in ours.layers for metric in layer.metrics]
    objective = Objective(given.pop("loss", None), layer_metrics=own, **given)
    update = Update(ours, objective, ours.optimizer, micro_batch_size)
    if case.verified:
        (findings,) = engine.compare(update, batches[:1])
        assert [finding for finding in findings if not finding.holds] == []
    tensors = [tf.nest.map_structure(tf.convert_to_tensor, batch) for batch in batches]
    specs = tf.nest.map_structure(
        lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), tensors[0]
    )
    step = tf.function(update, input_signature=[specs], autograph=False)
    epoch = tf.nest.map_structure(lambda *leaves: tf.concat(leaves, 0), *batches)
    expected: list[dict[str, float]] = []
    given = dict(zip(("x", "y", "sample_weight"), epoch, strict=False))
    theirs.fit(
        **given,
        batch_size=E,
        shuffle=False,
        verbose=0,
        callbacks=[EachUpdate(expected)],
    )
    for batch, of_keras in zip(tensors, expected, strict=True):
        results = step(batch)
        found = {name: float(results[name]) for name in of_keras}
        assert found == pytest.approx(
            {name: float(value) for name, value in of_keras.items()},
            rel=EXACT,
            abs=EXACT,
        )
    ours.optimizer.finalize_variable_values(ours.trainable_variables)  # as `fit` ends
    moved = [
        np.abs(a - b).max()
        for a, b in zip(start, theirs.get_weights(), strict=True)
        if a.size and a.dtype.kind == "f"
    ]
    assert max(moved) > 1e-4
    for variable, a, b in zip(
        ours.weights, ours.get_weights(), theirs.get_weights(), strict=True
    ):
        if a.dtype.kind == "f":
            np.testing.assert_allclose(
                a,
                b,
                rtol=0,
                atol=EXACT * max(1.0, np.abs(b).max()),
                err_msg=variable.path,
            )


# Losses: an output for each

N = E + TAIL
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


@pytest.mark.slow  # in `make test` each is in tests/accumulation/test_weighting_and_slicing.py
@pytest.mark.parametrize("micro_batch_size", CUTS)
def test_every_loss(micro_batch_size):
    make = lambda: {  # noqa: E731
        name: getattr(keras.losses, name)(**arguments)
        for name, (arguments, _, _) in LOSSES.items()
    }
    weights = {name: np.random.default_rng(1).uniform(0.1, 2, N) for name in LOSSES}
    y = {name: labels for name, (_, _, labels) in LOSSES.items()}
    model = lambda: heads(  # noqa: E731
        {name: activation for name, (_, activation, _) in LOSSES.items()}
    )
    check(
        Case(model, random(N, 6), y, weights, lambda: {"loss": make()}, verified=False),
        micro_batch_size,
    )


# Metrics, by what their labels and outputs are

THRESHOLDED = (
    "AUC",
    "BinaryAccuracy",
    "BinaryCrossentropy",
    "FalseNegatives",
    "FalsePositives",
    "Precision",
    "Recall",
)
METRICS: dict[str, dict[str, dict[str, Any]]] = {
    "binary": {
        **{key: {} for key in (*THRESHOLDED, "TrueNegatives", "TruePositives")},
        **{
            key: {"_": 0.5}
            for key in (
                "SensitivityAtSpecificity",
                "SpecificityAtSensitivity",
                "PrecisionAtRecall",
            )
        },
        "RecallAtPrecision": {"_": 0.5},
        "BinaryIoU": {"target_class_ids": [0, 1]},
        "Accuracy": {},
    },
    "one_hot": {
        **{
            key: {}
            for key in (
                "CategoricalAccuracy",
                "CategoricalCrossentropy",
                "KLDivergence",
                "F1Score",
            )
        },
        "FBetaScore": {"average": "micro"},
        "F1Score": {"average": "macro"},
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
        **{
            key: {}
            for key in (
                "CosineSimilarity",
                "LogCoshError",
                "MeanAbsoluteError",
                "MeanAbsolutePercentageError",
            )
        },
        **{
            key: {}
            for key in (
                "MeanSquaredError",
                "MeanSquaredLogarithmicError",
                "Poisson",
                "RootMeanSquaredError",
            )
        },
        **{
            key: {}
            for key in ("PearsonCorrelation", "ConcordanceCorrelation", "R2Score")
        },
    },
    "sign": {key: {} for key in ("Hinge", "SquaredHinge", "CategoricalHinge")},
}


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", CUTS)
@pytest.mark.parametrize(
    "kinds", [("sparse", "sign"), ("binary", "one_hot", "number")], ids=str
)
def test_every_metric(kinds, micro_batch_size):
    groups = {kind: METRICS[kind] for kind in kinds}

    def make(name, arguments):
        first = [arguments["_"]] if "_" in arguments else []
        return getattr(keras.metrics, name)(
            *first, **{k: v for k, v in arguments.items() if k != "_"}, name=name
        )

    def compiled():
        loss = {name: keras.losses.MeanSquaredError() for name in groups}
        sparse = (
            {"sparse": keras.losses.SparseCategoricalCrossentropy()}
            if "sparse" in groups
            else {}
        )
        weighted = {
            "binary": [
                keras.metrics.AUC(name="weighted"),
                keras.metrics.Recall(name="recalled"),
            ]
        }
        return {
            "loss": loss | sparse,
            "metrics": {
                output: [make(*entry) for entry in entries.items()]
                for output, entries in groups.items()
            },
            **({"weighted_metrics": weighted} if "binary" in groups else {}),
        }

    activations = {
        "binary": "sigmoid",
        "one_hot": "softmax",
        "sparse": "softmax",
        "number": "softplus",
        "sign": None,
    }
    y = {
        "binary": ONE_HOT,
        "one_hot": ONE_HOT,
        "sparse": classes(N),
        "number": 1 + np.abs(random(N, 3)),
        "sign": SIGNS,
    }
    activations, y = (
        {kind: of_kind[kind] for kind in kinds} for of_kind in (activations, y)
    )
    weights = np.random.default_rng(1).uniform(0.1, 2, N)
    check(
        Case(
            lambda: heads(activations),
            random(N, 6),
            y,
            weights,
            compiled,
            verified=False,
        ),
        micro_batch_size,
    )


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
@pytest.mark.parametrize(
    "name", mostly_slow(OPTIMIZERS, ["AdamW"], ["Adafactor", "Lamb", "Muon"])
)  # see tests/accumulation/test_embeddings.py
def test_every_optimizer(name, micro_batch_size):
    def model():
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [keras.Input((6,)), layers.Dense(7, "tanh"), layers.Dense(1)]
        )

    optimizer = lambda: getattr(keras.optimizers, name)(**OPTIMIZERS[name])  # noqa: E731
    check(
        Case(model, random(N, 6), random(N, 1), optimizer=optimizer, verified=False),
        micro_batch_size,
    )


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
        given = [
            {"kernel_regularizer": getattr(keras.regularizers, n)(**a)}
            for n, a in REGULARIZERS.items()
        ]
        given += [
            {"activity_regularizer": getattr(keras.regularizers, n)(**a)}
            for n, a in list(REGULARIZERS.items())[:3]
        ]
        given += [
            {"kernel_constraint": getattr(keras.constraints, n)(**a)}
            for n, a in CONSTRAINTS.items()
        ]
        return keras.Model(
            inputs,
            layers.Add()([layers.Dense(3, **arguments)(inputs) for arguments in given]),
        )

    check(Case(model, random(N, 6), random(N, 3), verified=False), micro_batch_size)


# Layers: a branch for each, of every kind of input

IMAGES = {f"{kind}2D": arguments for kind, arguments in {
    "Conv": {"filters": 2, "kernel_size": 2}, "Conv_Transpose": {"filters": 2, "kernel_size": 2},
    "SeparableConv": {"filters": 2, "kernel_size": 2}, "DepthwiseConv": {"kernel_size": 2},
    "AveragePooling": {"pool_size": 2}, "MaxPooling": {"pool_size": 2},
    "GlobalAveragePooling": {}, "GlobalMaxPooling": {},
    "AdaptiveAveragePooling": {"output_size": 2}, "AdaptiveMaxPooling": {"output_size": 2},
    "Cropping": {"cropping": 1}, "UpSampling": {}, "ZeroPadding": {},
}.items()}  # fmt: skip
LAYERS: dict[tuple[int, ...], dict[str, dict[str, Any]]] = {
    (6,): {
        "Dense": {"units": 2}, "EinsumDense": {"equation": "ab,bc->ac", "output_shape": 2}, "PReLU": {}, "ELU": {},
        "LeakyReLU": {}, "ReLU": {}, "Softmax": {}, "Activation": {"activation": "gelu"}, "Identity": {}, "Flatten": {},
        "LayerNormalization": {}, "RMSNormalization": {}, "GroupNormalization": {"groups": 2}, "UnitNormalization": {},
        "Normalization": {"mean": 0.1, "variance": 2.0}, "Rescaling": {"scale": 0.5}, "RepeatVector": {"n": 2},
        "Reshape": {"target_shape": (2, 3)}, "ActivityRegularization": {"l2": 0.01},
    },
    (5, 4): {
        **{name.replace("2D", "1D"): arguments for name, arguments in IMAGES.items()},
        **{key: {"units": 3} for key in ("GRU", "LSTM", "SimpleRNN")}, "Masking": {}, "Permute": {"dims": (2, 1)},
        "TimeDistributed": {"layer": lambda: layers.Dense(2)}, "Bidirectional": {"layer": lambda: layers.LSTM(2)},
        "RNN": {"cell": lambda: layers.StackedRNNCells([getattr(layers, name)(2) for name in INSIDE[:3]])},
    },
    (6, 6, 2): {**IMAGES, "ConvLSTM1D": {"filters": 2, "kernel_size": 2}},
    (5, 5, 5, 2): {
        **{n.replace("2D", "3D"): a for n, a in IMAGES.items() if not re.match("Separ|Depth|.*Pooling", n)},
        "ConvLSTM2D": {"filters": 2, "kernel_size": 2}, "GlobalMaxPooling3D": {},
        "GlobalAveragePooling3D": {},
    },
    (3, 4, 4, 4, 2): {"ConvLSTM3D": {"filters": 2, "kernel_size": 2}},
}  # fmt: skip
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
    given = {
        key: value() if callable(value) else value for key, value in arguments.items()
    }
    name = (
        f"{name.replace('_Transpose', '')}Transpose" if "_Transpose" in name else name
    )
    return getattr(layers, name)(**given)


@pytest.mark.parametrize("micro_batch_size", CUTS)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(
            shape,
            marks={(6,): [], (5, 4): pytest.mark.slow, (6, 6, 2): pytest.mark.slow}.get(
                shape, pytest.mark.soak
            ),
        )
        for shape in LAYERS
    ],
    ids=str,
)
def test_every_layer(shape, micro_batch_size):
    def model():
        inputs = keras.Input(shape)
        made = {
            name: layer(name, arguments)(inputs)
            for name, arguments in LAYERS[shape].items()
        }
        outputs = {
            name: layers.Dense(1, name=name)(layers.Flatten()(output))
            for name, output in made.items()
        }
        return keras.Model(
            inputs, outputs if len(outputs) > 1 else next(iter(outputs.values()))
        )

    y = {name: random(N, 1) for name in LAYERS[shape]}
    check(
        Case(
            model, random(N, *shape), y if len(y) > 1 else random(N, 1), verified=False
        ),
        micro_batch_size,
    )


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", CUTS)
def test_every_merging_and_attending_layer(micro_batch_size):
    def model():
        left, right = (
            keras.Input((4, 3), name="left"),
            keras.Input((4, 3), name="right"),
        )
        tokens = keras.Input((4,), dtype="int64", name="tokens")
        both = [layers.Dense(3)(left), layers.Dense(3)(right)]
        made = {
            name: getattr(layers, name)(**({"axes": -1} if name == "Dot" else {}))(both)
            for name in MERGING
        }
        made |= {
            name: getattr(layers, name)()(both)
            for name in ("Attention", "AdditiveAttention")
        }
        made["MultiHeadAttention"] = layers.MultiHeadAttention(2, 2)(*both)
        made["GroupQueryAttention"] = layers.GroupQueryAttention(2, 2, 1)(*both)
        made |= {name: getattr(layers, name)(7, 3)(tokens) for name in OF_TOKENS}
        outputs = {
            name: layers.Dense(1, name=name)(layers.Flatten()(output))
            for name, output in made.items()
        }
        return keras.Model({"left": left, "right": right, "tokens": tokens}, outputs)

    x = {
        "left": random(N, 4, 3),
        "right": random(N, 4, 3, seed=1),
        "tokens": classes(N, 4, of=7),
    }
    names = (*MERGING, *OF_SEQUENCES, *OF_TOKENS)
    check(
        Case(model, x, {name: random(N, 1) for name in names}, verified=False),
        micro_batch_size,
    )


# Shapes of models


class Residual(keras.Model):
    """Subclassed and unbuilt, with a layer that is not always called and a metric of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = (
            layers.Dense(6, "tanh"),
            layers.Dense(1),
            layers.Dense(2),
        )

    def call(self, x, training=False):
        return self.second(x + self.first(x))


class Tied(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix = layers.Embedding(7, 4), layers.Dense(4)

    def build(self, shape):
        self.embedding.build(shape)
        self.mix.build((*shape, 4))

    def call(self, x):
        return keras.ops.matmul(
            self.mix(self.embedding(x)), keras.ops.transpose(self.embedding.embeddings)
        )


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
    left, right = keras.Input((6,), name="left"), keras.Input((6,), name="right")
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


TOKENS = classes(N, 5, of=7)
TOKENS[: E // 2, 3:] = 0
SHAPES = {
    "plain": lambda: Case(sequential(dense(5, "tanh"), dense()), random(N, 6), random(N, 1)),
    "two inputs, a shared tower": lambda: Case(shared, [random(N, 6), random(N, 6, seed=1)], random(N, 1)),
    "two outputs": lambda: Case(
        lambda: heads({"a": None, "b": "softmax"}), random(N, 6), {"a": random(N, 3), "b": classes(N)},
        {"a": np.linspace(0, 2, N), "b": np.linspace(1, 0.5, N)},
        lambda: {"loss": {"a": keras.losses.Huber(), "b": keras.losses.SparseCategoricalCrossentropy()},
                 "loss_weights": {"a": 0.5, "b": 2.0}},
    ),
    "frozen": lambda: Case(frozen, random(N, 6), random(N, 1)),
    "tied embedding": lambda: Case(Tied, TOKENS, classes(N, 5, of=7), compiled=token_loss),
    "recurrent with mask": lambda: Case(
        sequential(lambda: layers.Embedding(7, 4, mask_zero=True), lambda: layers.LSTM(3, return_sequences=True),
                   dense(7), shape=(5,), dtype="int64"),
        TOKENS, classes(N, 5, of=7), np.linspace(0.1, 2, N)[:, None] * np.ones((N, 5)), token_loss,
    ),
    "texts": lambda: Case(of_texts, tf.constant([["a", "b"], ["c", "d"]] * 9)[:N], random(N, 1)),
    "adds a loss and a metric": lambda: Case(sequential(dense(4), Penalised, dense()), random(N, 6), random(N, 1)),
    "subclassed and unbuilt": lambda: Case(Residual, random(N, 6), random(N, 1)),
    "layer and group normalisation": lambda: Case(
        sequential(dense(8), lambda: layers.LayerNormalization(), lambda: layers.GroupNormalization(2), dense()),
        random(N, 6), random(N, 1),
    ),
    "convolutional segmentation": lambda: Case(
        sequential(lambda: layers.Conv2D(3, 3, padding="same", activation="relu"), lambda: layers.Conv2D(2, 1),
                   shape=(6, 6, 1)),
        random(N, 6, 6, 1), classes(N, 6, 6, of=2),
        compiled=lambda: {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
    ),
    "nested": lambda: Case(sequential(sequential(dense(5, "relu"), dense(4)), dense()), random(N, 6), random(N, 1)),
}  # fmt: skip


@pytest.mark.parametrize("micro_batch_size", CUTS)
@pytest.mark.parametrize("name", mostly_slow(SHAPES, [], list(SHAPES)[::2]))
def test_every_shape_of_model(name, micro_batch_size):
    check(SHAPES[name](), micro_batch_size)


def exceptions() -> list[str]:
    """The names in the first column of the table in the documentation."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "exact.md").read_text(
        encoding="utf-8"
    )
    rows = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([\w.*]+)`", row)]


def test_the_catalogue_is_whole():
    covered = {f"losses.{name}" for name in LOSSES}
    covered |= {f"metrics.{name}" for entries in METRICS.values() for name in entries}
    covered |= {f"optimizers.{name}" for name in OPTIMIZERS}
    covered |= {f"regularizers.{name}" for name in REGULARIZERS} | {
        f"constraints.{name}" for name in CONSTRAINTS
    }
    of_shapes = [name for entries in LAYERS.values() for name in entries]
    names = [
        f"{name.replace('_Transpose', '')}Transpose" if "_Transpose" in name else name
        for name in of_shapes
    ]
    covered |= {
        f"layers.{name}"
        for name in (*names, *MERGING, *OF_SEQUENCES, *OF_TOKENS, *INSIDE)
    }
    public = {
        f"{kind}.{cls.__name__ if hasattr(getattr(keras, kind), cls.__name__) else name}"  # others are aliases
        for kind in KINDS
        for name, cls in vars(getattr(keras, kind)).items()
        if inspect.isclass(cls)
        and issubclass(cls, keras.layers.Layer if kind == "layers" else _base(kind))
    }
    excepted = {
        name
        for name in public
        if any(fnmatch.fnmatch(name, pattern) for pattern in exceptions())
    }
    assert public - covered - excepted == set()  # what Keras adds has to be classed
    assert covered - public == set()
    print(
        f"{len(public)} entries: {len(public & covered)} equal, {len(excepted - covered)} in the table of exceptions"
    )


def _base(kind):
    single = {"losses": "Loss", "metrics": "Metric", "optimizers": "Optimizer"}
    return getattr(getattr(keras, kind), single.get(kind) or kind[:-1].capitalize())


@pytest.mark.slow
def test_an_exception_is_one():
    """A negative control: what the table says of batch normalisation is seen."""
    normalised = sequential(dense(5), lambda: layers.BatchNormalization(), dense())
    with pytest.raises(AssertionError):
        check(Case(normalised, random(N, 6), random(N, 1)), 4)
