"""Hooks and fixtures of all tests.

TensorFlow is imported only by the modules that need it: most tests start the command.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests import programs, shared

ROOT = Path(__file__).parents[1]

# Environment variable: when the check's time is up, in seconds since the epoch.
UNTIL = "PIPELINE_TEST_UNTIL"

# Workers with trainers and shippers of their own share two cores: more threads would
# only wait for each other. No test asserts a speed.
ONE_THREAD = (
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
for _name in ONE_THREAD:
    os.environ.setdefault(_name, "1")
os.environ.pop("MLFLOW_TRACKING_URI", None)  # Commands of tests look in their folder.


# What a file shares with its tests: fixtures, or what TensorFlow has traced for it.
SHARING = re.compile(
    r'scope="module"|mlflow_server|^(import|from) (tensorflow|keras)\b', re.MULTILINE
)
TEST_IN_TABLE = re.compile(r"`([\w/]+\.py::\w+)`")


def pytest_configure(config: pytest.Config) -> None:
    """Begin the session, and start the warm process while the workers collect."""
    if not hasattr(config, "workerinput"):
        shared.begin()
        if config.getoption("numprocesses", None):
            shared.warm_server()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a browser as slow; order the tests of workers by importance.

    Workers begin with the guarantees of CONTRIBUTING.md, in case time runs out. Then
    follow the files that share something, those with the most tests first: all would
    wait for a large one that began last. The others have another order in each check,
    so that not always the same tests are left out.
    """
    for item in items:
        if "chromium" in item.fixturenames:  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.slow)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return  # one process leaves a module once, with its fixtures

    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    guarantees = set(TEST_IN_TABLE.findall(contributing))
    slow_tests = Counter()
    for item in items:
        if item.get_closest_marker("slow") and _shares(_file_of(item)):
            slow_tests[_file_of(item)] += 1

    def place(item: pytest.Item) -> tuple[bool, int, int]:
        file = _file_of(item)
        test = str(item.nodeid).partition("[")[0].removeprefix("tests/")
        return test not in guarantees, -slow_tests[file], _drawn_place(file)

    items.sort(key=place)


def _file_of(item: pytest.Item) -> str:
    return str(item.nodeid).partition("::")[0]


def _drawn_place(file: str) -> int:
    """Return a number that depends on the file and the check; 0 without a check."""
    until = os.environ.get(UNTIL)
    if not until:
        return 0
    return zlib.crc32(f"{until} {file}".encode())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip slow tests once the time of the check is up; `make test` is complete."""
    until = os.environ.get(UNTIL)
    is_late = until is not None and time.time() > float(until)
    if is_late and item.get_closest_marker("slow"):
        pytest.skip("the time of the check was up on this machine")


class Scheduling(LoadScopeScheduling):
    """Gives a file that shares something to one worker, all else test by test.

    xdist's own `loadgroup` finds no group with pytest 9.2, whose IDs of tests are not
    text.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if _shares(file) else nodeid


@cache
def _shares(file: str) -> bool:
    text = (ROOT / file).read_text(encoding="utf-8")
    return SHARING.search(text) is not None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how often each process was killed where.

    Each of these was recovered from, or its test has failed.
    """
    kills = shared.noted()
    if kills:
        terminalreporter.section(f"{sum(kills.values())} kills, each recovered from")
        for line, count in sorted(kills.items()):
            terminalreporter.line(f"{count:5}  {line}")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shared.end()


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """Collect each module's garbage at its end, and freeze what stays.

    A worker's heap is large: each later collection would look at it again.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_tracking_uri() -> Iterator[None]:
    """Undo `mlflow.set_tracking_uri`, which also exports MLFLOW_TRACKING_URI.

    Commands of later tests in this process would use that store.
    """
    yield
    if "MLFLOW_TRACKING_URI" in os.environ:
        sys.modules["mlflow"].set_tracking_uri(None)


@pytest.fixture(scope="session", autouse=True)
def three_devices() -> None:
    """Make three logical CPU devices: the host, and two replicas of a MirroredStrategy.

    TensorFlow takes them only before its first operation. A module that needs them
    imports TensorFlow at its top, so it is loaded by now, and builds nothing there.
    `make test-gpu` uses the GPU instead, and leaves memory to the commands it starts.
    """
    if "tensorflow" in sys.modules:
        import tensorflow as tf

        if os.environ.get("PIPELINE_TEST_DEVICE") == "gpu":
            for gpu in tf.config.list_physical_devices("GPU"):
                tf.config.experimental.set_memory_growth(gpu, True)
            return
        tf.config.set_visible_devices([], "GPU")
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 3
        )


@pytest.fixture(scope="session", autouse=True)
def open_streams() -> None:
    """Give absl, which TensorFlow imports, the real stream in place of pytest's.

    It would close that one when Hydra sets up logging.
    """
    if "absl.logging" in sys.modules:
        handler = sys.modules["absl.logging"].get_absl_handler()
        handler.python_handler.stream = sys.__stderr__


@pytest.fixture(scope="session")
def chromium() -> Iterator:
    """Give the worker's one browser; a test opens a `window` of it, and closes that."""
    programs.need("chromium", "chromedriver")
    from tests.browser import browser

    with browser() as chrome:
        yield chrome


@pytest.fixture
def precision() -> Iterator:
    """Give a function that sets Keras' precision by the name of its policy.

    The end of the test restores the precision.
    """
    import keras

    floatx = keras.config.floatx()
    policy = keras.config.dtype_policy()

    def set_precision(name: str) -> None:
        # Losses and metrics have no policy of their own: they follow floatx.
        if name == "float64":
            keras.config.set_floatx("float64")
        else:
            keras.config.set_floatx("float32")
        keras.config.set_dtype_policy(name)
        keras.utils.set_random_seed(0)

    set_precision("float32")
    yield set_precision
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)


@pytest.fixture
def float64(precision) -> None:
    """Set double precision, in which a difference beyond rounding is seen."""
    precision("float64")
