"""Lists the items that a store must have when a run ends, and checks the store.

A proxy between this machine and a server may confirm a request and lose it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from pipeline.common.errors import first_line
from pipeline.tracking import failures

# MLflow's error codes, and HTTP status codes, of a location of artifacts that accepts
# files but cannot list them.
# Number of answers with an error after which the artifacts are not verified.
MOST_FAILED_LISTS = 5
_NO_LIST_CODES = (
    "PERMISSION_DENIED",
    "NOT_IMPLEMENTED",
    "ENDPOINT_NOT_FOUND",
    "FEATURE_DISABLED",
)
_NO_LIST_STATUS = (
    HTTPStatus.FORBIDDEN,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.METHOD_NOT_ALLOWED,
    HTTPStatus.NOT_IMPLEMENTED,
)


class InputId(NamedTuple):
    """Identifies an input. The splits of one dataset differ in the digest."""

    name: str
    digest: str


@dataclass
class Expected:
    """The items that a run's store must have once all lines read so far are shipped.

    Params and rows are added when they are read from the journal, whether they are sent
    or the store has them already. All other items are added when the store has
    confirmed the request. Models, system metrics and profiles are not included.

    Attributes:
        params: the names of params.
        tags: the keys of tags.
        removed_tags: the keys of tags that were removed.
        inputs: the datasets, one for each split.
        artifacts: the paths of files in the run's artifacts.
    """

    params: set[str] = field(default_factory=set)
    tags: set[str] = field(default_factory=set)
    removed_tags: set[str] = field(default_factory=set)
    inputs: set[InputId] = field(default_factory=set)
    artifacts: set[str] = field(default_factory=set)
    # The names of the metrics in a row → the steps of the rows with these metrics. A
    # run has few such combinations and many steps.
    _rows: dict[tuple[str, ...], set[int]] = field(default_factory=dict)
    _failed_lists: int = 0

    def add_row(self, step: int, metrics: Iterable[str]) -> None:
        """Expect the points of one row."""
        self._rows.setdefault(tuple(metrics), set()).add(step)

    def lacking(self, client: MlflowClient, run_id: str) -> str:
        """Return a description of one item that the store lacks, or "" if none.

        Metrics are checked at each step, inputs by name and digest, and all other items
        by name only.

        Raises:
            OSError: the artifacts cannot be listed now.
            Exception: another request has failed.
        """
        run = client.get_run(run_id)
        params = self.params - run.data.params.keys()
        if params:
            return f"the param {min(params)}"
        tags = self.tags - run.data.tags.keys()
        if tags:
            return f"the tag {min(tags)}"
        stale_tags = self.removed_tags & run.data.tags.keys()
        if stale_tags:
            return f"the request to remove the tag {min(stale_tags)}"
        inputs = self.inputs - _input_ids(run)
        if inputs:
            return f"the input {min(inputs).name}"
        artifacts = self.artifacts - self._listed_artifacts(client, run_id)
        if artifacts:
            return f"the artifact {min(artifacts)}"
        return self._lacking_points(client, run_id)

    def _lacking_points(self, client: MlflowClient, run_id: str) -> str:
        """Return a description of the missing points of one metric, or "" if none."""
        steps_by_key: dict[str, set[int]] = {}
        for keys, steps in self._rows.items():
            for key in keys:
                steps_by_key[key] = steps_by_key.get(key, set()) | steps
        for key, steps in steps_by_key.items():
            missing = len(steps - stored_steps(client, run_id, key))
            if missing:
                return f"{missing:,} of {len(steps):,} points of {key}"
        return ""

    def listed(self, client: MlflowClient, run_id: str, folder: str) -> set[str] | None:
        """Return the paths of the artifacts in a folder, or None if they are unknown.

        They are unknown if the location of the artifacts can never be listed, or if the
        server has answered more than `MOST_FAILED_LISTS` requests with an error.

        Args:
            client: an MLflow client for the store.
            run_id: the run.
            folder: the folder; "" for the root folder.

        Raises:
            OSError: the location cannot be listed now.
        """
        try:
            return {file.path for file in client.list_artifacts(run_id, folder or None)}
        except Exception as error:
            # A server that forbids listing may answer with an internal error.
            if failures.is_answer(error):
                self._failed_lists += 1
            if _can_never_list(error) or self._failed_lists > MOST_FAILED_LISTS:
                return None
            problem = f"the artifacts cannot be listed: {first_line(error)}"
            raise OSError(problem) from error

    def _listed_artifacts(self, client: MlflowClient, run_id: str) -> set[str]:
        """Return the artifacts in all folders of expected artifacts.

        If the artifacts in the store are unknown (see `listed`), the expected ones are
        returned.
        """
        paths: set[str] = set()
        for folder in {path.rpartition("/")[0] for path in self.artifacts}:
            listed = self.listed(client, run_id, folder)
            if listed is None:
                return set(self.artifacts)
            paths |= listed
        return paths


def stored_steps(client: MlflowClient, run_id: str, key: str) -> set[int]:
    """Return the steps at which a store has a point of a metric."""
    return {point.step for point in client.get_metric_history(run_id, key)}


def _input_ids(run: Any) -> set[InputId]:
    if not run.inputs:
        return set()
    datasets = [entry.dataset for entry in run.inputs.dataset_inputs]
    return {InputId(dataset.name, dataset.digest) for dataset in datasets}


def _can_never_list(error: Exception) -> bool:
    """Return whether an error shows that a location can never be listed.

    Listing is then unsupported, forbidden or rejected. Any other error, such as a
    network error, says nothing about the artifacts.
    """
    if isinstance(error, NotImplementedError | PermissionError):
        return True
    if isinstance(error, MlflowException):
        return failures.is_rejected(error) or error.error_code in _NO_LIST_CODES
    return failures.status_code(error) in _NO_LIST_STATUS
