"""Runs and sweeps that an earlier version recorded can be rerun, reported, resumed, and run again where jobs miss."""

from __future__ import annotations

import sqlite3
import tarfile
import zlib
from contextlib import closing
from pathlib import Path

import pytest

from tests.running import Store, one_process

LANDED = Path(__file__).parents[1] / "fixtures" / "landed" / "store.tar.xz"
# The starts of their run IDs.
RUN, MULTIRUN, SEEDS = "1d4e27389b14", "da57269d0b99", "047ed851fc11"
INTERRUPTED, UNINTERRUPTED = "4e36a9a50a53", "b35d930823f9"
CHECKPOINT, UPDATES = 9, 48  # of the interrupted run
ASKED = "model=mlp training.epochs=1 hardware.device=cpu tracking.log_model=false tracking.system_metrics=false"


def restore(folder: Path) -> Store:
    """Place the recorded store in `folder`."""
    with tarfile.open(LANDED) as packed:
        packed.extractall(folder, filter="data")
    dump = folder / "mlruns" / "store.sql"
    with closing(sqlite3.connect(folder / "mlruns" / "mlflow.db")) as database:
        database.executescript(
            dump.read_text(encoding="utf-8").replace("/somewhere", str(folder))
        )
    dump.unlink()
    journal = folder / "outputs" / "interrupted" / "journal.jsonl"
    journal.write_bytes(moved(journal.read_bytes(), folder))
    return Store(folder)


def moved(journal: bytes, folder: Path) -> bytes:
    """Return a journal that names `folder`: each line starts with the CRC of all lines up to it."""
    lines, crc, head = [], 0, len('{"crc":"00000000",')
    for line in journal.replace(b"/somewhere", str(folder).encode()).splitlines(
        keepends=True
    ):
        crc = zlib.crc32(line[head:], crc)
        lines.append(f'{{"crc":"{crc:08x}",'.encode() + line[head:])
    return b"".join(lines)


def forget(store: Store, run_id: str) -> None:
    """Delete a run from the database as if it had never been."""
    with (
        closing(sqlite3.connect(store.folder / "mlruns" / "mlflow.db")) as database,
        database,
    ):
        for table in ("metrics", "latest_metrics", "params", "tags", "runs"):
            database.execute(f"DELETE FROM {table} WHERE run_uuid = ?", (run_id,))


@pytest.fixture(scope="module")
def landed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("landed")
    store = restore(folder)
    runs = {run.info.run_id[:12]: run for run in store.runs()}
    # How a processor compresses the digits differs in bytes: here the points say that the data are the same.
    answers = one_process(
        {"rerun": f"rerun {runs[RUN].info.run_id} dataset.checksum=none"}, folder
    )
    return store, answers, runs


@pytest.fixture(scope="module")
def landed_wider(landed):
    store, answers, runs = landed
    (second,) = [
        run
        for run in runs.values()
        if run.data.tags.get("sweep", "")[:12] == SEEDS and _job(run) == "seed=1"
    ]
    answers |= one_process(
        {
            "report": f"report {MULTIRUN}",
            "resume": "resume outputs/interrupted dataset.checksum=none",
            "nothing left": f"sweep seeds --again {SEEDS} hydra/launcher=basic",
            "nothing left of a multirun": f"train -m {ASKED} accumulation.factor=1,2,4 hydra/launcher=basic "
            f"tracking.sweep={runs[MULTIRUN].info.run_id}",
        },
        store.folder,
    )
    before = len(store.runs())
    forget(store, second.info.run_id)
    answers |= one_process(
        {"one left": f"sweep seeds --again {SEEDS} hydra/launcher=basic"}, store.folder
    )
    return store, answers, before, second


def _job(run) -> str:
    return run.data.tags["sweep.job"]


def test_a_run_reruns_to_the_same_points(landed):
    store, answers, _ = landed
    assert answers["rerun"]["status"] == 0, answers["rerun"]["err"]
    (new,) = [
        run for run in store.runs() if run.data.tags.get("rerun.of", "")[:12] == RUN
    ]
    assert new.data.tags["rerun.verdict"] in ("bit-equal", "equal within rounding")
    built = [
        new.data.params[key]
        for key in ("model._target_", "training.metrics.bits._target_")
    ]
    assert built == [
        "pipeline.components.model.mlp",
        "pipeline.components.metrics.BitsPerToken",
    ]


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_its_end(landed_wider):
    store, answers, _, _ = landed_wider
    assert answers["resume"]["status"] == 0, answers["resume"]["err"]
    runs = {run.info.run_id[:12]: run for run in store.runs()}
    assert runs[INTERRUPTED].info.status == "FINISHED"
    resumed, straight = (
        store.history(runs[run_id], "train/loss")
        for run_id in (INTERRUPTED, UNINTERRUPTED)
    )
    assert list(resumed) == list(straight) == list(range(1, UPDATES + 1))
    assert [resumed[update] for update in range(1, CHECKPOINT + 1)] == list(
        straight.values()
    )[:CHECKPOINT]
    assert resumed == pytest.approx(
        straight, rel=1e-3
    )  # equal to the bit on the machine that recorded them


@pytest.mark.slow
def test_a_sweep_reports(landed_wider):
    _, answers, _, _ = landed_wider
    assert answers["report"]["status"] == 0, answers["report"]["err"]
    assert "Jobs: 3 of 3 jobs finished." in answers["report"]["out"]
    assert [
        path
        for path in answers["report"]["changed"]
        if path.endswith("report/report.html")
    ]


@pytest.mark.slow
def test_a_sweep_has_nothing_left(landed_wider):
    _, answers, before, _ = landed_wider
    for case, jobs in (("nothing left", 2), ("nothing left of a multirun", 3)):
        assert answers[case]["status"] == 0, answers[case]["err"]
        assert f"{jobs} of {jobs} jobs finished" in answers[case]["err"]
        assert ": started" not in answers[case]["err"]
    assert before == 11  # the ten that were recorded, and the rerun


@pytest.mark.slow
def test_what_is_missing_of_a_sweep_runs_again_to_the_same_loss(landed_wider):
    store, answers, before, lost = landed_wider
    assert answers["one left"]["status"] == 0, answers["one left"]["err"]
    assert [
        line for line in answers["one left"]["err"].splitlines() if ": started" in line
    ] == ["  seed=1: started"]
    assert len(store.runs()) == before
    (new,) = [run for run in store.runs() if _is_second(run)]
    assert new.info.run_id != lost.info.run_id
    assert new.data.metrics["train/loss"] == pytest.approx(
        lost.data.metrics["train/loss"], rel=1e-4
    )


def _is_second(run) -> bool:
    return run.data.tags.get("sweep", "")[:12] == SEEDS and _job(run) == "seed=1"
