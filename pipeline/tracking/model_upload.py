"""Ships the model that a run saved in its directory to MLflow, as the run's logged model."""

import shutil
import stat
from pathlib import Path

import yaml
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput


def check(folder: Path) -> None:
    """Refuse, by an `OSError`, a folder with anything but files and folders: a run directory may be somebody else's."""
    for path in (folder, *folder.rglob("*")):
        if not (stat.S_ISREG(mode := path.lstat().st_mode) or stat.S_ISDIR(mode)):
            raise OSError(f"{path.relative_to(folder.parent)} is neither a file nor a folder")


def ship(client: MlflowClient, experiment_id: str, run_id: str, folder: Path) -> None:
    """Log the model in `folder`, once per run however often it is shipped, and remove the folder."""
    run, described = client.get_run(run_id), folder / "MLmodel"
    # An earlier shipper may have died in the middle.
    known = client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'")
    params = run.data.params
    entry = next(iter(known), None) or client.create_logged_model(experiment_id, "model", run_id, params=params)
    ids = {"run_id": run_id, "model_id": entry.model_id, "model_uuid": entry.model_id}
    content = yaml.safe_load(described.read_text(encoding="utf-8"))
    content |= {"artifact_path": entry.artifact_location, **ids}
    described.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    client.log_model_artifacts(entry.model_id, str(folder))
    client.finalize_logged_model(entry.model_id, "READY")
    if not run.outputs or entry.model_id not in [output.model_id for output in run.outputs.model_outputs]:
        client.log_outputs(run_id, [LoggedModelOutput(entry.model_id, step=0)])
    shutil.rmtree(folder)
