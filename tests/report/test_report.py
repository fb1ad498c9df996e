"""The report of a sweep: its files, for any store, and the page in a real browser."""

from __future__ import annotations

import csv
import html
import json
import math
from pathlib import Path

import numpy as np
import pytest
from plotly import graph_objects
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from pipeline.common.errors import ConfigError
from pipeline.report import html_page, plots, reading, table, writer
from pipeline.report.findings import SweepFinding
from pipeline.report.html_page import Plot
from tests import synthetic
from tests.browser import picture, window
from tests.synthetic import PlantedSweep

# The name of an optimizer, as the store has it.
NASTY = "<img src=x onerror=console.error('run')></script> $x_$ &amp;"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return synthetic.store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def by_batch(store, tmp_path_factory) -> writer.Report:
    sweep = synthetic.at_fixed_micro_batch(store)
    return writer.write(store.uri, sweep.run_id, tmp_path_factory.mktemp("by_batch"))


@pytest.fixture(scope="module")
def nasty(store, tmp_path_factory) -> writer.Report:
    """Return the report of a sweep that still runs.

    It has a job for each thing that can go wrong, and names that a page must escape.
    """
    seeds = [f"optimizer={NASTY} seed={seed}" for seed in range(4)]
    names = [*seeds, "optimizer=slow", "optimizer=lost"]
    sweep = PlantedSweep(store, names, ["optimizer", "seed"], NASTY)
    loss = 2 * 0.95 ** np.arange(20)
    sweep.job(seeds[0], {"train/loss": loss})
    sweep.job(
        seeds[1],
        {"train/loss": [*loss[:5], math.nan]},
        status="FAILED",
        tags={"failure": f"Lost: {NASTY}\nmore"},
    )
    sweep.job(
        seeds[2],
        {"train/loss": loss[:3]},
        status="FAILED",
        tags={"failure": "first try"},
    )
    sweep.job(seeds[2], {"train/loss": loss * 1.1})
    sweep.job(seeds[3], {"train/loss": [*loss[:4], math.inf]}, status="KILLED")
    sweep.job("optimizer=slow", {"train/loss": loss[:7] * 2}, status="RUNNING")
    return writer.write(store.uri, sweep.run_id, tmp_path_factory.mktemp("nasty"))


def first_on(written: writer.Report, topic: str) -> SweepFinding:
    """Return the first finding on the topic."""
    return next(finding for finding in written.findings if finding.topic == topic)


def plots_of(store, written: writer.Report) -> list[Plot]:
    return plots.draw(reading.read(store.uri, written.run_id))


# --- what a store may hold ---


def test_each_state_of_a_job_is_counted_and_the_latest_run_of_a_job_is_taken(nasty):
    finding = first_on(nasty, "jobs")
    assert finding.figures == {
        "planned": 6,
        "FINISHED": 2,
        "FAILED": 1,
        "KILLED": 1,
        "RUNNING": 1,
        "NO RUN": 1,
    }
    assert f"Lost: {NASTY}" in finding.text
    assert "first try" not in finding.text
    next_step = first_on(nasty, "next")
    assert next_step.figures["missing"][-1] == "optimizer=lost"
    assert f"--again {nasty.run_id}" in next_step.text


def test_a_job_that_ended_early_does_not_bend_the_mean_of_its_group(store, nasty):
    all_plots = {plot.key: plot for plot in plots_of(store, nasty)}
    means = []
    for trace in all_plots["train_loss_by_updates"].data:
        is_group = html.escape(NASTY, quote=False) in trace["name"]
        if is_group and "hoverinfo" not in trace:
            means.append(trace)
    (mean,) = means
    assert mean["y"] == pytest.approx(2.1 * 0.95 ** np.arange(20))


def test_no_sentence_occurs_twice(nasty):
    texts = [finding.text for finding in nasty.findings]
    assert len(set(texts)) == len(texts)


def test_a_sweep_of_which_nothing_ran_is_reported(store, tmp_path):
    sweep = PlantedSweep(store, ["factor=1", "factor=2"])
    written = writer.write(store.uri, sweep.run_id, tmp_path / "new" / "folder")
    assert first_on(written, "jobs").figures == {"planned": 2, "NO RUN": 2}
    topics = {finding.topic for finding in written.findings if finding.figures}
    assert topics == {"jobs", "next"}
    files = sorted(path.name for path in written.page.parent.iterdir())
    assert files == ["findings.json", "jobs.csv", "report.html"]


