"""The training loop: update, record, evaluate, checkpoint.

In: an update, effective batches, a recorder. Out: rows for the tracker, checkpoints,
the last loss.
"""

__all__ = ["evaluator", "loop", "oom_retry", "profiler", "progress", "recorder"]
