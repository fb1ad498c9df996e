"""A run that begins with another run's checkpoint.

Also the best checkpoint of a run, and a run that a callback stopped.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.checkpoints import files, fork, snapshot
from pipeline.checkpoints.files import BEST
from pipeline.checkpoints.fork import Fork
from pipeline.config import compose
from pipeline.run import ending_lines
from tests import composing
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
STOP = (
    "+training.callbacks.stop={_target_: keras.callbacks.EarlyStopping, "
    "monitor: val_accuracy, patience: 1}"
)
BEST_LOSS = ("training.keep_best.metric=val/loss", "training.keep_best.mode=min")


def begun(*arguments: str) -> tuple[str, ...]:
    """Return the overrides of `RUN` for the run directory `fork`, with `arguments`."""
    return (*RUN[:-1], "hydra.run.dir=fork", *arguments)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder with a run that has the checkpoints of updates 21, 35 and 40."""
    folder = folder_of(tmp_path_factory.mktemp("source"))
    interrupted(folder, AT, 15, *RUN)
    shutil.copytree(folder / "run" / "checkpoints" / str(AT), folder / str(AT))
    pipeline("resume", "run", cwd=folder)
    shutil.move(folder / str(AT), folder / "run" / "checkpoints" / str(AT))
    return folder


@pytest.fixture
def folder(source, tmp_path):
    """A copy of `source`, with its store."""
    shutil.copytree(source, tmp_path / "copy")
    return tmp_path / "copy"


def run_in(folder, name):
    """Return the run of the run directory `name`."""
    own_id = run_id(folder, name)
    (run,) = [run for run in Store(folder).runs() if run.info.run_id == own_id]
    return run


