"""The training loop that logs every update ÷ the same loop that logs nothing, and the CPU time of a logged update.

Both are `pipeline.training.loop.Trainer`. The tracked one has a journal and a shipper with a SQLite store, as
`pipeline train` has, and logs ten metrics an update beside the system's. While the other one has its turn the
shipper is stopped (SIGSTOP), so that all it does is charged to the turns of the loop that it works for: at least
one writing into the store in each, because a pair of turns is longer than what lies between two.

CPU time is that of the trainer's thread inside the recorder, fetching included, and of the shipper's whole process
until the last row is in the store; their start is not in it.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks import fit
from benchmarks.figures import Figure, ratios
from benchmarks.turns import Coroutine, alternate
from benchmarks.workloads import sizes
from pipeline.tracking.journal import Journal
from pipeline.tracking.tracker import Tracker
from pipeline.training.progress import Progress
from pipeline.training.recorder import Recorder

SLOW = 0.050  # seconds of an update from which on the ratio has a target


def measure(name: str, rounds: int, seconds: float) -> list[Figure]:
    """The ratio and the CPU time."""
    updates = fit.updates_within(name, seconds)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "mlflow.db"
        journal = Journal(f"sqlite:///{store}", "benchmark")
        journal.ready()
        tracker = Tracker(journal, Path(folder), fit.plan(name))
        run = {
            "experiment": "benchmark",
            "name": name,
            "params": {},
            "tags": {},
            "system_metrics": True,
        }
        run_id = journal.start(Path(folder) / "journal.jsonl", run)["run_id"]
        recorder = Metered(
            tracker, fit.plan(name), 1, lambda: 0, Progress(fit.FOREVER, shown=False)
        )
        contenders = {
            "tracked": Coroutine(fit.ours(name, updates, recorder)),
            "bare": Coroutine(fit.ours(name, updates)),
        }
        try:
            alternate(contenders, 1)
            _wait(store, run_id, recorder.logged)
            first, cpu = (
                recorder.logged,
                recorder.cpu + _cpu(journal.shipper.process.pid),
            )
            turns = contenders | {
                "bare": _stopped(journal.shipper.process.pid, contenders["bare"])
            }
            times = alternate(turns, rounds)
            _wait(store, run_id, recorder.logged)
            each = (recorder.cpu + _cpu(journal.shipper.process.pid) - cpu) / (
                recorder.logged - first
            )
        finally:
            for contender in contenders.values():
                contender.close()
            journal.close("FINISHED")
    best = {
        who: sizes(name).effective * updates / min(values)
        for who, values in times.items()
    }
    ratio = Figure(
        "tracking",
        name,
        "tracked ÷ bare",
        ratios(times["bare"], times["tracked"]),
        "",
        best,
        "examples/s",
    )
    update = min(times["bare"]) / updates
    if update >= SLOW:
        ratio.at_least = 0.98
    else:
        ratio.note = f"an update takes {1e3 * update:.1f} ms: no target under {1e3 * SLOW:.0f} ms"
    logged = f"over {recorder.logged - first} updates of {1e3 * update:.1f} ms"
    return [
        ratio,
        Figure(
            "tracking",
            name,
            "CPU of a logged update",
            [1e3 * each],
            "ms",
            at_most=1.0,
            note=logged,
        ),
    ]


class Metered(Recorder):
    """Counts the rows it logs and the CPU time of its thread for them."""

    cpu = 0.0
    logged = 0

    def fetch(self) -> None:
        begun, rows = time.thread_time(), len(self._unfetched)
        super().fetch()
        self.cpu += time.thread_time() - begun
        self.logged += rows


def _stopped(pid: int, turn: Callable[[], None]) -> Callable[[], None]:
    def stopped() -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            turn()
        finally:
            os.kill(pid, signal.SIGCONT)

    return stopped


def _cpu(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _wait(store: Path, run_id: str, rows: int) -> None:
    """Until the shipper has brought all `rows` updates there."""
    query = "SELECT COUNT(*) FROM metrics WHERE run_uuid = ? AND key = 'train/loss'"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with sqlite3.connect(store, timeout=30) as connection:
            if connection.execute(query, (run_id,)).fetchone()[0] >= rows:
                return
        time.sleep(0.2)
    raise RuntimeError(
        f"the shipper did not bring {rows} updates to the store within a minute"
    )
