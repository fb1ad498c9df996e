"""What the tests share. TensorFlow is imported only by the modules that need it: most tests start the command."""

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

# Workers with trainers and shippers of their own share two cores: more threads only wait for each other. No test
# asserts a speed.
ONE_THREAD = (
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
for _name in ONE_THREAD:
    os.environ.setdefault(_name, "1")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shared.begin()
        if config.getoption("numprocesses", None):
            shared.warm_server()  # while the workers collect


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave what needs a browser to `make test-all`; let workers begin with the guarantees, in case time runs out.

    Then follow the files that share something, those with the most tests first: all would wait for a large one that
    began last. Of the others something else is left out each time.
    """
    for item in items:
        if "chromium" in item.fixturenames:  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.slow)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return  # one process leaves a module once, with its fixtures
    listed = set(
        re.findall(
            r"`([\w/]+\.py::\w+)`",
            (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"),
        )
    )
    until = os.environ.get("PIPELINE_TEST_UNTIL")
    file_of = {item: str(item.nodeid).partition("::")[0] for item in items}
    sizes = Counter(
        file
        for item, file in file_of.items()
        if _shares(file) and item.get_closest_marker("slow")
    )

    def place(item: pytest.Item) -> tuple[bool, int, int]:
        test, file = (
            str(item.nodeid).partition("[")[0].removeprefix("tests/"),
            file_of[item],
        )
        return (
            test not in listed,
            -sizes[file],
            zlib.crc32(f"{until} {file}".encode()) if until else 0,
        )

    items.sort(key=place)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out the rest of what `make test-all` adds where the check's time is up; `make test` is always whole."""
    until = os.environ.get("PIPELINE_TEST_UNTIL")  # seconds since the epoch
    if (
        until is not None
        and time.time() > float(until)
        and item.get_closest_marker("slow")
    ):
        pytest.skip("the time of the check was up on this machine")


class Scheduling(LoadScopeScheduling):
    """Gives one worker what shares something; all else is given out test by test, after these groups.

    A file shares its fixtures, or what TensorFlow has traced for it. xdist's own `loadgroup` finds no group with
    pytest 9.2, whose IDs of tests are not text.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if _shares(file) else nodeid


@cache
def _shares(file: str) -> bool:
    text = (ROOT / file).read_text(encoding="utf-8")
    return bool(
        re.search(
            r'scope="module"|mlflow_server|^(import|from) (tensorflow|keras)\b',
            text,
            re.MULTILINE,
        )
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of what was killed where; each of these was recovered from, or its test has failed."""
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
    """Collect each module's garbage at its end, and look no more at what stays: a worker's heap is large."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def three_devices() -> None:
    """Three logical CPU devices, for a MirroredStrategy in this process: the host, or two replicas beside it.

    TensorFlow takes them only before its first operation. A module that needs them imports TensorFlow at its
    top, so it is loaded by now, and builds nothing there.
    """
    if "tensorflow" in sys.modules:
        import tensorflow as tf

        tf.config.set_visible_devices([], "GPU")
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 3
        )


@pytest.fixture(scope="session", autouse=True)
def open_streams() -> None:
    """Let absl, which comes with TensorFlow, keep no stream of pytest's: it closes it when Hydra sets up logging."""
    if "absl.logging" in sys.modules:
        sys.modules[
            "absl.logging"
        ].get_absl_handler().python_handler.stream = sys.__stderr__


@pytest.fixture(scope="session")
def chromium() -> Iterator:
    """The worker's one browser; what a test opens in a `window` of it is closed with it."""
    programs.need("chromium", "chromedriver")
    from tests.browser import browser

    with browser() as chrome:
        yield chrome


@pytest.fixture
def precision() -> Iterator:
    """A function that sets Keras' precision by the name of its policy; the test's end restores it."""
    import keras

    before = keras.config.floatx(), keras.config.dtype_policy()

    def set_precision(name: str) -> None:
        # Losses and metrics have no policy of their own: they follow floatx.
        keras.config.set_floatx("float64" if name == "float64" else "float32")
        keras.config.set_dtype_policy(name)
        keras.utils.set_random_seed(0)

    set_precision("float32")
    yield set_precision
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


@pytest.fixture
def float64(precision) -> None:
    """Double precision: where two ways to compute the same differ by rounding alone, it shows."""
    precision("float64")
