"""A run that begins with another run's checkpoint, the best checkpoint of a run, and what a callback stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.checkpoints import files, snapshot
from pipeline.checkpoints.files import BEST
from pipeline.config import compose
from tests.checkpoints.test_resume_rules import (
    RUN,
    UPDATES,
    check_equal,
    folder_of,
    interrupted,
    weights,
)
from tests.parameters import mostly_slow
from tests.running import Store, one_process, pipeline, python

AT = 21
STOP = "+training.callbacks.stop={_target_: keras.callbacks.EarlyStopping, monitor: val_accuracy, patience: 1}"
BEST_LOSS = ("training.keep_best.metric=val/loss", "training.keep_best.mode=min")


def begun(*arguments: str) -> tuple[str, ...]:
    """The command line of `RUN` in another folder, and with other arguments."""
    return (*RUN[:-1], "hydra.run.dir=fork", *arguments)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder with a run whose checkpoints of updates 35 and 40 are there, and that of 21 as well."""
    folder = folder_of(tmp_path_factory.mktemp("source"))
    interrupted(folder, AT, 15, *RUN)
    shutil.copytree(folder / "run" / "checkpoints" / str(AT), folder / str(AT))
    pipeline("resume", "run", cwd=folder)
    shutil.move(folder / str(AT), folder / "run" / "checkpoints" / str(AT))
    return folder


@pytest.fixture
def folder(source, tmp_path):
    """A copy of it, with its store."""
    shutil.copytree(source, tmp_path / "copy")
    return tmp_path / "copy"


def run_in(folder, name):
    (run,) = [
        run for run in Store(folder).runs() if run.info.run_id == run_id(folder, name)
    ]
    return run


def run_id(folder, name):
    lines = map(json.loads, (folder / name / "journal.jsonl").read_text().splitlines())
    return next(line["run"]["run_id"] for line in lines if "run" in line)


def histories(folder, name, after=0):
    found = Store(folder).histories(run_in(folder, name))
    return {
        key: {step: value for step, value in points.items() if step > after}
        for key, points in found.items()
    }


def bits(arrays):
    return {name: array.tobytes() for name, array in arrays.items()}


def last_weights(folder, name, update=UPDATES):
    found = files.at(folder / name / "checkpoints", update)
    return snapshot.read(found.folder, found.meta).arrays


@pytest.mark.slow
def test_a_run_that_was_interrupted_goes_on_to_the_same_result(source, tmp_path):
    undisturbed = folder_of(tmp_path)
    pipeline("train", *RUN, cwd=undisturbed)
    check_equal(source, undisturbed)
    segments = json.loads((source / "run" / "segments.json").read_text())
    assert [segment["after"] for segment in segments] == [0, AT]
    assert Store(source).run().data.tags["segments"] == "2"


def test_a_fork_that_changes_nothing_is_the_run_itself(folder):
    """With its weights alone another run follows: the negative control."""
    said = pipeline("train", *begun(f"start.run=run@{AT}"), cwd=folder)
    one, other = run_in(folder, "run"), run_in(folder, "fork")
    assert (
        f"goes on with the state of run {one.info.run_id} after update {AT}"
        in said.stderr
    )
    # The checkpoint was left by a signal, before the evaluation that was due: that is the fork's first row.
    assert histories(folder, "fork") == histories(folder, "run", AT)
    assert min(histories(folder, "fork")["train/loss"]) == AT + 1
    assert bits(last_weights(folder, "fork")) == bits(weights(folder))
    assert one.data.tags["forks"] == other.info.run_id
    assert (other.data.tags["start.run"], other.data.tags["start.update"]) == (
        one.info.run_id,
        str(AT),
    )
    assert other.data.tags["updates"] == str(UPDATES)
    begun_with = json.loads(
        (folder / "fork" / "journal.jsonl").read_text().splitlines()[0]
    )["start"]
    assert begun_with["segment"]["after"] == AT
    begin = f"start.run={run_id(folder, 'run')[:9]}@{AT}"
    pipeline(
        "train",
        *RUN[:-1],
        "hydra.run.dir=second",
        begin,
        "start.weights_only=true",
        "seed=0",
        cwd=folder,
    )
    found, straight = histories(folder, "second"), histories(folder, "run")
    assert list(found["train/loss"]) == list(range(1, UPDATES + 1))
    assert (
        found["train/loss"][1] < 0.9 * straight["train/loss"][1]
    )  # of weights that have learned
    assert found["train/learning_rate"] == straight["train/learning_rate"]
    later = [
        found["train/loss"][step] != straight["train/loss"][step]
        for step in range(AT + 1, UPDATES + 1)
    ]
    assert all(later)
    # Two forks of one run are both named in it.
    forks = [run_id(folder, name) for name in ("fork", "second")]
    assert run_in(folder, "run").data.tags["forks"] == ", ".join(forks)


