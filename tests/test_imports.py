"""Libraries are left out of the shipper's imports alone; what a job can import is in `launching/test_local.py`."""

from __future__ import annotations

import subprocess
import sys

from tests.running import environment

SHIPPER = """
import gc, sys
from pipeline.tracking import shipper
assert gc.isenabled()
assert not {"pandas", "sklearn", "matplotlib"} & set(sys.modules)
import pandas
with shipper.without("pandas"):
    import pandas  # it is loaded
with shipper.without("wave"):
    try:
        import wave
    except ImportError:
        print("absent")
import wave
"""


def test_a_shipper_is_without_data_frames_and_only_while_it_imports():
    done = subprocess.run([sys.executable, "-c", SHIPPER], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "absent\n"
