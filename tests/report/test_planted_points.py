"""Points that are put into a store by SQL are those that MLflow would log."""

from __future__ import annotations

import math
from functools import partial

from mlflow.entities import Metric

from tests import synthetic

POINTS = [
    Metric("train/loss", 2.0, 1000, 1),
    Metric("train/loss", math.nan, 1003, 3),
    Metric("train/loss", 1.5, 1002, 2),
    Metric("val/loss", math.inf, 1004, 4),
    Metric("val/loss", -math.inf, 1005, 4),
    Metric("val/examples_seen", 0.0, 1000, 0),
]


def test_points_are_those_that_mlflow_would_log(tmp_path):
    store = synthetic.store(tmp_path)
    client = store.client()
    experiment = store.experiment("planted")
    found = []
    for log in (client.log_batch, partial(synthetic.log_points, store)):
        run_id = client.create_run(experiment).info.run_id
        log(run_id, POINTS)
        latest = client.get_run(run_id).data.metrics
        histories = {}
        for key in latest:
            points = client.get_metric_history(run_id, key)
            rows = [(point.step, point.timestamp, point.value) for point in points]
            histories[key] = sorted(map(str, rows))
        found.append((str(sorted(latest.items())), histories))
    assert found[0] == found[1]
    assert "nan" in found[0][0]
