"""What a run logs to MLflow, and how it gets there.

In: rows of updates and evaluations, tags, files. Out: a journal on disk, which a
separate process ships to the store. `tracker` names what is logged, `provenance`
describes the environment and the data, `journal` and `journal_file` say what is written
and what survives a crash, `store` opens the user's own store, `foreign_store` any
other, and `sync_run` ships what a trainer left behind.
"""

import logging
import os

__all__ = [
    "foreign_store",
    "journal",
    "journal_file",
    "logged_model",
    "params",
    "provenance",
    "store",
    "sync_run",
    "tracker",
    "user_metrics",
]

# MLflow reads these when it is imported. Migrations are quiet, and a lost server causes
# an error within seconds.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# MLflow would print a server's address with its password, and would print it to the
# pipe on which the shipper answers the trainer.
os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"

logging.getLogger("alembic").setLevel(logging.WARNING)
# These log the error that they raise at every retry.
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
logging.getLogger("urllib3.connectionpool").setLevel(logging.CRITICAL)
