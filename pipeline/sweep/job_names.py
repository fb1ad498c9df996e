"""Names of a sweep's jobs, such as `factor=8 batch=256`."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config import plain


def job_names(
    varied_values: Sequence[Mapping[str, Any]],
    batch_sizes: Sequence[int],
    first: int = 0,
) -> list[str]:
    """Return a unique name for each job, made of the values that vary between the jobs.

    Args:
        varied_values: the varied values of each job, by config key.
        batch_sizes: effective batch size of each job.
        first: number of the first job.
    """
    batch_sizes_differ = len(set(batch_sizes)) > 1
    names = []
    for values, batch_size in zip(varied_values, batch_sizes, strict=True):
        parts = [plain.short(key, value) for key, value in values.items()]
        has_batch = any(part.startswith("batch=") for part in parts)
        if batch_sizes_differ and not has_batch:
            parts.append(f"batch={batch_size}")
        name = " ".join(parts) or "job"
        names.append(name.replace("${", "{"))  # OmegaConf would interpolate it

    if len(set(names)) < len(names):
        names = [f"{name} #{number}" for number, name in enumerate(names, first)]
    return names
