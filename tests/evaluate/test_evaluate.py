"""`pipeline evaluate` and `pipeline predict`: a run with a user's own data and model.

Few processes do most of it, since each loads TensorFlow: one trains the run, and others
evaluate it.
"""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from mlflow.entities import Run

from pipeline.common.errors import ConfigError
from pipeline.dataset.stream import Loader
from pipeline.evaluate import command_line, subject
from pipeline.tracking import journal_file
from tests.checkpoints.test_files import saved
from tests.running import Store, one_process, pipeline, start, wait
from tests.shared import place_store

MINE = """
import shutil
import time
from pathlib import Path
import keras, numpy as np, tensorflow as tf
from pipeline.dataset import Data

def few():
    x = np.random.default_rng(1).normal(size=(3, 2)).astype("float32")
    examples = tf.data.Dataset.from_tensor_slices((x,))
    return Data(examples, examples, classes=2)

def points(flip=False, slow=False, labels=True, removes=None):
    if removes is not None:
        shutil.rmtree(removes)
    random = np.random.default_rng(0)
    x = random.normal(size=(6600, 2)).astype("float32")
    y = (x[:, 0] > x[:, 1]).astype("int64") ^ int(flip)
    data = tf.data.Dataset.from_tensor_slices((x, y) if labels else (x,))
    test = data.skip(600)
    if slow:
        test = test.enumerate().map(pause)
    return Data(data.take(200), data.skip(200).take(400), classes=2, test=test)

def pause(number, example):
    def sleep(number):
        # Not while the checksum of the data is computed, and not in a second process.
        if number == 5500 and Path("out.parquet.parts").exists():
            while not Path("killed").exists():
                time.sleep(0.01)
        return number
    with tf.control_dependencies([tf.numpy_function(sleep, [number], tf.int64)]):
        return tf.nest.map_structure(tf.identity, example)

def tiny(input_shape, classes):
    return keras.Sequential([keras.Input(input_shape), keras.layers.Dense(classes)])
"""
TRAIN = (
    "train --config-dir conf experiment=exact dataset=points model=tiny "
    "hydra.run.dir=run tracking.log_model=false tracking.system_metrics=false "
    "training.epochs=2 accumulation.effective_batch_size=50 optimizer=sgd "
    "optimizer.learning_rate=1 +optimizer.use_ema=true +optimizer.ema_momentum=0.8 "
    "training.evaluate_every=2 training.checkpoint_every=2 "
    # The loss falls, so that the best checkpoint is not the last one.
    "'training.keep_best={metric: val/loss, mode: max}'"
)
BEST = 2
LAST = 8
EQUAL = 1e-12


@dataclass(frozen=True)
class Made:
    """A folder with a run, what the commands in it answered, and the run at the end."""

    folder: Path
    store: Store
    run: Run
    answers: dict[str, dict]

    @property
    def run_id(self) -> str:
        return str(self.run.info.run_id)

    def history(self, key: str) -> dict[int, float]:
        return self.store.history(self.run, key)


def write_own_code(folder: Path) -> None:
    """Write a user's own code and config groups."""
    (folder / "conf/dataset").mkdir(parents=True)
    (folder / "conf/model").mkdir()
    (folder / "mine.py").write_text(MINE)
    dataset = "_target_: mine.points\nflip: false\nslow: false\nlabels: true\n"
    dataset += "removes: null\n"
    (folder / "conf/dataset/points.yaml").write_text(dataset)
    (folder / "conf/dataset/few.yaml").write_text("_target_: mine.few\n")
    (folder / "conf/model/tiny.yaml").write_text("_target_: mine.tiny\n")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    write_own_code(folder)
    place_store(folder)
    lines = {
        "train": TRAIN,
        "only printed": "evaluate run@best --no-log",
        "best": "evaluate run@best",
        "last": "evaluate run --split validation",
        "other data, no name": "evaluate run dataset.flip=true",
        "another key": "evaluate run optimizer.learning_rate=2",
        "no such update": "evaluate run@3",
        "a name of a split": "evaluate run --name test",
        "replicas": "evaluate run hardware.replicas=2",
    }
    answers = one_process(lines, folder)
    assert answers["train"]["status"] == 0, answers["train"]["err"]
    store = Store(folder)
    return Made(folder, store, store.run(), answers)


@pytest.fixture(scope="module")
def made_wider(made):
    """Return the same after more commands."""
    lines = {
        "again": "evaluate run@best",
        "other data": "evaluate run dataset.flip=true --name flipped",
        "predict": "predict run@best --split test --out whole.parquet",
        "predict again": "predict run@best --split test --out whole.parquet",
        "named like an update": "evaluate run@3 --no-log",
    }
    shutil.copytree(made.folder / "run", made.folder / "run@3")
    return replace(made, answers=made.answers | one_process(lines, made.folder))


