"""Runs that cut their effective batches by tokens, from end to end."""

from __future__ import annotations

import itertools
import re

import pytest

from tests.killed_run import KILL
from tests.running import Store, pipeline, train_in

EXACT = 1e-11  # relative; a run has 12 updates here

TEXTS = """
import os
import keras
import numpy as np
import tensorflow as tf
from pipeline.dataset import Data

CLASSES = 12


def split(count, seed):
    numbers = np.random.default_rng(seed)
    lengths = 2 + np.minimum(numbers.geometric(0.1, count), 40)
    rows = [numbers.integers(1, CLASSES, length) for length in lengths]

    def examples():
        for row in rows:
            yield row[:-1], row[1:]

    spec = tf.TensorSpec([None], tf.int32)
    found = tf.data.Dataset.from_generator(examples, output_signature=(spec, spec))
    return found.apply(tf.data.experimental.assert_cardinality(count))


def texts():
    return Data(split(60, 0), split(10, 1), name="texts", classes=CLASSES)


def shown(x, y, outputs):
    return {"text": list(range(len(x)))}


class Scarce(keras.layers.Layer):
    "It has no memory for more than MOST positions, up to the limit of the cut."

    def call(self, x):
        def check(shape):
            # The checks before a run compute larger batches than the limit allows.
            if int(os.environ["MOST"]) < shape[0] * shape[1] <= 100:
                raise MemoryError("no room")  # ResourceExhaustedError of TensorFlow
            return shape

        shape = tf.py_function(check, [tf.shape(x)], tf.int32)
        with tf.control_dependencies([shape]):
            return tf.identity(x)


def scarce(classes):
    inputs = keras.Input([None], dtype="int32")
    vectors = Scarce()(keras.layers.Embedding(classes, 8)(inputs))
    return keras.Model(inputs, keras.layers.Dense(classes)(vectors))
"""
TEXT = (
    "~dataset",
    "+dataset={_target_: texts.texts, pad: {multiple: 4, value: 0}}",
    "objective=language_model",
    "accumulation.effective_batch_size=16",
    "training.epochs=3",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
)
CONFIG = (
    *TEXT,
    "model=decoder",
    "model.length=48",
    "model.width=8",
    "model.blocks=1",
    "model.heads=2",
    "hardware.precision=float64",
    "hardware.deterministic=true",
)
TOKENS = "accumulation.micro_batch_tokens=100"
UPDATES = range(1, 13)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run that was cut by tokens, and one that was not cut."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "texts.py").write_text(TEXTS)
    trained(folder, "tokens", TOKENS)
    trained(folder, "whole", "accumulation.factor=1")
    return folder


def trained(folder, name, *more, config=CONFIG, **options):
    return train_in(folder, name, *config, *more, **options)


def histories(folder, name):
    store = Store(folder)
    return store.histories(store.run(name), "train/", "val/", "perf/")


def assert_same_updates(run, other, steps=UPDATES):
    for metric in ("train/loss", "train/accuracy", "train/gradient_norm"):
        values = [other[metric][step] for step in steps]
        assert [run[metric][step] for step in steps] == pytest.approx(values, rel=EXACT)
    for metric in ("val/loss", "val/accuracy"):
        assert run[metric] == pytest.approx(other[metric], rel=EXACT)


@pytest.mark.slow
def test_a_run_has_the_updates_of_whole_batches_and_counts_its_cut(folder):
    run = histories(folder, "tokens")
    whole = histories(folder, "whole")
    assert_same_updates(run, whole)

    # Padded positions of a whole batch are more than the limit, so each is cut.
    counts = [run["train/micro_steps"][step] for step in UPDATES]
    assert counts[0] > 1
    assert all(later > before + 1 for before, later in itertools.pairwise(counts))
    tokens = [run["train/tokens"][step] for step in UPDATES]
    seen = [run["train/tokens_seen"][step] for step in UPDATES]
    assert seen == [sum(tokens[:step]) for step in UPDATES]
    # An epoch has the same tokens in any order.
    assert seen[3] == sum(tokens[4:8]) == sum(tokens[8:])
    shares = run["perf/padding_share"].values()
    assert 0 < min(shares) <= max(shares) < 0.5

    assert not any("noise" in metric or "variance" in metric for metric in run)
    assert "train/accumulation_factor" not in run
    assert "train/tokens" not in whole
    assert "perf/padding_share" not in whole


@pytest.mark.slow
def test_it_is_killed_resumed_and_repeated(folder):
    every = "training.checkpoint_every=1"
    trained(folder, "killed", TOKENS, KILL, every, status=-9, AT="7")
    done = pipeline("resume", "killed", cwd=folder)
    # An epoch has four updates: the checkpoint is from within the second one.
    assert re.search("continues after update [56]", done.stderr)
    whole = histories(folder, "tokens")
    run = histories(folder, "killed")
    for metric in ("train/loss", "train/micro_steps", "train/tokens_seen"):
        assert run[metric] == whole[metric]

    run_id = Store(folder).run("tokens").info.run_id
    again = ("--allow", "texts", "tracking.experiment=again")
    rerun = pipeline("rerun", run_id, *again, cwd=folder)
    assert "bit-equal" in rerun.stderr


