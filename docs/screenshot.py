"""python -m docs.screenshot [run|sweep|trajectories] — trains, and writes docs/run.png, sweep.png or trajectories.png.

- run (the default): the charts of one run in MLflow's UI; about two minutes.
- sweep: the page that compares the 15 runs of `pipeline sweep factor_at_fixed_micro_batch`; about eight minutes.
- trajectories: the plot in the report of `pipeline sweep factor_at_fixed_effective_batch` in float32 and float64; about
  four minutes.

Debian's packages chromium and chromium-driver are needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mlflow.tracking import MlflowClient
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from pipeline.sweep import mlflow_view
from pipeline.sweep.parent_run import ParentRun
from tests.browser import browser, picture, server

HERE = Path(__file__).resolve().parent
CHARTS = "train/(acc|eff|exam|grad|learn|loss)"  # the text for the page's search box
# The number of charts that are drawn; 0 while one of them is empty.
DRAWN = """
const charts = [...document.querySelectorAll('.js-plotly-plot')];
return charts.every(chart => chart.querySelector('.trace path')) ? charts.length : 0"""
SETTLE = 2.0  # seconds for the charts to take their final size


def main(of: str = "run") -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = f"sqlite:///{folder}/mlruns/mlflow.db"
        verb = {
            "run": ["train"],
            "sweep": ["sweep", "factor_at_fixed_micro_batch"],
            "trajectories": [
                "sweep",
                "factor_at_fixed_effective_batch",
                "hardware.precision=float32,float64",
            ],
        }[of]
        overrides = ["tracking.log_model=false", "tracking.system_metrics=false"]
        subprocess.run(
            [sys.executable, "-m", "pipeline", *verb, *overrides],
            cwd=folder,
            check=True,
        )
        client = MlflowClient(store)
        (experiment,) = client.search_experiments(filter_string="name = 'pipeline'")
        if of == "trajectories":
            (parent,) = client.search_runs(
                [experiment.experiment_id], "tags.`sweep.name` != ''"
            )
            photograph_trajectories(
                Path(
                    client.download_artifacts(
                        parent.info.run_id, "report/report.html", folder
                    )
                )
            )
            return
        with server(store) as address, browser() as chrome:
            photograph = {"run": photograph_run, "sweep": photograph_sweep}[of]
            photograph(chrome, address, client, experiment.experiment_id)


def photograph_trajectories(page: Path) -> None:
    """Save the report's plot of the differences between trajectories."""
    with browser(900, 640) as chrome:
        chrome.get(page.as_uri())
        WebDriverWait(chrome, 120).until(
            lambda c: c.execute_script("return document.body.dataset.drawn")
        )
        plot = chrome.find_element(By.ID, "difference")
        # Let the plot fill the window: on the page two or three are side by side.
        chrome.execute_script(
            "document.querySelector('.plots:has(#difference)').style.display = 'block'"
        )
        chrome.execute_script(
            "arguments[0].style.height = '480px'; Plotly.Plots.resize(arguments[0])",
            plot,
        )
        time.sleep(SETTLE)
        (HERE / "trajectories.png").write_bytes(
            plot.find_element(By.XPATH, "..").screenshot_as_png
        )


def photograph_run(
    chrome: webdriver.Chrome, address: str, client: MlflowClient, experiment_id: str
) -> None:
    """Save the charts of the only run."""
    (run,) = client.search_runs([experiment_id])
    chrome.get(
        f"{address}/#/experiments/{experiment_id}/runs/{run.info.run_id}/model-metrics"
    )
    wait = WebDriverWait(chrome, 120)
    boxes = wait.until(
        lambda c: c.find_elements(
            By.CSS_SELECTOR, 'input[placeholder="Search metric charts"]'
        )
    )
    boxes[0].send_keys(CHARTS)
    photograph_charts(chrome, range(6, 7), HERE / "run.png")


def photograph_sweep(
    chrome: webdriver.Chrome, address: str, client: MlflowClient, experiment_id: str
) -> None:
    """Save the page that the link of the only sweep opens."""
    (parent,) = client.search_runs([experiment_id], "tags.`sweep.name` != ''")
    name, varied = (
        parent.data.tags["sweep.name"],
        json.loads(parent.data.tags["sweep.varied"]),
    )
    sweep = ParentRun(
        address,
        parent.info.run_id,
        experiment_id,
        name,
        varied=varied,
        metrics=["accuracy"],
    )
    chrome.get(f"{address}/{mlflow_view.saved_view(sweep)}")
    photograph_charts(chrome, range(5, 20), HERE / "sweep.png")


def photograph_charts(chrome: webdriver.Chrome, charts: range, path: Path) -> None:
    """Save the open page to `path` once the number of charts on it is in `charts`."""
    # A chart shows its toolbar under the mouse; a headless browser has no mouse and shows all toolbars.
    chrome.execute_script(
        "document.head.append(Object.assign(document.createElement('style'), {textContent: arguments[0]}))",
        ".modebar { display: none }",
    )
    WebDriverWait(chrome, 120).until(lambda c: c.execute_script(DRAWN) in charts)
    time.sleep(SETTLE)
    picture(chrome, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
