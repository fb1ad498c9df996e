"""A run with further validation sets, from its rows to those of its rerun.

It is evaluated before its first update, killed in the middle of an epoch, and resumed.
"""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest

from pipeline.checkpoints import files, snapshot
from tests.checkpoints.test_fork import histories as histories_of
from tests.checkpoints.test_resume_rules import folder_of, interrupted
from tests.run.fitted import fit, parts_of
from tests.running import Store, pipeline

UPDATES = 26  # the examples of two epochs, and two updates
SETS = (
    "dataset.validations={late: {split: 'validation[50%:]', every: 5}, other: "
    "{_target_: pipeline.dataset.digits, validation_split: test, every: epoch/3}}"
)
MODEL = ("model=mlp", "model.hidden=[8]")
RUN = (
    "experiment=exact",
    *MODEL,
    "optimizer=momentum",
    f"training.updates={UPDATES}",
    "training.checkpoint_every=7",
    "training.evaluate_at_start=true",
    SETS,
    "training.keep_best={metric: val/late/accuracy, mode: max}",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
    "+training.callbacks.it={_target_: mine.Interrupt}",
    "training.resume=auto",
    "hydra.run.dir=run",
)
EXACT = 1e-12
STEPS = {
    "": [0, 12, 24, UPDATES],
    "late/": [0, *range(5, UPDATES, 5), UPDATES],
    "other/": [0, 4, 8, 12, 16, 20, 24, UPDATES],
}


@pytest.fixture
def undisturbed(tmp_path, float64):
    """The run in this process; its callback interrupts commands alone."""
    config = [text for text in RUN if not text.startswith("+training.callbacks")]
    return fit(tmp_path, *config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = folder_of(tmp_path_factory.mktemp("sets"))
    # The row of update 15 is there, and the run goes on after update 14.
    interrupted(folder, 17, 9, *RUN)
    resumed = pipeline("train", *RUN, cwd=folder)
    assert "continues after update 14" in resumed.stderr
    return folder


@pytest.mark.slow
def test_each_set_has_its_rows_once_whatever_happens_to_the_run(folder):
    store = Store(folder)
    run = store.runs()[0]  # other tests add reruns and forks
    rows = store.histories(run, "val/")
    expected = {}
    for prefix, steps in STEPS.items():
        for name in ("loss", "accuracy"):
            expected[f"val/{prefix}{name}"] = steps
    every_step = sorted(set().union(*STEPS.values()))
    expected["val/examples_seen"] = every_step
    assert {key: list(points) for key, points in rows.items()} == expected

    updates = list(range(1, UPDATES + 1))
    seen = store.history(run, "train/examples_seen")
    assert list(store.history(run, "train/loss")) == updates
    assert rows["val/examples_seen"] == {step: seen.get(step, 0) for step in every_step}

    late = rows["val/late/accuracy"]
    del late[0]
    best = max(late, key=late.__getitem__)
    assert store.history(run, "best/val/late/accuracy") == {best: late[best]}
    assert store.history(run, "best/update") == {best: best}
    contexts = [entry.tags[0].value for entry in run.inputs.dataset_inputs]
    sets = ["validations.late", "validations.other"]
    assert sorted(contexts) == ["training", "validation", *sets]
    record = json.loads((folder / "run" / "dataset.json").read_text())
    assert record["examples"]["validations.late"] == 90


def test_values_are_those_of_keras_on_the_same_examples(undisturbed):
    rows = undisturbed.rows.validations
    steps = set().union(*STEPS.values())
    assert [update for update, _ in rows] == sorted(steps)
    for update, row in rows:
        expected = {"examples_seen"}
        for prefix, steps_of_set in STEPS.items():
            if update in steps_of_set:
                expected |= {f"{prefix}loss", f"{prefix}accuracy"}
        assert set(row) | {"examples_seen"} == expected, update

    last_weights = undisturbed.parts.model.get_weights()
    for (_, row), weights in (
        (rows[0], undisturbed.first_weights),
        (rows[-1], last_weights),
    ):
        check_values(undisturbed.parts, weights, row)


@pytest.mark.slow
def test_values_of_a_run_are_those_of_keras_on_the_same_examples(folder, float64):
    store = Store(folder)
    rows = store.histories(store.runs()[0], "val/")
    parts = parts_of("hardware.precision=float64", *MODEL, SETS)
    first = parts.model.get_weights()
    for step, weights in ((0, first), (UPDATES, weights_at(folder, UPDATES))):
        row = {}
        for key, points in rows.items():
            if step in points:
                row[key.removeprefix("val/")] = points[step]
        check_values(parts, weights, row)


def check_values(parts, weights, row):
    """Check a row with all sets against `evaluate` of Keras, with some weights."""
    splits = {
        "": "validation",
        "late/": "validations.late",
        "other/": "validations.other",
    }
    model = keras.models.clone_model(parts.model)
    model.set_weights(weights)
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        run_eagerly=True,
    )
    losses = []
    for prefix, split in splits.items():
        examples = parts.data.splits[split].batch(1000)
        results = model.evaluate(examples, verbose=0, return_dict=True)
        losses.append(results["loss"])
        for name, value in results.items():
            assert row[f"{prefix}{name}"] == pytest.approx(value, rel=EXACT)
    # Each set has examples of its own, so that none has the values of another.
    differences = np.subtract.outer(losses, losses)[~np.eye(3, dtype=bool)]
    assert np.abs(differences).min() > 1e9 * EXACT


def weights_at(folder, update):
    """Return the weights in the checkpoint of an update."""
    arrays = snapshot.read(files.at(folder / "run" / "checkpoints", update)).arrays
    return [array for name, array in arrays.items() if name.startswith("model/")]


@pytest.mark.slow
def test_a_rerun_compares_all_rows_and_the_data_of_each_set(folder):
    original = Store(folder).runs()[0]
    run_id = original.info.run_id
    done = pipeline("rerun", run_id, "--allow", "mine", cwd=folder)
    assert "bit-equal: " in done.stderr
    changed = SETS.replace("50%", "40%")
    other = pipeline("rerun", run_id, "--allow", "mine", changed, cwd=folder, status=3)
    assert "differs: dataset must be that of run" in other.stderr
    assert "validations.late differs" in other.stderr


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["last but one", "best"])
def test_a_fork_is_evaluated_once_where_it_begins(folder, checkpoint):
    """Its step 0 does not exist. Of the best checkpoint, the evaluation is pending."""
    at = 21
    if checkpoint == "best":
        at = int(Store(folder).runs()[0].data.metrics["best/update"])
    fork = [
        text for text in RUN if not text.startswith(("hydra.run", "training.resume"))
    ]
    start = f"start.run=run@{at}"
    name = f"fork at {at}"
    pipeline("train", *fork, start, f"hydra.run.dir='{name}'", cwd=folder)
    rows = histories_of(folder, name)
    assert list(rows["val/loss"]) == [at, *(step for step in STEPS[""] if step > at)]
    late = [at, *(step for step in STEPS["late/"] if step > at)]
    assert list(rows["val/late/loss"]) == late
    assert min(rows["train/loss"]) == at + 1
