"""What of a run does not depend on how its effective batch is cut.

That is dropout, and the moving statistics.
"""

from __future__ import annotations

import pytest

from tests.running import TINY, Store, pipeline, train_in

# As in test_same_noise.py; a run has 12 updates here.
EXACT = 1e-12

MODULE = """
import keras
from keras import layers

def recurrent(input_shape, classes):
    recurrent = [layers.Reshape((8, 8)), layers.LSTM(4, dropout=0.2)]
    others = [layers.Dropout(0.2), layers.BatchNormalization(), layers.Dense(classes)]
    return keras.Sequential([keras.Input(input_shape), *recurrent, *others])

def normalised(input_shape, classes):
    norm = layers.BatchNormalization(name="norm")
    parts = [layers.Flatten(), norm, layers.Dropout(0.2), layers.Dense(classes)]
    return keras.Sequential([keras.Input(input_shape), *parts])
"""
EXACTLY = (
    *TINY,
    "hardware.precision=float64",
    "hardware.deterministic=true",
    "accumulation.effective_batch_size=120",
)


def trained(folder, name, *more):
    train_in(folder, name, *EXACTLY, *more)
    store = Store(folder)
    run = store.run(name)
    return run, store.histories(run)["train/loss"]


@pytest.mark.slow
def test_dropout_that_does_not_depend_on_the_cut(tmp_path):
    dropout = ("model.dropout=0.3", "accumulation.same_noise=true")
    run, whole = trained(tmp_path, "whole", *dropout, "accumulation.factor=1")
    assert run.data.tags["model.cut_dependent_noise"] == "none"
    _, two = trained(
        tmp_path, "two", *dropout, "accumulation.factor=3", "hardware.replicas=2"
    )
    assert two == pytest.approx(whole, rel=EXACT)
    run, other = trained(
        tmp_path, "other", "model.dropout=0.3", "accumulation.factor=4"
    )
    assert run.data.tags["model.cut_dependent_noise"] == "dropout, dropout_1"
    assert other != pytest.approx(whole, rel=1e9 * EXACT)


@pytest.mark.soak
def test_a_rerun_and_verify_have_that_dropout(tmp_path):
    dropout = ("model.dropout=0.3", "accumulation.same_noise=true")
    run, _ = trained(tmp_path, "cut", *dropout, "accumulation.factor=4")
    rerun = pipeline("rerun", run.info.run_id, cwd=tmp_path)
    assert "bit-equal" in rerun.stderr
    verified = pipeline(
        "verify", "model=mlp", *dropout, "accumulation.factor=4", cwd=tmp_path
    )
    assert "noise off" not in verified.stdout
    assert "equal within rounding" in verified.stdout


@pytest.mark.slow
def test_layers_that_an_update_is_not_exact_for_are_named(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    own = (
        "model._target_=mine.recurrent",
        "~model.hidden",
        "~model.dropout",
        "~model.l2",
    )
    printed = pipeline(
        "train", *TINY, *own, "accumulation.same_noise=auto", cwd=tmp_path
    ).stderr
    assert "noise of each micro-batch, not of the effective batch: lstm" in printed
    normalised = (
        "normalized within each micro-batch, moving statistics updated once per "
        "update: batch_normalization"
    )
    assert normalised in printed
    tags = Store(tmp_path).run().data.tags
    assert tags["model.cut_dependent_noise"] == "lstm"
    assert tags["model.batch_dependent_layers"] == "batch_normalization"


@pytest.mark.soak
def test_moving_statistics_that_do_not_depend_on_the_cut(tmp_path):
    """The layer normalizes by the micro-batch, and evaluates by the effective batch."""
    (tmp_path / "mine.py").write_text(MODULE)
    own = (
        "model._target_=mine.normalised",
        "~model.hidden",
        "~model.dropout",
        "~model.l2",
    )
    # What is left to differ are the moving statistics.
    frozen = "optimizer.learning_rate=1e-30"

    def validated(name, *more):
        run, _ = trained(tmp_path, name, *own, frozen, *more)
        return Store(tmp_path).histories(run)["val/loss"]

    whole = validated("whole", "accumulation.factor=1")
    two = validated("two", "accumulation.factor=5", "hardware.replicas=2")
    assert two == pytest.approx(whole, rel=EXACT)
    micro = validated(
        "micro", "accumulation.factor=5", "accumulation.moving_statistics=micro"
    )
    assert micro != pytest.approx(whole, rel=1e6 * EXACT)


@pytest.mark.slow
def test_a_normalised_run_again_and_in_another_cut(tmp_path):
    """Again it is bit-identical.

    In another cut it is another run, which no rounding explains.
    """
    (tmp_path / "mine.py").write_text(MODULE)
    own = (
        "model._target_=mine.normalised",
        "~model.hidden",
        "~model.dropout",
        "~model.l2",
        # So nothing but the normalization depends on the cut.
        "accumulation.same_noise=true",
    )
    _, once = trained(tmp_path, "once", *own, "accumulation.factor=5")
    _, again = trained(tmp_path, "again", *own, "accumulation.factor=5")
    assert again == once
    _, two = trained(
        tmp_path, "two", *own, "accumulation.factor=1", "hardware.replicas=2"
    )
    assert two != pytest.approx(once, rel=1e6 * EXACT)
