"""What a terminal shows of a run: the bar comes after what was printed before the first update."""

from __future__ import annotations

import os
import subprocess
import sys
import termios
from contextlib import suppress

from tests.running import environment

PROGRAM = """
import sys
from pipeline.training.progress import Progress
progress = Progress(3)
print("banner", file=sys.stderr)
progress.show(1, {"loss": 2.5, "learning_rate": 0.1}, 10.0)
progress.close()
"""


def test_the_bar_is_drawn_after_the_banner():
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    with os.fdopen(ours, "rb") as terminal:
        subprocess.run([sys.executable, "-c", PROGRAM], stderr=theirs, env=environment(), check=True)
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the terminal is closed once all is read
            while more := terminal.read1():
                shown += more
    assert shown.startswith(b"banner\r\n")
    assert b"1/3" in shown
    assert b"loss 2.5, lr 0.1, 10 examples/s" in shown
