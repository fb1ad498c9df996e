"""Ships a model that a run saved in its directory to MLflow, as a logged model of the run."""

import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import requests
import yaml
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput
from mlflow.exceptions import MlflowException

from pipeline.common import imports

TAG = "pipeline.model"  # of a logged model: the name of its folder, which no other model has
TOLD = 1.0  # seconds between two signs that an upload goes on
AWAY = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")


Tell = Callable[[], object]


def ship(
    client: MlflowClient,
    experiment_id: str,
    run_id: str,
    folder: Path,
    tell: Tell = lambda: None,
) -> None:
    """Log the model in `folder`, once however often it is shipped, and remove the folder, which may not exist any more.

    Calls `tell` every second while the files are uploaded, as a large model takes minutes.

    Raises:
        OSError: it holds a link or the like; a run directory may be somebody else's.
    """
    removed = folder.with_name(
        f".{folder.name}"
    )  # renamed first, so that no half of it is shipped after a kill
    shutil.rmtree(removed, ignore_errors=True)
    if not folder.is_symlink() and not folder.exists():
        return
    for path in (folder, *folder.rglob("*")):
        if not (stat.S_ISREG(mode := path.lstat().st_mode) or stat.S_ISDIR(mode)):
            raise OSError(
                f"{path.relative_to(folder.parent)} is neither a file nor a folder"
            )
    described, run = folder / "MLmodel", client.get_run(run_id)
    content = dict(yaml.safe_load(described.read_text(encoding="utf-8")))
    entry = next(
        iter(
            client.search_logged_models(
                [experiment_id], f"tags.`{TAG}` = '{folder.name}'"
            )
        ),
        None,
    )
    if entry is None:
        named = {"name": "model", "source_run_id": run_id}
        with imports.variables_set(
            MLFLOW_HTTP_REQUEST_MAX_RETRIES="0"
        ):  # each could leave another one behind
            entry = client.create_logged_model(
                experiment_id, **named, tags={TAG: folder.name}, params=run.data.params
            )
    content |= {
        "run_id": run_id,
        "model_id": entry.model_id,
        "model_uuid": entry.model_id,
    }
    new = folder.with_name(f".{folder.name}.MLmodel")
    new.write_text(
        yaml.safe_dump({**content, "artifact_path": entry.artifact_location}),
        encoding="utf-8",
    )
    new.replace(described)
    with _telling(tell):
        client.log_model_artifacts(entry.model_id, str(folder))
    client.finalize_logged_model(entry.model_id, "READY")
    if not run.outputs or entry.model_id not in [
        output.model_id for output in run.outputs.model_outputs
    ]:
        client.log_outputs(run_id, [LoggedModelOutput(entry.model_id, step=0)])
    folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


@contextmanager
def _telling(tell: Tell) -> Iterator[None]:
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(TOLD):
            tell()

    telling = threading.Thread(target=repeat, daemon=True)
    telling.start()
    try:
        yield
    finally:
        done.set()
        telling.join()


def may_pass(error: Exception) -> bool:
    """Return whether the store may take the model at another try: it is away, or says that it is busy."""
    if isinstance(error, MlflowException):
        return error.error_code in AWAY
    response = getattr(error, "response", None)
    if response is not None:
        return response.status_code >= 500 or response.status_code in (408, 429)
    return isinstance(error, requests.RequestException)
