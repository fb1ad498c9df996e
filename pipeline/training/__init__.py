"""The loop: update, record, evaluate, checkpoint.

In: the parts of a run. Out: rows for a tracker, and the last loss.
"""

__all__ = ["best_evaluation", "evaluator", "loop", "oom_retry", "progress", "recorder"]
