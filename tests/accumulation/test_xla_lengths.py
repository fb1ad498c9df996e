"""A cut by tokens that XLA compiles has few shapes, and the same update."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.accumulation import (
    AccumulatingModel,
    Evaluation,
    Update,
    choose_xla_lengths,
    philox,
)
from pipeline.accumulation import update as update_module
from pipeline.accumulation.same_noise import Key
from pipeline.accumulation.token_cut import TokenLimit, cut_by_tokens
from pipeline.accumulation.token_cut_for_xla import cut_for_xla
from tests.accumulation.replicas import strategy_on
from tests.accumulation.sequences import (
    LENGTHS,
    build,
    cases,
    cross_entropy,
    dense,
    difference,
    whole,
)
from tests.accumulation.test_noise_by_tokens import batch as noisy_batch
from tests.accumulation.test_noise_by_tokens import noisy_model
from tests.parameters import mostly_slow

EXACT = 1e-12
BY_XLA = {
    "jit_compile": True,
    "xla_lengths": (4, 8),
}
NAMES = ["attention", "LSTM", "masked", "causal", "sum", "two sequences", "two outputs"]


def ragged(lengths):
    return tf.RaggedTensor.from_row_lengths(tf.range(sum(lengths)), lengths)


def sgd_for(model):
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build(model.trainable_variables)
    return optimizer


def test_a_cut_to_check_by_hand():
    lengths = [1, 8, 4, 9, 2, 4, 1, 8, 1, 5, 4, 3, 2, 1]
    limit = TokenLimit(24, xla_lengths=(4, 8))
    cut = cut_for_xla((ragged(lengths),), limit)
    # 9 8 | 8 5 4 | 4 4 3 2 2 1 | 1 1 1: the first is longer than all lengths for XLA.
    sizes = [2, 3, 6, 3]
    in_order = [lengths[example] for example in cut.order.numpy()]
    assert in_order == sorted(lengths, reverse=True)
    assert cut.ends.numpy().tolist() == list(itertools.accumulate(sizes))
    assert cut.for_xla.minimum_lengths.numpy().tolist() == [0, 8, 4, 0]
    assert int(cut.for_xla.begin) == 2
    assert int(cut.for_xla.end) == 2 + 3 + 6

    assert int(cut.counts.micro_batches) == 4
    assert int(cut.counts.tokens) == sum(lengths) == 53
    assert int(cut.counts.positions) == 2 * 9 + 3 * 8 + 6 * 4 + 3 * 1
    assert cut.counts.compiled.numpy().tolist() == [1, 1]


@pytest.mark.parametrize("tokens", mostly_slow([1, 7, 40, 1000], [7, 40]))
@pytest.mark.parametrize("examples", [None, 3])
@pytest.mark.parametrize("xla_lengths", [(4,), (3, 8), (20,)])
def test_full_micro_batches_have_one_shape_for_each_length(
    tokens, examples, xla_lengths
):
    numbers = np.random.default_rng(tokens)
    limit = TokenLimit(tokens, examples, xla_lengths=xla_lengths)
    for count in (0, 1, 2, 30):
        inputs = numbers.integers(0, 12, count)
        labels = numbers.integers(0, 12, count)
        parts = (ragged(inputs.tolist()), ragged(labels.tolist()))
        cut = cut_for_xla(parts, limit)
        assert sorted(cut.order.numpy()) == [*range(count)]

        longest = np.maximum(inputs, labels)
        begin = int(cut.for_xla.begin)
        end = int(cut.for_xla.end)
        bounds = [0, *cut.ends.numpy()]
        assert begin in bounds
        assert end in bounds
        assert bounds[-1] == count
        micro_batches = itertools.pairwise(bounds)
        padded_lengths = cut.for_xla.minimum_lengths.numpy()
        for (start, stop), length in zip(micro_batches, padded_lengths, strict=True):
            rows = cut.order.numpy()[start:stop]
            if not begin <= start < end:
                # Not compiled: examples that are too long, or the last few.
                is_longer = longest[rows].max() > xla_lengths[-1]
                assert is_longer or stop == count
                assert length == 0
                continue
            assert length in xla_lengths
            assert longest[rows].max() <= length
            most = max(1, tokens // length)
            assert len(rows) == min(most, examples or most)


@pytest.mark.parametrize(
    "name", mostly_slow(NAMES, fast=["two outputs"], slow=NAMES[:-1])
)
def test_an_update_is_that_of_the_whole_padded_batch(float64, name):
    case = cases()[name]
    model = build(case)
    expected = whole(model, case.loss, dense(case.batch))
    optimizer = sgd_for(model)
    update = Update(model, case.loss, optimizer, micro_batch_tokens=12, **BY_XLA)
    sums = tf.function(update.sums, autograph=False)(case.batch)
    assert update.compiled
    assert difference(sums, expected) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_replicas_and_noise_have_the_update_of_the_cut_without_xla(float64, devices):
    weights = []
    for options in ({}, BY_XLA):
        strategy = strategy_on(devices)
        with strategy.scope():
            model = noisy_model()
            optimizer = sgd_for(model)
        update = Update(
            model,
            cross_entropy(),
            optimizer,
            micro_batch_tokens=12,
            same_noise=True,
            strategy=strategy,
            **options,
        )
        step = tf.function(update, autograph=False)
        for _ in range(2):
            step(noisy_batch())
        values = [np.ravel(weight) for weight in model.get_weights()]
        weights.append(np.concatenate(values))
    without, with_xla = weights
    np.testing.assert_allclose(with_xla, without, rtol=0, atol=EXACT)


# Of the lengths 2, 4 and 8, at most 4, 2 and 1 examples are full micro-batches.
COMPILED = {
    (7,): 0b100,
    (2, 2, 3, 3, 1, 2): 0b011,
    (9, 8, 2, 2): 0b100,  # too long; 8; the last one is not full
    (2, 2): 0,
}


@pytest.mark.parametrize("lengths", COMPILED)
def test_which_lengths_have_been_compiled(lengths):
    limit = TokenLimit(8, xla_lengths=(2, 4, 8))
    counts = cut_for_xla((ragged(lengths),), limit).counts
    assert int(update_module._bits(counts.compiled)) == COMPILED[lengths]


@pytest.mark.slow
def test_an_update_says_for_which_lengths_xla_has_compiled():
    inputs = keras.Input([None, 1])
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    options = BY_XLA | {"xla_lengths": (2, 4, 8)}
    update = Update(model, loss, sgd_for(model), micro_batch_tokens=8, **options)

    @tf.function(autograph=False)
    def step(x, y):
        update((x, y))
        return update.compiled_lengths

    for lengths, bits in COMPILED.items():
        values = tf.ones([sum(lengths), 1])
        x = tf.RaggedTensor.from_row_lengths(values, lengths)
        assert int(step(x, x)) == bits


@pytest.mark.slow
def test_an_evaluation_is_that_without_xla(float64):
    case = cases()["causal"]
    model = build(case)
    losses = []
    for options in ({}, BY_XLA):
        evaluation = Evaluation(model, case.loss, micro_batch_tokens=12, **options)
        sums = tf.function(evaluation, autograph=False)(case.batch)
        losses.append(float(sums.mean_loss()))
    assert losses[1] == pytest.approx(losses[0], rel=EXACT)


@pytest.mark.slow
def test_a_saved_model_keeps_the_lengths_and_fits_with_them(float64, tmp_path):
    case = cases()["causal"]
    model = AccumulatingModel(build(case), micro_batch_tokens=12, xla_lengths=(2, 4, 8))
    model.compile("sgd", case.loss, jit_compile=True)
    plain = AccumulatingModel(build(case), micro_batch_tokens=12)
    plain.compile("sgd", case.loss)
    data = tf.data.Dataset.from_tensor_slices(case.batch).batch(len(LENGTHS))
    for network in (model, plain):
        network.fit(data, epochs=2, verbose=0)
    for weight, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=0, atol=EXACT)

    file = tmp_path / "model.keras"
    model.save(file)
    assert keras.saving.load_model(file).xla_lengths == (2, 4, 8)


def test_many_counters_draw_the_blocks_of_tensorflow():
    key = Key.from_seed(tf.constant([-3, 5], tf.int64))
    for position in (0, 1, 12_345_678, 2**31 - 1):
        counter = key.counter + tf.constant([position * 2**32, 0], tf.uint64)
        expected = tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[5, 4], key=key.key, counter=counter, alg=1, dtype=tf.uint32
        )
        lower = tf.bitcast(counter[0], tf.int64) + tf.range(5, dtype=tf.int64)
        upper = tf.bitcast(counter[1], tf.int64)
        words = philox.random_words(tf.bitcast(key.key[0], tf.int64), lower, upper)
        assert words.numpy().tolist() == expected.numpy().tolist()


def positions_with(lengths, chosen):
    """Return the sum of the lengths, each rounded up to the next chosen one."""
    return sum(min(length for length in chosen if length >= x) for x in lengths)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_chosen_lengths_have_the_least_padding(count):
    numbers = np.random.default_rng(count)
    lengths = numbers.integers(1, 40, 30)
    chosen = choose_xla_lengths(lengths, count, multiple=4)
    assert all(length % 4 == 0 for length in chosen)

    multiples = range(4, 44, 4)
    longest = 4 * -(-lengths.max() // 4)
    positions = []
    for others in itertools.combinations(multiples, count):
        if max(others) == longest:
            positions.append(positions_with(lengths, others))
    assert positions_with(lengths, chosen) == min(positions)


def test_fewer_lengths_are_chosen_where_there_are_fewer():
    assert choose_xla_lengths([3, 3, 5], 4, multiple=1) == (3, 5)
    assert choose_xla_lengths([0], 4) == (8,)
    # Of 100,000 different lengths, the longest has its place.
    assert choose_xla_lengths(range(1, 100_001), 2, multiple=1)[-1] >= 100_000


def test_lengths_are_chosen_for_the_examples_of_a_ragged_tensor():
    assert choose_xla_lengths(ragged([3, 9, 16])) == (8, 16)
    assert choose_xla_lengths(tf.constant([3, 9])) == (8, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.5],), "lengths must be whole numbers, .* dtype float64"),
        (([[1, 2]],), r"one for each example. Received: shape \(1, 2\)"),
        (([],), "lengths must not be empty"),
        (([3, -1],), "lengths must not be negative. Received: -1"),
        (([3], 1.5), "count must be a whole number of at least 1. Received: 1.5"),
        (([3], 33), "count must be at most 32. Received: 33"),
        (([3], 4, 0), "multiple must be a whole number of at least 1. Received: 0"),
    ],
)
def test_wrong_arguments_of_the_choice_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        choose_xla_lengths(*arguments)


def test_few_lengths_compute_little_more_padding():
    numbers = np.random.default_rng(0)
    lengths = np.clip(numbers.lognormal(4, 1, 256), 1, 512).astype(int)
    x = ragged(lengths.tolist())
    chosen = choose_xla_lengths(lengths, 4)
    limit = TokenLimit(16 * 512, xla_lengths=chosen)
    with_xla = int(cut_for_xla((x,), limit).counts.positions)
    without = int(cut_by_tokens(x, limit).counts.positions)
    assert without < with_xla < 1.5 * without
    # Negative control: with the longest length alone, all padding is computed.
    limit = TokenLimit(16 * 512, xla_lengths=(512,))
    assert int(cut_for_xla((x,), limit).counts.positions) > 3 * without


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"xla_lengths": (4, 2)}, r"xla_lengths must increase. Received: \(4, 2\)"),
        ({"xla_lengths": (0, 2)}, "each of xla_lengths must be a whole number"),
        (
            {"xla_lengths": (4, 6), "pad_multiple": 4},
            "xla_lengths must be multiples of pad_multiple, 4",
        ),
        ({"jit_compile": True}, r"such as choose_xla_lengths\(x\.row_lengths"),
        ({"xla_lengths": 8}, "must be a sequence of whole numbers, .* Received: 8"),
        ({"xla_lengths": None}, r"\(\) for none. Received: None"),
        ({"xla_lengths": range(1, 34)}, "must have at most 32 lengths"),
    ],
)
def test_wrong_lengths_are_rejected(options, message):
    model = build(cases()["LSTM"])
    with pytest.raises(ValueError, match=message):
        Update(model, "mse", sgd_for(model), micro_batch_tokens=8, **options)
    with pytest.raises(ValueError, match="must be empty without micro_batch_tokens"):
        Update(model, "mse", sgd_for(model), 8, xla_lengths=(2,))
