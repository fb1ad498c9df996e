"""The main job end to end: processes, a SQLite store, and what a user finds in it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from pipeline.common.errors import RunError
from pipeline.common.signals import Interruption, Terminated
from pipeline.config import compose
from pipeline.run import run
from tests.run.fitted import fit
from tests.running import Store, pipeline, start

QUIET = ("tracking.log_model=false", "tracking.system_metrics=false")
EXACT = ("experiment=exact", "model=mlp", "training.updates=30", *QUIET)
EPOCHS = 10
EXAMPLES = 1437
UPDATES = EPOCHS * 12


@pytest.fixture(scope="module")
def main_job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("main")
    done = pipeline("train", "model.filters=[32,64]", "hydra.run.dir=run", cwd=folder)
    return done, Store(folder)


@pytest.fixture(scope="module")
def proofs(tmp_path_factory):
    """Return the store of one run a size, all by one process.

    The last micro-batch size divides neither batch nor tail.
    """
    folder = tmp_path_factory.mktemp("proofs")
    save = (
        "+training.callbacks.save={_target_: keras.callbacks.ModelCheckpoint, "
        "save_weights_only: true, save_freq: 30,"
        "filepath: '${hydra:runtime.output_dir}/final.weights.h5'}"
    )
    sizes = "accumulation.micro_batch_size=128,24"
    sweep = ("hydra/launcher=basic", "hydra.sweep.dir=runs")
    pipeline("train", "-m", *EXACT, sizes, "optimizer=adamw", save, *sweep, cwd=folder)
    return Store(folder)


def test_digits_are_learned_and_the_run_is_printed(main_job):
    done, store = main_job
    run = store.run()
    assert run.info.status == "FINISHED"
    assert store.history(run, "val/accuracy")[UPDATES] >= 0.97
    sizes = (
        "effective batch 128 = 32 × 4 × 1 replica; "
        "1437 examples → 12 updates per epoch (last one 29), 120 in all"
    )
    assert sizes in done.stderr
    assert run.info.run_id in done.stderr
    assert "pipeline ui" in done.stderr
    assert str(store.folder / "run") in done.stderr


def test_a_run_ends_with_its_results_its_times_and_the_way_on(main_job):
    done, store = main_job
    run = store.run()
    losses = store.history(run, "val/loss")
    best = min(losses, key=losses.get)
    result, times, way_on = done.stderr.splitlines()[-3:]
    assert result == (
        f"last val/loss {losses[UPDATES]:.4f}, "
        f"best {losses[best]:.4f} after update {best}"
    )
    form = (
        rf"{UPDATES} updates in ([\d.]+) s: training ([\d.]+) s, "
        r"compilation ([\d.]+) s, evaluation and the rest ([\d.]+) s"
    )
    seconds, *parts = map(float, re.fullmatch(form, times).groups())
    assert seconds == pytest.approx(sum(parts), abs=0.3)
    assert parts[1] == pytest.approx(run.data.metrics["perf/compile_seconds"], abs=0.1)
    repeat = f"pipeline rerun {run.info.run_id}"
    assert way_on == f"open it with: pipeline ui; repeat it with: {repeat}"


def test_every_metric_is_there_once_on_every_update(main_job):
    _, store = main_job
    histories = store.histories(store.run(), "train/", "perf/")
    # It is there from the first update on that it could be told.
    histories.pop("train/gradient_noise_scale")
    assert set(histories) == {
        "train/loss",
        "train/accuracy",
        "train/learning_rate",
        "train/gradient_norm",
        "train/gradient_variance",
        "train/gradient_squared_norm",
        "train/effective_batch_size",
        "train/micro_steps",
        "train/examples_seen",
        "train/epoch",
        "perf/update_seconds",
        "perf/examples_per_second",
        "perf/compile_seconds",
        "perf/peak_memory_bytes",
    }
    for key, history in histories.items():
        assert list(history) == list(range(1, UPDATES + 1)), key
    for key, history in store.histories(store.run(), "val/").items():
        assert list(history) == list(range(12, UPDATES + 1, 12)), key


def test_counters_are_those_of_the_examples(main_job):
    _, store = main_job
    run = store.run()
    sizes = store.history(run, "train/effective_batch_size")
    assert [sizes[update] for update in (1, 11, 12, 13, 24)] == [128, 128, 29, 128, 29]
    assert store.history(run, "train/examples_seen")[UPDATES] == EPOCHS * EXAMPLES
    assert store.history(run, "train/epoch")[UPDATES] == EPOCHS
    # The tail of 29 is one micro-batch of 32.
    assert store.history(run, "train/micro_steps")[12] == 11 * 4 + 1
    assert store.history(run, "train/micro_steps")[UPDATES] == EPOCHS * 45


def test_learning_rate_is_the_schedule_at_the_updates_before(main_job):
    import keras

    _, store = main_job
    schedule = keras.optimizers.schedules.CosineDecay(
        0.001, 114, warmup_target=0.01, warmup_steps=6
    )
    logged = store.history(store.run(), "train/learning_rate")
    assert list(logged) == list(range(1, UPDATES + 1))
    for update, rate in logged.items():
        expected = np.float32(schedule(update - 1))
        assert abs(rate - expected) <= np.spacing(expected)  # one unit of float32


def test_params_tags_inputs_and_artifacts(main_job):
    _, store = main_job
    run = store.run()
    params = run.data.params
    assert params["optimizer._target_"] == "keras.optimizers.AdamW"
    assert params["schedule.warmup_target"] == "0.01"
    assert params["hardware.precision"] == "float32"
    derived = {
        key: value for key, value in params.items() if key.startswith("derived.")
    }
    parameters = derived.pop("derived.parameters")
    assert derived == {
        "derived.effective_batch_size": "128",
        "derived.factor": "4",
        "derived.micro_batch_size": "32",
        "derived.replicas": "1",
        "derived.updates": "120",
    }
    # Two 3×3 convolutions, a dense layer over 2×2×64, the logits; each with biases.
    convolutions = (9 * 32 + 32) + (9 * 32 * 64 + 64)
    dense = 256 * 128 + 128
    logits = 128 * 10 + 10
    assert int(parameters) == convolutions + dense + logits
    assert run.data.tags["model.batch_dependent_layers"] == "none"
    version, _, digest = run.data.tags["config.hash"].partition(":")
    assert version == "v2"
    assert len(digest) == 64
    examples = {}
    for entry in run.inputs.dataset_inputs:
        profile = json.loads(entry.dataset.profile)
        examples[entry.tags[0].value] = profile["num_examples"]
    assert examples == {"training": 1437, "validation": 180}
    names = {artifact.path for artifact in store.client.list_artifacts(run.info.run_id)}
    assert {"config.yaml", "overrides.yaml", "environment.json"} <= names
    recorded = yaml.safe_load((store.folder / "run" / "config.yaml").read_text())
    assert recorded["schedule"]["warmup_target"] == 0.01
    assert any(key.startswith("system/") for key in run.data.metrics)


@pytest.mark.slow
def test_logged_model_predicts_the_same(main_job, monkeypatch):
    import mlflow
    import numpy as np
    from sklearn.datasets import load_digits

    _, store = main_job
    run = store.run()
    monkeypatch.chdir(store.folder)
    mlflow.set_tracking_uri(store.client.tracking_uri)
    model = mlflow.pyfunc.load_model(f"runs:/{run.info.run_id}/model")
    digits = load_digits()
    outputs = model.predict((digits.images[..., None] / 16).astype(np.float32))
    assert outputs.shape == (1797, 10)
    assert np.mean(np.argmax(outputs, axis=1) == digits.target) >= 0.97
    assert model.metadata.signature.inputs.inputs[0].shape == (-1, 8, 8, 1)


def test_every_factor_trains_the_same_trajectory(tmp_path, float64):
    """The last micro-batch size divides neither batch nor tail."""
    runs = []
    for size in (128, 24):
        cut = (f"accumulation.micro_batch_size={size}", "training.updates=14")
        runs.append(fit(tmp_path, *EXACT, "optimizer=adamw", *cut))
    one, other = runs
    assert len(one.rows.updates) == 14
    assert other.curve("loss") == pytest.approx(one.curve("loss"), rel=1e-12)
    rows = zip(other.rows.validations, one.rows.validations, strict=True)
    for (update, row), (expected_update, expected) in rows:
        assert update == expected_update
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert_close(other.parts.model.get_weights(), one.parts.model.get_weights())


def assert_close(weights, expected):
    for array, expected_array in zip(weights, expected, strict=True):
        # Relative to the size of the array: single entries pass through zero.
        distance = np.linalg.norm(array - expected_array)
        assert distance <= 1e-12 * np.linalg.norm(expected_array)


@pytest.mark.slow
def test_every_run_of_a_sweep_over_the_factor_is_the_same(proofs):
    import h5py

    runs = proofs.by_param(proofs.trained(), "derived.micro_batch_size")
    reference = runs["128",]
    other = runs["24",]
    losses = proofs.history(reference, "train/loss")
    assert len(losses) == 30

    def weights(run):
        arrays = []

        def visit(_, node):
            if isinstance(node, h5py.Dataset) and node.dtype == np.float64:
                arrays.append(node[()])

        saved = Path(run.data.params["training.callbacks.save.filepath"])
        with h5py.File(saved) as file:
            file.visititems(visit)
        return arrays

    assert proofs.history(other, "train/loss") == pytest.approx(losses, rel=1e-12)
    assert proofs.history(other, "val/loss") == pytest.approx(
        proofs.history(reference, "val/loss"), rel=1e-12
    )
    assert_close(weights(other), weights(reference))


@pytest.mark.slow
def test_two_devices_train_the_same_trajectory_in_one_run(proofs):
    one = proofs.by_param(proofs.trained(), "derived.micro_batch_size")["128",]
    more = ("optimizer=adamw", "hardware.replicas=2", "tracking.experiment=two")
    pipeline("train", *EXACT, *more, cwd=proofs.folder)
    two = proofs.run("two")  # one run; `history` refuses a row that is doubled
    assert two.data.params["derived.replicas"] == "2"
    assert two.data.params["derived.micro_batch_size"] == "16"
    for key in (
        "train/loss",
        "train/gradient_norm",
        "train/accuracy",
        "val/loss",
        "val/accuracy",
    ):
        expected = pytest.approx(proofs.history(one, key), rel=1e-12)
        assert proofs.history(two, key) == expected, key
    seen = proofs.history(one, "train/examples_seen")
    assert proofs.history(two, "train/examples_seen") == seen


@pytest.mark.slow
def test_what_fails_before_the_first_update_fails_the_run(tmp_path):
    # The record is to be written there.
    (tmp_path / "run" / "config.yaml").mkdir(parents=True)
    done = pipeline(
        "train", "experiment=quick", *QUIET, "hydra.run.dir=run", cwd=tmp_path, status=1
    )
    run = Store(tmp_path).run()
    assert run.info.status == "FAILED"
    assert run.data.tags["failure"].startswith("IsADirectoryError")
    assert "IsADirectoryError" in done.stderr


@pytest.mark.slow
def test_non_finite_loss_fails_the_run_at_its_update(tmp_path):
    done = pipeline(
        "train",
        "experiment=quick",
        "optimizer=sgd",
        "optimizer.learning_rate=1e30",
        *QUIET,
        cwd=tmp_path,
        status=1,
    )
    store = Store(tmp_path)
    run = store.run()
    assert run.info.status == "FAILED"
    last = max(store.history(run, "train/loss"))
    assert f"at update {last}" in run.data.tags["failure"]
    assert done.stderr.splitlines()[-1].startswith("pipeline: NonFiniteError: loss=nan")
    assert "Traceback" not in done.stderr


@pytest.mark.slow  # `make test` interrupts in tests/training/test_loop.py
@pytest.mark.parametrize(
    ("number", "status", "exit_status"),
    [
        (signal.SIGINT, "KILLED", 130),
        pytest.param(signal.SIGTERM, "KILLED", 143, marks=pytest.mark.soak),
        pytest.param(signal.SIGHUP, "KILLED", 143, marks=pytest.mark.soak),
        pytest.param(signal.SIGKILL, "KILLED", -9, marks=pytest.mark.soak),
    ],
)
def test_an_interrupted_run_is_closed_with_all_it_had_logged(
    tmp_path, number, status, exit_status
):
    process = start(
        "train",
        "training.epochs=100000",
        "model=mlp",
        *QUIET,
        "hydra.run.dir=run",
        cwd=tmp_path,
        warm=True,
    )
    journal = tmp_path / "run" / "journal.jsonl"
    _wait(lambda: journal.exists() and journal.read_text().count("metrics") > 100)
    os.killpg(process.pid, number)  # as a terminal does it: the whole group
    _, err = process.communicate(timeout=60)
    assert process.returncode == exit_status, err
    store = Store(tmp_path)
    _wait(lambda: store.run().info.status != "RUNNING")
    assert store.run().info.status == status
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    written = [row["step"] for row in rows if "train/loss" in row.get("metrics", {})]
    assert written == list(range(1, len(written) + 1))
    assert list(store.history(store.run(), "train/loss")) == written
    if number != signal.SIGKILL:
        assert "Traceback" not in err
        (line,) = [line for line in err.splitlines() if line.startswith("resume from")]
        command = f": pipeline resume {tmp_path}/run"
        assert line == f"resume from update {written[-1]}{command}"


def _wait(condition, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.2)


def test_an_exit_of_the_users_code_is_a_failure(tmp_path, monkeypatch):
    """With its status 0 the command would end as if all was well."""
    monkeypatch.setattr(
        run.resume_rules, "find_continuation", lambda *_, **__: sys.exit(0)
    )
    with pytest.raises(RunError, match=r"the run's code called exit\(0\)"):
        run.run(compose.composed([]), [], tmp_path)


def test_a_closed_terminal_lets_the_update_finish():
    """A shell repeats the signal; a second one of another kind would end the update."""
    # Under nohup the tests ignore it.
    before = signal.signal(signal.SIGHUP, signal.default_int_handler)
    with Interruption().listening() as interruption, interruption.between_updates():
        for _ in range(2):
            signal.raise_signal(signal.SIGHUP)
        assert isinstance(interruption.asked(), Terminated)
    signal.signal(signal.SIGHUP, before)
