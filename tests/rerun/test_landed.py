"""A run and two sweeps that an earlier version recorded still rerun, report, and run what is missing of them."""

from __future__ import annotations

import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from tests.running import Store, one_process

LANDED = Path(__file__).parents[1] / "fixtures" / "landed" / "store.tar.xz"
RUN, MULTIRUN, SEEDS = "10849ed9c6dd", "bffe1a1d6f49", "d64aa7187fc7"  # the starts of their run IDs
ASKED = "model=mlp training.epochs=1 hardware.device=cpu tracking.log_model=false tracking.system_metrics=false"


def restore(folder: Path) -> Store:
    """Place the recorded store in `folder`."""
    with tarfile.open(LANDED) as packed:
        packed.extractall(folder, filter="data")
    dump = folder / "mlruns" / "store.sql"
    with closing(sqlite3.connect(folder / "mlruns" / "mlflow.db")) as database:
        database.executescript(dump.read_text(encoding="utf-8").replace("/somewhere", str(folder)))
    dump.unlink()
    return Store(folder)


def forget(store: Store, run_id: str) -> None:
    """Delete a run from the database as if it had never been."""
    with closing(sqlite3.connect(store.folder / "mlruns" / "mlflow.db")) as database, database:
        for table in ("metrics", "latest_metrics", "params", "tags", "runs"):
            database.execute(f"DELETE FROM {table} WHERE run_uuid = ?", (run_id,))


@pytest.fixture(scope="module")
def landed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("landed")
    store = restore(folder)
    runs = {run.info.run_id[:12]: run for run in store.runs()}
    (second,) = [run for run in runs.values() if run.data.tags.get("sweep", "")[:12] == SEEDS and _job(run) == "seed=1"]
    parent = {name: runs[name].info.run_id for name in (MULTIRUN, SEEDS)}
    answers = one_process(
        {
            "rerun": f"rerun {runs[RUN].info.run_id}",
            "report": f"report {MULTIRUN}",
            "nothing left": f"sweep seeds --again {SEEDS} hydra/launcher=basic",
            "nothing left of a multirun": f"train -m {ASKED} accumulation.factor=1,2,4 hydra/launcher=basic "
            f"tracking.sweep={parent[MULTIRUN]}",
        },
        folder,
    )
    before = len(store.runs())
    forget(store, second.info.run_id)
    answers |= one_process({"one left": f"sweep seeds --again {SEEDS} hydra/launcher=basic"}, folder)
    return store, answers, before, second


def _job(run) -> str:
    return run.data.tags["sweep.job"]


def test_a_run_reruns_to_the_same_points(landed):
    store, answers, _, _ = landed
    assert answers["rerun"]["status"] == 0, answers["rerun"]["err"]
    (new,) = [run for run in store.runs() if run.data.tags.get("rerun.of", "")[:12] == RUN]
    assert new.data.tags["rerun.verdict"] in ("bit-equal", "equal within rounding")


def test_a_sweep_reports(landed):
    _, answers, _, _ = landed
    assert answers["report"]["status"] == 0, answers["report"]["err"]
    assert "Jobs: 3 of 3 jobs finished." in answers["report"]["out"]
    assert [path for path in answers["report"]["changed"] if path.endswith("report/report.html")]


def test_a_sweep_has_nothing_left(landed):
    _, answers, before, _ = landed
    for case, jobs in (("nothing left", 2), ("nothing left of a multirun", 3)):
        assert answers[case]["status"] == 0, answers[case]["err"]
        assert f"{jobs} of {jobs} jobs finished" in answers[case]["err"]
        assert ": started" not in answers[case]["err"]
    assert before == 9  # the eight that were recorded, and the rerun


def test_what_is_missing_of_a_sweep_runs_again_to_the_same_loss(landed):
    store, answers, before, lost = landed
    assert answers["one left"]["status"] == 0, answers["one left"]["err"]
    assert [line for line in answers["one left"]["err"].splitlines() if ": started" in line] == ["  seed=1: started"]
    assert len(store.runs()) == before
    (new,) = [run for run in store.runs() if _is_second(run)]
    assert new.info.run_id != lost.info.run_id
    assert new.data.metrics["train/loss"] == pytest.approx(lost.data.metrics["train/loss"], rel=1e-4)


def _is_second(run) -> bool:
    return run.data.tags.get("sweep", "")[:12] == SEEDS and _job(run) == "seed=1"
