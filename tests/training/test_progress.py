"""What a terminal shows of a run.

The bar comes after what was printed before the first update.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import termios
from contextlib import suppress
from types import SimpleNamespace

import pytest

from pipeline.training import progress
from pipeline.training.progress import Progress
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
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            stderr=theirs,
            env=environment(),
            check=True,
        )
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the terminal is closed once all is read
            while more := terminal.read1():
                shown += more
    assert shown.startswith(b"banner\r\n")
    assert b"1/3" in shown
    assert b"loss 2.5, lr 0.1, 10 examples/s" in shown


CLOSED = """
from pipeline.training.progress import Progress
progress = Progress(1)
progress.show(1, {"loss": 2.5, "learning_rate": 0.1}, 10.0)
progress.evaluated("test", 1, {"loss": 2.0})
progress.close()
"""


@pytest.mark.parametrize("open_end", [os.pipe, os.openpty])
def test_a_run_goes_on_where_nobody_reads_its_progress(open_end):
    """As by `| head`, or when the terminal is closed."""
    ours, theirs = open_end()
    os.close(ours)
    done = subprocess.run(
        [sys.executable, "-c", CLOSED], stderr=theirs, env=environment()
    )
    os.close(theirs)
    assert done.returncode == 0


def test_a_crash_is_seen_while_notices_of_libraries_are_held_back():
    crash = (
        "import os, signal; from pipeline.common import imports\n"
        "with imports.without_chatter(): os.kill(os.getpid(), signal.SIGSEGV)"
    )
    done = subprocess.run(
        [sys.executable, "-c", crash], capture_output=True, text=True, env=environment()
    )
    assert done.stderr.startswith("Fatal Python error: Segmentation fault")


@pytest.mark.parametrize(
    ("known", "last_lines"), [(0, ["update 2  loss 0.5"]), (9, [])]
)
def test_a_run_that_does_not_know_its_last_update_shows_it_when_it_ends(
    capsys, monkeypatch, known, last_lines
):
    monkeypatch.setattr(progress, "SECONDS", math.inf)
    shown = Progress(known)
    for update in (1, 2):
        shown.show(update, {"loss": 1 / update, "learning_rate": 0.1}, 100.0)
    assert capsys.readouterr().err == ""  # no line is due
    shown.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("  lr ")[0] for line in lines] == last_lines
    shown.close()
    assert capsys.readouterr().err == ""


def test_a_log_has_every_evaluation(capsys):
    shown = Progress(9)
    for update in (1, 2, 3):
        shown.show(update, {"loss": 1.0, "learning_rate": 0.1}, 100.0)
        shown.evaluated("val", update, {"loss": 0.5 / update})
    shown.evaluated("test", 3, {"loss": 0.25})
    assert capsys.readouterr().err.splitlines() == [
        "update 1/9  val/loss 0.5000",
        "update 2/9  val/loss 0.2500",
        "update 3/9  val/loss 0.1667",
        "update 3/9  test/loss 0.2500",
    ]


def test_the_time_left_is_without_compilation(capsys, monkeypatch):
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(progress, "time", clock)
    shown = Progress(100)
    now[0] = 140.0  # what is built before the first update
    shown.start_clock()
    now[0] = 140.0 + 60 + 10  # compilation, and ten updates of a second
    row = {"loss": 1.0, "learning_rate": 0.1}
    shown.show(10, row, 100.0, compile_seconds=60.0)
    assert capsys.readouterr().err.endswith("  90 s left\n")
