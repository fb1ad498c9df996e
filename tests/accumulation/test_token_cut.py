"""A cut by tokens is as small as it can be, and the update that of the whole batch."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

from pipeline.accumulation import (
    AccumulatingModel,
    Evaluation,
    Update,
    accumulate_gradients,
    padding_checks,
)
from pipeline.accumulation.batch import share_of
from pipeline.accumulation.internals import Batches, Objective, Share
from pipeline.accumulation.token_cut import TokenLimit, cut_by_tokens, dealt
from tests.accumulation.replicas import strategy_on
from tests.accumulation.sequences import (
    CLASSES,
    LENGTHS,
    VOCABULARY,
    build,
    cases,
    causal,
    cross_entropy,
    dense,
    difference,
    whole,
)
from tests.parameters import mostly_slow

EXACT = 1e-12
NAMES = ["attention", "LSTM", "masked", "causal", "sum", "two sequences", "two outputs"]
LIMITS = [1, 10, 19, 10_000]


def ragged(lengths):
    return tf.RaggedTensor.from_row_lengths(tf.range(sum(lengths)), lengths)


def padded_lengths(lengths, multiple):
    """Return the next multiple of each length; an empty sequence is padded as well."""
    multiples = np.ceil(np.asarray(lengths) / multiple).astype(int)
    return np.maximum(1, multiples) * multiple


def positions_of(cut, columns, multiple=1):
    """Return the padded positions of each micro-batch, as a person would count them.

    Args:
        cut: the cut.
        columns: for each input, the lengths of its sequences.
        multiple: of which padded lengths are.
    """
    lengths = np.asarray(columns)
    order = np.asarray(cut.order)
    positions = []
    start = 0
    for end in np.asarray(cut.ends):
        examples = order[start:end]
        longest = lengths[:, examples].max(1)
        positions_of_example = padded_lengths(longest, multiple).sum()
        positions.append(int(positions_of_example * len(examples)))
        start = end
    return positions


class Cost(NamedTuple):
    """The cost of a cut; fewer micro-batches count more than fewer positions."""

    micro_batches: int
    positions: int


def best(columns, limit):
    """Return the lowest cost of all cuts of the examples in the order of their costs."""
    costs = padded_lengths(columns, limit.pad_multiple)
    order = np.argsort(-costs.sum(0), kind="stable")
    costs = costs[:, order]
    count = costs.shape[1]
    results = []
    # Between each two examples, there is an edge or none.
    for bits in itertools.product([False, True], repeat=count - 1):
        inner = [index + 1 for index, is_cut in enumerate(bits) if is_cut]
        edges = [0, *inner, count]
        positions = positions_within(limit, costs, edges)
        if positions is not None:
            results.append(Cost(len(edges) - 1, positions))
    return min(results)


def positions_within(limit, costs, edges):
    """Return the positions of a cut; None if a micro-batch of it is too large.

    A micro-batch of one example may have any size.
    """
    positions = 0
    for start, end in itertools.pairwise(edges):
        examples = end - start
        cost = costs[:, start:end].max(1).sum() * examples
        if examples > 1 and cost > limit.tokens:
            return None
        if limit.examples is not None and examples > limit.examples:
            return None
        positions += int(cost)
    return positions


def test_a_cut_to_check_by_hand():
    lengths = [1, 8, 4, 9, 2, 4, 1, 8, 1, 5, 4, 3, 2, 1]
    cut = cut_by_tokens(ragged(lengths), TokenLimit(27))
    # 9 8 8 | 5 4 4 4 3 | 2 2 1 1 1 1, each with its place: equal lengths keep their order.
    first = [3, 1, 7]
    second = [9, 2, 5, 10, 11]
    third = [4, 12, 0, 6, 8, 13]
    assert cut.order.numpy().tolist() == first + second + third
    assert cut.ends.numpy().tolist() == [3, 3 + 5, 3 + 5 + 6]

    assert int(cut.counts.micro_batches) == 3
    assert int(cut.counts.tokens) == sum(lengths) == 53
    assert int(cut.counts.positions) == 3 * 9 + 5 * 5 + 6 * 2


@pytest.mark.parametrize("limit", mostly_slow([1, 7, 16, 40, 1000], [7, 40]))
@pytest.mark.parametrize("examples", [None, 3])
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("sequences", [1, 2])
def test_no_cut_has_fewer_micro_batches_or_less_padding(
    limit, examples, multiple, sequences
):
    numbers = np.random.default_rng(limit)
    limit = TokenLimit(limit, examples, multiple)
    for count in (1, 2, 9):
        columns = [numbers.integers(0, 12, count).tolist() for _ in range(sequences)]
        inputs = [ragged(lengths) for lengths in columns]
        cut = cut_by_tokens(inputs, limit)
        positions = positions_of(cut, columns, multiple)
        assert cut.ends.numpy()[-1] == count
        assert Cost(len(positions), sum(positions)) == best(columns, limit)

        assert int(cut.counts.micro_batches) == len(positions)
        assert int(cut.counts.positions) == sum(positions)
        assert int(cut.counts.tokens) == np.sum(columns)
        sizes = np.diff([0, *cut.ends.numpy()])
        for size, computed in zip(sizes, positions, strict=True):
            assert computed <= limit.tokens or size == 1
            assert examples is None or size <= examples


def test_no_examples_make_no_micro_batch():
    cut = cut_by_tokens(ragged([]), TokenLimit(5))
    assert cut.ends.numpy().tolist() == []
    assert int(cut.counts.micro_batches) == 0


def cuts():
    """Return each case with each limit, as it is and shuffled and padded further."""
    slow = [("attention", 19, 1), ("attention", 1, 1), ("attention", 1, 4)]
    limits = itertools.cycle(LIMITS)
    for name, limit in zip(NAMES[1:], limits, strict=False):
        slow += [(name, limit, 1), (name, limit, 4)]
    every = itertools.product(NAMES, LIMITS, [1, 4])
    return mostly_slow(every, [("attention", 19, 4)], slow)


@pytest.mark.parametrize(("name", "limit", "multiple"), cuts())
def test_gradients_are_those_of_the_whole_padded_batch(float64, name, limit, multiple):
    case = cases()[name]
    model = build(case)
    expected = whole(model, case.loss, dense(case.batch))
    batch = case.batch
    if multiple > 1:
        order = np.random.default_rng(1).permutation(len(LENGTHS))
        batch = shuffled(batch, order)
    sums = tf.function(accumulate_gradients)(
        model, case.loss, batch, micro_batch_tokens=limit, pad_multiple=multiple
    )
    assert difference(sums, expected) < EXACT

    # A token has room for one example, and 10,000 for all.
    if limit == 1:
        assert int(sums.cut.micro_batches) == len(LENGTHS)
    if limit == 10_000:
        assert int(sums.cut.micro_batches) == 1


def shuffled(batch, order):
    """Return the examples of a batch at the places in `order`."""
    return tf.nest.map_structure(lambda leaf: tf.gather(leaf, order), batch)


def built_sgd(model):
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build(model.trainable_variables)
    return optimizer


def assert_equal_weights(model, reference):
    pairs = zip(model.get_weights(), reference.get_weights(), strict=True)
    for weight, expected in pairs:
        np.testing.assert_allclose(weight, expected, rtol=EXACT, atol=EXACT)


def mean_of_means(case, limit):
    """Return the gradient of the mean of the micro-batches' means: a mistake."""
    model = build(case)
    inputs, *_ = case.batch
    cut = cut_by_tokens(inputs, TokenLimit(limit))
    edges = [0, *cut.ends.numpy()]
    gradients = []
    for start, end in itertools.pairwise(edges):
        rows = cut.order[start:end]
        micro_batch = dense(shuffled(case.batch, rows))
        gradients.append(whole(model, case.loss, micro_batch).gradient)
    return [sum(parts) / len(parts) for parts in zip(*gradients, strict=True)]


