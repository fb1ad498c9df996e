"""What a machine may lack: a test that needs it is skipped, in a line that names Debian's package."""

from __future__ import annotations

import os
import shutil

import pytest

PACKAGES = {  # program → Debian's package
    "chromium": "chromium",
    "chromedriver": "chromium-driver",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    **dict.fromkeys(
        ("sbatch", "srun", "squeue", "scancel", "sinfo", "scontrol"), "slurm-client"
    ),
    "initdb": "postgresql",
    "ss": "iproute2",
}
INSTALLED = "PIPELINE_TEST_INSTALLED"  # environment variable: packages for whose want no test may be skipped


def need(*programs: str, path: str | None = None) -> None:
    """Skip the test unless all `programs` are found; fail it where their package is said to be installed.

    Args:
        path: folders to search, as PATH has them; None for PATH and /usr/sbin, where daemons are.
    """
    searched = f"{os.environ.get('PATH', '')}:/usr/sbin" if path is None else path
    for program in programs:
        if shutil.which(program, path=searched) is None:
            said = (
                f"{program} is not on this machine: apt-get install {PACKAGES[program]}"
            )
            if PACKAGES[program] in os.environ.get(INSTALLED, "").split():
                pytest.fail(f"{said}, which is installed")
            pytest.skip(said)


def give_up(reason: str, *packages: str) -> None:
    """Skip the test for a `reason`; fail it where the `packages` that it is about are said to be installed."""
    if set(packages) <= set(os.environ.get(INSTALLED, "").split()):
        pytest.fail(f"{reason}, and {', '.join(packages)} is installed")
    pytest.skip(reason)
