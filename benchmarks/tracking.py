"""The training loop that logs every update ÷ the same loop that logs nothing.

The CPU time of a logged update is measured too. Both loops are
`pipeline.training.loop.Trainer`. The tracked one has a journal and a shipper with a
SQLite store, as `pipeline train` has, and logs ten metrics an update beside the
system's. During a turn of the other one the shipper is stopped (SIGSTOP), so that all
its work is charged to the turns of the loop that it works for. Each of these turns has
at least one write into the store, because a pair of turns is longer than the time
between two writes.

CPU time is that of the trainer's thread within the recorder, fetching included, and of
the shipper's process until the last row is in the store, without their start.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import fit
from benchmarks.figures import Figure, ratios
from benchmarks.turns import Coroutine, alternate
from benchmarks.workloads import Workload
from pipeline.tracking.journal import Journal
from pipeline.tracking.journal_lines import RunStart
from pipeline.tracking.tracker import Tracker
from pipeline.training.progress import Progress
from pipeline.training.recorder import Recorder

SLOW = 0.050  # seconds of an update from which on the ratio has a target
PATIENCE = 60  # seconds that the shipper may take to bring its rows to the store


@dataclass(frozen=True)
class Measurement:
    """The seconds of all turns, and what logging cost in them.

    Attributes:
        times: the seconds of every contender in every round.
        logged: updates that were logged.
        cpu_seconds: CPU time of these updates.
    """

    times: dict[str, list[float]]
    logged: int
    cpu_seconds: float


def measure(workload: Workload, rounds: int, seconds: float) -> list[Figure]:
    """Return the ratio and the CPU time of an update."""
    updates = fit.updates_within(workload, seconds)
    with tempfile.TemporaryDirectory() as folder:
        measurement = _measured(workload, updates, rounds, Path(folder))
    times = measurement.times

    examples = workload.effective * updates
    update_seconds = min(times["bare"]) / updates
    target = None
    note = ""
    if update_seconds >= SLOW:
        target = 0.98
    else:
        note = (
            f"an update takes {1e3 * update_seconds:.1f} ms: "
            f"no target under {1e3 * SLOW:.0f} ms"
        )
    return [
        Figure(
            "tracking",
            workload.name,
            "tracked ÷ bare",
            ratios(times["bare"], times["tracked"]),
            best={who: examples / min(turns) for who, turns in times.items()},
            best_unit="examples/s",
            at_least=target,
            note=note,
        ),
        Figure(
            "tracking",
            workload.name,
            "CPU time of a logged update",
            [1e3 * measurement.cpu_seconds / measurement.logged],
            unit="ms",
            at_most=1.0,
            note=f"over {measurement.logged} updates of {1e3 * update_seconds:.1f} ms",
        ),
    ]


def _measured(
    workload: Workload, updates: int, rounds: int, folder: Path
) -> Measurement:
    """Run both loops in turns, with a store in `folder`."""
    store = folder / "mlflow.db"
    journal = Journal(f"sqlite:///{store}", "benchmark")
    journal.ready()
    run = RunStart(experiment="benchmark", name=workload.name, system_metrics=True)
    ids = journal.start(folder / "journal.jsonl", run)
    assert ids is not None, "the store is on this machine"
    run_id = ids.run_id
    shipper = journal.shipper.process.pid

    plan = fit.plan(workload)
    tracker = Tracker(journal, folder, plan)
    progress = Progress(fit.FOREVER, shown=False)
    recorder = TimedRecorder(tracker, plan, 1, lambda: 0, progress)
    contenders = {
        "tracked": Coroutine(fit.ours(workload, updates, recorder)),
        "bare": Coroutine(fit.ours(workload, updates)),
    }
    try:
        # The start is no part of the CPU time.
        alternate(contenders, 1)
        _wait(store, run_id, recorder.logged)
        logged = recorder.logged
        cpu_seconds = recorder.cpu_seconds + _cpu_seconds(shipper)

        bare = _with_process_stopped(shipper, contenders["bare"])
        times = alternate(contenders | {"bare": bare}, rounds)
        _wait(store, run_id, recorder.logged)
        return Measurement(
            times,
            recorder.logged - logged,
            recorder.cpu_seconds + _cpu_seconds(shipper) - cpu_seconds,
        )
    finally:
        for contender in contenders.values():
            contender.close()
        journal.close("FINISHED")


class TimedRecorder(Recorder):
    """Counts the rows it logs and the CPU time of its thread for them."""

    cpu_seconds = 0.0
    logged = 0

    def fetch(self) -> None:
        begun = time.thread_time()
        rows = len(self._unfetched)
        super().fetch()
        self.cpu_seconds += time.thread_time() - begun
        self.logged += rows


def _with_process_stopped(pid: int, turn: Callable[[], None]) -> Callable[[], None]:
    def turn_of_this_process() -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            turn()
        finally:
            os.kill(pid, signal.SIGCONT)

    return turn_of_this_process


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _wait(store: Path, run_id: str, rows: int) -> None:
    """Wait until the shipper has brought all `rows` updates to the store."""
    query = "SELECT COUNT(*) FROM metrics WHERE run_uuid = ? AND key = 'train/loss'"
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with sqlite3.connect(store, timeout=30) as connection:
            if connection.execute(query, (run_id,)).fetchone()[0] >= rows:
                return
        time.sleep(0.2)
    raise RuntimeError(
        f"the shipper did not bring {rows} updates to the store within a minute"
    )