def test_a_sweep_is_found_by_its_name_and_by_the_start_of_its_run_id(store):
    sweep = PlantedSweep(store, [], name="only this one")
    assert reading.read(store.uri, "sweep only this one").run_id == sweep.run_id
    assert reading.read(store.uri, sweep.run_id[:12]).name == "only this one"
    # `pipeline sweep` names its newest sweep so.
    newer = PlantedSweep(store, [], name="only this one")
    assert reading.read(store.uri, "only this one").run_id == newer.run_id
    with pytest.raises(ConfigError, match="SWEEP must name one sweep of the store"):
        reading.read(store.uri, "another")


def test_a_store_that_does_not_exist_is_rejected_and_not_made(tmp_path):
    with pytest.raises(ConfigError, match=r"tracking\.uri must be a store that exists"):
        reading.read(f"sqlite:///{tmp_path}/none/mlflow.db", "any")
    assert not list(tmp_path.iterdir())


# --- the files ---


def csv_rows(written: writer.Report) -> list[dict[str, str]]:
    path = written.page.parent / "jobs.csv"
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_the_table_has_a_row_a_job(by_batch):
    row_by_job = {row["job"]: row for row in csv_rows(by_batch)}
    assert len(csv_rows(by_batch)) == 15
    row = row_by_job["factor=4 batch=128 seed=1"]
    assert row["status"] == "FINISHED"
    assert row["factor"] == "4"
    assert row["effective batch"] == "128"
    assert row["micro-batch"] == "32"
    assert float(row["time per update"]) == pytest.approx(0.04)
    assert float(row["noise scale"]) == 190


def test_no_cell_of_the_table_is_a_formula_or_moves_the_terminal(store, tmp_path):
    cell_by_name = {
        "=1+1": "'=1+1",
        "\t=1+1": "'?=1+1",
        "  +1": "'  +1",
        "\r@x": "'?@x",
        "\x1b[31ma=1": "?[31ma=1",
        "a=-1": "a=-1",
    }
    sweep = PlantedSweep(store, list(cell_by_name))
    written = writer.write(store.uri, sweep.run_id, tmp_path)
    text = (written.page.parent / "jobs.csv").read_bytes().decode()
    cells = [row["job"] for row in csv.DictReader(text.splitlines())]
    assert cells == list(cell_by_name.values())
    assert not {"\t", "\x1b"} & set(text)


def test_the_rows_of_the_page_stand_in_the_order_of_the_plan(store):
    sweep = PlantedSweep(store, ["factor=4", "factor=1", "factor=2"])
    sweep.job("factor=2", {"train/loss": [2, 1]}, factor=2)
    sweep.job("factor=1", {"train/loss": [2, 1]})
    results = reading.read(store.uri, sweep.run_id)
    rows = [row[0] for row in table.groups_table(results).rows]
    assert rows == ["factor=4", "factor=1", "factor=2"]
    assert list(results.groups) == rows


def test_findings_are_written_as_data_and_as_plain_text(nasty):
    data = json.loads((nasty.page.parent / "findings.json").read_text())
    topics = [entry["topic"] for entry in data]
    assert topics == [finding.topic for finding in nasty.findings]
    assert len(str(nasty).splitlines()) == len(nasty.findings)
    assert str(nasty).startswith("Jobs: 2 of 6 jobs finished.")


@pytest.mark.slow
def test_plotly_knows_every_property_and_draws_every_point(store, by_batch, nasty):
    for plot in plots_of(store, by_batch) + plots_of(store, nasty):
        # Plotly rejects what it does not know.
        figure = graph_objects.Figure(plot.data, plot.layout)
        for trace in figure.data:
            assert len(trace.x) == len(trace.y)
            assert np.isfinite(trace.y).all()


def test_the_page_needs_no_network_and_escapes_what_the_store_has(nasty):
    page = nasty.page.read_text()
    before_plotly = page[: page.index("<script>")]
    after_plotly = page[page.index('<script type="application/json"') :]
    ours = before_plotly + after_plotly
    assert "http:" not in ours
    assert "https:" not in ours
    assert "<img" not in ours
    parts = ("<h1>", "What was found", "<table", 'class="plotly-graph-div"')
    order = [ours.index(part) for part in parts]
    assert order == sorted(order)


def luminance(color: str) -> float:
    """Return the relative luminance of a color such as #0072b2, as WCAG 2.2 has it."""
    weights = (0.2126, 0.7152, 0.0722)
    total = 0.0
    for start, weight in zip((1, 3, 5), weights, strict=True):
        part = int(color[start : start + 2], 16) / 255
        if part <= 0.04045:
            linear = part / 12.92
        else:
            linear = ((part + 0.055) / 1.055) ** 2.4
        total += weight * linear
    return total


