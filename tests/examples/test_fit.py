"""The example of `compile` and `fit` learns, by the command on its top."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.running import ROOT, environment
from tests.shared import warm_address
from tests.warm import Python

SCRIPT = ROOT / "examples" / "fit" / "train.py"


@pytest.mark.slow
def test_it_learns(tmp_path):
    code = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    process = Python(
        warm_address(),
        ["-c", code],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
    )
    out, err = process.communicate()
    assert process.returncode == 0, err
    printed = re.findall(r"^epoch .* loss (\S+)", out, re.MULTILINE)
    losses = list(map(float, printed))
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.3
    assert float(re.findall(r"val_accuracy (\S+)", out)[-1]) > 0.8
