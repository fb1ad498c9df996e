"""A run hands ragged batches to its update, which is that of the whole padded batch."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.common.errors import ConfigError
from pipeline.components import assembly
from pipeline.config.compose import composed
from pipeline.config.resolve import resolve
from pipeline.dataset import Data

EXACT = 1e-12
CLASSES = 12
SIZE = 48
HERE = __name__
CONFIG = (
    "~dataset",
    f"+dataset={{_target_: {HERE}.texts, pad: {{multiple: 4, value: 0}}}}",
    "objective=language_model",
    "optimizer=sgd",
    "schedule=constant",
    "~model",
    f"+model={{_target_: {HERE}.network}}",
    "hardware.precision=float64",
    "hardware.device=cpu",
    "accumulation.effective_batch_size=16",
    "training.updates=2",
)
TOKENS = "accumulation.micro_batch_tokens=100"


def texts(keeps_last: bool = False) -> Data:
    """Return texts of 1 to 40 tokens from 1 on.

    With `keeps_last`, an input has the last token of its text, too, so that it is one
    longer than its labels.
    """
    numbers = np.random.default_rng(0)
    lengths = 2 + np.minimum(numbers.geometric(0.1, 40), 39)
    rows = [numbers.integers(1, CLASSES, length) for length in lengths]

    def examples():
        for row in rows:
            x = row if keeps_last else row[:-1]
            yield x, row[1:]

    spec = tf.TensorSpec([None], tf.int32)
    split = tf.data.Dataset.from_generator(examples, output_signature=(spec, spec))
    split = split.apply(tf.data.experimental.assert_cardinality(len(rows)))
    return Data(split, split.take(10), name="texts", classes=CLASSES)


def padded_texts() -> Data:
    """Return the texts as arrays, padded to one size, with a weight of 0 for padding."""

    def padded(x, y):
        x = tf.pad(x, [[0, SIZE - tf.size(x)]])
        y = tf.pad(y, [[0, SIZE - tf.size(y)]])
        x = tf.ensure_shape(x, [SIZE])
        y = tf.ensure_shape(y, [SIZE])
        return x, y, tf.cast(x > 0, tf.float32)

    data = texts()
    split = data.train.map(padded)
    return Data(split, split.take(10), name="padded", classes=CLASSES)


def tokens_in(x, y):
    return tf.math.count_nonzero(x)


def network(classes: int, pools: bool = False, drops_last: bool = False) -> keras.Model:
    """Return a model whose outputs change with padding if it `pools`.

    If it `drops_last`, it has no output for the last token.
    """
    inputs = keras.Input([None], dtype="int32")
    vectors = keras.layers.Embedding(classes, 8)(inputs)
    if pools:
        vectors += keras.ops.mean(vectors, axis=1, keepdims=True)
    if drops_last:
        vectors = vectors[:, :-1]
    return keras.Model(inputs, keras.layers.Dense(classes)(vectors))


def parts_of(*more):
    return assembly.assemble(resolve(composed([*CONFIG, *more]), [*CONFIG, *more], {}))


def results_of(parts):
    """Return the results of two updates, and those of an evaluation after them."""
    update = tf.function(parts.update(), autograph=False)
    results = [update(batch) for batch in parts.batches]
    evaluation = parts.evaluation()
    (batch,) = parts.evaluation_batches()
    sums = tf.function(evaluation, autograph=False)(batch)
    results.append(sums.results(evaluation.measured))
    return [{name: float(value) for name, value in row.items()} for row in results]


PADDED_BEFORE = (
    f"dataset._target_={HERE}.padded_texts",
    f"+dataset.lengths={{length: {{_target_: {HERE}.tokens_in, _partial_: true}}, "
    "parts: [x, y, sample_weight]}",
)


@pytest.mark.parametrize(
    "dataset",
    [(), pytest.param(PADDED_BEFORE, marks=pytest.mark.slow)],
    ids=["ragged", "padded to one size before"],
)
def test_updates_and_evaluations_are_those_of_whole_padded_batches(float64, dataset):
    by_tokens = parts_of(*dataset, TOKENS)
    for spec in by_tokens.batches.element_spec:
        assert isinstance(spec, tf.RaggedTensorSpec)
    rows = results_of(by_tokens)
    expected = results_of(parts_of("accumulation.factor=1"))
    for row, other in zip(rows, expected, strict=True):
        for name in {"loss", "accuracy", "gradient_norm"} & other.keys():
            assert row[name] == pytest.approx(other[name], rel=EXACT)
    for row in rows[:2]:
        assert row["micro_steps"] > 1
        assert row["tokens"] < row["positions"] < 16 * SIZE / 2
        assert "gradient_variance" not in row


def test_padded_texts_without_their_lengths_are_rejected(float64):
    padded = f"dataset._target_={HERE}.padded_texts"
    with pytest.raises(ConfigError, match=r"or set dataset\.lengths, such as"):
        parts_of(padded, TOKENS)


def test_a_model_that_counts_padding_is_rejected_before_the_run(float64):
    with pytest.raises(ConfigError) as rejected:
        parts_of(TOKENS, "+model.pools=true")
    assert rejected.value.key == "accumulation.micro_batch_tokens"
    assert "must give the same outputs when an example is padded" in str(rejected.value)


@pytest.mark.slow
def test_a_model_that_needs_two_lengths_is_rejected_with_lengths_for_xla(float64):
    """All parts of a micro-batch that XLA compiles are padded to one length."""
    shorter_labels = (
        TOKENS,
        "dataset.pad.multiple=1",
        "+dataset.keeps_last=true",
        "+model.drops_last=true",
    )
    parts_of(*shorter_labels)  # is accepted without XLA
    with pytest.raises(ConfigError) as rejected:
        parts_of(*shorter_labels, "hardware.xla=true", "hardware.xla_lengths=[20,48]")
    assert rejected.value.key == "hardware.xla_lengths"
    assert "must be null if the model or its loss fails" in str(rejected.value)


BY_XLA = (TOKENS, "hardware.xla=true")


def test_lengths_are_chosen_and_their_cost_is_said(float64):
    parts = parts_of(*BY_XLA, "hardware.xla_lengths=auto")
    lengths = parts.spec.config.hardware.xla_lengths
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == 40
    names = ", ".join(map(str, lengths))
    found = re.search(
        rf"XLA at lengths {names} \((\d+)% more positions\)", parts.devices.description
    )
    assert 0 <= int(found[1]) < 100


@pytest.mark.slow
def test_lengths_may_be_listed_and_are_not_chosen_where_nothing_is_compiled(float64):
    listed = parts_of(*BY_XLA, "hardware.xla_lengths=[20,40]")
    assert listed.spec.config.hardware.xla_lengths == [20, 40]
    assert "XLA at lengths 20, 40" in listed.devices.description
    uncompiled = parts_of(TOKENS, "hardware.xla_lengths=auto")
    assert uncompiled.spec.config.hardware.xla_lengths is None
