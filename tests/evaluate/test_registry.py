"""`tracking.register`, and what `models:/NAME@ALIAS` names in `evaluate` and `train`."""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from pathlib import Path

import keras
import pytest
from mlflow.entities import Run

from pipeline.tracking.journal_file import Past
from tests.evaluate.test_evaluate import (
    BEST,
    EQUAL,
    LAST,
    TRAIN,
    Made,
    write_own_code,
)
from tests.running import Store, one_process, pipeline
from tests.shared import place_store

pytestmark = pytest.mark.slow
REGISTERED = TRAIN.replace("log_model=false", "register=points")
# The weights stay those with which the run begins.
BEGUN = TRAIN.replace("dir=run", "dir=begun").replace("rate=1", "rate=1e-300")


def by_name(store: Store, run_dir: Path) -> Run:
    """Return the run of a run directory."""
    return store.client.get_run(Past.read(run_dir).run_id)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run that has registered its model, and others that use it."""
    folder = tmp_path_factory.mktemp("registered")
    write_own_code(folder)
    place_store(folder)
    assert BEGUN.count("begun") == 1
    assert BEGUN.count("learning_rate=1e-300") == 1
    lines = {
        "train": REGISTERED,
        "begun": f"{BEGUN} start.run=models:/points@latest start.weights_only=true",
        "with optimizer": f"{BEGUN} start.run=models:/points@latest",
        "unknown": f"{BEGUN} start.run=models:/lines@latest start.weights_only=true "
        "hydra.run.dir=unborn",
        "no model": "train tracking.register=x tracking.log_model=false",
        "wrong name": "train tracking.register=a/b",
        "latest": "evaluate models:/points@latest --allow mine --no-log",
        "version": "evaluate models:/points/1 --allow mine --name there --split test",
        "not trusted": "evaluate models:/points@latest --no-log",
    }
    answers = one_process(lines, folder)
    for name in ("train", "begun", "latest", "version"):
        assert answers[name]["status"] == 0, answers[name]["err"]
    store = Store(folder)
    return Made(folder, store, by_name(store, folder / "run"), answers)


def test_the_version_names_the_run_and_the_update_of_its_best_checkpoint(made):
    (version,) = made.store.client.search_model_versions("name = 'points'")
    assert version.run_id == made.run_id
    assert version.tags["pipeline.run_id"] == made.run_id
    assert version.tags["pipeline.update"] == str(BEST)
    latest = made.store.client.get_model_version_by_alias("points", "latest")
    assert latest.version == version.version
    (output,) = made.run.outputs.model_outputs
    assert version.tags["pipeline.logged_model"] == output.model_id


@pytest.mark.parametrize("answer", ["latest", "version"])
def test_a_registered_model_has_the_results_of_the_best_checkpoint(made, answer):
    out = made.answers[answer]["out"]
    assert f"{made.run_id} after update {BEST}" in out
    (tested,) = made.history("test/loss").values()
    assert f"{tested:.6g}" in out
    assert made.history("eval/there/loss") == {BEST: pytest.approx(tested, rel=EQUAL)}


def test_a_run_begins_with_the_weights_of_a_model(made):
    """They are the averages of the best checkpoint, not its raw weights."""
    begun = by_name(made.store, made.folder / "begun")
    assert begun.data.params["start.run"] == "models:/points/1"
    assert begun.data.tags["start.run"] == made.run_id
    assert begun.data.tags["start.update"] == str(BEST)
    assert (
        begun.info.run_id in made.store.client.get_run(made.run_id).data.tags["forks"]
    )
    assert "begins with the weights of models:/points/1" in made.answers["begun"]["err"]
    losses = made.store.history(begun, "val/loss")
    assert losses[LAST] == pytest.approx(made.history("val/loss")[BEST], rel=EQUAL)


def test_elsewhere_the_weights_are_those_of_the_store_and_no_code_of_it_runs(
    made, tmp_path
):
    """The model in the store has an unpickled object and a layer that would run code."""
    (output,) = made.run.outputs.model_outputs
    (data,) = made.folder.glob(f"mlruns/**/{output.model_id}/artifacts/data")
    ran = tmp_path / "ran"
    plant(data, ran)
    shutil.copy(made.folder / "mine.py", tmp_path)
    line = (
        *("evaluate", f"{made.run_id}@best", "--name", "far", "--split", "test"),
        f"tracking.uri=sqlite:///{made.folder}/mlruns/mlflow.db",
        *("--allow", "mine"),
    )
    pipeline(*line, cwd=tmp_path)
    assert not ran.exists()
    (tested,) = made.history("test/loss").values()
    evaluated = made.store.history(made.run, "eval/far/loss")
    assert evaluated == {BEST: pytest.approx(tested, rel=EQUAL)}

    again = pipeline(*line, cwd=tmp_path)
    assert "eval/far is already logged after update 2" in again.stderr
    last = [part.replace("@best", f"@{LAST}") for part in line]
    answer = pipeline(*last, cwd=tmp_path, status=2)
    assert "must be the update of a logged model" in answer.stderr


def plant(data: Path, ran: Path) -> None:
    """Put code that makes the file `ran` into all files of a model but its weights."""
    custom = data / "global_custom_objects.cloudpickle"
    custom.write_bytes(pickle.dumps(Touch(str(ran))))
    archive = data / "model.keras"
    with zipfile.ZipFile(archive) as saved:
        weights = saved.read("model.weights.h5")
        metadata = saved.read("metadata.json")
    path = str(ran)
    layer = keras.layers.Lambda(lambda x: [x, Path(path).touch()][0])
    with zipfile.ZipFile(archive, "w") as hostile:
        hostile.writestr("model.weights.h5", weights)
        hostile.writestr("metadata.json", metadata)
        serialized = keras.saving.serialize_keras_object(layer)
        hostile.writestr("config.json", json.dumps(serialized))


class Touch:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize(
    ("answer", "key", "rule"),
    [
        ("with optimizer", "start.weights_only", "must be true if start.run is a"),
        ("unknown", "start.run", "must name a registered model of the store"),
        ("no model", "tracking.register", "must be null with tracking.log_model=false"),
        ("wrong name", "tracking.register", "must consist of up to 100 letters"),
        ("not trusted", "dataset._target_", "mine.points"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(made, answer, key, rule):
    result = made.answers[answer]
    assert result["status"] == 2
    assert key in result["err"].splitlines()[-1]
    assert rule in result["err"].splitlines()[-1]
    assert result["changed"] == []
