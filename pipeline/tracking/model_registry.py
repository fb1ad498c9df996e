"""Finds logged models in a store, and downloads their weights.

The store is not trusted. Of a model, only the Keras archive is downloaded, and its
weights are loaded into a model that the config builds: neither the model nor its code
is ever loaded from the store.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common.errors import ConfigError, first_line
from pipeline.common.secrets import mask
from pipeline.common.sqlite_uri import absolute
from pipeline.config.model_uris import MODEL
from pipeline.tracking.foreign_store import RUN_ID, ForeignStore
from pipeline.trust import artifact_locations

# Tags of a version in the registry: the IDs of the run and of its logged model, which a
# SQL store does not keep elsewhere.
RUN_TAG = "pipeline.run_id"
MODEL_TAG = "pipeline.logged_model"
# Tag of a logged model and of its version: the number of completed updates.
UPDATE_TAG = "pipeline.update"
ARCHIVE = "data/model.keras"  # path of the Keras archive among a model's artifacts
_MODEL_ID = re.compile("m-[0-9a-f]{32}")


@dataclass(frozen=True)
class StoredModel:
    """A logged model in a store.

    Attributes:
        store: the store.
        name: the name shown to the user: `models:/NAME/VERSION`, or the ID of its run.
        model_id: its ID.
        place: the location of its artifacts, which has been checked.
        run_id: the ID of its run.
        updates_done: the number of completed updates of its weights.
    """

    store: ForeignStore
    name: str
    model_id: str
    place: str
    run_id: str
    updates_done: int

    def download(self, folder: Path, key: str) -> Path:
        """Download the archive with the weights to `folder`; return its path.

        Raises:
            ConfigError: the model has no archive, or it cannot be downloaded.
        """
        import mlflow

        try:
            client = self.store.client()
            files = client.list_logged_model_artifacts(self.model_id, "data")
            if ARCHIVE in [file.path for file in files]:
                path = mlflow.artifacts.download_artifacts(
                    artifact_uri=f"{self.place}/{ARCHIVE}",
                    dst_path=str(folder),
                    tracking_uri=self.store.uri,
                )
                return Path(path)
        except ConfigError:
            raise
        except Exception as error:
            rule = f"must have a model that can be downloaded ({first_line(error)})"
            raise ConfigError(key, rule, self.name) from error
        rule = f"must have a model with Keras' {ARCHIVE}; any other kind contains code"
        raise ConfigError(key, rule, self.name)


def registered(store: ForeignStore, uri: str, key: str) -> StoredModel:
    """Return the model that `models:/NAME@ALIAS` or `models:/NAME/VERSION` names.

    Args:
        store: the store with the registry.
        uri: the URI of the model.
        key: the config key or argument that an error names.

    Raises:
        ConfigError: there is no such version, or this package has not registered it.
    """
    from mlflow.exceptions import MlflowException

    match = MODEL.fullmatch(uri)
    assert match is not None
    name = match["name"]
    client = store.client()
    try:
        if match["alias"]:
            version = client.get_model_version_by_alias(name, match["alias"])
        else:
            version = client.get_model_version(name, match["version"])
    except MlflowException as error:
        rule = (
            "must name a registered model of the store "
            f"{mask(absolute(store.uri))} ({first_line(error)})"
        )
        raise ConfigError(key, rule, uri) from error

    run_id = str(version.tags.get(RUN_TAG))
    update = str(version.tags.get(UPDATE_TAG))
    if not (RUN_ID.fullmatch(run_id) and re.fullmatch("[0-9]{1,10}", update)):
        rule = "must be a version that tracking.register has registered"
        raise ConfigError(key, rule, uri)
    resolved = f"models:/{name}/{int(version.version)}"
    model_id = str(version.tags.get(MODEL_TAG))
    return _checked(store, resolved, model_id, run_id, int(update), key)


def of_run(store: ForeignStore, run: Any, key: str) -> dict[int, StoredModel]:
    """Return the logged models of a run by the number of completed updates, in order.

    A run that was resumed after its end has several.

    Raises:
        ConfigError: the run has no logged model.
    """
    run_id = run.info.run_id
    model_ids = []
    if run.outputs:
        model_ids = [output.model_id for output in run.outputs.model_outputs]
    models = {}
    for model_id in model_ids:
        entry = store.client().get_logged_model(model_id)
        # Older versions logged the weights after the last update.
        update = str(entry.tags.get(UPDATE_TAG, run.data.tags.get("updates")))
        if re.fullmatch("[0-9]{1,10}", update):
            model = _checked(store, run_id, model_id, run_id, int(update), key)
            models[int(update)] = model
    if not models:
        rule = (
            "must be a run whose directory is below the working folder, or that has "
            "logged a model"
        )
        raise ConfigError(key, rule, run_id)
    return dict(sorted(models.items()))


def _checked(
    store: ForeignStore, name: str, model_id: str, run_id: str, update: int, key: str
) -> StoredModel:
    """Return the model, after a check of its ID and of the place of its artifacts."""
    if not _MODEL_ID.fullmatch(model_id):
        raise ConfigError(key, "must have a model whose ID has MLflow's format", name)
    entry = store.client().get_logged_model(model_id)
    artifact_locations.check(entry.artifact_location, store.uri, store.places)
    place = entry.artifact_location.rstrip("/")
    return StoredModel(store, name, model_id, place, run_id, update)
