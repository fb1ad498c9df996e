"""Heartbeats of a sweep: they tell whether a process still works on a sweep that the store calls RUNNING."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterable
from typing import Any

from pipeline.common.errors import ConfigError

ALIVE = "sweep.alive"  # tag of the parent: time of the last heartbeat, in ms since the epoch
# Metrics that show that a job is alive. System metrics come every few seconds, also where an update takes minutes.
SIGNS = ("train/loss", "system/cpu_utilization_percentage")
HEARTBEAT, GONE = 20.0, 120.0  # seconds between two heartbeats; seconds of silence after which a process is gone


def beat(client: Any, run_id: str, closed: threading.Event) -> None:
    """Start a thread that writes heartbeats to the store until `closed` is set."""

    def tell() -> None:
        while not closed.is_set():
            with contextlib.suppress(Exception):  # the store may be away for a while
                client.set_tag(run_id, ALIVE, str(int(time.time() * 1000)))
            closed.wait(HEARTBEAT)

    threading.Thread(target=tell, daemon=True).start()


def close_abandoned(client: Any, parent: Any, children: Iterable[Any]) -> None:
    """Close those `children` of a sweep whose processes ended without closing their runs.

    Raises:
        ConfigError: a process of the sweep gave a sign of life less than `GONE` seconds ago.
    """
    running = [run for run in children if run.info.status == "RUNNING"]
    alive = parent.data.tags.get(ALIVE, "")
    signs = [int(alive) if re.fullmatch("[0-9]{1,15}", alive) else 0] if parent.info.status == "RUNNING" else []
    for run in running:
        histories = [client.get_metric_history(run.info.run_id, key) for key in SIGNS if key in run.data.metrics]
        signs += [run.info.start_time, *(point.timestamp for history in histories for point in history)]
    silence = time.time() - max(signs, default=0) / 1000
    if silence < GONE:
        rule = f"must have ended: {silence:.0f} s ago it still gave a sign of life ({GONE:.0f} s of silence are enough)"
        raise ConfigError("SWEEP", rule, parent.info.run_id)
    for run in running:
        close_lost(client, run)


def close_lost(client: Any, run: Any) -> None:
    """Close the run of a job whose process and shipper have ended."""
    client.set_tag(run.info.run_id, "failure", "The job ended, and its shipper, without a word.")
    client.set_terminated(run.info.run_id, "KILLED")
