"""Ships to MLflow a model that a run has saved in its directory.

The model becomes a logged model of its run. It is tagged with the unique name of its
folder and is looked up by this tag, so shipping it twice creates no second model, and
no second version in the registry.
"""

import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput
from mlflow.exceptions import MlflowException

from pipeline.common import durable, imports
from pipeline.tracking.model_registry import MODEL_TAG, RUN_TAG, UPDATE_TAG

TAG = "pipeline.model"  # tag of a logged model: the name of its folder
TOLD = 1.0  # seconds between two progress reports of an upload


def ship(
    client: MlflowClient,
    experiment_id: str,
    run_id: str,
    folder: Path,
    tell: Callable[[], object] = lambda: None,
    *,
    update: int | None = None,
    register: str | None = None,
) -> None:
    """Log the model in `folder`, register it if it has a name, and remove the folder.

    Args:
        client: an MLflow client for the store.
        experiment_id: the experiment of the run.
        run_id: the run.
        folder: the saved model. If it does not exist, the model counts as shipped.
        tell: called every second while the files are uploaded, since the upload of a
            large model takes minutes.
        update: the number of completed updates of its weights, or None if unknown.
        register: the name under which the model is registered, or None.

    Raises:
        OSError: the folder holds a link or a special file. These are rejected since the
            run directory may come from somebody else.
    """
    # Remove the rest of a folder that an earlier call has shipped. A folder is renamed
    # before it is removed, so that an incomplete folder is never shipped.
    removed = folder.with_name(f".{folder.name}")
    shutil.rmtree(removed, ignore_errors=True)
    if not folder.is_symlink() and not folder.exists():
        return

    _check_files(folder)
    run = client.get_run(run_id)
    description = folder / "MLmodel"
    content = dict(yaml.safe_load(description.read_text(encoding="utf-8")))
    entry = _find_or_create(client, experiment_id, folder.name, run, update)
    content["run_id"] = run_id
    content["model_id"] = entry.model_id
    content["model_uuid"] = entry.model_id
    content["artifact_path"] = entry.artifact_location
    new = folder.with_name(f".{folder.name}.MLmodel")
    new.write_text(yaml.safe_dump(content), encoding="utf-8")
    durable.sync(new)
    new.replace(description)

    with _telling(tell):
        client.log_model_artifacts(entry.model_id, str(folder))
    client.finalize_logged_model(entry.model_id, "READY")
    if entry.model_id not in _output_ids(run):
        client.log_outputs(run_id, [LoggedModelOutput(entry.model_id, step=0)])
    if register is not None:
        _register(client, register, run_id, entry)
    folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _check_files(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            name = path.relative_to(folder.parent)
            raise OSError(f"{name} is neither a file nor a folder")


def _find_or_create(
    client: MlflowClient, experiment_id: str, name: str, run: Any, update: int | None
) -> Any:
    """Return the logged model for the folder `name`, created if it does not exist."""
    models = client.search_logged_models([experiment_id], f"tags.`{TAG}` = '{name}'")
    entry = next(iter(models), None)
    if entry is None:
        tags = {TAG: name}
        if update is not None:
            tags[UPDATE_TAG] = str(update)
        # Disable MLflow's retries: each one could create another model.
        with imports.variables_set(MLFLOW_HTTP_REQUEST_MAX_RETRIES="0"):
            entry = client.create_logged_model(
                experiment_id,
                name="model",
                source_run_id=run.info.run_id,
                tags=tags,
                params=run.data.params,
            )
    return entry


def _register(client: MlflowClient, name: str, run_id: str, entry: Any) -> None:
    """Register a logged model as a new version, unless it is registered already.

    MLflow itself resolves the alias `latest` to the last version of a name.
    """
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    tags = {RUN_TAG: run_id, MODEL_TAG: entry.model_id}
    if UPDATE_TAG in entry.tags:
        tags[UPDATE_TAG] = entry.tags[UPDATE_TAG]
    condition = f"name = '{name}' and run_id = '{run_id}'"
    for version in client.search_model_versions(condition):
        if version.tags.get(MODEL_TAG) == entry.model_id:
            return
    # Disable MLflow's retries: each one could create another version.
    with imports.variables_set(MLFLOW_HTTP_REQUEST_MAX_RETRIES="0"):
        client.create_model_version(
            name,
            # MLflow would look for `models:/ID` in the store of its own settings.
            source=entry.artifact_location,
            run_id=run_id,
            tags=tags,
            model_id=entry.model_id,
        )


def _output_ids(run: Any) -> list[str]:
    if not run.outputs:
        return []
    return [output.model_id for output in run.outputs.model_outputs]


@contextmanager
def _telling(tell: Callable[[], object]) -> Iterator[None]:
    """Call `tell` every `TOLD` seconds within the block."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(TOLD):
            tell()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