@pytest.mark.slow
def test_xla_compiles_a_run_for_a_few_lengths_which_are_recorded(folder):
    compiled = (TOKENS, "hardware.xla=true", "hardware.xla_lengths=auto")
    first_line = trained(folder, "xla", *compiled).stderr.splitlines()[0]
    lengths = Store(folder).run("xla").data.params["hardware.xla_lengths"]
    assert f"XLA at lengths {lengths.strip('[]')} (" in first_line
    assert len(lengths.split(",")) > 1
    run = histories(folder, "xla")
    assert_same_updates(run, histories(folder, "whole"))
    assert run["train/tokens"] == histories(folder, "tokens")["train/tokens"]

    # A run that is resumed has the lengths of its record, in place of `auto`.
    some = (KILL, "training.checkpoint_every=1", "hardware.xla_lengths=[8,44]")
    trained(folder, "killed xla", *compiled, *some, status=-9, AT="7")
    done = pipeline("resume", "killed xla", "hardware.xla_lengths=auto", cwd=folder)
    assert "XLA at lengths 8, 44;" in done.stderr
    assert_same_updates(histories(folder, "killed xla"), run)


@pytest.mark.slow
def test_a_fork_counts_on_and_a_resumed_run_keeps_its_unit(folder):
    shown = "+training.shown.texts={_target_: texts.shown, _partial_: true}"
    more = ("training.epochs=1", "schedule=constant", shown)
    done = trained(folder, "short", TOKENS, *more)
    assert "is left out" not in done.stderr
    assert list((folder / "short" / "shown").iterdir())
    fork = ("start.run=short", "schedule=constant", "training.epochs=2")
    trained(folder, "fork", "accumulation.micro_batch_tokens=60", *fork)
    short = histories(folder, "short")
    run = histories(folder, "fork")
    for metric in ("train/micro_steps", "train/tokens_seen"):
        assert min(run[metric]) == 5
        assert short[metric][4] < run[metric][5]
    assert run["train/tokens_seen"][8] == 2 * short["train/tokens_seen"][4]

    command = ("resume", "short", "training.epochs=3")
    line = pipeline(*command, "accumulation.factor=2", cwd=folder, status=2).stderr
    assert (
        "accumulation.micro_batch_tokens must be a number, as in the run: 100. "
        "Received: null." in line
    )
    # Another limit is the same run.
    more = pipeline(*command, "accumulation.micro_batch_tokens=200", cwd=folder)
    assert "accumulation.micro_batch_tokens 200 (was 100)" in more.stderr


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["replicas", "workers"])
def test_replicas_and_workers_have_the_same_updates(folder, devices):
    two = (f"hardware.{devices}=2", "hardware.open_ports=true")
    trained(folder, devices, TOKENS, *two)
    run = histories(folder, devices)
    whole = histories(folder, "whole")
    assert_same_updates(run, whole)
    tokens = histories(folder, "tokens")
    assert run["train/tokens_seen"] == tokens["train/tokens_seen"]


@pytest.mark.slow
def test_a_batch_schedule_keeps_the_limit(folder):
    schedule = (
        "accumulation.batch_schedule=[{start: {updates: 0}, effective_batch_size: 16}, "
        "{start: {updates: 4}, effective_batch_size: 30}]"
    )
    trained(folder, "stages", TOKENS, schedule)
    trained(folder, "whole stages", "accumulation.factor=1", schedule)
    run = histories(folder, "stages")
    whole = histories(folder, "whole stages")
    steps = sorted(whole["train/loss"])
    assert len(steps) == 8
    assert_same_updates(run, whole, steps)
    factors = [run["train/accumulation_factor"][step] for step in steps]
    assert sum(factors) == run["train/micro_steps"][max(steps)]
    assert factors[4] > factors[0]


@pytest.mark.slow
def test_verify_says_that_it_is_the_whole_batch(folder):
    done = pipeline("verify", *CONFIG, TOKENS, cwd=folder)
    assert (
        "an update in micro-batches of at most 100 tokens and one of the whole batch "
        "are equal within rounding" in done.stdout
    )


@pytest.mark.slow
def test_a_cut_that_does_not_fit_is_repeated_with_half_the_tokens(folder):
    model = (
        "~model",
        "+model={_target_: texts.scarce}",
        "hardware.precision=float64",
    )

    def run(name, most):
        return trained(folder, name, TOKENS, *model, config=TEXT, MOST=str(most))

    run("roomy", 1000)
    done = run("scarce", 60)
    assert "with micro-batches of 50 tokens instead of 100" in done.stderr
    rows = histories(folder, "scarce")
    assert_same_updates(rows, histories(folder, "roomy"))
    assert set(rows["perf/micro_batch_tokens"].values()) == {50}
    tags = Store(folder).run("scarce").data.tags
    assert re.fullmatch(
        r"100 tokens up to update \d, 50 tokens then", tags["micro_batch_size.halved"]
    )
    assert tags["micro_batch_size.validation"] == "50 tokens"


@pytest.mark.slow
def test_a_sweep_over_limits_and_an_evaluation(folder):
    place = ("tracking.experiment=sweep", "hydra.sweep.dir=sweep")
    limits = "accumulation.micro_batch_tokens=60,100"
    done = pipeline("train", "-m", *CONFIG, limits, *place, cwd=folder)
    assert "tokens=60" in done.stdout + done.stderr
    command = ("evaluate", "tokens", "--no-log", "--split", "validation")
    printed = pipeline(*command, cwd=folder).stdout
    loss = histories(folder, "tokens")["val/loss"][12]
    assert f"{loss:.6g}" in printed
    pipeline("predict", "tokens", "--out", "rows.parquet", cwd=folder)
