"""A real MLflow server and a real Chromium, for tests and pictures of their pages."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
# What a user of MLflow's UI has clicked on the first day: training mode, and the
# assistant's panel closed.
PREFERENCES = """
localStorage.setItem("mlflow.workflowType_v1", '"machine_learning"');
localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true");
"""


@contextmanager
def server(store_uri: str, seconds: float = 90) -> Iterator[str]:
    """Run an MLflow server on a free port of 127.0.0.1, and give its address.

    Args:
        store_uri: the backend store, in the form of `tracking.uri`.
        seconds: how long it may take to answer.
    """
    port = _free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", store_uri, "--workers", "1"]
    environment = {
        **os.environ,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    with tempfile.TemporaryFile() as log:
        # It has a session of its own: the server starts other processes, and ending the
        # first one leaves some of them behind.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            if not _answers(f"{address}/health", process, seconds):
                log.seek(0)
                end_of_log = log.read().decode(errors="replace")[-4000:]
                raise RuntimeError(f"mlflow server did not answer:\n{end_of_log}")
            yield address
        finally:
            _end_group(process)


@contextmanager
def browser(width: int = 1600, height: int = 1000) -> Iterator[webdriver.Chrome]:
    """Run a headless Chromium with a new profile and a page of `width` × `height`."""
    chromium = shutil.which("chromium")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        raise RuntimeError(
            "chromium and chromedriver are needed "
            "(Debian's chromium and chromium-driver)"
        )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = Options()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        chrome = webdriver.Chrome(options, Service(driver))
        try:
            _new_window(chrome, width, height)
            yield chrome
        finally:
            chrome.quit()


@contextmanager
def window(
    chrome: webdriver.Chrome, width: int = 1600, height: int = 1000
) -> Iterator[webdriver.Chrome]:
    """Open a window of `chrome` with a page of `width` × `height`.

    `chrome` acts on it until it is closed at the end.
    """
    before = chrome.current_window_handle
    _new_window(chrome, width, height)
    opened = chrome.current_window_handle
    try:
        yield chrome
    finally:
        # A test may have ended in a window that the page opened.
        chrome.switch_to.window(opened)
        chrome.close()
        chrome.switch_to.window(before)


def _new_window(chrome: webdriver.Chrome, width: int, height: int) -> None:
    chrome.switch_to.new_window("window")
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    script = {"source": PREFERENCES}
    chrome.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", script)
    # What other windows have logged is read here, so that a test finds only its own.
    chrome.get_log("browser")


def picture(chrome: webdriver.Chrome, path: Path) -> None:
    """Write what the window shows as a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(chrome.get_screenshot_as_png())


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _answers(address: str, process: subprocess.Popen[bytes], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
        time.sleep(0.3)
    return False


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for ending in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, ending)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
