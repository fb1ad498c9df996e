"""The disk of a new SQLite store is full: the run is rejected, and nothing is there."""

from __future__ import annotations

import resource

import pytest

from pipeline.common.errors import ConfigError
from pipeline.tracking.store import Store
from tests.disks import FILLER, disk, fill, free
from tests.running import TINY, pipeline
from tests.shared import migrated_store

RULE = "must be a store that answers ("


@pytest.fixture
def folder(tmp_path):
    """A folder whose `disk` is a small disk."""
    with disk(tmp_path / "disk"):
        yield tmp_path


def uri_in(folder):
    return f"sqlite:///{folder}/disk/store/mlflow.db"


def files(folder):
    """Return the names of all files and folders, without that which fills the disk."""
    return {path.name for path in folder.rglob("*")} - {"disk", FILLER}


def test_a_new_store_on_a_full_disk_is_rejected(folder):
    Store(uri_in(folder))  # there is space
    fill(folder / "disk")
    with pytest.raises(ConfigError) as error:
        Store(uri_in(folder))
    assert str(error.value).startswith(
        f"tracking.uri {RULE}{folder}/disk has no space for a new store: No space left "
        "on device)."
    )
    assert files(folder) == set()


def test_a_limit_of_files_is_a_full_disk(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        with pytest.raises(ConfigError, match="no space for a new store: File too lar"):
            Store(f"sqlite:///{tmp_path}/mlflow.db")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files(tmp_path) == set()


def test_a_disk_that_fills_up_before_the_store_is_there(folder):
    """Nothing of the store remains, so that the same command makes it later."""
    store = Store(uri_in(folder))
    store._new_database = migrated_store().read_bytes()
    fill(folder / "disk")
    with pytest.raises(OSError, match="No space left on device"):
        store.client()
    assert files(folder) <= {"store", "mlflow.db.lock"}
    free(folder / "disk")
    assert store.client().search_experiments() != []


def test_a_run_is_rejected_in_one_line(folder):
    fill(folder / "disk")
    line = ("train", *TINY, f"tracking.uri={uri_in(folder)}", "hydra.run.dir=run")
    done = pipeline(*line, cwd=folder, status=2)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"pipeline: tracking.uri {RULE}{folder}/disk has no space")
    assert files(folder) == set()
