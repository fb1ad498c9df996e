"""The batch script of the examples has valid syntax and command lines.

No Slurm is needed here; tests/sweep/test_slurm.py submits it.
"""

from __future__ import annotations

import re
import subprocess

from pipeline.config.compose import composed
from pipeline.sweep.files import sweep_files
from tests.running import ROOT

SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
TEXT = SCRIPT.read_text(encoding="utf-8")


def test_its_syntax():
    done = subprocess.run(["bash", "-n", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert TEXT.rstrip().splitlines()[-1].startswith('exec pipeline train "$@"')


def test_its_command_lines_compose():
    submitted = re.search(
        r"^# Command: +sbatch examples/slurm/train\.sbatch ((?:\S+=\S+ ?)+)",
        TEXT,
        re.MULTILINE,
    )
    assert submitted
    config = composed(submitted[1].split())
    assert config.model["_target_"] == "pipeline.components.model.mlp"

    sweep = re.search(r"^# +pipeline sweep (\S+) (.*)$", TEXT, re.MULTILINE)
    assert sweep
    name, overrides = sweep.groups()
    folder = str(sweep_files()[name].parent)
    options = ["--config-dir", folder, "--config-name", name]
    assert composed([*options, *overrides.split()])