def test_the_mean_of_micro_batch_means_is_another_gradient(float64):
    weighted = cases()["causal"]
    x, y, _ = weighted.batch
    case = weighted._replace(batch=(x, y))
    expected = whole(build(case), case.loss, dense(case.batch)).gradient
    wrong = mean_of_means(case, 19)
    largest = max(np.abs(gradient).max() for gradient in expected)
    differences = []
    for value, gradient in zip(wrong, expected, strict=True):
        differences.append(np.abs(value - gradient).max())
    assert max(differences) / largest > 0.01


@pytest.mark.parametrize(
    ("name", "devices"),
    mostly_slow(
        itertools.product(["two outputs", "two sequences"], [1, 2]),
        fast=[],
        slow=[("two outputs", 1), ("two sequences", 2)],
    ),
)
def test_updates_on_replicas_and_in_shares(float64, name, devices):
    case = cases()[name]
    strategy = strategy_on(devices)
    reference = build(case)
    expected = whole(reference, case.loss, dense(case.batch))
    reference_optimizer = built_sgd(reference)
    gradients = [tf.constant(gradient) for gradient in expected.gradient]
    reference_optimizer.apply(gradients, reference.trainable_variables)

    share = Share.for_replicas(case.batch, 0, devices, devices)
    for batch in (case.batch, share):
        with strategy.scope():
            model = build(case)
            optimizer = built_sgd(model)
        update = Update(
            model,
            case.loss,
            optimizer,
            micro_batch_tokens=19,
            strategy=strategy,
            noise_every=1,
        )
        results = tf.function(update)(batch)
        assert float(results["loss"]) == pytest.approx(expected.loss, rel=EXACT)
        assert_equal_weights(model, reference)

        # Sorted micro-batches are no random samples: the noise is not measured.
        assert "gradient_variance" not in results
        inputs, *_ = case.batch
        sequences = len(tf.nest.flatten(inputs))
        assert float(results["tokens"]) == sum(LENGTHS) * sequences
        assert results["micro_steps"] >= 2 * devices
        assert results["positions"] >= results["tokens"]


