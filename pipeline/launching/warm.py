"""What a job needs, imported once: the process that imports this module is the one that jobs are forked from.

It starts no runtime and opens no device, so that a fork of it is as good as a new process.
"""

import os

from pipeline import imports
from pipeline.launching import gpus

os.setsid()  # Ctrl-C in the terminal is for the sweep, which ends its jobs in good order
with imports.without_chatter():
    import tensorflow_datasets  # noqa: F401

    from pipeline import assembly, job, recorder, training  # noqa: F401
    from pipeline.tracking import tracker  # noqa: F401
gpus.refuse_to_be_forked()
