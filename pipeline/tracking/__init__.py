"""What a run leaves in MLflow, and how it gets there.

In: rows of an update or an evaluation, tags, files. Out: a journal on disk, which a process of its own ships to the
store. `tracker` names what is logged, `provenance` describes the surroundings, `store` opens a store, and
`foreign_store` one that need not be the user's own.
"""

import logging
import os

__all__ = [
    "foreign_store",
    "journal",
    "journal_file",
    "logged_model",
    "provenance",
    "store",
    "sweep_record",
    "sync_run",
    "tracker",
]

# Here, as MLflow reads it when it is imported: quiet migrations, and answers within seconds where a server is gone.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# It prints a server's address, password and all, and on the shipper's line to the trainer.
os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
logging.getLogger("alembic").setLevel(logging.WARNING)
for _name in ("mlflow.store.db.utils", "urllib3.connectionpool"):  # they log what they raise, at each try
    logging.getLogger(_name).setLevel(logging.CRITICAL)
