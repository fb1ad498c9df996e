"""The verbs that are one thin file each.

In: what follows the verb on the command line. Out: its exit status.
"""

__all__ = ["resume", "sync", "train", "ui"]