@pytest.mark.slow
def test_a_fork_with_another_learning_rate(tmp_path):
    """A constant rate is a variable, which a checkpoint has as well: it must not overrule the config."""
    folder = folder_of(tmp_path)
    constant = (
        *RUN[:-1],
        "schedule=constant",
        "training.updates=10",
        "training.checkpoint_every=5",
    )
    pipeline("train", *constant, "hydra.run.dir=run", cwd=folder)
    begin = (*constant, "start.run=run@5", "hydra.run.dir=fork")
    said = pipeline("train", *begin, "optimizer.learning_rate=0.01", cwd=folder)
    assert "after update 5, with a learning rate of its own" in said.stderr
    found = histories(folder, "fork")
    assert list(found["train/learning_rate"].values()) == pytest.approx([0.01] * 5)
    assert (
        found["train/loss"][6] == histories(folder, "run")["train/loss"][6]
    )  # before its first own update
    assert found["train/loss"][7] != histories(folder, "run")["train/loss"][7]


TEXTS = (
    "12345678",
    "1e10",
    "12e4@40",
    "00123456",
    "1_0",
    "a,b",
    "null",
    "runs/lr=0.1@3",
    "nan",
)


@pytest.mark.parametrize("run", mostly_slow(TEXTS, ["1e10", "a,b", "null"]))
def test_a_run_is_text_as_it_is_written(run):
    values = run.split(",")
    if len(values) > 1:
        assert compose.as_text([f"start.run={run}"]) == ["start.run=a,b"]
        return
    for override in (f"start.run={run}", f"++start.run={run}", f"start.run='{run}'"):
        found = compose.composed([override]).start.run
        assert found == (None if run == "null" and "'" not in override else run)


@pytest.mark.slow
def test_what_no_run_can_begin_with_is_refused(folder):
    (folder / "empty").mkdir()
    shutil.copytree(folder / "run", folder / "none")
    shutil.rmtree(folder / "none" / "checkpoints")
    shutil.copytree(folder / "run", folder / "torn")
    torn = next((folder / "torn" / "checkpoints" / "40").glob("arrays.data*"))
    torn.write_bytes(torn.read_bytes()[:-1])
    train = f"train {' '.join(RUN[:5])} hydra.run.dir=fork start.run="
    line = "start.run must be one run directory, or the start of the ID of one run whose directory lies below this one."
    there = "start.run must name an update whose checkpoint is there. Received: 'run@7'. Choices: 21, 35, 40."
    expected = {
        f"{train}run@7": there,
        f"{train}nowhere@7": f"{line} Received: 'nowhere'.",
        f"{train}12345678": f"{line} Received: '12345678'.",
        f"{train}1e10": f"{line} Received: '1e10'.",
        f"{train}empty": f"{line} Received: 'empty'.",
        f"{train}none": "start.run must be a run with a checkpoint: see training.checkpoint_every. Received: 'none'.",
        f"{train}torn@40": "the checkpoint torn/checkpoints/40 must not be damaged (arrays.data",
        f"{train}run": "training must have a horizon beyond the 40 updates of start.run. Received: 40.",
        f"{train}run@21 training.updates=21": "training must have a horizon beyond the 21 updates of start.run.",
        f"{train}run@21 model.hidden=[8]": "the checkpoint must fit the model, whose model/",
        f"{train}run@21 model.hidden=[8] start.weights_only=true": "the checkpoint must fit the model, whose model/",
        f"{train}run@21 optimizer=adam": "the checkpoint must fit the model, whose optimizer/",
        f"{train}run@21 optimizer=sgd": "the checkpoint must fit the model, which has no such variable.",
        f"{train}run@21 hardware.precision=float64": "the checkpoint must fit the model, whose model/",
        "train start.weights_only=true": "start.weights_only must come with start.run, whose weights are meant.",
        "train model=mlp training.keep_best.metric=val/f1 training.keep_best.mode=max": "training.keep_best.metric "
        "must be a metric of the validation split. Received: 'val/f1'. Choices: val/loss, val/accuracy.",
    }
    answers = one_process({line: line for line in expected}, folder)
    for line, rule in expected.items():
        answer = answers[line]
        assert answer["status"] == 2, (line, answer)
        assert answer["err"].splitlines()[-1].startswith(f"pipeline: {rule}"), (
            line,
            answer["err"],
        )
        assert answer["changed"] == [], line
    assert [run.info.run_id for run in Store(folder).runs()] == [run_id(folder, "run")]


