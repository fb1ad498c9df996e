"""A forked process is the same to a test as one that was started.

The rest of the suite relies on it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from tests.running import python

SCRIPT = """
import json, os, signal, sys, threading
loaded = [name for name in ("tensorflow", "mlflow") if name in sys.modules]
print(json.dumps({
    "arguments": sys.argv[1:],
    "folder": os.getcwd(),
    "colour": os.environ.get("COLOUR"),
    "path": sys.path[:1],
    "session": os.getsid(0) == os.getpid(),
    "threads": len(os.listdir("/proc/self/task")),
    "input": sys.stdin.read(),
    "main": __name__,
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "descriptors": len(os.listdir("/proc/self/fd")),
}))
print("complained", loaded, file=sys.stderr)
sys.exit(3)
"""


def test_it_tells_the_same_as_a_new_process(tmp_path):
    outputs = []
    for warm in (True, False):
        process = python(
            "-c",
            SCRIPT,
            "one",
            cwd=tmp_path,
            warm=warm,
            stdin=subprocess.PIPE,
            COLOUR="red",
        )
        out, err = process.communicate("typed")
        assert process.returncode == process.poll() == 3, err
        assert err.startswith("complained")
        assert ("tensorflow" in err) is warm
        outputs.append(json.loads(out))
    forked, started = outputs
    if forked["path"] == [str(tmp_path)]:  # the same for `-c`
        forked["path"] = [""]
    assert forked == started
    assert (forked["threads"], forked["colour"], forked["input"]) == (1, "red", "typed")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_and_is_its_status(tmp_path, number):
    process = python(
        "-c", "import time; print('begun', flush=True); time.sleep(60)", cwd=tmp_path
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    os.kill(process.pid, number)
    assert process.wait(30) == -number


def test_one_does_not_see_what_another_has_done(tmp_path):
    change = (
        "import sys, keras; keras.config.set_floatx('float64'); "
        "sys.modules['mine'] = keras"
    )
    ask = "import sys, keras; print(keras.config.floatx(), 'mine' in sys.modules)"
    assert python("-c", change, cwd=tmp_path).wait() == 0
    assert python("-c", ask, cwd=tmp_path).communicate() == ("float32 False\n", "")
