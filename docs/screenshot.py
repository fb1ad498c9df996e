"""python -m docs.screenshot [run|sweep|trajectories]: train, and write a picture.

- run (the default): the charts of one run in MLflow's UI, docs/run.png. About two
  minutes.
- sweep: the page that compares the 15 runs of `pipeline sweep
  factor_at_fixed_micro_batch`, docs/sweep.png. About eight minutes.
- trajectories: the plot in the report of `pipeline sweep
  factor_at_fixed_effective_batch` in float32 and float64, docs/trajectories.png. About
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

from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from pipeline.sweep import mlflow_view
from pipeline.sweep.parent_run import ParentRun
from tests.browser import browser, picture, server

HERE = Path(__file__).resolve().parent
# The arguments of `pipeline`, by the name of the picture.
COMMANDS = {
    "run": ["train"],
    "sweep": ["sweep", "factor_at_fixed_micro_batch"],
    "trajectories": [
        "sweep",
        "factor_at_fixed_effective_batch",
        "hardware.precision=float32,float64",
    ],
}
# The text for the page's search box, and the number of charts that it finds.
CHARTS = "train/(acc|eff|exam|gradient_norm|learn|loss)"
NUMBER_OF_CHARTS = 6
SEARCH_BOX = 'input[placeholder="Search metric charts"]'
# The number of charts that are drawn; 0 while one of them is empty.
DRAWN = """
const charts = [...document.querySelectorAll('.js-plotly-plot')];
return charts.every(chart => chart.querySelector('.trace path')) ? charts.length : 0"""
# A chart shows its toolbar under the mouse; a headless browser has no mouse and shows
# all toolbars.
HIDE_TOOLBARS = """
const style = document.createElement('style');
style.textContent = '.modebar { display: none }';
document.head.append(style);"""
# Let the plot fill the window: on the page two or three are side by side.
ENLARGE = """
document.querySelector('.plots:has(#difference)').style.display = 'block';
arguments[0].style.height = '480px';
Plotly.Plots.resize(arguments[0]);"""
PATIENCE = 120  # seconds for a page to show its charts
SETTLE = 2.0  # seconds for the charts to take their final size


def main(name: str = "run") -> None:
    command = [sys.executable, "-m", "pipeline", *COMMANDS[name]]
    command += ["tracking.log_model=false", "tracking.system_metrics=false"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(command, cwd=folder, check=True)
        store = f"sqlite:///{folder}/mlruns/mlflow.db"
        client = MlflowClient(store)
        (experiment,) = client.search_experiments(filter_string="name = 'pipeline'")
        experiment_id = experiment.experiment_id

        if name == "trajectories":
            sweep_id = only_sweep(client, experiment_id).info.run_id
            report = "report/report.html"
            page = client.download_artifacts(sweep_id, report, folder)
            photograph_trajectories(Path(page))
            return
        with server(store) as address, browser() as chrome:
            if name == "sweep":
                photograph_sweep(chrome, address, client, experiment_id)
            else:
                photograph_run(chrome, address, client, experiment_id)


def photograph_trajectories(page: Path) -> None:
    """Save the report's plot of the differences between trajectories."""
    with browser(900, 640) as chrome:
        chrome.get(page.as_uri())
        WebDriverWait(chrome, PATIENCE).until(
            lambda driver: driver.execute_script("return document.body.dataset.drawn")
        )
        plot = chrome.find_element(By.ID, "difference")
        chrome.execute_script(ENLARGE, plot)
        time.sleep(SETTLE)
        figure = plot.find_element(By.XPATH, "..")
        (HERE / "trajectories.png").write_bytes(figure.screenshot_as_png)


def photograph_run(
    chrome: webdriver.Chrome, address: str, client: MlflowClient, experiment_id: str
) -> None:
    """Save the charts of the only run."""
    (run,) = client.search_runs([experiment_id])
    page = f"#/experiments/{experiment_id}/runs/{run.info.run_id}/model-metrics"
    chrome.get(f"{address}/{page}")
    boxes = WebDriverWait(chrome, PATIENCE).until(
        lambda driver: driver.find_elements(By.CSS_SELECTOR, SEARCH_BOX)
    )
    boxes[0].send_keys(CHARTS)
    charts = range(NUMBER_OF_CHARTS, NUMBER_OF_CHARTS + 1)
    photograph_charts(chrome, charts, HERE / "run.png")


def photograph_sweep(
    chrome: webdriver.Chrome, address: str, client: MlflowClient, experiment_id: str
) -> None:
    """Save the page that the link of the only sweep opens."""
    run = only_sweep(client, experiment_id)
    sweep = ParentRun(
        address,
        run.info.run_id,
        experiment_id,
        run.data.tags["sweep.name"],
        varied=json.loads(run.data.tags["sweep.varied"]),
        metrics=["accuracy"],
    )
    chrome.get(f"{address}/{mlflow_view.save_view(sweep, {})}")
    photograph_charts(chrome, range(4, 20), HERE / "sweep.png")


def only_sweep(client: MlflowClient, experiment_id: str) -> Run:
    """Return the parent run of the only sweep in the store."""
    (run,) = client.search_runs([experiment_id], "tags.`sweep.name` != ''")
    return run


def photograph_charts(chrome: webdriver.Chrome, charts: range, path: Path) -> None:
    """Save the open page to `path` once the number of charts on it is in `charts`."""
    chrome.execute_script(HIDE_TOOLBARS)
    WebDriverWait(chrome, PATIENCE).until(
        lambda driver: driver.execute_script(DRAWN) in charts
    )
    time.sleep(SETTLE)
    picture(chrome, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