@pytest.fixture(scope="module")
def made_by_id(made_wider):
    """The answers to commands that name the run by its ID."""
    made = made_wider
    lines = {
        "by ID": f"evaluate {made.run_id}@{LAST} --allow mine --no-log",
        "not trusted": f"evaluate {made.run_id}",
        "same name": "evaluate run dataset.flip=true dataset.slow=true --name flipped",
        "set": "predict run --split late --out set.parquet "
        "'+dataset.validations.late={_target_: mine.points, flip: true}'",
        "no such set": "predict run --split lat --out none.parquet",
        "no labels": "predict run dataset.labels=false --out no_labels.parquet",
        "labels": "predict run --out labels.parquet",
        # Fewer than an effective batch has.
        "few": "predict run --config-dir conf dataset=few --out few.parquet",
    }
    return one_process(lines, made.folder)


@pytest.mark.parametrize(
    ("answer", "update"), [("best", BEST), ("last", LAST), ("only printed", BEST)]
)
def test_a_checkpoint_has_the_results_that_the_run_logged(made, answer, update):
    """The run averages its weights, which an evaluation uses and a checkpoint keeps."""
    assert made.answers[answer]["status"] == 0, made.answers[answer]["err"]
    for metric in ("loss", "accuracy"):
        logged = made.history(f"val/{metric}")[update]
        evaluated = made.history(f"eval/validation/{metric}")
        assert set(evaluated) == {BEST, LAST}
        assert evaluated[update] == pytest.approx(logged, rel=EQUAL)
        # A control: another checkpoint has other results.
        assert evaluated[BEST] != pytest.approx(evaluated[LAST], rel=1e-6)
    assert f"{made.history('val/loss')[update]:.6g}" in made.answers[answer]["out"]
    if answer != "only printed":
        said = f"run {made.run_id} has eval/validation/… after update {update}"
        assert said in made.answers[answer]["err"]


@pytest.mark.slow
def test_code_that_has_changed_since_the_run_is_named(made):
    lines = {
        "run directory": "evaluate run --no-log",
        "by ID": f"evaluate {made.run_id} --allow mine --no-log",
        "predict": "predict run --out changed.parquet",
    }
    code = made.folder / "mine.py"
    code.write_text(MINE + "\n# changed\n")
    try:
        answers = one_process(lines, made.folder)
    finally:
        code.write_text(MINE)
    said = "code that has changed since the run: mine.py"
    for answer in answers.values():
        assert answer["status"] == 0, answer["err"]
        assert said in answer["err"]
    assert said not in made.answers["only printed"]["err"]


def test_the_test_split_is_that_of_the_best_checkpoint(made):
    (tested,) = made.history("test/loss").values()
    assert made.history("eval/test/loss") == {BEST: pytest.approx(tested, rel=EQUAL)}


def test_what_is_only_printed_leaves_nothing(made):
    assert made.answers["only printed"]["changed"] == []
    assert made.answers["only printed"]["out"] == made.answers["best"]["out"]


@pytest.mark.slow
def test_an_evaluation_is_logged_once(made_wider):
    made = made_wider
    assert "is already logged after update 2" in made.answers["again"]["err"]
    assert made.answers["again"]["changed"] == []
    assert made.run.info.status == "FINISHED"


@pytest.mark.slow
def test_other_data_have_a_name_of_their_own(made_wider):
    made = made_wider
    assert made.answers["other data"]["status"] == 0
    # Each label is the other one.
    accuracy = made.history("eval/flipped-validation/accuracy")[LAST]
    assert accuracy == pytest.approx(1 - made.history("val/accuracy")[LAST], rel=EQUAL)
    assert LAST in made.history("eval/flipped-test/loss")


@pytest.mark.slow
def test_by_its_id_a_run_is_read_from_the_store(made, made_by_id):
    answer = made_by_id["by ID"]
    assert answer["status"] == 0, answer["err"]
    assert f"{made.history('val/loss')[LAST]:.6g}" in answer["out"]
    answer = made_by_id["not trusted"]
    assert answer["status"] == 2
    assert "mine.points" in answer["err"]
    assert (
        "trust it with --allow mine, or name the run by its directory," in answer["err"]
    )
    assert answer["changed"] == []


@pytest.mark.slow
def test_another_evaluation_under_the_same_name_is_refused(made_by_id):
    answer = made_by_id["same name"]
    assert answer["status"] == 2
    assert "--name must be a new name" in answer["err"]
    assert answer["changed"] == []


