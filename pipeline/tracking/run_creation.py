"""Finds the run of a journal in a store, or creates it once."""

import time
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException

from pipeline.common import imports
from pipeline.common.errors import ConfigError
from pipeline.tracking import failures
from pipeline.tracking.journal_lines import Start
from pipeline.tracking.store import Store, check_id

CREATE_TRIES = 5  # maximum number of attempts to create the run
CREATE_RETRY = 1.0  # seconds between two attempts


class RunDirError(ConfigError):
    """The run of a run directory is deleted, or is being shipped by another process."""

    def __init__(self, rule: str, run_dir: Path):
        super().__init__("RUN_DIR", rule, str(run_dir))


def find_or_create(
    store: Store, line: Start, run_dir: Path, *, may_exist: bool, run_id: str
) -> Any:
    """Return the run of a journal; create it, and its experiment, if it does not exist.

    Args:
        store: the store.
        line: the first line of the journal.
        run_dir: the run directory, for errors.
        may_exist: whether another process may have created the run.
        run_id: the run's ID, or "" if it is not known.

    Raises:
        RunDirError: the run is deleted.
        ConfigError: the experiment is deleted.
        MlflowException: the run was rejected, or `CREATE_TRIES` attempts have failed.
    """
    journal = line.start.tags["journal"]
    if may_exist:
        run = _find(store, journal, run_dir, run_id)
        if run is not None:
            return run

    # A failed request may still have created the run. So MLflow's own retries are
    # disabled, and before each further attempt the run is searched for.
    experiment_id = store.experiment(line.start.experiment)
    tries = 0
    while True:
        tries += 1
        try:
            return _create(store, experiment_id, line)
        except MlflowException as error:
            if tries == CREATE_TRIES or failures.is_rejected(error):
                raise
        time.sleep(CREATE_RETRY)
        run = _find(store, journal, run_dir)
        if run is not None:
            return run


def _find(store: Store, journal: str, run_dir: Path, run_id: str = "") -> Any:
    """Return the run with this value of the tag `journal`, or None.

    Raises:
        RunDirError: the run is deleted.
    """
    run = store.find_run(journal, run_id)
    if run is not None and run.info.lifecycle_stage != "active":
        command = f"mlflow runs restore --run-id {run.info.run_id}"
        rule = f"must have a run that is not deleted; to restore it: {command}"
        raise RunDirError(rule, run_dir)
    return run


def _create(store: Store, experiment_id: str, line: Start) -> Any:
    """Create the run with one request."""
    client = store.client()
    start = line.start
    # MLflow reads the variable at each request.
    with imports.variables_set(MLFLOW_HTTP_REQUEST_MAX_RETRIES="0"):
        run = client.create_run(experiment_id, line.time, dict(start.tags), start.name)
    check_id(run.info.run_id, "a run")
    return run