def tokens_of_shares(batch, devices) -> list[int]:
    """Return the number of tokens that each replica gets of a batch."""
    strategy = strategy_on(devices)

    def tokens():
        (x, _, _), _ = share_of(batch)
        return tf.size(x.flat_values)

    per_replica = tf.function(lambda: strategy.run(tokens))()
    values = strategy.experimental_local_results(per_replica)
    return [int(value) for value in values]


def test_replicas_get_as_many_tokens_and_each_example_once():
    numbers = np.random.default_rng(0)
    lengths = np.clip(numbers.lognormal(4, 1, 128), 1, 512).astype(int)
    x = tf.RaggedTensor.from_row_lengths(np.arange(lengths.sum()), lengths)
    y = tf.range(len(lengths))
    mean = lengths.sum() / 3

    batch = dealt((x, y), 3, pad_multiple=1)
    inputs, labels, _ = batch.batch
    assert sorted(labels.numpy()) == [*range(len(lengths))]
    for row, label in zip(inputs, labels.numpy(), strict=True):
        assert row.numpy().tolist() == x[label].numpy().tolist()
    assert max(tokens_of_shares(batch, 3)) < 1.1 * mean

    # Negative control: equally many examples of a sorted batch are unequal shares.
    in_order = tf.argsort(-lengths)
    by_length = (tf.gather(x, in_order), tf.gather(y, in_order), None)
    assert max(tokens_of_shares(by_length, 3)) > 1.5 * mean