@pytest.mark.parametrize(
    ("answer", "key", "rule"),
    [
        ("other data, no name", "--name", "must be given"),
        ("a name of a split", "--name", "must not be the name of a split"),
        ("another key", "optimizer.learning_rate", "must be left out"),
        ("replicas", "hardware.replicas", "must be left out"),
        ("no such update", "RUN", "must name an update whose checkpoint exists"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(made, answer, key, rule):
    check_refused(made.answers[answer], key, rule)


@pytest.mark.slow
def test_the_name_of_a_run_directory_may_look_like_an_update(made_wider):
    answer = made_wider.answers["named like an update"]
    assert answer["status"] == 0, answer["err"]


def test_a_split_that_does_not_end_is_rejected():
    endless = tf.data.Dataset.from_tensors((np.ones((4, 2)), np.ones(4))).repeat()
    data = SimpleNamespace(
        splits={"train": endless}, loaders={"train": Loader(endless, "train")}
    )
    rule = r"--split must be a split that does not repeat\. Received: 'train'"
    with pytest.raises(ConfigError, match=rule):
        command_line.split_key(SimpleNamespace(data=data), "train")


def test_a_file_of_predictions_is_not_replaced(made_wider):
    rule = "must be a file that does not exist"
    check_refused(made_wider.answers["predict again"], "--out", rule)


def check_refused(result, key, rule):
    assert result["status"] == 2
    assert key in result["err"].splitlines()[-1]
    assert rule in result["err"].splitlines()[-1]
    assert result["changed"] == []


@pytest.mark.slow
def test_a_run_that_is_running_is_not_written_to(made, tmp_path):
    """Its own process holds the lock of the journal, as this test does here."""
    shutil.copytree(made.folder / "run", tmp_path / "run")
    journal = tmp_path / "run/journal.jsonl"
    before = journal.read_bytes()
    descriptor = os.open(journal, os.O_RDWR)
    assert journal_file.lock(descriptor, journal_file.WRITER)
    result = pipeline("evaluate", "run", cwd=tmp_path, status=2)
    os.close(descriptor)
    rule = "is still running: with --no-log, the results are only printed"
    assert rule in result.stderr
    assert journal.read_bytes() == before


@pytest.mark.slow
def test_a_checkpoint_stays_while_it_is_evaluated(made, tmp_path):
    """A run that is training removes its checkpoint as it writes a better one."""
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    descriptor = os.open(tmp_path / "run/journal.jsonl", os.O_RDWR)
    assert journal_file.lock(descriptor, journal_file.WRITER)
    command = ["evaluate", "run@best", "--no-log", "--config-dir", "conf"]
    removes = "dataset.removes=run/checkpoints/best"
    result = pipeline(*command, removes, cwd=tmp_path)
    os.close(descriptor)
    assert not (tmp_path / "run/checkpoints/best").exists()
    assert f"{made.history('val/loss')[BEST]:.6g}" in result.stdout


@pytest.mark.slow
def test_examples_without_labels_are_predicted(made, made_by_id):
    tables = {}
    for name in ("labels", "no_labels"):
        answer = made_by_id[name.replace("_", " ")]
        assert answer["status"] == 0, answer["err"]
        tables[name] = pq.read_table(made.folder / f"{name}.parquet")
    assert tables["no_labels"].column_names == ["position", "output"]
    assert tables["no_labels"]["output"] == tables["labels"]["output"]

    assert made_by_id["few"]["status"] == 0, made_by_id["few"]["err"]
    assert pq.read_table(made.folder / "few.parquet").num_rows == 3

    assert {"label", "loss"} < set(tables["labels"].column_names)


@pytest.mark.slow
def test_a_further_validation_set_is_predicted(made, made_by_id):
    assert made_by_id["set"]["status"] == 0, made_by_id["set"]["err"]
    table = pq.read_table(made.folder / "set.parquet")
    assert table.num_rows == 400
    evaluated = made.history("eval/flipped-validation/loss")[LAST]
    assert np.mean(table["loss"]) == pytest.approx(evaluated, rel=EQUAL)
    # A control: the split of the run has other labels.
    assert np.mean(table["loss"]) != pytest.approx(made.history("val/loss")[LAST])

    answer = made_by_id["no such set"]
    assert answer["status"] == 2
    assert "--split must be a split of the dataset. Received: 'lat'" in answer["err"]
    assert answer["changed"] == []


@pytest.mark.slow
def test_predictions_have_a_row_for_each_example(made_wider):
    made = made_wider
    table = pq.read_table(made.folder / "whole.parquet")
    assert table.column_names == ["position", "output", "label", "loss"]
    assert table["position"].to_pylist() == list(range(6000))
    outputs = np.array(table["output"].to_pylist())
    labels = np.array(table["label"])
    assert outputs.shape == (6000, 2)
    losses = np.log(np.exp(outputs).sum(axis=1)) - outputs[range(6000), labels]
    np.testing.assert_allclose(table["loss"], losses, EQUAL, 1e-14)
    (tested,) = made.history("test/loss").values()
    assert np.mean(table["loss"]) == pytest.approx(tested, rel=EQUAL)


@pytest.mark.slow
def test_predictions_go_on_after_a_kill(made, made_wider, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(made.folder, folder, ignore=shutil.ignore_patterns("*.parquet"))
    line = ("predict", "run@best", "--split", "test", "--out", "out.parquet")
    slow = (*line, "dataset.slow=true")
    process = start(*slow, cwd=folder)
    parts = folder / "out.parquet.parts"
    wait(lambda: list(parts.glob("[0-9]*.parquet")))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (folder / "killed").touch()
    (written,) = parts.glob("[0-9]*.parquet")
    assert pq.read_metadata(written).num_rows < 6000
    assert not (folder / "out.parquet").exists()

    other = pipeline("predict", "run", *line[2:], cwd=folder, status=2)
    assert "contains a part of other predictions" in other.stderr

    result = pipeline(*slow, cwd=folder)
    assert "continues after 4100 rows" in result.stderr
    assert not parts.exists()
    whole = pq.read_table(made.folder / "whole.parquet")
    assert pq.read_table(folder / "out.parquet").equals(whole)


def test_weights_that_are_not_the_last_ones_are_named(tmp_path, capsys):
    """As if the disk had been full when the last checkpoint was to be written."""
    saved(tmp_path / "checkpoints", 3, 5)
    start = {"format": 1, "store": "sqlite:///x", "tags": {"journal": "1"}}
    writer = journal_file.create(tmp_path / journal_file.JOURNAL_NAME)
    writer.write({"start": start})
    writer.write({"tags": {"updates": "12"}})
    checkpoint = subject._checkpoint(tmp_path, "", "run")
    assert checkpoint.updates_done == 5
    assert capsys.readouterr().err == ""  # it may still write later checkpoints

    writer.write({"end": "FINISHED"})
    subject._checkpoint(tmp_path, "5", "run@5")
    assert capsys.readouterr().err == ""
    subject._checkpoint(tmp_path, "", "run")
    assert capsys.readouterr().err == (
        "these are the weights after update 5: the run has finished after update 12, "
        "but has no checkpoint of it\n"
    )
    writer.close()


@pytest.mark.slow
def test_an_earlier_checkpoint_is_not_taken_for_the_best_one(made, tmp_path):
    """As if the disk had been full when the later checkpoints were to be written."""
    write_own_code(tmp_path)
    place_store(tmp_path)
    shutil.copytree(made.folder / "run", tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    for folder in checkpoints.glob("[0-9]*"):
        shutil.rmtree(folder)
    (best,) = (checkpoints / "best").iterdir()
    best.rename(best.with_name(str(BEST - 1)))
    rejected = pipeline("evaluate", "run@best", "--no-log", cwd=tmp_path, status=2)
    rule = (
        f"RUN must have the checkpoint of its best evaluation, after update {BEST}, "
        "which was not written. Received: 'run@best'."
    )
    assert rule in rejected.stderr


@pytest.mark.slow
def test_an_evaluation_is_shipped_once_the_store_answers(tmp_path):
    """The run was trained, and is evaluated, without a store."""
    write_own_code(tmp_path)
    place_store(tmp_path)
    away = "tracking.uri=http://127.0.0.1:9 tracking.patience=1"
    lines = {
        "train": f"{TRAIN} {away} tracking.when_unreachable=offline",
        "evaluate": "evaluate run@best tracking.patience=1 --split validation",
        "again": "evaluate run@best tracking.patience=1 --split validation",
        "sync": "sync run tracking.uri=sqlite:///mlruns/mlflow.db",
        "sync again": "sync run tracking.uri=sqlite:///mlruns/mlflow.db",
    }
    answers = one_process(lines, tmp_path)
    statuses = [answer["status"] for answer in answers.values()]
    assert statuses == [4, 4, 0, 0, 0], answers
    store = Store(tmp_path)
    run = store.run()
    assert run.info.status == "FINISHED"
    logged = store.history(run, "val/loss")[BEST]
    evaluated = store.history(run, "eval/validation/loss")
    assert evaluated == {BEST: pytest.approx(logged, rel=EQUAL)}
    assert "eval.validation.2" in run.data.tags
