"""Preloaded by the forkserver: imports what every job needs.

It starts no runtime and opens no device.
"""

import os
import pickle
import sys
from typing import Any

from pipeline.common import imports
from pipeline.sweep import gpus

os.setsid()  # Ctrl-C in the terminal reaches only the sweep, which ends its jobs
with imports.without_chatter():
    import tensorflow_datasets  # noqa: F401

    from pipeline.components import fitting  # noqa: F401
    from pipeline.run import run  # noqa: F401

for descriptor in os.listdir("/proc/self/fd"):
    # A forked process could not use an open device.
    if os.path.realpath(f"/proc/self/fd/{descriptor}").startswith(gpus.DEVICES):
        sys.exit(
            "pipeline: importing TensorFlow has opened a device: "
            "each job imports it for itself"
        )


def _print_error(kind: Any, error: Any, trace: Any) -> None:
    # A sweep that is interrupted while it starts a job leaves a process without a job.
    if not issubclass(kind, EOFError | pickle.UnpicklingError):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _print_error
