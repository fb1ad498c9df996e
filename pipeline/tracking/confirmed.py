"""Records the items that a store has confirmed, and checks that the store has them.

A proxy between this machine and a server may confirm a request and lose it.
"""

from dataclasses import dataclass, field
from typing import Any

from mlflow import MlflowClient


@dataclass
class Confirmed:
    """The names of everything that was shipped to one run.

    Attributes:
        params: the names of params.
        tags: the keys of tags.
        removed_tags: the keys of tags that were removed.
        inputs: the names of datasets.
        artifacts: the names of files in the root folder of the run's artifacts.
    """

    params: set[str] = field(default_factory=set)
    tags: set[str] = field(default_factory=set)
    removed_tags: set[str] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)
    artifacts: set[str] = field(default_factory=set)
    # The names of the metrics in a row → the steps of the rows with these metrics. A
    # run has few such combinations and many steps.
    _rows: dict[tuple[str, ...], set[int]] = field(default_factory=dict)

    def add_row(self, step: int, metrics: dict[str, float]) -> None:
        """Record that the points of one row were shipped."""
        self._rows.setdefault(tuple(metrics), set()).add(step)

    def lacking(self, client: MlflowClient, run_id: str) -> str:
        """Return the kind and the name of the first missing item, or "" if none is.

        Metrics are checked at each step, all other items by name only.
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
            return f"the removal of the tag {min(stale_tags)}"
        inputs = self.inputs - _input_names(run)
        if inputs:
            return f"the input {min(inputs)}"
        artifacts = self.artifacts - self._listed_artifacts(client, run_id)
        if artifacts:
            return f"the artifact {min(artifacts)}"
        return self._lacking_points(client, run_id)

    def _lacking_points(self, client: MlflowClient, run_id: str) -> str:
        """Describe the first metric with missing points, or return "" if none has."""
        steps_by_key: dict[str, set[int]] = {}
        for keys, steps in self._rows.items():
            for key in keys:
                steps_by_key[key] = steps_by_key.get(key, set()) | steps
        for key, steps in steps_by_key.items():
            missing = len(steps - stored_steps(client, run_id, key))
            if missing:
                return f"{missing:,} of {len(steps):,} points of {key}"
        return ""

    def _listed_artifacts(self, client: MlflowClient, run_id: str) -> set[str]:
        """Return the names of the artifacts that the store has in the root folder.

        If the artifact location cannot be listed, return all shipped artifacts, so that
        none counts as missing.
        """
        try:
            return {file.path for file in client.list_artifacts(run_id)}
        except Exception:  # some locations accept files but cannot list them
            return set(self.artifacts)


def stored_steps(client: MlflowClient, run_id: str, key: str) -> set[int]:
    """Return the steps at which a store has a point of a metric."""
    return {point.step for point in client.get_metric_history(run_id, key)}


def _input_names(run: Any) -> set[str]:
    if not run.inputs:
        return set()
    return {entry.dataset.name for entry in run.inputs.dataset_inputs}
