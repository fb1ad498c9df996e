"""What the tests submit as jobs."""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil


def who():
    """Of the process that runs this: what a job could tell from."""
    print("said")
    print("complained", file=sys.stderr)
    here = psutil.Process()
    loaded = sorted({"tensorflow", "mlflow"} & set(sys.modules))
    ancestors = [parent.pid for parent in here.parents()]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    waits = signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
    return os.getcwd(), os.environ.get("COLOUR"), sys.stdin.read(), loaded, ancestors, set(blocked), waits


def computed():
    import tensorflow as tf

    return float(tf.function(lambda x: tf.reduce_sum(tf.matmul(x, x)))(tf.ones([64, 64])))


def raising():
    raise ValueError("the job is cursed")


def dying():
    os.kill(os.getpid(), signal.SIGKILL)


def lasting(folder):
    with (folder / "begun").open("a") as file:
        file.write("once\n")
    time.sleep(60)


def noted(file):
    with file.open("a") as opened:
        opened.write("once\n")
