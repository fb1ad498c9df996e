"""Names of a sweep's jobs, such as `factor=8 batch=256`."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config import plain


def job_names(
    varied_values: Sequence[Mapping[str, Any]], batches: Sequence[int], first: int = 0
) -> list[str]:
    """Return a unique name for each job, which says what varies between the jobs.

    Args:
        varied_values: the varied values of each job, by config key.
        batches: effective batch size of each job.
        first: number of the first job.
    """
    batches_differ = len(set(batches)) > 1
    names = []
    for values, batch in zip(varied_values, batches, strict=True):
        parts = [plain.short(key, value) for key, value in values.items()]
        has_batch = any(part.startswith("batch=") for part in parts)
        if batches_differ and not has_batch:
            parts.append(f"batch={batch}")
        name = " ".join(parts) or "job"
        names.append(name.replace("${", "{"))  # OmegaConf would interpolate it

    if len(set(names)) < len(names):
        names = [f"{name} #{number}" for number, name in enumerate(names, first)]
    return names
