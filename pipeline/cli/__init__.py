"""The verbs `train`, `sweep`, `resume`, `critical`, `stop`, `sync` and `ui`.

Each verb is a function that takes the arguments after the verb, and returns the exit
status.
"""

__all__ = ["critical", "resume", "stop", "sync", "train", "ui"]
