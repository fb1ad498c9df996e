"""Skips a test that needs a program which this machine lacks.

The reason names Debian's package. Where the environment says that this package is
installed, the test fails instead.
"""

from __future__ import annotations

import os
import shutil

import pytest

# Debian's package of each program.
PACKAGES = {
    "chromium": "chromium",
    "chromedriver": "chromium-driver",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "srun": "slurm-client",
    "squeue": "slurm-client",
    "scancel": "slurm-client",
    "sinfo": "slurm-client",
    "scontrol": "slurm-client",
    "initdb": "postgresql",
    "ss": "iproute2",
}

# Environment variable: the installed packages, whose tests may not be skipped.
INSTALLED = "PIPELINE_TEST_INSTALLED"


def need(*programs: str, path: str | None = None) -> None:
    """Skip the test unless all `programs` exist; fail it if their package is installed.

    Args:
        programs: names of `PACKAGES`.
        path: folders to search, in the form of PATH. None for PATH and /usr/sbin, which
            has the daemons.
    """
    if path is None:
        path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    for program in programs:
        if shutil.which(program, path=path) is not None:
            continue
        package = PACKAGES[program]
        message = f"{program} is not on this machine: apt-get install {package}"
        if package in _installed():
            pytest.fail(f"{message}, which is installed")
        pytest.skip(message)


def give_up(reason: str, *packages: str) -> None:
    """Skip the test for a `reason`; fail it if all its `packages` are installed."""
    if set(packages) <= _installed():
        pytest.fail(f"{reason}, and {', '.join(packages)} is installed")
    pytest.skip(reason)


def _installed() -> set[str]:
    return set(os.environ.get(INSTALLED, "").split())
