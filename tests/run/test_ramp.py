"""A run whose effective batch changes: its updates are those of plain Keras, whatever interrupts it."""

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
from pipeline.components import assembly
from pipeline.config.compose import composed
from pipeline.config.resolve import resolve
from pipeline.config.stages import Slice
from pipeline.dataset import batches as batching
from pipeline.dataset import load
from tests.checkpoints.test_kills import left_in
from tests.parameters import mostly_slow
from tests.running import Store, pipeline, start
from tests.shared import place_store

# 1437 examples: 16 · 32 + 9 · 100 + 25; 14 · 100 + 37; 5 · 256 + 157.
STAGES = ((0, 32), (16, 100), (41, 256))
RAMP = (
    "accumulation.batch_schedule=[{start:{updates:0},effective_batch_size:32},"
    "{start:{examples:500},effective_batch_size:100},{start:{epochs:2},effective_batch_size:256}]"
)
SIZES = [32] * 16 + [100] * 9 + [25] + [100] * 14 + [37] + [256] * 5 + [157]
RUN = (
    *(
        "model=mlp",
        "model.hidden=[16]",
        "model.dropout=0",
        "hardware.precision=float64",
        "optimizer=momentum",
    ),
    *(
        "schedule=constant",
        "scaling=linear",
        "scaling.warmup=0",
        "training.epochs=3",
        "hardware.deterministic=true",
    ),
    *(
        "tracking.log_model=false",
        "tracking.system_metrics=false",
        "tracking.patience=30",
        "hydra.run.dir=run",
    ),
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
    """A folder with a run of three stages, and what it said."""
    folder = tmp_path_factory.mktemp("ramp")
    done = pipeline("train", *RUN, RAMP, "training.checkpoint_every=23", cwd=folder)
    return folder, done.stderr


@pytest.mark.slow
def test_the_rows_are_right_at_each_boundary(ramp):
    folder, said = ramp
    first = "effective batch 32 = 8 × 4 × 1 replica, 100 (factor 13) after update 16, 256 (factor 32) after update 41; "
    assert (
        f"{first}1437 examples → 45 updates per epoch (last one 29) at first, 47 in all"
        in said
    )
    assert (
        "scaling.rule=linear: learning rate × 0.25, × 0.78125 after update 16, × 2 after update 41"
        in said
    )
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
    assert {update: rows["train/epoch"][update] for update in (26, 41, 47)} == {
        26: 1,
        41: 2,
        47: 3,
    }
    base = 0.05 / 128  # of an example, in float32
    rates = [
        base * size
        for (after, size), end in zip(STAGES, (16, 41, 47), strict=True)
        for _ in range(end - after)
    ]
    assert list(rows["train/learning_rate"].values()) == pytest.approx(rates, rel=1e-6)
    assert {
        run.data.params[f"derived.{key}"] for key in ("effective_batch_size", "factor")
    } == {"32", "4"}


def test_each_update_is_that_of_plain_keras(ramp):
    """By `train_on_batch` on the whole batches. One that is cut elsewhere, of the same examples, is another run."""
    folder, _ = ramp
    found = Store(folder).histories(Store(folder).run(), "train/")
    losses, weights = by_keras(SIZES, found["train/learning_rate"])
    assert list(found["train/loss"].values()) == pytest.approx(losses, rel=EXACT)
    last = weights_in(folder / "run", 47)
    assert [array.shape for array in last] == [array.shape for array in weights]
    for one, other in zip(last, weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=EXACT, atol=EXACT)
    cut = [
        *SIZES[:15],
        16,
        116,
        *SIZES[17:],
    ]  # the 16th and the 17th update are of 32 and 100 examples
    losses, _ = by_keras(cut, found["train/learning_rate"])
    assert losses[:15] == pytest.approx(
        list(found["train/loss"].values())[:15], rel=EXACT
    )
    assert losses[-1] != pytest.approx(found["train/loss"][47], rel=1e6 * EXACT)


def by_keras(sizes, rates):
    """The losses and the last weights of `train_on_batch`, in float64, on the examples in the order of a run."""
    keras.config.set_floatx("float64")
    try:
        overrides = [*RUN, RAMP]
        parts = assembly.assemble(resolve(composed(overrides), overrides))
        given = {"seed": 0, "slices": [Slice(1437, 3)]}
        node = OmegaConf.create({"in_memory": True})
        epochs = list(
            batching.effective_batches(
                node, load.load(parts.spec.dataset), **given
            ).as_numpy_iterator()
        )
        x, y = (np.concatenate(column) for column in zip(*epochs, strict=True))
        model = keras.models.clone_model(parts.model)
        model.set_weights(parts.model.get_weights())
        model.compile(
            keras.optimizers.SGD(1.0, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        losses, first = [], 0
        for update, size in enumerate(sizes, 1):
            model.optimizer.learning_rate = rates[update]
            model.reset_metrics()
            losses.append(
                np.ravel(
                    model.train_on_batch(
                        x[first : first + size], y[first : first + size]
                    )
                )[0]
            )
            first += size
        return losses, model.get_weights()
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


def weights_in(run_dir: Path, update: int) -> list[np.ndarray]:
    found = files.at(run_dir / "checkpoints", update)
    arrays = snapshot.read(found.folder, found.meta).arrays
    return [
        array
        for name, array in arrays.items()
        if name.startswith("model/") and "seed" not in name
    ]


@pytest.mark.slow
def test_a_rerun_is_equal_and_so_is_a_fork_inside_of_the_ramp(ramp):
    folder, _ = ramp
    run = Store(folder).run()
    said = pipeline("rerun", run.info.run_id, "tracking.experiment=again", cwd=folder)
    assert "bit-equal" in said.stderr
    pipeline(
        "train",
        *RUN[:-1],
        RAMP,
        "start.run=run@46",
        "tracking.experiment=fork",
        "hydra.run.dir=fork",
        cwd=folder,
    )
    old, new = (
        Store(folder).histories(Store(folder).run(name), "train/")
        for name in ("pipeline", "fork")
    )
    assert new["train/loss"] == {47: old["train/loss"][47]}
    assert (new["train/examples_seen"], new["train/micro_steps"]) == (
        {47: 4311},
        {47: old["train/micro_steps"][47]},
    )
    said = pipeline(
        "train",
        *RUN,
        RAMP.replace(":256", ":128"),
        "training.resume=auto",
        cwd=folder,
        status=2,
    ).stderr
    assert (
        "accumulation.batch_schedule.2.effective_batch_size must be that of the run, 256. Received: 128."
        in said
    )


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
    )
    run = (
        *run,
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
            done = max(
                (int(path.name) for path in folder.glob("run/checkpoints/[0-9]*")),
                default=0,
            )
            process = start(*run, cwd=folder, KILL_AT=str(kill), BEGAN=str(done))
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
    one, two = (
        Store(each).histories(Store(each).run(), "train/")
        for each in (folder, tmp_path)
    )
    for key in ("train/effective_batch_size", "train/examples_seen", "train/epoch"):
        assert one[key] == two[key]
    assert two["train/loss"] == pytest.approx(one["train/loss"], rel=EXACT)
    assert list(two["train/accumulation_factor"].values()) == [
        ceil(ceil(size / 2) / 4) for size in SIZES
    ]


@pytest.mark.soak
def test_verify_shows_the_largest_stage(tmp_path):
    said = pipeline("verify", *RUN[:-1], RAMP, cwd=tmp_path)
    assert (
        "an update by 32 micro-batches of 8 and one of the whole batch are equal within rounding"
        in said.stdout
    )
    assert "retracing" not in said.stderr
