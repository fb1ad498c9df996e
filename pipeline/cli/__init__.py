"""The verbs `train`, `sweep`, `resume`, `critical`, `runs`, `stop`, `sync` and `ui`.

Each verb is a function that takes the arguments after the verb, and returns the exit
status.
"""

__all__ = ["critical", "resume", "runs", "stop", "sync", "train", "ui"]
