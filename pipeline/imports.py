"""Imports at the start: without what nobody needs, and without what nobody reads."""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Makes `import` of these packages fail, as where they are not installed; one that is loaded already stays.

    Large libraries import others for a corner of what they do, and do without where those are missing. Afterwards
    everything can be imported again. What is loaded meanwhile is left out of garbage collection, which would look
    through it again and again: a seventh of the import of TensorFlow, and of MLflow.
    """
    collects, loaded = gc.isenabled(), len(sys.modules)
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None is how Python marks such a name
    gc.disable()
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
        if len(sys.modules) > loaded:  # else what is there is of earlier jobs in this process, and may be garbage
            gc.freeze()
        if collects:
            gc.enable()


@contextmanager
def without_chatter() -> Iterator[None]:
    """Holds back the notices that TensorFlow's libraries print when they are loaded; lets all else through.

    They come before any log level is read, so that no setting stops them.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            for line in held.read().decode(errors="replace").splitlines():
                if not re.match(r"[IWE]\d{4} |\d{4}-\d\d-\d\d .*: [IWE] |WARNING: All log messages before absl", line):
                    print(line, file=sys.stderr, flush=True)