def run_id(folder, name):
    for line in (folder / name / "journal.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "run" in entry:
            return entry["run"]["run_id"]
    raise AssertionError(f"the journal of {name} names no run")


def histories(folder, name, after=0):
    """Return the histories of a run's metrics after an update."""
    later = {}
    for key, points in Store(folder).histories(run_in(folder, name)).items():
        later[key] = {step: value for step, value in points.items() if step > after}
    return later


def bits(arrays):
    return {name: array.tobytes() for name, array in arrays.items()}


def last_weights(folder, name, update=UPDATES):
    last = files.at(folder / name / "checkpoints", update)
    return snapshot.read(last).arrays


@pytest.mark.slow
def test_a_run_that_was_interrupted_goes_on_to_the_same_result(source, tmp_path):
    undisturbed = folder_of(tmp_path)
    pipeline("train", *RUN, cwd=undisturbed)
    check_equal(source, undisturbed)
    segments = json.loads((source / "run" / "segments.json").read_text())
    assert [segment["after"] for segment in segments] == [0, AT]
    assert Store(source).run().data.tags["segments"] == "2"


@pytest.mark.slow
def test_a_fork_that_changes_nothing_is_the_run_itself(folder):
    """With its weights alone another run follows: the negative control."""
    done = pipeline("train", *begun(f"start.run=run@{AT}"), cwd=folder)
    source_run = run_in(folder, "run")
    fork = run_in(folder, "fork")
    line = f"continues from the state of run {source_run.info.run_id} after update {AT}"
    assert line in done.stderr
    # A signal left the checkpoint before the evaluation that was due: it is the fork's
    # first row.
    assert histories(folder, "fork") == histories(folder, "run", AT)
    assert min(histories(folder, "fork")["train/loss"]) == AT + 1
    assert bits(last_weights(folder, "fork")) == bits(weights(folder))
    assert source_run.data.tags["forks"] == fork.info.run_id
    assert fork.data.tags["start.run"] == source_run.info.run_id
    assert fork.data.tags["start.update"] == str(AT)
    assert fork.data.tags["updates"] == str(UPDATES)
    first_line = (folder / "fork" / "journal.jsonl").read_text().splitlines()[0]
    assert json.loads(first_line)["start"]["segment"]["after"] == AT

    weights_only = (
        "hydra.run.dir=second",
        f"start.run={run_id(folder, 'run')[:9]}@{AT}",
        "start.weights_only=true",
        "seed=0",
    )
    pipeline("train", *RUN[:-1], *weights_only, cwd=folder)
    second = histories(folder, "second")
    straight = histories(folder, "run")
    losses = second["train/loss"]
    assert list(losses) == list(range(1, UPDATES + 1))
    # Its weights have learned.
    assert losses[1] < 0.9 * straight["train/loss"][1]
    assert second["train/learning_rate"] == straight["train/learning_rate"]
    for step in range(AT + 1, UPDATES + 1):
        assert losses[step] != straight["train/loss"][step]
    # Two forks of one run are both named in it.
    forks = [run_id(folder, name) for name in ("fork", "second")]
    assert run_in(folder, "run").data.tags["forks"] == ", ".join(forks)


@pytest.mark.slow
def test_a_fork_with_another_learning_rate(tmp_path):
    """A constant rate is a variable of the checkpoint too: the config overrules it."""
    folder = folder_of(tmp_path)
    constant = (
        *RUN[:-1],
        "schedule=constant",
        "training.updates=10",
        "training.checkpoint_every=5",
    )
    pipeline("train", *constant, "hydra.run.dir=run", cwd=folder)
    fork = ("start.run=run@5", "hydra.run.dir=fork", "optimizer.learning_rate=0.01")
    done = pipeline("train", *constant, *fork, cwd=folder)
    assert "after update 5, with a learning rate of its own" in done.stderr

    curves = histories(folder, "fork")
    rates = list(curves["train/learning_rate"].values())
    assert rates == pytest.approx([0.01] * 5)
    losses = curves["train/loss"]
    losses_of_run = histories(folder, "run")["train/loss"]
    # The loss of an update is that before the update.
    assert losses[6] == losses_of_run[6]
    assert losses[7] != losses_of_run[7]


@pytest.mark.parametrize(
    ("weights_only", "line"),
    [
        (
            False,
            "continues from the state of run a after update 5, with a learning rate ",
        ),
        (True, "begins with the weights of run a after update 5"),
    ],
)
def test_a_fork_says_that_its_precision_is_another_one(weights_only, line):
    """It took another precision without a word."""
    checkpoint = SimpleNamespace(updates_done=5)
    start = Fork("a", Path("run"), checkpoint, weights_only, own_rate=True)
    (said,) = start.messages({})
    assert said.startswith(line)
    start.precisions = ("float32", "mixed_bfloat16")
    assert start.messages({}) == [f"{said}, in mixed_bfloat16 instead of float32"]


@pytest.mark.parametrize(
    ("folder", "source", "needs_override"),
    [
        ("here/run", "a" * 32, False),
        ("other/run", "a" * 32, True),
        ("here/run", "{folder}", True),  # it is in no store, so it has no ID
    ],
)
def test_the_command_that_repeats_a_fork_names_a_run_that_it_would_not_find(
    tmp_path, monkeypatch, folder, source, needs_override
):
    """The command that was printed was rejected."""
    run_dir = tmp_path / folder
    run_dir.mkdir(parents=True)
    (run_dir / "journal.jsonl").touch()
    (tmp_path / "here").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "here")
    tags = {"start.run": source.format(folder=run_dir), "start.update": "5"}
    spec = composing.spec_of([f"start.run={run_dir}", "start.weights_only=true"])

    override = fork.override_to_repeat(spec, tags)
    line = ending_lines.open_or_repeat("b" * 32, spec, start=override)
    if needs_override:
        assert line.endswith(f"pipeline rerun {'b' * 32} start.run={run_dir}@5")
    else:
        assert line.endswith(f"pipeline rerun {'b' * 32}")


