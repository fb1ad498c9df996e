"""One run for tests of outages: its lines, as a trainer writes them, and all that a store has of it."""

from __future__ import annotations

import json
from pathlib import Path

from mlflow.tracking import MlflowClient

from pipeline.tracking.journal import Journal
from pipeline.tracking.journal_file import NAME

UPDATES = 400
FIRST = 1_700_000_000_000  # milliseconds since the epoch, of update 0
SEGMENT = {"after": 0, "cut": {"effective_batch_size": 8}}
DATASET = {
    "name": "d",
    "digest": "1",
    "source_type": "code",
    "source": "{}",
    "schema": "{}",
    "profile": "{}",
}
OURS = ("journal",)  # tags that name one run, and no other


def opened(uri: str, folder: Path, experiment: str, **options: object) -> Journal:
    """Return the journal of a run whose store has answered."""
    journal = Journal(uri, experiment, **options)
    try:
        journal.ready()
    except BaseException:
        journal.abandon()
        raise
    begin(journal, folder)
    return journal


def begin(journal: Journal, folder: Path) -> dict[str, str]:
    """Create the run and return what the store calls it, with all that one logs before it trains."""
    folder.mkdir(exist_ok=True)
    params = {f"key.{number}": str(number) for number in range(120)}
    run = {
        "experiment": journal.experiment,
        "name": "one",
        "params": params,
        "tags": {"mine": "1"},
    }
    answer = journal.start(
        folder / NAME, {**run, "system_metrics": False, "segment": SEGMENT}
    )
    journal.write({"dataset": DATASET, "context": "training"})
    for name in ("config.yaml", "dataset.json"):
        (folder / name).write_text(f"{name}\n")
        journal.write({"artifact": name})
    return answer


def train(journal: Journal, first: int, last: int) -> None:
    """Write the rows of some updates."""
    for step in range(first, last + 1):
        row = {
            "train/loss": 1.0 / step,
            "train/learning_rate": 0.1,
            "train/gradient_norm": step**0.5,
        }
        journal.write({"time": FIRST + step, "step": step, "metrics": row})
        if step % 100 == 0:
            journal.write(
                {
                    "time": FIRST + step,
                    "step": step,
                    "metrics": {"val/loss": 2.0 / step},
                }
            )


def fields(uri: str, experiment: str) -> dict[str, object]:
    """Return what a store has of an experiment's one run, but for what names it and when it was shipped."""
    client = MlflowClient(uri)
    (run,) = client.search_runs(
        [client.get_experiment_by_name(experiment).experiment_id], run_view_type=3
    )
    histories = {
        key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics
    }
    assert all(
        len({point.step for point in points}) == len(points)
        for points in histories.values()
    )
    return {
        "status": run.info.status,
        "stage": run.info.lifecycle_stage,
        "name": run.info.run_name,
        "params": run.data.params,
        "tags": {key: value for key, value in run.data.tags.items() if key not in OURS},
        "metrics": {
            key: sorted((point.step, point.value, point.timestamp) for point in points)
            for key, points in histories.items()
        },
        "inputs": [
            json.loads(json.dumps(each.to_dictionary()))
            for each in run.inputs.dataset_inputs
        ],
        "artifacts": sorted(
            (file.path, file.file_size)
            for file in client.list_artifacts(run.info.run_id)
        ),
    }


def times(uri: str, experiment: str) -> tuple[int, int]:
    """Return when the run began and ended, by the store."""
    client = MlflowClient(uri)
    (run,) = client.search_runs(
        [client.get_experiment_by_name(experiment).experiment_id]
    )
    return run.info.start_time, run.info.end_time


def sync(folder: Path, *arguments: str) -> int:
    """`pipeline sync` of the run in `folder` or below it, with the store that its journal names."""
    from pipeline.__main__ import main

    (journal,) = folder.rglob(NAME)
    store = json.loads(journal.read_text().partition("\n")[0])["start"]["store"]
    return main(["sync", str(folder), f"tracking.uri={store}", *arguments])
