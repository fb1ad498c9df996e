"""The verbs `train`, `sweep`, `resume`, `critical`, `sync` and `ui`.

In: the arguments after the verb. Out: the exit status.
"""

__all__ = ["critical", "resume", "sync", "train", "ui"]
