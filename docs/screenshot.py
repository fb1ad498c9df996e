"""python -m docs.screenshot — trains a run and writes docs/run.png, its page in MLflow's UI. About two minutes.

Needs Debian's chromium and chromium-driver.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mlflow.tracking import MlflowClient
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

from tests.browser import browser, picture, server

HERE = Path(__file__).resolve().parent
CHARTS = "train/(acc|eff|exam|grad|learn|loss)"  # what is typed into the page's search box
DRAWN = "return [...document.querySelectorAll('.js-plotly-plot')].filter(p => p.querySelector('.trace')).length"
SETTLE = 2.0  # seconds for the charts to take their final size


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = f"sqlite:///{folder}/mlruns/mlflow.db"
        overrides = ["tracking.log_model=false", "tracking.system_metrics=false"]
        subprocess.run([sys.executable, "-m", "pipeline", "train", *overrides], cwd=folder, check=True)
        client = MlflowClient(store)
        (experiment,) = client.search_experiments(filter_string="name = 'pipeline'")
        (run,) = client.search_runs([experiment.experiment_id])
        with server(store) as address, browser() as chrome:
            page = f"{address}/#/experiments/{experiment.experiment_id}/runs/{run.info.run_id}/model-metrics"
            photograph_charts(chrome, page, CHARTS, 6, HERE / "run.png")


def photograph_charts(chrome: WebDriver, page: str, search: str, charts: int, path: Path) -> None:
    """Writes the charts of a run to `path`.

    Args:
        chrome: an open browser.
        page: the address of the run's `model-metrics`.
        search: which charts, as the page's search box takes it.
        charts: how many that are.
        path: of the PNG.
    """
    wait = WebDriverWait(chrome, 120)
    chrome.get(page)
    boxes = wait.until(lambda c: c.find_elements(By.CSS_SELECTOR, 'input[placeholder="Search metric charts"]'))
    boxes[0].send_keys(search)
    # A chart's toolbar shows under a mouse; a headless browser has none, and then shows all of them.
    chrome.execute_script(
        "document.head.append(Object.assign(document.createElement('style'), {textContent: arguments[0]}))",
        ".modebar { display: none }",
    )
    wait.until(lambda c: c.execute_script(DRAWN) == charts)
    time.sleep(SETTLE)
    picture(chrome, path)


if __name__ == "__main__":
    main()
