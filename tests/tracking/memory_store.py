"""A store in memory, and the lines of a journal that are shipped to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST

UPDATES = 10
START = {
    "format": 1,
    "store": "memory",
    "experiment": "e",
    "name": "one",
    "params": {"a": 1, "b": "2", "c": None},
    "tags": {"journal": "j"},
    "system_metrics": False,
}
DATASET = {
    "name": "d",
    "digest": "1",
    "source_type": "code",
    "source": "{}",
    "schema": "{}",
    "profile": "{}",
}


@dataclass
class MemoryStore:
    """What the uploader uses of `Store` and of MLflow's client, with at most one run.

    Like MLflow's stores it keeps a point that is sent twice once.

    Attributes:
        error: what the request number `fails_at` raises, counted from 1.
        is_done: whether that request is done before it fails.
        requests: how many there were.
    """

    error: BaseException | None = None
    fails_at: int = 0
    is_done: bool = False
    requests: int = 0
    run: dict[str, Any] | None = None
    points: dict[tuple, float] = field(default_factory=dict)

    uri = "memory"
    database = None
    is_served = True

    def client(self) -> MemoryStore:
        return self

    def experiment(self, name: str) -> str:
        return "1"

    def file_id(self) -> None:
        return None

    def find_run(self, journal: str, run_id: str = "") -> Any:
        self._request(lambda: None)
        if self.run is None or self.run["tags"]["journal"] != journal:
            return None
        return self._snapshot()

    def status(self, run_id: str) -> str:
        self._request(lambda: None)
        return self.run["status"]

    def create_run(self, experiment_id: str, time: int, tags: dict, name: str) -> Any:
        def create() -> None:
            assert self.run is None, "there are two runs"
            self.run = {"tags": dict(tags), "name": name, "start": time}
            self.run |= {"status": "RUNNING", "end": None}
            self.run |= {"params": {}, "inputs": set(), "artifacts": set()}

        self._request(create)
        return self._snapshot()

    def log_batch(self, run_id: str, metrics: list = (), params: list = ()) -> None:
        def log() -> None:
            for point in metrics:
                self.points[point.key, point.step, point.timestamp] = point.value
            for param in params:
                self.run["params"][param.key] = param.value

        self._request(log)

    def log_inputs(self, run_id: str, datasets: list) -> None:
        inputs = [(entry.dataset.name, entry.dataset.digest) for entry in datasets]
        self._request(lambda: self.run["inputs"].update(inputs))

    def log_artifact(self, run_id: str, path: str, place: str | None) -> None:
        name = path.rpartition("/")[2]
        if place is not None:
            name = f"{place}/{name}"
        self._request(lambda: self.run["artifacts"].add(name))

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self._request(lambda: self.run["tags"].update({key: value}))

    def delete_tag(self, run_id: str, key: str) -> None:
        def delete() -> None:
            if key not in self.run["tags"]:
                raise MlflowException("no such tag", RESOURCE_DOES_NOT_EXIST)
            del self.run["tags"][key]

        self._request(delete)

    def update_run(self, run_id: str, status: str) -> None:
        self._request(lambda: self.run.update(status=status))

    def set_terminated(self, run_id: str, status: str, time: int = 0) -> None:
        self._request(lambda: self.run.update(status=status, end=time))

    def get_run(self, run_id: str) -> Any:
        self._request(lambda: None)
        return self._snapshot()

    def list_artifacts(self, run_id: str, path: str | None = None) -> list:
        self._request(lambda: None)
        names = []
        for name in self.run["artifacts"]:
            if name.rpartition("/")[0] == (path or ""):
                names.append(name)
        return [SimpleNamespace(path=name) for name in names]

    def get_metric_history(self, run_id: str, key: str) -> list:
        self._request(lambda: None)
        return [
            SimpleNamespace(step=step) for name, step, _ in self.points if name == key
        ]

    def content(self) -> tuple:
        """Return all that the store has."""
        return self.run, self.points

    def _request(self, change: Any) -> None:
        self.requests += 1
        if self.requests != self.fails_at:
            change()
            return
        if self.is_done:
            change()
        raise self.error

    def _snapshot(self) -> Any:
        info = SimpleNamespace(
            run_id="r",
            experiment_id="1",
            lifecycle_stage="active",
            artifact_uri="memory:/r",
            status=self.run["status"],
            end_time=self.run["end"],
        )
        data = SimpleNamespace(
            params=dict(self.run["params"]),
            tags=dict(self.run["tags"]),
            metrics={key: 0.0 for key, _, _ in self.points},
        )
        inputs = []
        for name, digest in self.run["inputs"]:
            dataset = SimpleNamespace(name=name, digest=digest)
            inputs.append(SimpleNamespace(dataset=dataset))
        return SimpleNamespace(
            info=info, data=data, inputs=SimpleNamespace(dataset_inputs=inputs)
        )


# The files of one evaluation.
PICTURE = "images/shown~worst+step+5+timestamp+105+1.png"
TABLE = "shown/examples_000000005.csv"


def write_files(folder: Path) -> None:
    """Write the files that the lines name."""
    for name in ("note.txt", PICTURE, TABLE):
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(name)


def row(step):
    metrics = {"train/loss": 1.0 / step, "train/learning_rate": 0.1}
    return {"time": 100 + step, "step": step, "metrics": metrics}


def lines(*, end=True):
    yield {"time": 1, "start": START}
    yield {"time": 2, "run": {"run_id": "r", "experiment_id": "1"}}
    yield {"time": 3, "dataset": DATASET, "context": "training"}
    validation = {**DATASET, "digest": "2"}
    yield {"time": 3, "dataset": validation, "context": "validation"}
    yield {"time": 4, "artifact": "note.txt"}
    for step in range(1, UPDATES // 2 + 1):
        yield row(step)
    yield {"time": 5, "step": UPDATES // 2, "shown": [PICTURE, TABLE]}
    yield {"time": 5, "tags": {"failure": "it"}}
    yield {"time": 6, "end": "FAILED"}
    yield {"time": 7, "resume": {}}
    for step in range(UPDATES // 2 + 1, UPDATES + 1):
        yield row(step)
    yield {"time": 8, "tags": {"mine": "1"}}
    if end:
        yield {"time": 9, "end": "FINISHED"}
