"""The example of a training loop of one's own learns, in both of its ways."""

from __future__ import annotations

import subprocess

import pytest

from tests.running import ROOT, environment
from tests.shared import warm_address
from tests.warm import Python

SCRIPT = ROOT / "examples" / "own_loop" / "train.py"


RUN_IN_FLOAT64 = """
import runpy
import keras
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
runpy.run_path(SCRIPT, run_name="__main__")
"""


@pytest.mark.slow
def test_it_learns_the_same_in_both_ways(tmp_path):
    """In float64 the printed digits are equal: both halves differ in rounding alone."""
    code = RUN_IN_FLOAT64.replace("SCRIPT", repr(str(SCRIPT)))
    process = Python(
        warm_address(),
        ["-c", code],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
    )
    out, err = process.communicate()
    assert process.returncode == 0, err
    epochs = [line for line in out.splitlines() if line.startswith("epoch")]
    losses = [float(line.split()[-1]) for line in epochs]
    assert len(losses) == 10
    assert losses[:5] == sorted(losses[:5], reverse=True)
    assert losses[4] < 0.3
    assert losses[5:] == losses[:5]
