"""Python collects no garbage while the commands import TensorFlow.

Nor does it later look at what was imported first.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc
from pipeline.common import imports
with {context}:
    import keras
    enabled_meanwhile = gc.isenabled()
print(enabled_meanwhile, gc.isenabled(), gc.get_freeze_count() > 100_000)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "printed"),
    [
        ("imports.without_chatter()", "False True True"),
        ("__import__('contextlib').nullcontext()", "True True False"),
    ],
    ids=["without chatter", "plain"],
)
def test_no_garbage_is_collected_meanwhile(context, printed):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(context=context)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [printed]
