"""A run whose effective batch changes: its updates are those of plain Keras.

They are so whatever interrupts it.
"""

from __future__ import annotations

import json
import signal
from math import ceil
from pathlib import Path

import keras
import numpy as np
import pytest
from omegaconf import OmegaConf

from pipeline.checkpoints import files, snapshot
from pipeline.config.stages import Slice
from pipeline.dataset import batches as batching
from pipeline.dataset import load
from tests.checkpoints.test_kills import left_in
from tests.parameters import mostly_slow
from tests.run.fitted import fit, parts_of
from tests.running import Store, pipeline, start
from tests.shared import place_store

# 1437 examples: 16 · 32 + 9 · 100 + 25; 14 · 100 + 37; 5 · 256 + 157.
STAGES = ((0, 32), (16, 100), (41, 256))
RAMP = (
    "accumulation.batch_schedule=[{start:{updates:0},effective_batch_size:32},"
    "{start:{examples:500},effective_batch_size:100},"
    "{start:{epochs:2},effective_batch_size:256}]"
)
SIZES = [32] * 16 + [100] * 9 + [25] + [100] * 14 + [37] + [256] * 5 + [157]
RUN = (
    "model=mlp",
    "model.hidden=[16]",
    "model.dropout=0",
    "hardware.precision=float64",
    "optimizer=momentum",
    "schedule=constant",
    "scaling=linear",
    "scaling.warmup=0",
    "training.epochs=3",
    "hardware.deterministic=true",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
    "tracking.patience=30",
    "hydra.run.dir=run",
)
EXACT = 1e-12
KILLER = """
import os, signal
import keras

class Killer(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.done = getattr(self, "done", int(os.environ.get("BEGAN", 0))) + 1
        if self.done == int(os.environ.get("KILL_AT", 0)):
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def ramp(tmp_path_factory):
    """Return a folder with a run of three stages, and what the run printed."""
    folder = tmp_path_factory.mktemp("ramp")
    done = pipeline("train", *RUN, RAMP, "training.checkpoint_every=23", cwd=folder)
    return folder, done.stderr


@pytest.mark.slow
def test_the_rows_are_right_at_each_boundary(ramp):
    folder, printed = ramp
    sizes = (
        "effective batch 32 = 8 × 4 × 1 replica, 100 (factor 13) after update 16, "
        "256 (factor 32) after update 41; 1437 examples → 45 updates per epoch "
        "(last one 29) at first, 47 in all"
    )
    assert sizes in printed
    rates = (
        "scaling.rule=linear: learning rate × 0.25, × 0.78125 after update 16, "
        "× 2 after update 41"
    )
    assert rates in printed
    run = Store(folder).run()
    assert json.loads(run.data.tags["accumulation.stages"]) == [
        list(stage) for stage in STAGES
    ]
    rows = Store(folder).histories(run, "train/")
    assert list(rows["train/effective_batch_size"].values()) == SIZES
    assert list(rows["train/examples_seen"].values()) == np.cumsum(SIZES).tolist()
    factors = [-(-size // 8) for size in SIZES]
    assert list(rows["train/accumulation_factor"].values()) == factors
    assert list(rows["train/micro_steps"].values()) == np.cumsum(factors).tolist()
    assert rows["train/epoch"][26] == 1
    assert rows["train/epoch"][41] == 2
    assert rows["train/epoch"][47] == 3
    base = 0.05 / 128  # of an example, in float32
    rates = []
    for (after, size), end in zip(STAGES, (16, 41, 47), strict=True):
        rates += [base * size] * (end - after)
    assert list(rows["train/learning_rate"].values()) == pytest.approx(rates, rel=1e-6)
    assert run.data.params["derived.effective_batch_size"] == "32"
    assert run.data.params["derived.factor"] == "4"


def test_each_update_is_that_of_plain_keras(tmp_path, float64):
    """Keras trains by `train_on_batch` on the whole batches.

    A run on the same examples whose batches end elsewhere is another run.
    """
    run = fit(tmp_path, *RUN, RAMP)
    recorded_losses = run.curve("loss")
    rates = run.curve("learning_rate")
    losses, weights = by_keras(run.parts, run.first_weights, SIZES, rates)
    assert recorded_losses == pytest.approx(losses, rel=EXACT)
    assert_close(run.parts.model.get_weights(), weights)

    # The 16th and the 17th update are of 32 and 100 examples.
    other_sizes = [*SIZES[:15], 16, 116, *SIZES[17:]]
    losses, _ = by_keras(run.parts, run.first_weights, other_sizes, rates)
    assert losses[:15] == pytest.approx(recorded_losses[:15], rel=EXACT)
    assert losses[-1] != pytest.approx(recorded_losses[-1], rel=1e6 * EXACT)


@pytest.mark.slow
def test_a_run_and_its_last_checkpoint_are_those_of_plain_keras(ramp, float64):
    folder, _ = ramp
    rows = Store(folder).histories(Store(folder).run(), "train/")
    parts = parts_of(*RUN, RAMP)
    rates = list(rows["train/learning_rate"].values())
    losses, weights = by_keras(parts, parts.model.get_weights(), SIZES, rates)
    assert list(rows["train/loss"].values()) == pytest.approx(losses, rel=EXACT)
    assert_close(weights_in(folder / "run", 47), weights)


def assert_close(weights, expected):
    assert [array.shape for array in weights] == [array.shape for array in expected]
    for ours, of_keras in zip(weights, expected, strict=True):
        np.testing.assert_allclose(ours, of_keras, rtol=EXACT, atol=EXACT)


def by_keras(parts, first_weights, sizes, rates):
    """Return the losses and the last weights of `train_on_batch`.

    The examples are in the order of a run.
    """
    node = OmegaConf.create({"in_memory": True})
    epochs = batching.effective_batches(
        node, load.load(parts.spec.dataset), seed=0, slices=[Slice(1437, 3)]
    )
    columns = zip(*epochs.as_numpy_iterator(), strict=True)
    x, y = (np.concatenate(column) for column in columns)
    model = keras.models.clone_model(parts.model)
    model.set_weights(first_weights)
    model.compile(
        keras.optimizers.SGD(1.0, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        run_eagerly=True,  # without a trace for each size
    )
    losses = []
    first = 0
    for size, rate in zip(sizes, rates, strict=True):
        model.optimizer.learning_rate = rate
        model.reset_metrics()
        end = first + size
        results = model.train_on_batch(x[first:end], y[first:end])
        losses.append(np.ravel(results)[0])
        first = end
    return losses, model.get_weights()


def weights_in(run_dir: Path, update: int) -> list[np.ndarray]:
    checkpoint = files.at(run_dir / "checkpoints", update)
    arrays = snapshot.read(checkpoint).arrays
    weights = []
    for name, array in arrays.items():
        if name.startswith("model/") and "seed" not in name:
            weights.append(array)
    return weights


@pytest.mark.slow
def test_a_rerun_is_equal_and_so_is_a_fork_inside_of_the_ramp(ramp):
    folder, _ = ramp
    run = Store(folder).run()
    done = pipeline("rerun", run.info.run_id, "tracking.experiment=again", cwd=folder)
    assert "bit-equal" in done.stderr
    pipeline(
        "train",
        *RUN[:-1],
        RAMP,
        "start.run=run@46",
        "tracking.experiment=fork",
        "hydra.run.dir=fork",
        cwd=folder,
    )
    store = Store(folder)
    old = store.histories(store.run("pipeline"), "train/")
    new = store.histories(store.run("fork"), "train/")
    assert new["train/loss"] == {47: old["train/loss"][47]}
    assert new["train/examples_seen"] == {47: 4311}
    assert new["train/micro_steps"] == {47: old["train/micro_steps"][47]}
    rejected = pipeline(
        "train",
        *RUN,
        RAMP.replace(":256", ":128"),
        "training.resume=auto",
        cwd=folder,
        status=2,
    ).stderr
    rule = (
        "accumulation.batch_schedule.2.effective_batch_size must be that of the run, "
        "256. Received: 128."
    )
    assert rule in rejected


@pytest.mark.slow
def test_a_run_that_is_killed_in_each_stage_goes_on_to_the_bit(tmp_path):
    cosine = [text for text in RUN if not text.startswith("schedule")]
    run = (
        "train",
        *cosine,
        RAMP,
        "schedule=cosine",
        "schedule.clock=examples",
        "training.checkpoint_every=3",
        "training.resume=auto",
        "+training.callbacks.killer._target_=mine.Killer",
        "model.dropout=0.2",
    )
    left = []
    for name, kills in (("undisturbed", []), ("killed", [10, 30, 44])):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "mine.py").write_text(KILLER)
        for kill in kills:
            place_store(folder)
            checkpoints = folder.glob("run/checkpoints/[0-9]*")
            began = max((int(path.name) for path in checkpoints), default=0)
            process = start(*run, cwd=folder, KILL_AT=str(kill), BEGAN=str(began))
            _, err = process.communicate(timeout=240)
            assert process.returncode == -signal.SIGKILL, err
        pipeline(*run, cwd=folder)
        left.append(left_in(folder, 47))
    assert left[0] == left[1]


@pytest.mark.parametrize(
    "count",
    mostly_slow(
        ["hardware.replicas=2", "hardware.workers=2"], [], ["hardware.workers=2"]
    ),
)
def test_replicas_and_workers_train_the_same_run(ramp, tmp_path, count):
    folder, _ = ramp
    pipeline("train", *RUN, RAMP, count, "hardware.open_ports=true", cwd=tmp_path)
    one = Store(folder).histories(Store(folder).run(), "train/")
    two = Store(tmp_path).histories(Store(tmp_path).run(), "train/")
    for key in ("train/effective_batch_size", "train/examples_seen", "train/epoch"):
        assert one[key] == two[key]
    assert two["train/loss"] == pytest.approx(one["train/loss"], rel=EXACT)
    factors = [ceil(ceil(size / 2) / 4) for size in SIZES]
    assert list(two["train/accumulation_factor"].values()) == factors


@pytest.mark.soak
def test_verify_shows_the_largest_stage(tmp_path):
    done = pipeline("verify", *RUN[:-1], RAMP, cwd=tmp_path)
    verdict = (
        "an update in 32 micro-batches of 8 and one of the whole batch are equal "
        "within rounding"
    )
    assert verdict in done.stdout
    assert "retracing" not in done.stderr
