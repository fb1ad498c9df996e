"""What is collected over an evaluation: the worst examples, and the counts."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.accumulation import Evaluation
from pipeline.accumulation.internals import Objective, Share
from pipeline.shown.collector import Collected
from pipeline.shown.observer import Observer
from pipeline.shown.plan import (
    InputKind,
    Settings,
    ShownInput,
    input_to_show,
    make_plan,
)
from pipeline.shown.show import Show
from pipeline.training.evaluator import SplitEvaluator
from tests.parameters import mostly_slow

CLASSES = 3
EXAMPLES = 11
NUMBERS = ShownInput(0, InputKind.NUMBERS)


def identity(classes=CLASSES):
    """Return a model whose outputs are its inputs."""
    inputs = keras.Input((classes,))
    return keras.Model(inputs, keras.layers.Activation("linear")(inputs))


def collected(
    x,
    *labels,
    loss,
    batch_size=4,
    micro_batch_size=3,
    strategy=None,
    settings=None,
    model=None,
    **objective,
) -> tuple[Collected, dict[str, float]]:
    """Evaluate, and return what was collected, with the results of the evaluation."""
    with (strategy or tf.distribute.get_strategy()).scope():
        model = model or identity(x.shape[-1])
    goal = Objective(loss, **objective)
    settings = settings or Settings(examples=4)
    outputs = {"": model(x)}
    plan = make_plan(settings, goal, tf.constant(labels[0]), outputs, NUMBERS)
    observer = Observer(goal, plan.has_losses)
    evaluation = Evaluation(
        model, goal, micro_batch_size, strategy=strategy, observe=observer
    )
    show = Show(plan, None, None)
    batches = tf.data.Dataset.from_tensor_slices((x, *labels)).batch(batch_size)
    results = SplitEvaluator(evaluation, batches, show=show)()
    return show.collected, results


def sparse_data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(EXAMPLES, CLASSES)).astype("float32")
    return x, generator.integers(0, CLASSES, EXAMPLES)


def log_softmax(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "replicas"),
    mostly_slow([(4, 3, 1), (11, 11, 1), (3, 1, 1), (4, 3, 2)], [(4, 3, 1)]),
)
def test_it_is_what_numpy_computes_whatever_the_cut(
    batch_size, micro_batch_size, replicas
):
    strategy = None
    if replicas > 1:
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    x, y = sparse_data()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    shown, results = collected(
        x,
        y,
        loss=loss,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        strategy=strategy,
    )
    logs = log_softmax(x)
    losses = -logs[np.arange(EXAMPLES), y]
    order = np.argsort(-losses)[:4]
    assert [example.index for example in shown.worst] == order.tolist()
    np.testing.assert_allclose(
        [example.loss for example in shown.worst], losses[order], rtol=1e-5
    )
    assert results["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert [example.index for example in shown.fixed] == [0, 1, 2, 3]
    for example in (*shown.fixed, *shown.worst):
        np.testing.assert_array_equal(example.shown_input, x[example.index])
        (view,) = example.views.values()
        assert view.label == y[example.index]
        assert view.predicted == x[example.index].argmax()

    matrix = np.zeros((CLASSES, CLASSES), int)
    np.add.at(matrix, (y, x.argmax(-1)), 1)
    np.testing.assert_array_equal(shown.confusion, matrix)
    confidence = np.exp(logs).max(-1)
    positions = np.histogram(confidence, 10, (0, 1))[0]
    np.testing.assert_array_equal(shown.reliability.positions, positions)
    correct = np.histogram(confidence[y == x.argmax(-1)], 10, (0, 1))[0]
    np.testing.assert_array_equal(shown.reliability.correct, correct)


def test_a_literal_to_check_by_hand():
    """Two classes; an example is predicted wrongly with a confidence of 0.8."""
    x = np.array([[0.9, 0.1], [0.2, 0.8]], "float32")
    loss = keras.losses.SparseCategoricalCrossentropy()
    shown, _ = collected(x, np.array([0, 0]), loss=loss)
    assert shown.confusion.tolist() == [[1, 1], [0, 0]]
    assert shown.worst[0].index == 1
    assert shown.worst[0].loss == pytest.approx(-np.log(0.2), rel=1e-5)
    # (|1 − 0.9| + |0 − 0.8|) / 2
    assert shown.reliability.calibration_error() == pytest.approx(0.45, rel=1e-5)


def test_a_binary_output_has_two_classes():
    x = np.array([[0.9], [0.3], [0.6]], "float32")
    y = np.array([[1], [0], [0]], "float32")
    shown, _ = collected(x, y, loss=keras.losses.BinaryCrossentropy())
    assert shown.confusion.tolist() == [[1, 1], [0, 1]]
    (view,) = shown.worst[0].views.values()
    assert (int(view.label), int(view.predicted)) == (0, 1)
    assert view.confidence == pytest.approx(0.6)


def test_one_hot_labels_are_classes():
    x, y = sparse_data()
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    one_hot = keras.losses.CategoricalCrossentropy(from_logits=True)
    expected, _ = collected(x, y, loss=sparse)
    shown, _ = collected(x, np.eye(CLASSES, dtype="float32")[y], loss=one_hot)
    np.testing.assert_array_equal(shown.confusion, expected.confusion)
    assert [each.index for each in shown.worst] == [
        each.index for each in expected.worst
    ]


def test_what_has_no_weight_does_not_count():
    """Padding counts nothing, and an example that is all padding is no worst one."""
    inputs = keras.Input((2, CLASSES))
    model = keras.Model(inputs, keras.layers.Activation("linear")(inputs))
    x = np.zeros((3, 2, CLASSES), "float32")
    x[:, 1, 2] = 50.0  # a sure prediction of class 2, which is wrong
    y = np.zeros((3, 2), "int32")
    weights = np.array([[1, 0], [1, 1], [0, 0]], "float32")
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    shown, _ = collected(x, y, weights, loss=loss, model=model)
    assert [example.index for example in shown.worst] == [1, 0]
    # The mean over the positions that count: (ln 3 + 50) / 2, and ln 3.
    losses = [example.loss for example in shown.worst]
    np.testing.assert_allclose(losses, [(np.log(3) + 50) / 2, np.log(3)], rtol=1e-5)
    assert shown.confusion.tolist() == [[2, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert shown.fixed[2].loss is None


def test_a_loss_that_is_not_a_number_is_the_worst():
    x = np.array([[1, 0], [np.nan, 0], [0, 1]], "float32")
    y = np.array([0, 0, 0])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    shown, _ = collected(x, y, loss=loss)
    assert [example.index for example in shown.worst] == [1, 2, 0]


def test_a_worker_shows_its_share():
    """The positions of its examples are those in the split."""
    x, y = sparse_data()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    goal = Objective(loss)
    model = identity()
    plan = make_plan(Settings(), goal, tf.constant(y), {"": model(x)}, NUMBERS)
    show = Show(plan, None, None)
    evaluation = Evaluation(model, goal, 4, observe=Observer(goal, has_losses=True))
    for first in (0, 6):
        # Of batches of six, the second half.
        part = slice(first + 3, min(first + 6, EXAMPLES))
        examples = min(6, EXAMPLES - first)
        batch = (tf.constant(x[part]), tf.constant(y[part]))
        share = Share(batch, tf.constant(3), tf.constant(examples))
        _, observation = evaluation.observed(share)
        show.add(share, observation)
    indices = {example.index for example in show.collected.worst}
    assert indices == {3, 4, 5, 9, 10}
    for example in show.collected.worst:
        np.testing.assert_array_equal(example.shown_input, x[example.index])


def plan_of(loss, y, output, **objective):
    goal = Objective(loss, **objective)
    labels = tf.constant(y)
    return make_plan(Settings(), goal, labels, {"": tf.constant(output)}, NUMBERS)


def test_what_does_not_apply_is_named():
    numbers = np.zeros((4, 1), "float32")
    plan = plan_of(keras.losses.MeanSquaredError(), numbers, numbers)
    assert plan.has_losses
    assert plan.notes == [
        "tracking.show leaves out the confusion matrix: the labels are not classes",
        "tracking.show leaves out the reliability curve: the labels are not classes",
    ]
    many = plan_of(
        keras.losses.SparseCategoricalCrossentropy(),
        np.zeros(4, "int32"),
        np.zeros((4, 51), "float32"),
    )
    assert many.settings.reliability
    assert many.notes == [
        "tracking.show leaves out the confusion matrix: there are 51 classes, and it "
        "shows at most 50"
    ]
    of_batch = plan_of(
        keras.losses.SparseCategoricalCrossentropy(),
        np.zeros(4, "int32"),
        np.zeros((4, 3), "float32"),
        loss_over="effective_batch",
    )
    assert not of_batch.has_losses
    assert of_batch.notes == [
        "tracking.show leaves out the worst examples: the loss is not of single "
        "examples"
    ]

    class Own(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return tf.zeros_like(y_pred[:, 0])

    own = plan_of(Own(), np.zeros(4, "int32"), np.zeros((4, 3), "float32"))
    assert own.settings.confusion
    assert own.notes == [
        "tracking.show leaves out the reliability curve: the loss does not say by "
        "from_logits whether outputs are probabilities"
    ]


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (tf.TensorSpec((8, 8, 1), tf.float32), InputKind.PICTURE),
        (tf.TensorSpec((None, None, 3), tf.uint8), InputKind.PICTURE),
        (tf.TensorSpec((8, 8, 2), tf.float32), InputKind.NUMBERS),
        (tf.TensorSpec((None,), tf.int32), InputKind.TOKENS),
        (tf.TensorSpec((), tf.string), InputKind.TOKENS),
        (tf.TensorSpec((30,), tf.float32), InputKind.NUMBERS),
        (tf.TensorSpec((None, 4), tf.float32), InputKind.NUMBERS),
    ],
)
def test_the_kind_of_an_input(spec, kind):
    assert input_to_show(spec).kind is kind
    # Among other parts, it is the one that is shown.
    numbers = tf.TensorSpec((2,), tf.float32)
    several = input_to_show({"a": numbers, "b": spec})
    if kind is not InputKind.NUMBERS:
        assert (several.position, several.kind) == (1, kind)
