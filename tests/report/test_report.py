"""The report of a sweep: its files, whatever the store holds, and the page in a real browser."""

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
from pipeline.report import comparison, html_page, plots, writer
from pipeline.report.findings import Finding
from tests import synthetic
from tests.browser import picture, window
from tests.synthetic import Made

NASTY = "<img src=x onerror=console.error('run')></script> $x_$ &amp;"  # an optimizer's name, as the store has it


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return synthetic.store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def by_batch(store, tmp_path_factory) -> writer.Report:
    made = synthetic.at_fixed_micro_batch(store)
    return writer.write(store.uri, made.run_id, tmp_path_factory.mktemp("by_batch"))


@pytest.fixture(scope="module")
def nasty(store, tmp_path_factory) -> writer.Report:
    """A sweep that still runs, with a job for each thing that can go wrong, and names that a page must escape."""
    names = [f"optimizer={NASTY} seed={seed}" for seed in range(4)] + [
        "optimizer=slow",
        "optimizer=lost",
    ]
    made = Made(store, names, ["optimizer", "seed"], NASTY)
    loss = 2 * 0.95 ** np.arange(20)
    made.job(names[0], {"train/loss": loss})
    made.job(
        names[1],
        {"train/loss": [*loss[:5], math.nan]},
        status="FAILED",
        tags={"failure": f"Lost: {NASTY}\nmore"},
    )
    made.job(
        names[2],
        {"train/loss": loss[:3]},
        status="FAILED",
        tags={"failure": "first try"},
    )
    made.job(names[2], {"train/loss": loss * 1.1})
    made.job(names[3], {"train/loss": [*loss[:4], math.inf]}, status="KILLED")
    made.job(names[4], {"train/loss": loss[:7] * 2}, status="RUNNING")
    return writer.write(store.uri, made.run_id, tmp_path_factory.mktemp("nasty"))


def of(written: writer.Report, topic: str) -> Finding:
    return next(finding for finding in written.findings if finding.topic == topic)


# --- what a store may hold ---


def test_each_state_of_a_job_is_counted_and_the_latest_run_of_a_job_is_taken(nasty):
    finding = of(nasty, "jobs")
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
    assert of(nasty, "next").figures["missing"][-1] == "optimizer=lost"
    assert f"--again {nasty.run_id}" in of(nasty, "next").text


def test_a_job_that_ended_early_does_not_bend_its_group_and_nothing_is_said_twice(
    store, nasty
):
    plot = next(
        p
        for p in plots.draw(comparison.read(store.uri, nasty.run_id))
        if p.key == "train_loss_by_updates"
    )
    (mean,) = [
        one
        for one in plot.data
        if html.escape(NASTY, quote=False) in one["name"] and "hoverinfo" not in one
    ]
    assert mean["y"] == pytest.approx(2.1 * 0.95 ** np.arange(20))
    assert len({finding.text for finding in nasty.findings}) == len(nasty.findings)


def test_a_sweep_of_which_nothing_ran_is_reported(store, tmp_path):
    written = writer.write(
        store.uri,
        Made(store, ["factor=1", "factor=2"]).run_id,
        tmp_path / "new" / "folder",
    )
    assert of(written, "jobs").figures == {"planned": 2, "NO RUN": 2}
    assert {finding.topic for finding in written.findings if finding.figures} == {
        "jobs",
        "next",
    }
    assert sorted(path.name for path in written.page.parent.iterdir()) == [
        "findings.json",
        "jobs.csv",
        "report.html",
    ]


def test_a_sweep_is_found_by_its_name_and_by_the_start_of_its_run_id(store):
    made = Made(store, [], name="only this one")
    assert comparison.read(store.uri, "sweep only this one").run_id == made.run_id
    assert comparison.read(store.uri, made.run_id[:12]).name == "only this one"
    newer = Made(store, [], name="only this one")
    assert (
        comparison.read(store.uri, "only this one").run_id == newer.run_id
    )  # as `pipeline sweep` names it
    with pytest.raises(ConfigError, match="SWEEP must name one sweep of the store"):
        comparison.read(store.uri, "another")


def test_a_store_that_does_not_exist_is_refused_and_not_made(tmp_path):
    with pytest.raises(ConfigError, match=r"tracking\.uri must be a store that exists"):
        comparison.read(f"sqlite:///{tmp_path}/none/mlflow.db", "any")
    assert not list(tmp_path.iterdir())


# --- the files ---


