"""Large imports leave out what nobody needs, and are themselves left out of garbage collection."""

from __future__ import annotations

import subprocess
import sys

from tests.running import environment

# In a process of its own: what is frozen stays so.
SCRIPT = """
import gc, weakref
from pipeline import imports

try:
    with imports.without("wave"):
        import smtpd_that_is_nowhere
except ImportError:
    pass
assert gc.isenabled()

with imports.without("wave"):
    try:
        import wave
    except ImportError:
        print("absent")
    assert not gc.isenabled()
    import xmlrpc.client
import wave
frozen = gc.get_freeze_count()
assert frozen > 1000, frozen


class Cycle:
    def __init__(self):
        self.itself = self


# What an earlier job left behind in this process: nothing is loaded, so it is not kept.
left = weakref.ref(Cycle())
with imports.without("matplotlib"):
    import xmlrpc.client
gc.collect()
assert left() is None and gc.get_freeze_count() == frozen

gc.disable()
with imports.without():
    pass
assert not gc.isenabled()
"""


def test_absent_for_a_while_and_collected_as_before():
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "absent\n"