@pytest.mark.parametrize("ema", mostly_slow(["false", "true"], [], ["true"]))
def test_the_test_split_is_evaluated_once_with_the_best_weights(tmp_path, ema):
    """Equal to the bit to the test split of a run that ends where the best one was."""
    rate = (
        "schedule=constant",
        "optimizer.learning_rate=0.3",
        f"+optimizer.use_ema={ema}",
        "optimizer.momentum=0.0",
    )
    common = (
        "train",
        *RUN[:-2],
        *rate,
        "training.checkpoint_every=null",
        "dataset.test_split=test",
    )
    # The first evaluation: what is «best» does not matter here, but that more is trained after it.
    best_loss = ("training.keep_best.metric=val/loss", "training.keep_best.mode=max")
    pipeline(*common, *best_loss, "hydra.run.dir=best", cwd=tmp_path)
    store = Store(tmp_path)
    best = store.run()
    at = int(best.data.metrics["best/update"])
    assert at < UPDATES  # or nothing is shown
    pipeline(*common, f"training.updates={at}", "hydra.run.dir=ended", cwd=tmp_path)
    _, ended = sorted(store.runs(), key=lambda run: run.info.start_time)
    for key in ("test/loss", "test/accuracy"):
        assert store.history(best, key) == store.history(ended, key)
        assert list(store.history(best, key)) == [at]
    validated = store.history(best, "val/loss")
    assert (
        validated[at] != validated[UPDATES]
    )  # of the last weights it would be another
    assert store.history(best, "test/loss")[at] != store.history(best, "val/loss")[at]
    assert [each.tags[0].value for each in best.inputs.dataset_inputs] == [
        "training",
        "validation",
        "test",
    ]


@pytest.mark.slow
def test_a_fork_is_interrupted_and_rerun(folder, source):
    """One that was interrupted before its first checkpoint begins where it began, and a rerun does, too."""
    auto = begun(
        "training.resume=auto", "start.run=run@21", "training.checkpoint_every=null"
    )
    interrupted(folder, 25, 9, *auto)
    pipeline("train", *auto, cwd=folder)
    assert histories(folder, "fork") == histories(folder, "run", AT)
    forked = run_id(folder, "fork")
    allow = (
        "--allow=mine",
        f"--allow={source}",
    )  # the store is a copy, and says where its artifacts were
    pipeline("rerun", forked, *allow, "hydra.run.dir=again", cwd=folder)
    again = run_in(folder, "again")
    assert again.data.tags["rerun.verdict"] == "bit-equal"
    assert again.data.tags["start.run"] == run_id(folder, "run")
    shutil.rmtree(folder / "run" / "checkpoints" / "21")
    third = f"rerun {forked} {' '.join(allow)} hydra.run.dir=third"
    answers = one_process({"gone": third, "dry": f"{third} --dry"}, folder)
    shutil.rmtree(folder / "run")
    answers |= one_process({"no run": third}, folder)
    for name, answer in answers.items():
        rule = (
            "be one run directory, or the start of the ID"
            if name == "no run"
            else "name an update whose checkpoint"
        )
        assert answer["status"] == 2, answer
        assert f"start.run must {rule}" in answer["err"].splitlines()[-1], name
    assert not (folder / "third").exists()


@pytest.mark.slow
def test_a_source_that_cannot_be_written_fails_no_fork(folder):
    store = Store(folder)
    store.client.delete_run(run_id(folder, "run"))
    pipeline("train", *begun(f"start.run=run@{AT}", "training.updates=23"), cwd=folder)
    assert run_in(folder, "fork").info.status == "FINISHED"
    assert "not_shipped" not in run_in(folder, "fork").data.tags


@pytest.fixture(scope="module")
def stopping(tmp_path_factory):
    """A run that EarlyStopping ends, with its best checkpoint."""
    folder = folder_of(tmp_path_factory.mktemp("stopping"))
    pipeline("train", *STOPPING, cwd=folder)
    return folder


STOPPING = (
    *RUN,
    *BEST_LOSS,
    STOP,
    "training.updates=200",
    "optimizer.learning_rate=0.3",
    "training.evaluate_every=4",
)