def test_a_run_that_begins_anew_or_with_an_id_needs_no_override(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tags = {"start.run": "a" * 32, "start.update": "5"}
    for overrides in ([], ["start.run=aaaaaaa@5"], ["start.run='models:/m@latest'"]):
        weights_only = ["start.weights_only=true"] if overrides else []
        spec = composing.spec_of([*overrides, *weights_only])
        assert fork.override_to_repeat(spec, tags) == ""


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


@pytest.mark.parametrize("run", mostly_slow(TEXTS, ["1e10", "a,b"]))
def test_a_run_is_text_as_it_is_written(run):
    values = run.split(",")
    if len(values) > 1:
        assert compose.as_text([f"start.run={run}"]) == ["start.run=a,b"]
        return
    assert compose.composed([f"start.run='{run}'"]).start.run == run
    expected = None if run == "null" else run
    for override in (f"start.run={run}", f"++start.run={run}"):
        assert compose.composed([override]).start.run == expected


@pytest.mark.slow
def test_what_no_run_can_begin_with_is_rejected(folder):
    (folder / "empty").mkdir()
    shutil.copytree(folder / "run", folder / "none")
    shutil.rmtree(folder / "none" / "checkpoints")
    shutil.copytree(folder / "run", folder / "torn")
    torn = next((folder / "torn" / "checkpoints" / "40").glob("arrays.data*"))
    torn.write_bytes(torn.read_bytes()[:-1])

    one_run = (
        "start.run must be one run directory, or the start of the ID of one run whose "
        f"directory lies below {folder}. Received: "
    )
    has_journal = one_run.replace(
        ". Received",
        ". A run directory has a journal.jsonl: a run that was killed before it began "
        "has none, so train it again. Received",
    )
    must_fit = "the checkpoint must fit the model, whose "
    horizon = "training must have a horizon beyond the "
    rule_by_start = {
        "run@7": "start.run must name an update whose checkpoint exists. "
        "Received: 'run@7'. Choices: 21, 35, 40.",
        "nowhere@7": f"{one_run}'nowhere'.",
        "12345678": f"{one_run}'12345678'.",
        "1e10": f"{one_run}'1e10'.",
        "empty": f"{has_journal}'empty'.",
        "none": "start.run must be a run with a checkpoint: "
        "see training.checkpoint_every. Received: 'none'.",
        "torn@40": "the checkpoint torn/checkpoints/40 must not be damaged "
        "(arrays.data",
        "run": f"{horizon}40 updates of start.run. Received: 40.",
        "run@21 training.updates=21": f"{horizon}21 updates of start.run.",
        "run@21 model.hidden=[8]": f"{must_fit}model/",
        "run@21 model.hidden=[8] start.weights_only=true": f"{must_fit}model/",
        "run@21 optimizer=adam": f"{must_fit}optimizer/",
        "run@21 optimizer=sgd": "the checkpoint must fit the model, "
        "which has no such variable.",
        "run@21 hardware.precision=float64": f"{must_fit}model/",
    }
    best_f1 = "train model=mlp "
    best_f1 += "training.keep_best.metric=val/f1 training.keep_best.mode=max"
    rule_by_line = {
        "train start.weights_only=true": "start.weights_only must come with start.run, "
        "which provides the weights.",
        best_f1: "training.keep_best.metric must be a metric of the validation split. "
        "Received: 'val/f1'. Choices: val/loss, val/accuracy.",
    }
    train = f"train {' '.join(RUN[:5])} hydra.run.dir=fork"
    for start, rule in rule_by_start.items():
        rule_by_line[f"{train} start.run={start}"] = rule

    answers = one_process({line: line for line in rule_by_line}, folder)
    for line, rule in rule_by_line.items():
        answer = answers[line]
        assert answer["status"] == 2, (line, answer)
        last = answer["err"].splitlines()[-1]
        assert last.startswith(f"pipeline: {rule}"), (line, answer["err"])
        assert answer["changed"] == [], line
    assert [run.info.run_id for run in Store(folder).runs()] == [run_id(folder, "run")]


@pytest.mark.parametrize("ema", mostly_slow(["false", "true"], [], ["true"]))
def test_the_test_split_is_evaluated_once_with_the_best_weights(tmp_path, ema):
    """The result has the bits of a run that ends where the best one was."""
    common = (
        "train",
        *RUN[:-2],
        "schedule=constant",
        "optimizer.learning_rate=0.3",
        f"+optimizer.use_ema={ema}",
        "optimizer.momentum=0.0",
        "training.checkpoint_every=null",
        "dataset.test_split=test",
    )
    # The highest loss is that of the first evaluation. What is best does not matter
    # here, only that training goes on after it.
    best_loss = ("training.keep_best.metric=val/loss", "training.keep_best.mode=max")
    pipeline(*common, *best_loss, "hydra.run.dir=best", cwd=tmp_path)
    store = Store(tmp_path)
    best = store.run()
    update = int(best.data.metrics["best/update"])
    assert update < UPDATES  # or nothing is shown

    until_best = (f"training.updates={update}", "hydra.run.dir=ended")
    pipeline(*common, *until_best, cwd=tmp_path)
    _, ended = store.runs()
    for key in ("test/loss", "test/accuracy"):
        assert store.history(best, key) == store.history(ended, key)
        assert list(store.history(best, key)) == [update]
    validated = store.history(best, "val/loss")
    # With the last weights it would be another one.
    assert validated[update] != validated[UPDATES]
    assert store.history(best, "test/loss")[update] != validated[update]
    splits = [used.tags[0].value for used in best.inputs.dataset_inputs]
    assert splits == ["training", "validation", "test"]


@pytest.mark.slow
def test_a_fork_is_interrupted_and_rerun(folder, source):
    """Without a checkpoint of its own it begins where it began, and so does a rerun."""
    auto = begun(
        "training.resume=auto", "start.run=run@21", "training.checkpoint_every=null"
    )
    interrupted(folder, 25, 9, *auto)
    pipeline("train", *auto, cwd=folder)
    assert histories(folder, "fork") == histories(folder, "run", AT)
    fork = run_id(folder, "fork")
    # The store is a copy, which says where its artifacts were.
    allow = ("--allow=mine", f"--allow={source}")
    pipeline("rerun", fork, *allow, "hydra.run.dir=again", cwd=folder)
    again = run_in(folder, "again")
    assert again.data.tags["rerun.verdict"] == "bit-equal"
    assert again.data.tags["start.run"] == run_id(folder, "run")

    third = f"rerun {fork} {' '.join(allow)} hydra.run.dir=third"
    no_checkpoint = "start.run must name an update whose checkpoint"
    no_run = "start.run must be one run directory, or the start of the ID"
    shutil.rmtree(folder / "run" / "checkpoints" / "21")
    lines = {"gone": third, "dry": f"{third} --dry"}
    for answer in one_process(lines, folder).values():
        assert answer["status"] == 2, answer
        assert no_checkpoint in answer["err"].splitlines()[-1]
    shutil.rmtree(folder / "run")
    answer = one_process({"no run": third}, folder)["no run"]
    assert answer["status"] == 2, answer
    assert no_run in answer["err"].splitlines()[-1]
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
    """Return the best update of a run, after a check of the metrics that name it."""
    run = run_in(folder, name)
    store = Store(folder)
    curve = histories(folder, name)["val/loss"]
    step = min(curve, key=curve.__getitem__)
    assert store.history(run, "best/val/loss") == {step: curve[step]}
    assert store.history(run, "best/update") == {step: step}
    return step


@pytest.mark.slow
def test_which_callback_stopped_a_run_and_what_was_best(stopping):
    run = run_in(stopping, "run")
    done = max(histories(stopping, "run")["train/loss"])
    assert done < 200
    assert run.data.tags["stopped_by"] == f"training.callbacks.stop after update {done}"
    assert run.data.tags["updates"] == str(done)
    assert run.data.params["derived.updates"] == "200"
    best = files.at(stopping / "run" / "checkpoints" / BEST, best_of(stopping))
    loss = best.meta.loop.validation["loss"]
    assert loss == run.data.metrics["best/val/loss"]


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
    stopped_by = run_in(folder, "run").data.tags["stopped_by"]
    assert stopped_by == run_in(stopping, "run").data.tags["stopped_by"]
    expected = last_weights(stopping, "run", done)
    assert bits(last_weights(folder, "run", done)) == bits(expected)


OTHER_UNITS = """
import numpy as np
import tensorflow as tf


def table(offset):
    numbers = np.random.default_rng(0)
    x = numbers.normal(offset, 1.0, (96, 5)).astype("float32")
    y = (x.sum(1) > 5 * offset).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y))
    return data.take(64), data.skip(64)
"""


EVALUATE_ELSEWHERE = """
import keras
import numpy as np
import units

_, validation = units.table(3)
x, y = map(np.array, zip(*validation.as_numpy_iterator()))
model = keras.models.load_model(FILE, compile=False)
loss = keras.losses.BinaryCrossentropy()(y[:, None], model(x))
print(float(loss), np.ravel(model.layers[1].mean).tolist())
"""


@pytest.mark.slow
def test_a_fork_onto_other_data_normalises_as_what_it_began_with(tmp_path):
    """Its training and its logged model use the means that the weights belong to."""
    (tmp_path / "units.py").write_text(OTHER_UNITS)
    common = (
        "dataset=breast_cancer",
        "dataset._target_=units.table",
        "model=tabular",
        "model.activation=sigmoid",
        "model.dropout=0",
        "model.hidden=[8]",
        "objective=binary",
        "training.epochs=2",
        "accumulation.effective_batch_size=32",
        "tracking.system_metrics=false",
        "training.checkpoint_every=epoch",
    )
    pipeline("train", *common, "+dataset.offset=0", "hydra.run.dir=run", cwd=tmp_path)
    fork = (
        "+dataset.offset=3",
        "start.run=run",
        "start.weights_only=true",
        "hydra.run.dir=fork",
    )
    pipeline("train", *common, *fork, cwd=tmp_path)

    store = Store(tmp_path)
    run = run_in(tmp_path, "fork")
    (logged,) = store.client.search_logged_models(
        [run.info.experiment_id], f"source_run_id = '{run.info.run_id}'"
    )
    file = next(Path(logged.artifact_location.removeprefix("file://")).rglob("*.keras"))
    check = EVALUATE_ELSEWHERE.replace("FILE", repr(str(file)))
    out, err = python("-c", check, cwd=tmp_path).communicate(timeout=120)
    loss, means = out.strip().splitlines()[-1].split(" ", 1)
    # The means are those of the first table; those of the second are about 3.
    assert max(map(abs, json.loads(means))) < 1, err
    last = list(store.history(run, "val/loss").values())[-1]
    # A mean of 32 float32, in another order.
    assert float(loss) == pytest.approx(last, rel=1e-5)
