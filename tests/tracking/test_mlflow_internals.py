"""What pipeline/tracking/uploader.py uses of MLflow still is what it was read as."""

from __future__ import annotations

import inspect

from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from pipeline.tracking import store, uploader

WHERE = "see pipeline/tracking/uploader.py"


def test_the_signatures_are_those_that_were_read():
    assert {"run_id", "tracking_uri"} <= set(inspect.signature(SystemMetricsMonitor).parameters), WHERE
    for name in ("collect_metrics", "aggregate_metrics"):
        assert list(inspect.signature(getattr(SystemMetricsMonitor, name)).parameters) == ["self"], WHERE


def test_a_sample_is_of_this_moment(tmp_path):
    made = store.Store(f"sqlite:///{tmp_path}/mlflow.db")
    run_id = made.client().create_run(made.experiment("it")).info.run_id
    sample = uploader.system_sampler(made.uri, run_id)
    for _ in range(2):
        found = sample()
        assert found["cpu_utilization_percentage"] >= 0, WHERE
        assert found["system_memory_usage_megabytes"] > 0, WHERE
