"""What is collected over an evaluation: the worst examples, and the counts."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.accumulation import Evaluation
from pipeline.accumulation.internals import Objective, Share
from pipeline.shown.collector import BINS, Collected
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
WORST = 4  # how many fixed and how many worst examples are shown
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
    model=None,
) -> tuple[Collected, dict[str, float]]:
    """Evaluate, and return what was collected, with the results of the evaluation.

    Args:
        x: inputs of the split.
        labels: its labels, or its labels and sample weights.
        loss: the loss.
        batch_size: of the evaluation.
        micro_batch_size: of the evaluation.
        strategy: for several replicas.
        model: the model; by default, its outputs are its inputs.
    """
    if model is None:
        with (strategy or tf.distribute.get_strategy()).scope():
            model = identity(x.shape[-1])
    goal = Objective(loss)
    outputs = {"": model(x)}
    y = tf.constant(labels[0])
    plan = make_plan(Settings(examples=WORST), goal, y, outputs, NUMBERS)

    observer = Observer(goal, plan.has_losses)
    evaluation = Evaluation(
        model, goal, micro_batch_size, strategy=strategy, observe=observer
    )
    show = Show(plan, None, None)
    examples = tf.data.Dataset.from_tensor_slices((x, *labels))
    evaluator = SplitEvaluator(evaluation, examples.batch(batch_size), show=show)
    results = evaluator()
    return show.collected, results


def cross_entropy(**options):
    """Return the loss of outputs that are logits."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def sparse_data():
    """Return logits, (examples, classes), and labels that do not depend on them."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(EXAMPLES, CLASSES)).astype("float32")
    y = generator.integers(0, CLASSES, EXAMPLES)
    return x, y


def log_softmax(x):
    sums = np.exp(x).sum(-1, keepdims=True)
    return x - np.log(sums)


def indices_of(examples):
    """Return the positions of examples in their split."""
    return [example.index for example in examples]


def losses_of(examples):
    return [example.loss for example in examples]


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
    shown, results = collected(
        x,
        y,
        loss=cross_entropy(),
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        strategy=strategy,
    )

    # The worst examples.
    log_probabilities = log_softmax(x)
    losses = -log_probabilities[np.arange(EXAMPLES), y]
    worst = np.argsort(-losses)[:WORST]
    assert indices_of(shown.worst) == worst.tolist()
    np.testing.assert_allclose(losses_of(shown.worst), losses[worst], rtol=1e-5)
    assert results["loss"] == pytest.approx(losses.mean(), rel=1e-5)

    # The fixed ones, and what is shown of each.
    predicted = x.argmax(-1)
    assert indices_of(shown.fixed) == [0, 1, 2, 3]
    for example in (*shown.fixed, *shown.worst):
        np.testing.assert_array_equal(example.shown_input, x[example.index])
        (view,) = example.views.values()
        assert view.label == y[example.index]
        assert view.predicted == predicted[example.index]

    # The confusion matrix.
    matrix = np.zeros((CLASSES, CLASSES), int)
    np.add.at(matrix, (y, predicted), 1)
    np.testing.assert_array_equal(shown.confusion, matrix)

    # The reliability curve.
    confidence = np.exp(log_probabilities).max(-1)
    positions, _ = np.histogram(confidence, BINS, (0, 1))
    np.testing.assert_array_equal(shown.reliability.positions, positions)
    is_correct = y == predicted
    correct, _ = np.histogram(confidence[is_correct], BINS, (0, 1))
    np.testing.assert_array_equal(shown.reliability.correct, correct)


def test_a_literal_to_check_by_hand():
    """Two classes; an example is predicted wrongly with a confidence of 0.8."""
    x = np.array([[0.9, 0.1], [0.2, 0.8]], "float32")
    y = np.array([0, 0])
    loss = keras.losses.SparseCategoricalCrossentropy()
    shown, _ = collected(x, y, loss=loss)
    assert shown.confusion.tolist() == [[1, 1], [0, 0]]
    worst = shown.worst[0]
    assert worst.index == 1
    assert worst.loss == pytest.approx(-np.log(0.2), rel=1e-5)
    # (|1 − 0.9| + |0 − 0.8|) / 2
    assert shown.reliability.calibration_error() == pytest.approx(0.45, rel=1e-5)


def test_a_binary_output_has_two_classes():
    x = np.array([[0.9], [0.3], [0.6]], "float32")
    y = np.array([[1], [0], [0]], "float32")
    shown, _ = collected(x, y, loss=keras.losses.BinaryCrossentropy())
    assert shown.confusion.tolist() == [[1, 1], [0, 1]]
    worst = shown.worst[0]
    (view,) = worst.views.values()
    assert int(view.label) == 0
    assert int(view.predicted) == 1
    assert view.confidence == pytest.approx(0.6)


def test_one_hot_labels_are_classes():
    x, y = sparse_data()
    expected, _ = collected(x, y, loss=cross_entropy())
    one_hot = np.eye(CLASSES, dtype="float32")[y]
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    shown, _ = collected(x, one_hot, loss=loss)
    np.testing.assert_array_equal(shown.confusion, expected.confusion)
    assert indices_of(shown.worst) == indices_of(expected.worst)


def test_what_has_no_weight_does_not_count():
    """Padding counts nothing, and an example that is all padding is no worst one."""
    inputs = keras.Input((2, CLASSES))
    model = keras.Model(inputs, keras.layers.Activation("linear")(inputs))
    x = np.zeros((3, 2, CLASSES), "float32")
    x[:, 1, 2] = 50.0  # a sure prediction of class 2, which is wrong
    y = np.zeros((3, 2), "int32")
    weights = np.array([[1, 0], [1, 1], [0, 0]], "float32")
    loss = cross_entropy(reduction="mean_with_sample_weight")
    shown, _ = collected(x, y, weights, loss=loss, model=model)
    assert indices_of(shown.worst) == [1, 0]
    # The loss of a position of zeros, and the mean over those that count.
    unsure = np.log(CLASSES)
    expected = [(unsure + 50) / 2, unsure]
    np.testing.assert_allclose(losses_of(shown.worst), expected, rtol=1e-5)
    assert shown.confusion.tolist() == [[2, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert shown.fixed[2].loss is None


def test_a_loss_that_is_not_a_number_is_the_worst():
    x = np.array([[1, 0], [np.nan, 0], [0, 1]], "float32")
    y = np.array([0, 0, 0])
    shown, _ = collected(x, y, loss=cross_entropy())
    assert indices_of(shown.worst) == [1, 2, 0]


def shown_and_evaluated(x, y):
    """Return what shows the examples of these data, and the evaluation it observes."""
    goal = Objective(cross_entropy())
    model = identity()
    plan = make_plan(Settings(), goal, tf.constant(y), {"": model(x)}, NUMBERS)
    observer = Observer(goal, has_losses=True)
    evaluation = Evaluation(model, goal, micro_batch_size=4, observe=observer)
    return Show(plan, None, None), evaluation


def test_a_worker_shows_its_share():
    """The positions of its examples are those in the split.

    The batches have 6 and 5 examples; the worker has what follows the first 3 of each.
    """
    x, y = sparse_data()
    show, evaluation = shown_and_evaluated(x, y)

    start = 3
    for first, end in ((0, 6), (6, EXAMPLES)):
        part = slice(first + start, end)
        batch = (tf.constant(x[part]), tf.constant(y[part]))
        examples = end - first
        share = Share(batch, tf.constant(start), tf.constant(examples))
        _, observation = evaluation.observed(share)
        show.add(share, observation)

    assert set(indices_of(show.collected.worst)) == {3, 4, 5, 9, 10}
    for example in show.collected.worst:
        np.testing.assert_array_equal(example.shown_input, x[example.index])


def test_the_first_worker_shows_its_share_of_batches_that_it_has_read_whole():
    """Padded batches are read whole, and the first worker observes their first half."""
    x, y = sparse_data()
    show, evaluation = shown_and_evaluated(x, y)

    for first, end in ((0, 6), (6, EXAMPLES)):
        batch = (tf.constant(x[first:end]), tf.constant(y[first:end]))
        _, observation = evaluation.observed(batch)
        share = tf.nest.map_structure(lambda leaf: leaf[:3], observation)
        show.add(batch, share)

    assert indices_of(show.collected.fixed) == [0, 1, 2, 6, 7, 8]
    assert set(indices_of(show.collected.worst)) == {0, 1, 2, 6, 7, 8}
    for example in show.collected.worst:
        np.testing.assert_array_equal(example.shown_input, x[example.index])


def plan_of(loss, y, output, **objective):
    """Return what an evaluation with this loss, these labels and outputs shows."""
    goal = Objective(loss, **objective)
    labels = tf.constant(y)
    outputs = {"": tf.constant(output)}
    return make_plan(Settings(), goal, labels, outputs, NUMBERS)


# A batch of four examples, and outputs for it.
CLASS_LABELS = np.zeros(4, "int32")
CLASS_OUTPUTS = np.zeros((4, CLASSES), "float32")


def test_labels_that_are_no_classes_have_no_matrix_and_no_curve():
    numbers = np.zeros((4, 1), "float32")
    plan = plan_of(keras.losses.MeanSquaredError(), numbers, numbers)
    assert plan.has_losses
    assert plan.notes == [
        "tracking.show leaves out the confusion matrix: the labels are not classes",
        "tracking.show leaves out the reliability curve: the labels are not classes",
    ]


def test_too_many_classes_have_no_matrix():
    outputs = np.zeros((4, 51), "float32")
    loss = keras.losses.SparseCategoricalCrossentropy()
    plan = plan_of(loss, CLASS_LABELS, outputs)
    assert plan.settings.reliability
    assert plan.notes == [
        "tracking.show leaves out the confusion matrix: there are 51 classes, and it "
        "shows at most 50"
    ]


def test_a_loss_over_the_effective_batch_has_no_worst_examples():
    loss = keras.losses.SparseCategoricalCrossentropy()
    plan = plan_of(loss, CLASS_LABELS, CLASS_OUTPUTS, loss_over="effective_batch")
    assert not plan.has_losses
    assert plan.notes == [
        "tracking.show leaves out the worst examples: a single example has no loss "
        "of its own"
    ]


def test_a_loss_of_a_user_has_no_reliability_curve():
    class Own(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return tf.zeros_like(y_pred[:, 0])

    plan = plan_of(Own(), CLASS_LABELS, CLASS_OUTPUTS)
    assert plan.settings.confusion
    assert plan.notes == [
        "tracking.show leaves out the reliability curve: the loss has no from_logits "
        "to say whether outputs are probabilities"
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
    chosen = input_to_show({"a": numbers, "b": spec})
    if kind is not InputKind.NUMBERS:
        assert chosen.position == 1
        assert chosen.kind is kind
