"""Logs runs to MLflow through a journal on disk.

Input: rows of metrics for updates and evaluations, tags, files. Output: a journal,
which a separate process ships to the store.

- `tracker` writes the logged metrics, tags and files.
- `provenance` records the environment and the data. `record_files` downloads the record
  of a run, and checks its form. `shown_files` names pictures and tables.
- `journal`, `journal_lines` and `journal_file` document the journal, its lines, and its
  state after a crash.
- `journal_summary` reads what a list of runs shows. `horizons` records and reads the
  horizons of a run that was resumed with a different one, `resumed_settings` other
  settings that a resumed run has changed.
- `store` opens a store, and creates a new SQLite store. `foreign_store` finds runs and
  sweeps in a store that may not be the user's own, and composes the commands that
  messages show.
- `run_paths` names the run to which a path belongs.
- `model_registry` finds logged models, and downloads their weights.
- `sync_run` ships the journal of a trainer that has ended. `older_copy` recognizes a
  run directory whose run was continued in another copy. `evaluation_log` adds the
  results of `pipeline evaluate` to a run that has ended.

Importing this package sets environment variables of MLflow, and silences loggers.
"""

import logging
import os

__all__ = [
    "evaluation_log",
    "foreign_store",
    "horizons",
    "journal",
    "journal_file",
    "journal_lines",
    "journal_summary",
    "logged_model",
    "model_registry",
    "older_copy",
    "params",
    "provenance",
    "record_files",
    "resumed_settings",
    "run_paths",
    "shown_files",
    "store",
    "sync_run",
    "tracker",
    "user_metrics",
]

# MLflow reads some of these variables when it is imported, and the number of retries
# and the timeout at each request. With these values, a request to an unreachable server
# fails instead of being retried for minutes, and less is printed.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# Keep MLflow from printing a server's address: it may contain a password, and standard
# output is the pipe on which the shipper answers the trainer.
os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"

logging.getLogger("alembic").setLevel(logging.WARNING)
# Silence loggers that log an error at every retry, and then also raise it.
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
logging.getLogger("urllib3.connectionpool").setLevel(logging.CRITICAL)