@pytest.mark.slow
def test_in_a_loop_over_replicas_each_one_cuts_the_share_that_it_passes(float64):
    case = cases()["causal"]
    strategy = strategy_on(2)
    with strategy.scope():
        model = build(case)

    def of_replica():
        share, _ = share_of(case.batch)
        sums = accumulate_gradients(model, case.loss, share, micro_batch_tokens=10)
        return sums.mean_loss(), sums.cut.tokens, sums.gradients()[-1]

    per_replica = tf.function(lambda: strategy.run(of_replica), autograph=False)()
    losses, tokens, gradients = map(strategy.experimental_local_results, per_replica)
    half = -(-len(LENGTHS) // 2)
    for replica, share in enumerate((slice(None, half), slice(half, None))):
        batch = tuple(part[share] for part in case.batch)
        expected = whole(build(case), case.loss, dense(batch))
        assert float(losses[replica]) == pytest.approx(expected.loss, rel=EXACT)
        assert int(tokens[replica]) == sum(LENGTHS[share])
        np.testing.assert_allclose(
            gradients[replica], expected.gradient[-1], atol=EXACT
        )


@pytest.mark.parametrize("lengths", [[4], [9, 1, 1], [0, 0, 0], [5, 5, 5, 5]])
def test_any_batch_is_dealt(lengths):
    x = tf.RaggedTensor.from_row_lengths(np.arange(sum(lengths)), lengths)
    batch = dealt((x, tf.range(len(lengths))), 3, pad_multiple=1)
    starts = batch.starts.numpy().tolist()
    assert starts == sorted(starts)
    assert (starts[0], starts[-1]) == (0, len(lengths))


def test_an_evaluation_has_the_losses_and_metrics_of_the_whole_batch(float64):
    case = cases()["LSTM"]
    model = with_layer(layers.Dense(4, "tanh"))  # it passes the mask on, as an LSTM
    x, y, weights = dense(case.batch)
    outputs = model(x)
    expected = keras.metrics.SparseCategoricalAccuracy()
    expected.update_state(y, outputs, weights)
    expected_accuracy = float(expected.result())
    expected_loss = float(case.loss(y, outputs, weights))

    accuracy = keras.metrics.SparseCategoricalAccuracy("accuracy")
    entropy = keras.metrics.SparseCategoricalCrossentropy("entropy", from_logits=True)
    objective = Objective(case.loss, weighted_metrics=[accuracy, entropy])
    evaluation = Evaluation(model, objective, micro_batch_tokens=10)
    sums = tf.function(evaluation, autograph=False)(case.batch)
    assert float(sums.mean_loss()) == pytest.approx(expected_loss, rel=EXACT)
    assert float(accuracy.result()) == pytest.approx(expected_accuracy, rel=EXACT)
    assert float(entropy.result()) == pytest.approx(expected_loss, rel=EXACT)
    assert int(sums.cut.tokens) == sum(LENGTHS)


@keras.saving.register_keras_serializable("tests")
class Pairs(losses.Loss):
    """Compares each example with all others."""

    couples_examples = True

    def call(self, y_true, y_pred):
        distances = tf.abs(y_pred[:, None] - y_pred[None])
        expected_distances = tf.abs(y_true[:, None] - y_true[None])
        # Pairs of neighbors count once more, so the order of the examples matters.
        neighbors = tf.reduce_mean(tf.abs(y_pred[1:] - y_pred[:-1]))
        return tf.reduce_mean(distances * expected_distances) + neighbors


def averaged():
    """Return a model whose outputs are one row an example."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None,), dtype="int64")
    hidden = layers.Embedding(VOCABULARY, 4, mask_zero=True)(inputs)
    hidden = layers.GlobalAveragePooling1D()(hidden)
    outputs = layers.Dense(CLASSES, kernel_regularizer="l2")(hidden)
    return keras.Model(inputs, outputs)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_outputs_of_a_loss_over_the_batch_are_in_the_order_of_the_examples(
    float64, devices
):
    x, *_ = cases()["attention"].batch
    y = np.random.default_rng(2).normal(size=(len(LENGTHS), CLASSES))
    strategy = strategy_on(devices)
    with strategy.scope():
        model = averaged()
        optimizer = built_sgd(model)
    with tf.GradientTape() as tape:
        outputs = model(x.to_tensor())
        loss = Pairs()(y, outputs) + sum(model.losses)
    variables = [variable.value for variable in model.trainable_variables]
    expected = tape.gradient(loss, variables)

    update = Update(
        model,
        Pairs(),
        optimizer,
        micro_batch_tokens=10,
        strategy=strategy,
        loss_over="effective_batch",
    )
    sums = tf.function(update.sums, autograph=False)((x, y))
    assert int(sums.cut.micro_batches) > 1
    assert float(sums.mean_loss()) == pytest.approx(float(loss), rel=EXACT)
    for gradient, expected_gradient in zip(sums.gradients(), expected, strict=True):
        on_first, *_ = strategy.experimental_local_results(gradient)
        np.testing.assert_allclose(
            tf.convert_to_tensor(on_first),
            tf.convert_to_tensor(expected_gradient),
            rtol=0,
            atol=EXACT,
        )


@pytest.mark.slow
def test_fit_is_that_of_whole_padded_batches(float64, tmp_path):
    case = cases()["causal"]
    batch = 6  # 6 and 5 examples

    def compiled(model):
        model.compile(
            keras.optimizers.SGD(0.5, momentum=0.9),
            case.loss,
            weighted_metrics=["accuracy"],
        )
        return model

    ragged_data = tf.data.Dataset.from_tensor_slices(case.batch).batch(batch)
    dense_data = tf.data.Dataset.from_tensor_slices(dense(case.batch)).batch(batch)
    plain = compiled(build(case))
    expected = plain.fit(dense_data, epochs=2, verbose=0).history
    model = compiled(AccumulatingModel(build(case), micro_batch_tokens=19))
    history = model.fit(ragged_data, epochs=2, verbose=0).history
    assert history["loss"] == pytest.approx(expected["loss"], rel=EXACT)
    for weight, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=0, atol=EXACT)

    # `evaluate` has the metrics of the padded batch.
    losses_and_metrics = model.evaluate(ragged_data, verbose=0, return_dict=True)
    x, y, weights = dense(case.batch)
    expected_metrics = plain.evaluate(
        x, y, len(LENGTHS), sample_weight=weights, verbose=0, return_dict=True
    )
    accuracy = losses_and_metrics["accuracy"]
    assert accuracy == pytest.approx(expected_metrics["accuracy"], rel=EXACT)

    # One batch of `predict` is padded to its longest example.
    inputs, *_ = case.batch
    rows = inputs[:3]
    outputs = model.predict(tf.data.Dataset.from_tensors(rows), verbose=0)
    expected_outputs = plain.predict(rows.to_tensor(), verbose=0)
    np.testing.assert_allclose(outputs, expected_outputs, atol=EXACT)

    # The limit of tokens is saved.
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.micro_batch_tokens == 19
    assert loaded.micro_batch_size is None


def accumulate(model, loss, batch, **options):
    accumulate_traced = tf.function(accumulate_gradients, autograph=False)
    return accumulate_traced(model, loss, batch, micro_batch_tokens=10, **options)


def with_layer(layer, *, mask_zero=True, pooled=False):
    """Return a model of a sequence with one more layer after its embedding."""
    inputs = keras.Input((None,), dtype="int64")
    hidden = layers.Embedding(VOCABULARY, 4, mask_zero=mask_zero)(inputs)
    hidden = layer(hidden)
    if pooled:
        hidden = layers.GlobalAveragePooling1D(name="average")(hidden)
    return keras.Model(inputs, layers.Dense(3)(hidden))


class FromTheRight(layers.Layer):
    """Adds to each position how many follow."""

    def call(self, x):
        count = tf.shape(x)[1]
        return x + tf.cast(tf.range(count)[::-1], x.dtype)[None, :, None]


class Squares(layers.Layer):
    """Adds the mean square over all positions to the loss."""

    def call(self, x):
        self.add_loss(tf.reduce_mean(tf.square(x)))
        return x


def named(kind, **options):
    return kind(name="suspect", **options)


# What depends on padding: a model, and whether its outputs are one row an example.
DEPENDING = {
    "convolution": lambda: with_layer(
        named(layers.Conv1D, filters=4, kernel_size=3, padding="same")
    ),
    "pooling": lambda: with_layer(named(layers.GlobalMaxPooling1D), mask_zero=False),
    "attention": lambda: with_layer(named(SelfAttention), mask_zero=False),
    "recurrent": lambda: with_layer(named(layers.LSTM, units=4), mask_zero=False),
    "backward": lambda: with_layer(
        layers.Bidirectional(layers.LSTM(4, return_sequences=True), name="suspect"),
        mask_zero=False,
    ),
    "from the right": lambda: with_layer(named(FromTheRight)),
    "over positions": lambda: with_layer(named(layers.GroupNormalization, groups=2)),
    "activity": lambda: with_layer(
        named(layers.Dense, units=4, activity_regularizer="l2", bias_initializer="ones")
    ),
    "added loss": lambda: with_layer(named(Squares)),
}


class SelfAttention(layers.Layer):
    def call(self, x):
        scores = tf.matmul(x, x, transpose_b=True)
        return tf.matmul(tf.nn.softmax(scores), x)


def batch_for(model):
    """Return sequences, with labels of examples or of positions, as the model has."""
    x, tags = cases()["masked"].batch
    is_one_row_an_example = len(model.output_shape) == 2
    if is_one_row_an_example:
        return x, tf.range(len(LENGTHS)) % 3
    return x, tags


@pytest.mark.parametrize("name", mostly_slow(DEPENDING, ["convolution"]))
def test_what_depends_on_padding_is_rejected_and_would_differ(
    float64, monkeypatch, name
):
    keras.utils.set_random_seed(0)
    model = DEPENDING[name]()
    batch = batch_for(model)
    rule = "model must (give the same outputs|add the same loss) when an example is"
    with pytest.raises(ValueError, match=rf"{rule}.*Received: suspect\b"):
        accumulate(model, cross_entropy(), batch)

    monkeypatch.setattr(
        "pipeline.accumulation.padding_checks._check_outputs", lambda *_: None
    )
    expected = whole(model, cross_entropy(), dense(batch))
    sums = accumulate(model, cross_entropy(), batch)
    assert difference(sums, expected) > 1e-4


@pytest.mark.parametrize(
    ("model", "remedy", "received"),
    [
        (
            lambda: with_layer(named(layers.GlobalMaxPooling1D)),
            "use a layer that respects the mask of its inputs",
            "suspect (GlobalMaxPooling1D), which ignores the mask",
        ),
        (
            lambda: with_layer(named(layers.GlobalMaxPooling1D), mask_zero=False),
            "mask the padding, as Masking or Embedding(mask_zero=True) does",
            "suspect (GlobalMaxPooling1D), whose inputs have no mask",
        ),
        (
            lambda: with_layer(layers.Conv1D(4, 1, name="convolution"), pooled=True),
            "use layers that pass their mask on",
            "average (GlobalAveragePooling1D), whose inputs have no mask: "
            "convolution (Conv1D) drops the mask",
        ),
    ],
)
def test_a_message_about_padding_says_what_happened_to_the_mask(
    model, remedy, received
):
    keras.utils.set_random_seed(0)
    suspect = model()
    with pytest.raises(ValueError) as rejected:
        accumulate(suspect, cross_entropy(), batch_for(suspect))
    message = str(rejected.value)
    assert f"padded at its end: {remedy}, or cut padded batches" in message
    assert message.endswith(f"Received: {received}")


def test_a_model_whose_weights_are_not_finite_is_not_tried(float64):
    """Its outputs say nothing about padding."""
    model = with_layer(named(layers.GlobalMaxPooling1D), mask_zero=False)
    inputs, *_ = batch_for(model)
    with pytest.raises(ValueError, match=r"Received: suspect\b"):
        padding_checks._check_outputs(model, inputs)
    model.set_weights([np.full_like(weight, np.nan) for weight in model.get_weights()])
    padding_checks._check_outputs(model, inputs)


@pytest.mark.slow
def test_weights_that_are_not_finite_give_a_loss_and_no_error_about_padding(float64):
    case = cases()["causal"]
    model = build(case)
    model.set_weights([np.full_like(weight, np.nan) for weight in model.get_weights()])
    evaluate = tf.function(Evaluation(model, case.loss, micro_batch_tokens=10))
    assert np.isnan(float(evaluate(case.batch).mean_loss()))
    update = Update(
        model, case.loss, built_sgd(model), micro_batch_tokens=10, same_noise=True
    )
    assert np.isnan(float(tf.function(update)(case.batch)["loss"]))


class Root(layers.Layer):
    """The root of a number; negative ones, as made-up examples have, have none."""

    def call(self, x):
        return tf.sqrt(x)


def of_roots():
    """Return a model of `Root`, and a batch for it."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None, 2))
    model = keras.Model(inputs, layers.Dense(3)(Root()(inputs)))
    flat = np.random.default_rng(0).uniform(size=[sum(LENGTHS), 2])
    x = tf.RaggedTensor.from_row_lengths(flat, list(LENGTHS))
    return model, (x, cases()["masked"].batch[1] % 3)


def test_a_layer_that_needs_other_numbers_is_not_taken_for_one_of_padding(float64):
    model, (x, _) = of_roots()
    padding_checks._check_outputs(model, x)


@pytest.mark.slow
def test_a_layer_that_needs_other_numbers_is_exact(float64):
    model, batch = of_roots()
    expected = whole(model, cross_entropy(), dense(batch))
    assert difference(accumulate(model, cross_entropy(), batch), expected) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("units", [1, 5])
def test_a_maximum_that_mostly_hides_padding_is_rejected(float64, units):
    short = [[1.0, -1.0]]
    long = [[2.0, 0.5], [0.0, 1.0], [-1.0, 3.0]]
    x = tf.ragged.constant([short, long], ragged_rank=1, dtype=tf.float64)
    y = tf.constant([0, 1])
    for seed in range(5):
        keras.utils.set_random_seed(seed)
        inputs = keras.Input((None, 2))
        hidden = layers.Dense(units)(inputs)
        hidden = layers.GlobalMaxPooling1D(name="suspect")(hidden)
        model = keras.Model(inputs, layers.Dense(3)(hidden))
        with pytest.raises(ValueError, match=r"Received: suspect\b"):
            accumulate(model, cross_entropy(), (x, y))


def test_a_loss_that_counts_padding_is_rejected_and_would_differ(float64, monkeypatch):
    case = cases()["causal"]
    loss = cross_entropy("sum_over_batch_size")
    model = build(case)
    with pytest.raises(ValueError, match="must not count padded positions"):
        accumulate(model, loss, case.batch)

    monkeypatch.setattr("pipeline.accumulation.loss_sums.check_loss", lambda *_: None)
    expected = whole(model, loss, dense(case.batch))
    sums = accumulate(model, loss, case.batch)
    assert difference(sums, expected) > 0.01


@pytest.mark.slow
def test_a_metric_that_counts_padding_is_rejected_and_would_differ(
    float64, monkeypatch
):
    case = cases()["causal"]
    model = build(case)
    accuracy = keras.metrics.SparseCategoricalAccuracy("accuracy")
    with pytest.raises(ValueError, match="metric accuracy must not count padded"):
        accumulate(model, case.loss, case.batch, metrics=[accuracy])

    monkeypatch.setattr("pipeline.accumulation.objective.check_metric", lambda *_: None)
    accuracy.reset_state()
    accumulate(model, case.loss, case.batch, metrics=[accuracy])
    of_micro_batches = float(accuracy.result())

    accuracy.reset_state()
    x, y, _ = dense(case.batch)
    accuracy.update_state(y, model(x))
    of_whole_batch = float(accuracy.result())
    assert abs(of_micro_batches - of_whole_batch) > 1e-3


@pytest.mark.slow
def test_normalization_by_the_batch_is_rejected_and_frozen_it_is_exact(float64):
    model = with_layer(named(layers.BatchNormalization), mask_zero=False)
    batch = batch_for(model)
    with pytest.raises(ValueError, match=r"BatchNormalization.*Received: suspect$"):
        accumulate(model, cross_entropy(), batch)

    model.get_layer("suspect").trainable = False
    expected = whole(model, cross_entropy(), dense(batch))
    sums = accumulate(model, cross_entropy(), batch)
    assert difference(sums, expected) < EXACT


def mean_over_positions():
    """Return a model whose outputs are one number for each position."""
    inputs = keras.Input((None, 1))
    outputs = layers.Dense(1)(inputs)
    return keras.Model(inputs, outputs[:, :, 0])


@functools.cache
def rejected_calls():
    x, tags = cases()["masked"].batch
    case = cases()["causal"]
    model = build(case)
    numbers = tf.RaggedTensor.from_row_lengths(
        tf.ones([sum(LENGTHS), 1], keras.config.floatx()), list(LENGTHS)
    )
    labels = numbers.with_flat_values(numbers.flat_values[:, 0])
    batches = Batches((x, tags), tf.constant([5, 6]))
    dropout = build(case)
    weights = tf.ones([len(LENGTHS), 2])

    def update(**options):
        return Update(model, case.loss, built_sgd(model), **options)

    return {
        "at least one input must be a ragged tensor": lambda: accumulate(
            model, case.loss, dense((x, tags))
        ),
        "micro_batch_tokens must be None for Batches": lambda: accumulate(
            model, case.loss, batches
        ),
        "must have a value for each position": lambda: accumulate(
            mean_over_positions(), losses.MeanSquaredError(), (numbers, labels)
        ),
        "sample weights of ragged labels must be": lambda: accumulate(
            model, case.loss, (x, tags, weights)
        ),
        "jit_compile must be": lambda: update(micro_batch_tokens=8, jit_compile=True),
        "micro_batch_size or micro_batch_tokens must be given": lambda: update(),
        "pad_multiple must be 1 without": lambda: update(
            micro_batch_size=2, pad_multiple=8
        ),
        "micro_batch_tokens must be a whole": lambda: update(micro_batch_tokens=0),
        "loss_over must be example with": lambda: tf.function(
            Update(
                dropout,
                Pairs(),
                built_sgd(dropout),
                micro_batch_tokens=8,
                loss_over="effective_batch",
            ),
            autograph=False,  # which would put a stack before the message
        )((x, tags)),
    }


@pytest.mark.parametrize("rule", mostly_slow(range(9), range(8)))
def test_what_has_no_cut_by_tokens_is_rejected_in_one_line(rule):
    message, call = list(rejected_calls().items())[rule]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_ragged_weights_of_other_lengths_than_their_labels_are_no_weights(float64):
    x, tags, weights = cases()["LSTM"].batch
    # As many weights, but two examples have exchanged theirs.
    lengths = [LENGTHS[1], LENGTHS[0], *LENGTHS[2:]]
    others = tf.RaggedTensor.from_row_lengths(weights.flat_values, lengths)
    rule = "ragged sample weights must be one per position of their labels"
    with pytest.raises(tf.errors.InvalidArgumentError, match=rule):
        accumulate_gradients(
            causal(), cross_entropy(), (x, tags, others), micro_batch_tokens=10
        )


def test_the_cut_by_size_has_no_counts_and_no_other_graph(float64):
    case = cases()["causal"]
    accumulate_traced = tf.function(accumulate_gradients, autograph=False)
    sums = accumulate_traced(build(case), case.loss, dense(case.batch), 4)
    assert sums.cut == ()
