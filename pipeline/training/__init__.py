"""The training loop, and the parts that record, evaluate and retry updates.

From an update, effective batches and a recorder, the loop produces rows for the
tracker, checkpoints and the last loss.
"""

__all__ = [
    "evaluator",
    "loop",
    "monitored",
    "oom_retry",
    "profiler",
    "progress",
    "recorder",
    "xla_timing",
]