def best_of(folder, name="run"):
    run = run_in(folder, name)
    points = {
        key: Store(folder).history(run, key) for key in ("best/val/loss", "best/update")
    }
    curve = histories(folder, name)["val/loss"]
    step = min(curve, key=curve.__getitem__)
    assert points == {"best/val/loss": {step: curve[step]}, "best/update": {step: step}}
    return step


@pytest.mark.slow
def test_which_callback_stopped_a_run_and_what_was_best(stopping):
    run = run_in(stopping, "run")
    done = max(histories(stopping, "run")["train/loss"])
    assert done < 200
    assert run.data.tags["stopped_by"] == f"training.callbacks.stop after update {done}"
    assert (run.data.tags["updates"], run.data.params["derived.updates"]) == (
        str(done),
        "200",
    )
    best = best_of(stopping)
    found = files.at(stopping / "run" / "checkpoints" / BEST, best)
    assert (
        found.meta["values"]["loop"]["validation"]["loss"]
        == run.data.metrics["best/val/loss"]
    )


@pytest.mark.slow
def test_the_best_and_the_stop_survive_a_kill(stopping, tmp_path):
    folder = folder_of(tmp_path)
    best = best_of(stopping)
    done = max(histories(stopping, "run")["train/loss"])
    # Between the best evaluation and its next checkpoint, which is within the patience.
    interrupted(folder, best + 1, 9, *STOPPING, "training.resume=auto")
    pipeline("train", *STOPPING, "training.resume=auto", cwd=folder)
    assert histories(folder, "run") == histories(stopping, "run")
    assert best_of(folder) == best
    tags = [run_in(each, "run").data.tags for each in (folder, stopping)]
    assert tags[0]["stopped_by"] == tags[1]["stopped_by"]
    then, now = (last_weights(each, "run", done) for each in (stopping, folder))
    assert bits(then) == bits(now)


OTHER_UNITS = """
import numpy as np
import tensorflow as tf


def table(offset):
    numbers = np.random.default_rng(0)
    x = numbers.normal(offset, 1.0, (96, 5)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, (x.sum(1) > 5 * offset).astype("float32")))
    return data.take(64), data.skip(64)
"""


@pytest.mark.slow
def test_a_fork_onto_other_data_normalises_as_what_it_began_with(tmp_path):
    """What it trains, and what it logs as its model, has the means that the checkpoint's weights were trained with."""
    (tmp_path / "units.py").write_text(OTHER_UNITS)
    given = (
        *(
            "dataset=breast_cancer",
            "dataset._target_=units.table",
            "model=tabular",
            "model.activation=sigmoid",
            "model.dropout=0",
        ),
        *(
            "model.hidden=[8]",
            "objective=binary",
            "training.epochs=2",
            "accumulation.effective_batch_size=32",
        ),
        *("tracking.system_metrics=false", "training.checkpoint_every=epoch"),
    )
    pipeline("train", *given, "+dataset.offset=0", "hydra.run.dir=run", cwd=tmp_path)
    more = (
        "+dataset.offset=3",
        "start.run=run",
        "start.weights_only=true",
        "hydra.run.dir=fork",
    )
    pipeline("train", *given, *more, cwd=tmp_path)
    store = Store(tmp_path)
    run = run_in(tmp_path, "fork")
    (logged,) = store.client.search_logged_models(
        [run.info.experiment_id], f"source_run_id = '{run.info.run_id}'"
    )
    file = next(Path(logged.artifact_location.removeprefix("file://")).rglob("*.keras"))
    check = (
        "import keras, numpy as np, units\n"
        "x, y = (np.array([example[part] for example in units.table(3)[1].as_numpy_iterator()]) for part in (0, 1))\n"
        f"model = keras.models.load_model({str(file)!r}, compile=False)\n"
        "loss = keras.losses.BinaryCrossentropy()(y[:, None], model(x))\n"
        "print(float(loss), np.ravel(model.layers[1].mean).tolist())\n"
    )
    out, err = python("-c", check, cwd=tmp_path).communicate(timeout=120)
    loss, means = out.strip().splitlines()[-1].split(" ", 1)
    assert max(map(abs, json.loads(means))) < 1, (
        err
    )  # of the first table: those of the second are about 3
    last = list(store.history(run, "val/loss").values())[-1]
    assert float(loss) == pytest.approx(
        last, rel=1e-5
    )  # the mean of 32 float32, in another order
