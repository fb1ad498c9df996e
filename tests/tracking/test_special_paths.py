"""Characters that TensorFlow, SQLAlchemy, Hydra or URLs read as something else.

Each is in the path of a checkpoint, of a store, or of a folder that a command names.
"""

from __future__ import annotations

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from sqlalchemy.engine import make_url

from pipeline.checkpoints import snapshot
from pipeline.checkpoints.snapshot import Snapshot
from pipeline.common import sqlite_uri
from pipeline.common.errors import ConfigError
from pipeline.config import validate
from pipeline.config.overrides import hydra_quoted
from pipeline.tracking.store import Store
from pipeline.trust import artifact_locations
from tests.running import TINY, one_process, pipeline
from tests.running import Store as StoreOf
from tests.shared import place_store

CHARACTERS = "[]{}%#&=+'\",:;*~$!() ü\\"
EACH = [f"a{character}b" for character in CHARACTERS] + ["[64,64]", "%zz", CHARACTERS]


@pytest.mark.parametrize("name", [*EACH, "a?b", "a%41b", "a*"])
def test_a_checkpoint_is_written_and_read_back(tmp_path, name):
    # A neighbour that the name matches as a pattern.
    (tmp_path / "a6b").mkdir()
    folder = tmp_path / name
    folder.mkdir()
    array = np.arange(3.0)
    saved = Snapshot({"a": array}, {})
    saved.write_arrays(folder)
    assert (folder / "arrays.index").exists()
    assert list((tmp_path / "a6b").iterdir()) == []
    arrays = snapshot.read_arrays(folder, saved.specs())
    np.testing.assert_array_equal(arrays["a"], array)


@pytest.mark.parametrize("name", EACH)
def test_the_address_of_a_store_leads_to_its_file(tmp_path, monkeypatch, name):
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    relative = f"sqlite:///{name}.db"
    assert sqlite_uri.misread(relative) == ""
    uri = sqlite_uri.absolute(relative)
    file = folder / f"{name}.db"
    for address in (relative, uri):
        assert folder / make_url(address).database == file
        assert Store(address).database == file
    # Its artifacts lie with it.
    artifacts = (folder / "artifacts" / "1").as_uri()
    artifact_locations.check(artifacts, uri)


@pytest.mark.parametrize(
    ("name", "rule"),
    [("a?b", "must have no . in its path, which would end"), ("a%41b", "no %-code")],
)
def test_a_store_whose_path_is_read_as_another_one_is_rejected(
    tmp_path, monkeypatch, name, rule
):
    """So is one in a working folder of that name, whose path a run records."""
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    address = make_url(sqlite_uri.absolute("sqlite:///mlflow.db")).database
    assert address != str(folder / "mlflow.db")  # what would be used
    with pytest.raises(ConfigError, match=rule):
        validate._check_store("sqlite:///mlflow.db")
    with pytest.raises(ConfigError, match=r"tracking\.uri must be a store"):
        Store("sqlite:///mlflow.db")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("uri", ["sqlite:///a?b.db", "sqlite:///a?b/c=d/e.db"])
def test_a_path_with_a_question_mark_is_not_taken_for_options(uri):
    with pytest.raises(ConfigError, match=r"must have no . in its path; options"):
        validate._check_store(uri)
    validate._check_store("sqlite:///a.db?timeout=30&cached_statements=128")


def test_a_recorded_store_leads_nowhere_else_by_a_code(tmp_path):
    recorded = f"sqlite:///{tmp_path}/%2e%2e/elsewhere.db"
    with pytest.raises(ConfigError, match="no %-code in its path"):
        Store(recorded)


@pytest.mark.parametrize(
    "name", ['it\'s "so"', pytest.param("a:b,:c", marks=pytest.mark.slow)]
)
def test_a_new_store_is_made_in_a_folder_of_that_name(tmp_path, monkeypatch, name):
    """MLflow writes the path of the working folder into a statement of SQL."""
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    store = Store("sqlite:///mlflow.db")
    assert store.experiment(name) == store.check(name)
    assert [path.name for path in folder.iterdir() if path.suffix == ".db"]


@pytest.mark.parametrize("name", EACH)
def test_hydra_reads_a_quoted_folder_as_it_is(name):
    override = f"hydra.run.dir={hydra_quoted(name)}"
    (parsed,) = OverridesParser.create().parse_overrides([override])
    assert parsed.value() == name


@pytest.mark.slow
def test_a_run_in_a_folder_with_all_of_them(tmp_path):
    """It trains, is resumed, synced, rerun and reported; its checkpoints are there."""
    folder = tmp_path / CHARACTERS
    folder.mkdir()
    place_store(folder)
    settings = [
        *TINY[2:],
        *("model=mlp", "training.epochs=null", "training.checkpoint_every=3"),
        *("training.evaluate_every=3", "hardware.deterministic=true"),
        f"tracking.experiment={hydra_quoted(CHARACTERS)}",
    ]
    sweep_dir = hydra_quoted(CHARACTERS)
    pipeline(
        *("train", "-m", *settings, "model.hidden=[8,8],[8]", "training.updates=6"),
        f"hydra.sweep.dir={sweep_dir}",
        "hydra.sweep.subdir='model.hidden=${model.hidden}'",
        cwd=folder,
    )
    store = StoreOf(folder)
    sweep = store.trained(CHARACTERS)[0].data.tags["sweep"]
    for job in (folder / CHARACTERS).glob("model.hidden=*"):
        assert (job / "checkpoints" / "6").is_dir()

    run_dir = f"{CHARACTERS}/hidden=[64,64]"
    place = f"hydra.run.dir={hydra_quoted(run_dir)}"
    pipeline("train", *settings, place, "training.updates=6", cwd=folder)
    checkpoints = folder / run_dir / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["3", "6"]
    run_id = store.trained(CHARACTERS)[-1].info.run_id
    lines = {
        "rerun": f"rerun {run_id}",
        "resume": f"resume {run_id} training.updates=9",
        "sync": "sync",
        "report": f"report {sweep}",
    }
    answers = one_process(lines, folder)
    for answer in answers.values():
        assert answer["status"] == 0, answer["err"]
    assert len(store.history(store.client.get_run(run_id), "train/loss")) == 9


def test_a_reference_in_the_working_folder_is_rejected(tmp_path):
    folder = tmp_path / "a${hydra.job.name}"
    folder.mkdir()
    (answer,) = one_process({"train": "train model=mlp"}, folder).values()
    assert answer["status"] == 2
    (line,) = answer["err"].splitlines()
    assert "the working folder must have no ${ in its path" in line
    assert answer["changed"] == []
