"""One run for tests of outages.

Its lines are written as by a trainer, and read back from the store.
"""

from __future__ import annotations

import json
from pathlib import Path

from mlflow.tracking import MlflowClient

from pipeline.tracking.journal import Journal
from pipeline.tracking.journal_file import JOURNAL_NAME
from pipeline.tracking.journal_lines import Artifact, Input, Row, RunIds, RunStart

UPDATES = 400
# Seconds that a busy machine may take for what is instant, such as ending a shipper.
BUSY = 60
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


def begin(journal: Journal, folder: Path) -> RunIds | None:
    """Create the run, with all that a run logs before it trains; return its IDs."""
    folder.mkdir(exist_ok=True)
    params = {f"key.{number}": str(number) for number in range(120)}
    run = RunStart(
        experiment=journal.experiment,
        name="one",
        params=params,
        tags={"mine": "1"},
        segment=SEGMENT,
    )
    ids = journal.start(folder / JOURNAL_NAME, run)
    journal.write(Input(DATASET, "training"))
    for name in ("config.yaml", "dataset.json"):
        (folder / name).write_text(f"{name}\n")
        journal.write(Artifact(name))
    return ids


def train(journal: Journal, first: int, last: int) -> None:
    """Write the rows of some updates."""
    for step in range(first, last + 1):
        row = {
            "train/loss": 1.0 / step,
            "train/learning_rate": 0.1,
            "train/gradient_norm": step**0.5,
        }
        journal.write(Row(step, row, time=FIRST + step))
        if step % 100 == 0:
            journal.write(Row(step, {"val/loss": 2.0 / step}, time=FIRST + step))


def fields(uri: str, experiment: str) -> dict[str, object]:
    """Return all that a store has of an experiment's one run.

    Left out is what differs between two equal runs: its IDs, and the time of shipping.
    """
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
            json.loads(json.dumps(entry.to_dictionary()))
            for entry in run.inputs.dataset_inputs
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
    """Run `pipeline sync` on the run in `folder`, with the store of its journal."""
    from pipeline.__main__ import main

    (journal,) = folder.rglob(JOURNAL_NAME)
    store = json.loads(journal.read_text().partition("\n")[0])["start"]["store"]
    return main(["sync", str(folder), f"tracking.uri={store}", *arguments])
