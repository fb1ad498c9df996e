"""What a job needs, imported once: the process that imports this module is the one that jobs are forked from.

It starts no runtime and opens no device, so that a fork of it is as good as a new process.
"""

import os
import pickle
import sys
from typing import Any

from pipeline.common import imports
from pipeline.sweep import gpus

os.setsid()  # Ctrl-C in the terminal is for the sweep, which ends its jobs in good order
with imports.without_chatter():
    import tensorflow_datasets  # noqa: F401

    from pipeline.tracking import tracker  # noqa: F401
    from pipeline.training import loop, recorder  # noqa: F401
opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
if any(path.startswith(gpus.DEVICES) for path in opened):  # which a fork could not use
    sys.exit("pipeline: importing TensorFlow has opened a device: each job imports it for itself")


def _say(kind: Any, error: Any, trace: Any) -> None:
    if not issubclass(kind, EOFError | pickle.UnpicklingError):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _say  # a sweep that is interrupted while it starts a job leaves a process without its task
