"""A run that MLflow does not take is closed, and says why."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pipeline.errors import ConfigError
from pipeline.tracking.journal import Journal
from tests.running import Store, environment

RUN = {"experiment": "pipeline", "name": "one", "params": {}, "tags": {}, "system_metrics": False}


def test_a_run_that_mlflow_refuses_is_failed(tmp_path):
    journal = Journal(f"sqlite:///{tmp_path}/mlruns/mlflow.db", "pipeline")
    journal.ready()
    with pytest.raises(RuntimeError, match="MLflow refused the run"):
        journal.start(tmp_path / "journal.jsonl", RUN | {"params": {"a//b": "1"}})
    assert Store(tmp_path).run().info.status == "FAILED"


def test_a_new_store_is_put_in_place_whole(tmp_path):
    journal = Journal(f"sqlite:///{tmp_path}/mlruns/mlflow.db", "pipeline")
    journal.ready()
    assert not (tmp_path / "mlruns").exists()  # until a run starts
    journal.start(tmp_path / "journal.jsonl", RUN)
    assert journal.close("FINISHED") is None
    assert Store(tmp_path).run().info.status == "FINISHED"
    assert not list((tmp_path / "mlruns").glob("*.new"))


def test_a_journal_is_of_one_run(tmp_path):
    (tmp_path / "journal.jsonl").write_text("{}\n")
    journal = Journal(f"sqlite:///{tmp_path}/mlruns/mlflow.db", "pipeline")
    journal.ready()
    try:
        with pytest.raises(ConfigError, match="must be a folder without a run in it"):
            journal.start(tmp_path / "journal.jsonl", RUN)
    finally:
        journal.abandon()
    assert not (tmp_path / "mlruns").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_a_user_without_a_name_is_recorded():
    # Imported first: somebody without a name may not read what root may.
    asked = (
        "import os; from pipeline.tracking import provenance\n"
        "os.setuid(54321); print(provenance.origin()['mlflow.user'])"
    )
    names = ("LOGNAME", "USER", "LNAME", "USERNAME")
    nameless = {key: value for key, value in environment().items() if key not in names}
    done = subprocess.run(
        [sys.executable, "-c", asked], cwd="/", env=nameless, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "unknown\n"
