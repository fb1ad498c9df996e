"""The private interface of MLflow that this package uses, as of MLflow 3.17.2.

SystemMetricsMonitor    samples the machine; its own thread would read the whole run before each of its writes

tests/tracking/test_mlflow_internals.py fails if another version differs.
"""

from __future__ import annotations

from collections.abc import Callable

from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor


def system_sampler(uri: str, run_id: str) -> Callable[[], dict[str, float]]:
    """Return a function that samples MLflow's system metrics, by name."""
    monitor = SystemMetricsMonitor(run_id, tracking_uri=uri)

    def sample() -> dict[str, float]:
        monitor.collect_metrics()
        sampled: dict[str, float] = monitor.aggregate_metrics()
        for part in monitor.monitors:
            part.clear_metrics()
        return sampled

    return sample
