"""The example of a training loop of one's own learns, by the command on its top."""

from __future__ import annotations

import subprocess
import sys

from tests.running import ROOT, environment


def test_it_learns(tmp_path):
    script = ROOT / "examples" / "own_loop" / "train.py"
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("epoch")]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.3