@pytest.mark.slow
def test_the_table_has_a_row_a_job(by_batch):
    with (by_batch.page.parent / "jobs.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 15
    row = next(row for row in rows if row["job"] == "factor=4 batch=128 seed=1")
    assert (
        row["status"],
        row["factor"],
        row["effective batch"],
        row["micro-batch"],
    ) == ("FINISHED", "4", "128", "32")
    assert float(row["time per update"]) == pytest.approx(0.04)
    assert float(row["noise scale"]) == 190


def test_no_cell_of_the_table_is_a_formula_or_moves_the_terminal(store, tmp_path):
    names = {
        "=1+1": "'=1+1",
        "\t=1+1": "'?=1+1",
        "  +1": "'  +1",
        "\r@x": "'?@x",
        "\x1b[31ma=1": "?[31ma=1",
        "a=-1": "a=-1",
    }
    with (
        writer.write(store.uri, Made(store, [*names]).run_id, tmp_path).page.parent
        / "jobs.csv"
    ).open("rb") as file:
        text = file.read().decode()
    assert [row["job"] for row in csv.DictReader(text.splitlines())] == [
        *names.values()
    ]
    assert not {"\t", "\x1b"} & set(text)


def test_findings_are_written_as_data_and_as_plain_text(nasty):
    data = json.loads((nasty.page.parent / "findings.json").read_text())
    assert [entry["topic"] for entry in data] == [
        finding.topic for finding in nasty.findings
    ]
    assert len(str(nasty).splitlines()) == len(nasty.findings)
    assert str(nasty).startswith("Jobs: 2 of 6 jobs finished.")


@pytest.mark.slow
def test_plotly_knows_every_property_and_draws_every_point(store, by_batch, nasty):
    for written in (by_batch, nasty):
        for plot in plots.draw(comparison.read(store.uri, written.run_id)):
            figure = graph_objects.Figure(
                plot.data, plot.layout
            )  # refuses what it does not know
            for trace in figure.data:
                assert len(trace.x) == len(trace.y)
                assert np.isfinite(trace.y).all()


def test_the_page_needs_no_network_and_escapes_what_the_store_says(nasty):
    page = nasty.page.read_text()
    own = (
        page[: page.index("<script>")]
        + page[page.index('<script type="application/json"') :]
    )
    assert "http:" not in own
    assert "https:" not in own
    assert "<img" not in own
    order = [
        own.index(part)
        for part in ("<h1>", "What was found", "<table", 'class="plotly-graph-div"')
    ]
    assert order == sorted(order)


def contrast(one: str, other: str) -> float:
    """WCAG 2.2's ratio of two colours such as #0072b2."""
    light = []
    for colour in (one, other):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
            for part in parts
        ]
        light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(light) + 0.05) / (min(light) + 0.05)


def test_colours_stand_out_from_their_ground():
    assert min(contrast(colour, "#ffffff") for colour in html_page.LIGHT) >= 3
    assert min(contrast(colour, "#0f1318") for colour in html_page.DARK) >= 3


def opened(chrome: webdriver.Chrome, page: Path, scheme: str) -> list[str]:
    """Opens `page` in the colour scheme and waits for its plots; gives the colours of its first plot's lines."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    chrome.get(page.as_uri())
    WebDriverWait(chrome, 120).until(
        lambda c: c.execute_script("return document.body.dataset.drawn")
    )
    lines = chrome.find_elements(
        By.CSS_SELECTOR, ".plotly-graph-div:first-of-type .scatterlayer .js-line"
    )
    return [line.value_of_css_property("stroke") for line in lines]


@pytest.mark.parametrize(
    ("which", "scheme"),
    [
        ("by_batch", "dark"),
        *(
            pytest.param(*c, marks=pytest.mark.slow)
            for c in (("by_batch", "light"), ("nasty", "light"), ("nasty", "dark"))
        ),
    ],
)
def test_the_page_on_a_phone(which, scheme, store, request, tmp_path, chromium):
    written = request.getfixturevalue(which)
    with window(chromium, 360, 740) as chrome:
        colours = opened(chrome, written.page, scheme)
        picture(chrome, tmp_path / f"{which}-{scheme}.png")
        assert chrome.get_log("browser") == []
        count = "return document.querySelectorAll(arguments[0]).length"
        asked = chrome.execute_script(count, ".plotly-graph-div")
        assert asked == len(plots.draw(comparison.read(store.uri, written.run_id))) > 5
        assert (
            chrome.execute_script(count, ".plotly-graph-div .main-svg:first-of-type")
            >= asked
        )
        assert chrome.execute_script(count, ".plotly-graph-div .trace") >= asked
        assert (
            chrome.execute_script("return document.documentElement.scrollWidth") == 360
        )
        ground = chrome.execute_script(
            "return getComputedStyle(document.body).backgroundColor"
        )
        assert (
            ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(15, 19, 24)"}[scheme]
        )
        first = {"light": "rgb(0, 114, 178)", "dark": "rgb(86, 180, 233)"}[scheme]
        assert colours[0] == first


# Boxes that one has to scroll, and texts of a plot that reach beyond it.
CLIPPED = """
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const boxes = all(".scroll, .legend, figure").filter(box => box.scrollWidth > box.clientWidth);
const beyond = figure => all("text", figure).filter(text => {
  const [inner, outer] = [text.getBoundingClientRect(), figure.getBoundingClientRect()];
  return inner.width && (inner.left < outer.left || inner.right > outer.right || inner.bottom > outer.bottom);
});
return [...boxes.map(box => box.className), ...all("figure").flatMap(beyond).map(text => text.textContent)];
"""


def test_a_group_is_hidden_in_all_plots_and_the_theme_can_change(by_batch, chromium):
    with window(chromium, 1200, 900) as chrome:
        opened(chrome, by_batch.page, "light")
        assert chrome.execute_script(CLIPPED) == []
        traces = "return document.querySelectorAll('#train_loss_by_updates .trace, #val_loss_by_seconds .trace').length"
        before = chrome.execute_script(traces)
        chrome.find_element(By.CSS_SELECTOR, ".legend button").click()
        WebDriverWait(chrome, 30).until(
            lambda c: c.execute_script(traces) == before * 4 // 5
        )
        features = [{"name": "prefers-color-scheme", "value": "dark"}]
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        line = "return getComputedStyle(document.querySelector('#final_by_factor .js-line')).stroke"
        WebDriverWait(chrome, 30).until(
            lambda c: c.execute_script(line) == "rgb(86, 180, 233)"
        )
        assert chrome.get_log("browser") == []
