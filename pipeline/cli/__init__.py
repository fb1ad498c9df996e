"""The verbs `train`, `sweep`, `resume`, `sync` and `ui`.

In: the arguments after the verb. Out: the exit status.
"""

__all__ = ["resume", "sync", "train", "ui"]