def contrast(color: str, ground: str) -> float:
    """Return the contrast ratio of two colors, as WCAG 2.2 has it."""
    darker, lighter = sorted([luminance(color), luminance(ground)])
    return (lighter + 0.05) / (darker + 0.05)


def test_colors_stand_out_from_their_ground():
    for color in html_page.LIGHT:
        assert contrast(color, "#ffffff") >= 3
    for color in html_page.DARK:
        assert contrast(color, "#0f1318") >= 3


# --- the page in a browser ---

GROUNDS = {"light": "rgb(255, 255, 255)", "dark": "rgb(15, 19, 24)"}
FIRST_COLORS = {"light": "rgb(0, 114, 178)", "dark": "rgb(86, 180, 233)"}
COUNT = "return document.querySelectorAll(arguments[0]).length"


def use_scheme(chrome: webdriver.Chrome, scheme: str) -> None:
    """Let the browser prefer the color scheme `light` or `dark`."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def first_line_colors(chrome: webdriver.Chrome, page: Path, scheme: str) -> list[str]:
    """Open `page`, wait for its plots, and return the colors of its first plot."""
    use_scheme(chrome, scheme)
    chrome.get(page.as_uri())
    WebDriverWait(chrome, 120).until(
        lambda browser: browser.execute_script("return document.body.dataset.drawn")
    )
    lines = chrome.find_elements(
        By.CSS_SELECTOR, ".plotly-graph-div:first-of-type .scatterlayer .js-line"
    )
    return [line.value_of_css_property("stroke") for line in lines]


@pytest.mark.parametrize(
    ("which", "scheme"),
    [
        ("by_batch", "dark"),
        pytest.param("by_batch", "light", marks=pytest.mark.slow),
        pytest.param("nasty", "light", marks=pytest.mark.slow),
        pytest.param("nasty", "dark", marks=pytest.mark.slow),
    ],
)
def test_the_page_on_a_phone(which, scheme, store, request, tmp_path, chromium):
    written = request.getfixturevalue(which)
    with window(chromium, 360, 740) as chrome:
        colors = first_line_colors(chrome, written.page, scheme)
        picture(chrome, tmp_path / f"{which}-{scheme}.png")
        assert chrome.get_log("browser") == []

        expected = len(plots_of(store, written))
        assert expected > 5
        assert chrome.execute_script(COUNT, ".plotly-graph-div") == expected
        drawn = ".plotly-graph-div .main-svg:first-of-type"
        assert chrome.execute_script(COUNT, drawn) >= expected
        assert chrome.execute_script(COUNT, ".plotly-graph-div .trace") >= expected

        width = chrome.execute_script("return document.documentElement.scrollWidth")
        assert width == 360
        ground = chrome.execute_script(
            "return getComputedStyle(document.body).backgroundColor"
        )
        assert ground == GROUNDS[scheme]
        assert colors[0] == FIRST_COLORS[scheme]


# Boxes that one has to scroll, and texts of a plot that reach beyond it.
CLIPPED = """
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const boxes = all(".scroll, .legend, figure")
  .filter(box => box.scrollWidth > box.clientWidth);
const isBeyond = (text, figure) => {
  const inner = text.getBoundingClientRect();
  const outer = figure.getBoundingClientRect();
  return inner.width && (inner.left < outer.left || inner.right > outer.right
    || inner.bottom > outer.bottom);
};
const beyond = figure => all("text", figure).filter(text => isBeyond(text, figure));
const texts = all("figure").flatMap(beyond);
return [...boxes.map(box => box.className), ...texts.map(text => text.textContent)];
"""


def test_a_group_is_hidden_in_all_plots_and_the_theme_can_change(by_batch, chromium):
    traces = "#train_loss_by_updates .trace, #val_loss_by_seconds .trace"
    line = "document.querySelector('#final_by_factor .js-line')"
    stroke = f"return getComputedStyle({line}).stroke"
    with window(chromium, 1200, 900) as chrome:
        first_line_colors(chrome, by_batch.page, "light")
        assert chrome.execute_script(CLIPPED) == []

        before = chrome.execute_script(COUNT, traces)
        chrome.find_element(By.CSS_SELECTOR, ".legend button").click()
        WebDriverWait(chrome, 30).until(
            lambda browser: browser.execute_script(COUNT, traces) == before * 4 // 5
        )

        use_scheme(chrome, "dark")
        WebDriverWait(chrome, 30).until(
            lambda browser: browser.execute_script(stroke) == FIRST_COLORS["dark"]
        )
        assert chrome.get_log("browser") == []
