"""Signs of life: whether the processes of a sweep and of its jobs still run.

The process that runs a sweep writes heartbeats to a tag of the parent run. For a job,
the start of its run and the metrics that it logs are signs of life.
"""

import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.common.errors import ConfigError
from pipeline.sweep import sweep_file
from pipeline.tracking.foreign_store import SweepRecord

ALIVE = "sweep.alive"  # tag of the parent: the last heartbeat, in ms since the epoch
# Seconds without a sign of life after which a process counts as dead.
SILENCE_LIMIT = 120.0
_HEARTBEAT_INTERVAL = 20.0  # seconds
# Metrics whose newest point shows when a job was last alive. System metrics are logged
# every few seconds, even if an update takes minutes.
_METRICS_OF_LIFE = ("train/loss", "system/cpu_utilization_percentage")


def write_heartbeats(parent: SweepRecord, closed: threading.Event) -> None:
    """Write heartbeats to the store until the sweep is closed."""
    while not closed.is_set():
        with suppress(Exception):  # the store may be unreachable for a while
            write_heartbeat(parent)
        closed.wait(_HEARTBEAT_INTERVAL)


def write_heartbeat(parent: SweepRecord) -> None:
    """Write one heartbeat to the store."""
    parent.client().set_tag(parent.run_id, ALIVE, str(int(time.time() * 1000)))


def reject_if_alive(
    client: Any, stored_parent: Any, running_jobs: Sequence[Any] = ()
) -> None:
    """Reject a sweep with a sign of life in the last `SILENCE_LIMIT` seconds.

    Args:
        client: an MLflow client for the store.
        stored_parent: MLflow's run of the sweep. Its heartbeats count while it is
            RUNNING, unless its process has certainly ended.
        running_jobs: the runs of jobs whose signs of life count, too; all are RUNNING.

    Raises:
        ConfigError: the sweep, or one of the jobs, is alive.
    """
    signs = [0]  # signs of life, in ms since the epoch
    if has_process(stored_parent):
        signs.append(_heartbeat(stored_parent))
    for run in running_jobs:
        signs.append(run.info.start_time)
        for key in _METRICS_OF_LIFE:
            if key in run.data.metrics:
                for point in client.get_metric_history(run.info.run_id, key):
                    signs.append(point.timestamp)

    silence = time.time() - max(signs) / 1000
    if silence < SILENCE_LIMIT:
        rule = (
            f"must have ended: {silence:.0f} s ago it still gave a sign of life "
            f"(it counts as ended after {SILENCE_LIMIT:.0f} s of silence)"
        )
        raise ConfigError("SWEEP", rule, stored_parent.info.run_id)


def was_killed(stored_parent: Any) -> bool:
    """Return whether a sweep is RUNNING in the store, though no process runs it."""
    if stored_parent.info.status != "RUNNING":
        return False
    # The first heartbeat is written some time after the parent run is created.
    is_new = time.time() - stored_parent.info.start_time / 1000 < SILENCE_LIMIT
    if ALIVE not in stored_parent.data.tags and is_new:
        return False
    return not has_process(stored_parent)


def has_process(stored_parent: Any) -> bool:
    """Return whether a process runs a sweep, by its last heartbeat and by its lock."""
    is_silent = time.time() - _heartbeat(stored_parent) / 1000 >= SILENCE_LIMIT
    return not is_silent and not _process_has_ended(stored_parent)


def _process_has_ended(stored_parent: Any) -> bool:
    """Return whether the process that runs a sweep has certainly ended.

    This is known only on its machine, and only if the sweep's folder lies below the
    working directory.
    """
    process_id = stored_parent.data.tags.get(sweep_file.PROCESS)
    if process_id is None:
        return False
    for folder in sweep_file.folders_below(Path()):
        if sweep_file.has_ended(folder, process_id):
            return True
    return False


def _heartbeat(stored_parent: Any) -> int:
    """Return the time of a sweep's last heartbeat, in ms since the epoch.

    It is 0 if there is none, or if the sweep is not RUNNING.
    """
    heartbeat = stored_parent.data.tags.get(ALIVE, "")
    is_time = re.fullmatch("[0-9]{1,15}", heartbeat)
    if stored_parent.info.status != "RUNNING" or not is_time:
        return 0
    return int(heartbeat)
