"""Preloaded by the forkserver: imports the modules that every job needs.

The imports must not open a device, since a forked job could not use it.
"""

import os
import pickle
import sys
from typing import Any

from pipeline.common import imports
from pipeline.sweep import gpus

# Leave the terminal's session, so that Ctrl-C reaches only the sweep, which ends its
# jobs.
os.setsid()
with imports.without_chatter():
    import tensorflow_datasets  # noqa: F401

    from pipeline.components import fitting  # noqa: F401
    from pipeline.run import run  # noqa: F401

for descriptor in os.listdir("/proc/self/fd"):
    # Exit if an import has opened a device. Jobs then do not use the forkserver.
    if os.path.realpath(f"/proc/self/fd/{descriptor}").startswith(gpus.DEVICES):
        sys.exit(
            "pipeline: importing TensorFlow has opened a device, so "
            "each job imports TensorFlow itself"
        )


def _print_error(kind: Any, error: Any, trace: Any) -> None:
    # Print no traceback for these errors: a sweep that is interrupted while it starts a
    # job leaves a process that receives no job.
    if not issubclass(kind, EOFError | pickle.UnpicklingError):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _print_error
