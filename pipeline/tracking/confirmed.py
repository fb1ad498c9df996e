"""What a store has confirmed of a run, and whether it has it when it is read again.

Something between this machine and a server may answer in its place, and lose requests.
"""

from dataclasses import dataclass, field
from typing import Any

from mlflow import MlflowClient


@dataclass
class Confirmed:
    """The names of what was shipped to one run.

    Attributes:
        params: their names.
        tags: their keys.
        removed_tags: the keys of tags that were removed.
        inputs: the names of datasets.
        artifacts: the names of files at the top.
    """

    params: set[str] = field(default_factory=set)
    tags: set[str] = field(default_factory=set)
    removed_tags: set[str] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)
    artifacts: set[str] = field(default_factory=set)
    # The names of the metrics in a row → the steps of such rows: a run has a few kinds
    # of rows, and many steps.
    _rows: dict[tuple[str, ...], set[int]] = field(default_factory=dict)

    def add_row(self, step: int, metrics: dict[str, float]) -> None:
        """Note the points of one row."""
        self._rows.setdefault(tuple(metrics), set()).add(step)

    def lacking(self, client: MlflowClient, run_id: str) -> str:
        """Return what the store does not have; empty if it has everything."""
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
        """Return how many points of a metric are missing; empty if none are."""
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
        """Return the artifacts at the top; those that were shipped if there is no list."""
        try:
            return {file.path for file in client.list_artifacts(run_id)}
        except Exception:  # a place may take files, and list none
            return set(self.artifacts)


def stored_steps(client: MlflowClient, run_id: str, key: str) -> set[int]:
    """Ask a store for the steps of a metric."""
    return {point.step for point in client.get_metric_history(run_id, key)}


def _input_names(run: Any) -> set[str]:
    if not run.inputs:
        return set()
    return {entry.dataset.name for entry in run.inputs.dataset_inputs}
