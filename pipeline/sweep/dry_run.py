"""`pipeline sweep NAME --dry`: lists the jobs of a sweep, and runs none of them."""

import sys
from collections.abc import Mapping

from omegaconf import DictConfig

from pipeline.common.errors import count, say
from pipeline.config.resolve import RunSpec
from pipeline.sweep.parent_run import finished_losses
from pipeline.tracking.foreign_store import ForeignStore, SweepRecord


def show(config: DictConfig, sizes_by_job: Mapping[str, str]) -> None:
    """Print a line for each job, then the number of jobs that the sweep would run.

    With `--again`, the jobs that have finished are marked. The store is only read.

    Args:
        config: the config of the multirun.
        sizes_by_job: the `sizes` of each job, by the job's name.

    Raises:
        ConfigError: the store does not have the sweep that `--again` names.
    """
    total = count(len(sizes_by_job), "job")
    finished: Mapping[str, float] = {}
    if config.tracking.sweep is not None:
        finished = _finished(config)
        missing = [name for name in sizes_by_job if name not in finished]
        total = f"{len(missing)} of {total} to run"

    lines = []
    for name, text in sizes_by_job.items():
        mark = " (finished)" if name in finished else ""
        lines.append(f"  {name}: {text}{mark}")
    say(*lines, total, to=sys.stdout)


def sizes(spec: RunSpec) -> str:
    """Return the cut of a run's first effective batch, and its length, in words."""
    accumulation = spec.config.accumulation
    cut = str(spec.batching)
    if spec.config.dataset.get("batched"):
        batches = count(spec.batching.factor, "batch", "batches")
        cut = f"{batches} of the dataset per update"
    elif spec.searches:
        size = spec.batching.effective_batch_size
        cut = f"effective batch {size}, micro-batch {accumulation.micro_batch_size}"
    if accumulation.batch_schedule is not None:
        cut += " at first"
    unit = spec.horizon.unit.removesuffix("s")
    return f"{cut}, {count(spec.horizon.length, unit)}"


def _finished(config: DictConfig) -> dict[str, float]:
    """Return the last losses of the finished jobs of the sweep `tracking.sweep`."""
    store = ForeignStore.open(config.tracking.uri, config.trust.allow)
    parent = store.sweep(config.tracking.sweep).info
    record = SweepRecord(store.uri, parent.run_id, parent.experiment_id)
    return finished_losses(record.children())
