"""Runs on padded data whose lengths are known, cut by tokens, from end to end."""

from __future__ import annotations

import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.killed_run import KILL
from tests.run.test_runs_cut_by_tokens import EXACT, histories
from tests.running import Store, pipeline, train_in

PADDED = """
import keras
import numpy as np
import tensorflow as tf
from pipeline.dataset import Data

CLASSES = 12
SIZE = 48


def split(count, seed, weighted, wrong):
    numbers = np.random.default_rng(seed)
    lengths = 1 + np.minimum(numbers.geometric(0.1, count), 40)
    x = np.zeros([count, SIZE], "int32")
    y = np.zeros([count, SIZE], "int32")
    weights = np.zeros([count, SIZE])
    for i, length in enumerate(lengths):
        row = numbers.integers(1, CLASSES, length + 1)
        x[i, :length] = row[:-1]
        y[i, :length] = row[1:]
        weights[i, :length] = 0.5 + i % 3
    lengths[7] -= wrong
    inputs = {"tokens": x, "length": lengths.astype("int32")}
    parts = (inputs, y, weights)
    if not weighted:
        parts = (inputs, y)
    return tf.data.Dataset.from_tensor_slices(parts)


def padded(weighted=True, wrong=0):
    return Data(
        split(60, 0, weighted, wrong),
        split(10, 1, weighted, 0),
        name="padded",
        classes=CLASSES,
    )


def count(x, y):
    "The length of a text, which has no zero before its end."
    return tf.math.count_nonzero(x["tokens"])


def recurrent(classes, masks=True):
    tokens = keras.Input([None], dtype="int32", name="tokens")
    length = keras.Input([], dtype="int32", name="length")
    vectors = keras.layers.Embedding(classes, 8, mask_zero=masks)(tokens)
    # The length is an input as any other, too.
    share = keras.ops.cast(length, "float64")[:, None] / SIZE
    start = keras.layers.Dense(8)(share)
    outputs = keras.layers.LSTM(8, return_sequences=True)(
        vectors, initial_state=[start, start]
    )
    inputs = {"tokens": tokens, "length": length}
    return keras.Model(inputs, keras.layers.Dense(classes)(outputs))
"""
CONFIG = (
    "~dataset",
    "+dataset={_target_: padded.padded}",
    "~model",
    "+model={_target_: padded.recurrent}",
    "objective=language_model",
    "accumulation.effective_batch_size=16",
    "training.epochs=3",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
    "hardware.precision=float64",
    "hardware.deterministic=true",
)
PARTS = "parts: [x.tokens, y, sample_weight]"
LENGTHS = (
    f"+dataset.lengths={{length: x.length, {PARTS}}}",
    "+dataset.pad={multiple: 4, value: 0}",
)
TOKENS = "accumulation.micro_batch_tokens=100"
UPDATES = range(1, 13)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run on padded texts, and one that is cut by tokens."""
    folder = tmp_path_factory.mktemp("lengths")
    (folder / "padded.py").write_text(PADDED)
    trained(folder, "padded", "accumulation.factor=1")
    trained(folder, "tokens", *LENGTHS, TOKENS)
    return folder


def trained(folder, name, *more, **options):
    return train_in(folder, name, *CONFIG, *more, **options)


def losses(run):
    return [run["train/loss"][step] for step in UPDATES]


def assert_same(run, other):
    for metric in ("train/loss", "train/accuracy", "train/gradient_norm"):
        values = [other[metric][step] for step in UPDATES]
        assert [run[metric][step] for step in UPDATES] == pytest.approx(
            values, rel=EXACT
        )
    for metric in ("val/loss", "val/accuracy"):
        assert run[metric] == pytest.approx(other[metric], rel=EXACT)


def test_it_is_the_run_on_the_padded_texts_with_less_padding(folder):
    padded = histories(folder, "padded")
    run = histories(folder, "tokens")
    assert_same(run, padded)
    assert run["train/micro_steps"][12] > 12
    assert max(run["perf/padding_share"].values()) < 0.5

    # Negative control: without masks and weights, padding counts.
    wrong = ("+dataset.weighted=false", "+model.masks=false", "accumulation.factor=1")
    trained(folder, "wrong", *wrong)
    assert losses(histories(folder, "wrong")) != pytest.approx(losses(run), rel=0.01)


def test_a_function_of_the_example_or_a_cut_by_examples_gives_the_same_run(folder):
    function = "{_target_: padded.count, _partial_: true}"
    lengths = f"+dataset.lengths={{length: {function}, {PARTS}}}"
    trained(folder, "function", lengths, LENGTHS[1], TOKENS)
    assert_same(histories(folder, "function"), histories(folder, "padded"))
    # Without a cut by tokens, the padding of an effective batch is shorter.
    trained(folder, "shorter", *LENGTHS, "accumulation.factor=2")
    assert_same(histories(folder, "shorter"), histories(folder, "padded"))


def test_it_is_killed_resumed_and_repeated(folder):
    every = "training.checkpoint_every=1"
    trained(folder, "killed", *LENGTHS, TOKENS, KILL, every, status=-9, AT="7")
    other = "dataset.lengths.parts=[x.tokens]"
    rejected = pipeline("resume", "killed", other, cwd=folder, status=2)
    assert "dataset.lengths.parts must be that of the run, [" in rejected.stderr
    done = pipeline("resume", "killed", cwd=folder)
    assert re.search("continues after update [56]", done.stderr)
    run = histories(folder, "killed")
    for metric in ("train/loss", "train/micro_steps", "train/tokens_seen"):
        assert run[metric] == histories(folder, "tokens")[metric]

    run_id = Store(folder).run("tokens").info.run_id
    again = ("--allow", "padded", "tracking.experiment=again")
    rerun = pipeline("rerun", run_id, *again, cwd=folder)
    assert "bit-equal" in rerun.stderr


def test_it_is_evaluated_predicted_and_verified(folder):
    command = ("evaluate", "tokens", "--no-log", "--split", "validation")
    printed = pipeline(*command, cwd=folder).stdout
    loss = histories(folder, "padded")["val/loss"][12]
    assert f"{loss:.6g}" in printed
    pipeline("predict", "tokens", "--out", "rows.parquet", cwd=folder)
    rows = pq.read_table(folder / "rows.parquet").to_pylist()
    lengths = [len(row["label"]) for row in rows]
    assert [len(row["output"]) for row in rows] == lengths
    assert {len(row["output"][0]) for row in rows} == {12}  # classes
    # The same texts are padded to one size in the run that knows no lengths.
    pipeline("predict", "padded", "--out", "padded.parquet", cwd=folder)
    padded = pq.read_table(folder / "padded.parquet").to_pylist()
    assert {len(row["output"]) for row in padded} == {48}
    assert lengths == [np.count_nonzero(row["label"]) for row in padded]
    for row, row_of_padded in zip(rows, padded, strict=True):
        assert row["label"] == row_of_padded["label"][: len(row["label"])]
    done = pipeline("verify", *CONFIG, *LENGTHS, TOKENS, cwd=folder)
    assert "are equal within rounding" in done.stdout


def test_a_text_that_would_lose_a_token_ends_it_before_it_begins(folder):
    done = trained(folder, "lost", *LENGTHS, TOKENS, "+dataset.wrong=1", status=2)
    assert (
        "example 7 of the train split, counted from 0: dataset.lengths of x.tokens "
        "must leave out only padding, which is zero." in done.stderr
    )
    assert not (folder / "lost").exists()
