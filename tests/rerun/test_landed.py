"""What an earlier version recorded can be rerun, reported and resumed.

The jobs that are missing from a sweep can be run again.
"""

from __future__ import annotations

import sqlite3
import tarfile
import zlib
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.running import Store, one_process

LANDED = Path(__file__).parents[1] / "fixtures" / "landed" / "store.tar.xz"
# The starts of their run IDs.
RUN = "1d4e27389b14"
MULTIRUN = "da57269d0b99"
SEEDS = "047ed851fc11"
INTERRUPTED = "4e36a9a50a53"
UNINTERRUPTED = "b35d930823f9"
# Of the interrupted run: the update of its checkpoint, and how many there are in all.
CHECKPOINT = 9
UPDATES = 48
OF_MULTIRUN = (
    "model=mlp training.epochs=1 hardware.device=cpu "
    "tracking.log_model=false tracking.system_metrics=false"
)


@dataclass(frozen=True)
class Landed:
    """The recorded store, and what commands did with it.

    Attributes:
        store: the store.
        answers: what each command line did.
        runs: the recorded runs, by the start of their ID.
    """

    store: Store
    answers: dict[str, dict]
    runs: dict


@dataclass(frozen=True)
class LandedWider:
    """The same after more commands.

    Attributes:
        store: the store.
        answers: what each command line did.
        runs_before: how many runs there were before a job was run again.
        lost: the run that was deleted before that.
    """

    store: Store
    answers: dict[str, dict]
    runs_before: int
    lost: object


def restore(folder: Path) -> Store:
    """Place the recorded store in `folder`."""
    with tarfile.open(LANDED) as packed:
        packed.extractall(folder, filter="data")
    dump = folder / "mlruns" / "store.sql"
    script = dump.read_text(encoding="utf-8").replace("/somewhere", str(folder))
    with closing(sqlite3.connect(folder / "mlruns" / "mlflow.db")) as database:
        database.executescript(script)
    dump.unlink()
    journal = folder / "outputs" / "interrupted" / "journal.jsonl"
    journal.write_bytes(moved(journal.read_bytes(), folder))
    return Store(folder)


def moved(journal: bytes, folder: Path) -> bytes:
    """Return a journal that names `folder`.

    Each of its lines starts with the CRC of all lines up to it.
    """
    lines = []
    crc = 0
    head = len('{"crc":"00000000",')
    journal = journal.replace(b"/somewhere", str(folder).encode())
    for line in journal.splitlines(keepends=True):
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


def runs_by_start(store: Store) -> dict:
    return {run.info.run_id[:12]: run for run in store.runs()}


def is_second_job(run) -> bool:
    """Return whether a run is the second job of the sweep over seeds."""
    tags = run.data.tags
    return tags.get("sweep", "")[:12] == SEEDS and tags["sweep.job"] == "seed=1"


@pytest.fixture(scope="module")
def landed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("landed")
    store = restore(folder)
    runs = runs_by_start(store)
    # How a processor compresses the digits differs in bytes: here the points say that
    # the data are the same.
    line = f"rerun {runs[RUN].info.run_id} dataset.checksum=none"
    return Landed(store, one_process({"rerun": line}, folder), runs)


@pytest.fixture(scope="module")
def landed_wider(landed):
    store = landed.store
    (second,) = [run for run in landed.runs.values() if is_second_job(run)]
    sweep = landed.runs[MULTIRUN].info.run_id
    again = f"sweep seeds --again {SEEDS} hydra/launcher=basic"
    lines = {
        "report": f"report {MULTIRUN}",
        "resume": "resume outputs/interrupted dataset.checksum=none",
        "nothing left": again,
        "nothing left of a multirun": f"train -m {OF_MULTIRUN} "
        f"accumulation.factor=1,2,4 hydra/launcher=basic tracking.sweep={sweep}",
    }
    answers = landed.answers | one_process(lines, store.folder)
    runs_before = len(store.runs())
    forget(store, second.info.run_id)
    answers |= one_process({"one left": again}, store.folder)
    return LandedWider(store, answers, runs_before, second)


def test_a_run_reruns_to_the_same_points(landed):
    answer = landed.answers["rerun"]
    assert answer["status"] == 0, answer["err"]
    runs = landed.store.runs()
    (new,) = [run for run in runs if run.data.tags.get("rerun.of", "")[:12] == RUN]
    assert new.data.tags["rerun.verdict"] in ("bit-equal", "equal within rounding")
    params = new.data.params
    assert params["model._target_"] == "pipeline.components.model.mlp"
    metric = params["training.metrics.bits._target_"]
    assert metric == "pipeline.components.metrics.BitsPerToken"


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_its_end(landed_wider):
    answer = landed_wider.answers["resume"]
    assert answer["status"] == 0, answer["err"]
    store = landed_wider.store
    runs = runs_by_start(store)
    assert runs[INTERRUPTED].info.status == "FINISHED"
    resumed = store.history(runs[INTERRUPTED], "train/loss")
    straight = store.history(runs[UNINTERRUPTED], "train/loss")
    assert list(resumed) == list(straight) == list(range(1, UPDATES + 1))
    for update in range(1, CHECKPOINT + 1):
        assert resumed[update] == straight[update]
    # On the machine that recorded them they are bit-identical.
    assert resumed == pytest.approx(straight, rel=1e-3)


@pytest.mark.slow
def test_a_sweep_reports(landed_wider):
    answer = landed_wider.answers["report"]
    assert answer["status"] == 0, answer["err"]
    assert "Jobs: 3 of 3 jobs finished." in answer["out"]
    assert any(path.endswith("report/report.html") for path in answer["changed"])


@pytest.mark.slow
def test_a_sweep_has_nothing_left(landed_wider):
    for case, jobs in (("nothing left", 2), ("nothing left of a multirun", 3)):
        answer = landed_wider.answers[case]
        assert answer["status"] == 0, answer["err"]
        assert f"{jobs} of {jobs} jobs finished" in answer["err"]
        assert ": started" not in answer["err"]
    assert landed_wider.runs_before == 11  # the ten that were recorded, and the rerun


@pytest.mark.slow
def test_what_is_missing_of_a_sweep_runs_again_to_the_same_loss(landed_wider):
    answer = landed_wider.answers["one left"]
    assert answer["status"] == 0, answer["err"]
    started = [line for line in answer["err"].splitlines() if ": started" in line]
    assert started == ["  seed=1: started"]
    runs = landed_wider.store.runs()
    assert len(runs) == landed_wider.runs_before
    (new,) = [run for run in runs if is_second_job(run)]
    lost = landed_wider.lost
    assert new.info.run_id != lost.info.run_id
    loss = new.data.metrics["train/loss"]
    assert loss == pytest.approx(lost.data.metrics["train/loss"], rel=1e-4)
