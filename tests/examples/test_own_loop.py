"""The example of a training loop of one's own learns, by the command on its top."""

from __future__ import annotations

import subprocess

from tests.running import ROOT, environment
from tests.shared import warm_address
from tests.warm import Python

SCRIPT = ROOT / "examples" / "own_loop" / "train.py"


def test_it_learns(tmp_path):
    code = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    process = Python(warm_address(), ["-c", code], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE)
    out, err = process.communicate()
    assert process.returncode == 0, err
    losses = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("epoch")]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.3
