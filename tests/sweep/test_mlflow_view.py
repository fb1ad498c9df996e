"""What a person sees who follows the link of a sweep.

It is MLflow's own UI, in Chromium, on a store with other runs in it. The pictures are
kept in the folder PIPELINE_TEST_ARTIFACTS, else in `tests/artifacts`.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from selenium.common.exceptions import StaleElementReferenceException, TimeoutException
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

from pipeline.sweep import mlflow_view, view_settings
from pipeline.sweep.parent_run import ParentRun
from pipeline.sweep.view_settings import AxisRange
from pipeline.tracking.store import Store
from tests import synthetic
from tests.browser import PREFERENCES, picture, server, window

ARTIFACTS = Path(
    os.environ.get("PIPELINE_TEST_ARTIFACTS", Path(__file__).parents[1] / "artifacts")
)
FACTORS = (1, 4, 16)
SEEDS = (0, 1)
MICRO = 8
# Each job of the first sweep sees as many: 800 updates of 8, to 50 of 128.
EXAMPLES = 6400
EVALUATIONS = 5
OPTIMIZERS = ("sgd", "adamw")

# A browser that was never told whether its user trains models or builds agents.
NEW = 'localStorage.removeItem("mlflow.workflowType_v1")'
# The chart at a place on the page: its title, the title of its x axis, and its lines by
# the ID of a run or group.
CHART = """
const cardId = '[data-testid="experiment-view-compare-runs-card"]';
const card = document.querySelectorAll(cardId)[arguments[0]];
const plot = card && card.querySelector('.js-plotly-plot');
if (!plot || !plot.data || !plot.querySelector('.trace')) return null;
const lines = plot.data.filter(trace => trace.uuid && !trace.fill);
const drawn = [...plot.querySelectorAll('.scatterlayer .trace .js-line')];
const points = line => ({x: [...line.x], y: [...line.y]});
return {
  title: card.innerText.split('\\n')[0],
  axis: plot.layout.xaxis.title.text,
  drawn: drawn.map(line => line.style.stroke),
  lines: Object.fromEntries(lines.map(line => [line.uuid, points(line)])),
}"""
ROWS = """
const rows = [...document.querySelectorAll('.ag-pinned-left-cols-container .ag-row')];
rows.sort((a, b) => a.getAttribute('row-index') - b.getAttribute('row-index'));
const aside = /^#|^(Hide|Unhide|Pin|Unpin) (group|run)$|ago$/;
const texts = row => row.innerText.split('\\n').filter(text => text);
return rows.map(row => texts(row).filter(text => !aside.test(text)).join(' '))"""


@dataclass
class Shown:
    """A store that MLflow serves, with two sweeps and a lone run in one experiment.

    Attributes:
        factors: the sweep over factor and seed, 6 jobs.
        optimizers: the sweep over optimizer and factor, 6 jobs.
        losses: of the first sweep, by factor and seed, after each update.
    """

    store: Store
    factors: synthetic.PlantedSweep
    optimizers: synthetic.PlantedSweep
    losses: dict[tuple[int, int], np.ndarray]
    address: str = ""
    chrome: WebDriver | None = None

    def fragment(self, sweep: synthetic.PlantedSweep) -> str:
        return mlflow_view.save_view(sweep.planned, {})

    def open(self, fragment: str) -> None:
        self.chrome.get("about:blank")  # else a new fragment is no new page
        self.chrome.get(f"{self.address}/{fragment}")

    def wait(self, for_: Callable[[], Any], what: str) -> Any:
        waiting = WebDriverWait(
            self.chrome, 240, ignored_exceptions=[StaleElementReferenceException]
        )
        try:
            return waiting.until(lambda _: for_())
        except TimeoutException:
            picture(self.chrome, ARTIFACTS / "failed.png")
            raise AssertionError(
                f"{what}\n{self.chrome.current_url}\n{self.rows()}"
            ) from None

    def rows(self) -> list[str]:
        rows: list[str] = self.chrome.execute_script(ROWS)
        return rows

    def chart(self, place: int, lines: int) -> dict[str, Any]:
        """Return the chart there, once it has this number of lines."""

        def complete() -> Any:
            chart = self.chrome.execute_script(CHART, place)
            if not chart or len(chart["lines"]) != lines:
                return None
            return chart if len(chart["drawn"]) >= lines else None

        chart: dict[str, Any] = self.wait(
            complete, f"chart {place} has no {lines} lines"
        )
        return chart


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """Make the store alone, with short curves: neither a server nor a browser."""
    return made(tmp_path_factory.mktemp("stored"), EXAMPLES // 10)


def made(folder: Path, examples: int) -> Shown:
    """Return a store whose first sweep has jobs that see `examples` examples each."""
    store = synthetic.store(folder)
    factors, losses = sweep_over_factors(store, examples)
    optimizers = sweep_over_optimizers(store)
    client = store.client()
    lone = client.create_run(factors.experiment_id, run_name="lone").info.run_id
    client.log_metric(lone, "train/loss", 1.0, step=1)
    client.set_terminated(lone)
    return Shown(store, factors, optimizers, losses)


def sweep_over_factors(
    store: Store, examples: int
) -> tuple[synthetic.PlantedSweep, dict[tuple[int, int], np.ndarray]]:
    """Return a sweep over factor and seed, and the losses of each of its jobs."""
    settings = list(itertools.product(FACTORS, SEEDS))
    sweep = synthetic.PlantedSweep(
        store,
        [f"factor={factor} seed={seed}" for factor, seed in settings],
        ["accumulation.factor", "seed"],
        "factor_at_fixed_micro_batch",
    )
    losses = {}
    for factor, seed in settings:
        batch = MICRO * factor
        seen = batch * np.arange(1, examples // batch + 1)
        loss = 2 * np.exp(-seen / 3000) + 0.1 * seed + 0.05 * np.log2(factor)
        losses[factor, seed] = loss
        sweep.job(
            f"factor={factor} seed={seed}",
            curves_of(loss, seen, factor),
            factor=factor,
            batch=batch,
            seed=seed,
        )
    sweep.end()
    return sweep, losses


def curves_of(loss: np.ndarray, seen: np.ndarray, factor: int) -> dict[str, Any]:
    """Return the metrics of a job from its loss and its examples seen."""
    curves: dict[str, Any] = {
        "train/loss": loss,
        "val/loss": {},
        "val/accuracy": {},
        "val/examples_seen": {},
    }
    # Evaluations are at no round part of the run: most of these steps fall out of a
    # thinned-out `train/` row.
    for share in np.linspace(0.19, 0.99, EVALUATIONS):
        step = max(1, int(share * len(seen)))
        curves["val/loss"][step] = loss[step - 1]
        curves["val/accuracy"][step] = 1 - loss[step - 1] / 3
        curves["val/examples_seen"][step] = seen[step - 1]
    if factor > 1:
        curves["train/gradient_noise_scale"] = 100 + seen / 100
    return curves


def sweep_over_optimizers(store: Store) -> synthetic.PlantedSweep:
    settings = list(itertools.product(OPTIMIZERS, FACTORS))
    names = [f"optimizer={name} factor={factor}" for name, factor in settings]
    sweep = synthetic.PlantedSweep(
        store, names, ["optimizer", "accumulation.factor"], "optimizer_by_factor"
    )
    for name, (_, factor) in zip(names, settings, strict=True):
        curves = {"train/loss": 2 * 0.99 ** np.arange(20) + len(name) / 100}
        # Both are SGD: the optimizers differ in no param, only in the jobs' names.
        params = {"optimizer._target_": "keras.SGD"}
        sweep.job(name, curves, factor=factor, params=params)
    sweep.end()
    return sweep


@pytest.fixture(scope="module")
def shown(
    tmp_path_factory: pytest.TempPathFactory, chromium: WebDriver
) -> Iterator[Shown]:
    stored = made(tmp_path_factory.mktemp("shown"), EXAMPLES)
    with server(stored.store.uri, seconds=300) as address, window(chromium) as chrome:
        chrome.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": NEW})
        yield replace(stored, address=address, chrome=chrome)


@dataclass
class Page:
    """What the page of the first sweep shows: one look, for several tests."""

    rows: list[str]
    loss: dict[str, Any]
    validation: dict[str, Any]
    navigation: set[str]


@pytest.fixture(scope="module")
def page(shown: Shown) -> Page:
    shown.open(shown.fragment(shown.factors))
    loss = shown.chart(0, lines=len(FACTORS))
    validation = shown.chart(1, lines=len(FACTORS))
    picture(shown.chrome, ARTIFACTS / "sweep.png")
    return Page(shown.rows(), loss, validation, _pages(shown))


def test_the_link_opens_the_sweep_and_nothing_else(page: Page) -> None:
    expected = []
    for factor in FACTORS:
        expected.append(f"Group: factor={factor} {len(SEEDS)}")
        for seed in SEEDS:
            expected.append(f"factor={factor} seed={seed}")
    assert page.rows == expected


def test_seeds_are_averaged_along_examples_seen(shown: Shown, page: Page) -> None:
    assert page.loss["title"] == "train/loss"
    assert page.loss["axis"] == "train/examples_seen"
    for factor in FACTORS:
        line = page.loss["lines"][f"tag.sweep.repeats.factor={factor}"]
        batch = MICRO * factor
        assert (line["x"][0], line["x"][-1]) == (batch, EXAMPLES)
        average = np.mean([shown.losses[factor, seed] for seed in SEEDS], axis=0)
        np.testing.assert_allclose(
            line["y"], average[np.array(line["x"], int) // batch - 1], rtol=1e-9
        )


def test_every_evaluation_is_drawn_however_long_the_run(page: Page) -> None:
    assert page.validation["title"] == "val/loss"
    assert page.validation["axis"] == "val/examples_seen"
    points = [len(line["x"]) for line in page.validation["lines"].values()]
    assert points == [EVALUATIONS] * len(FACTORS)


def test_a_new_browser_opens_the_link_in_training_mode(page: Page) -> None:
    assert {"Runs", "Models"} <= page.navigation
    assert not {"Sessions", "Judges", "Playground"} & page.navigation


def test_a_chart_has_the_range_of_its_values(shown: Shown) -> None:
    """It would begin at 0, to which the UI fills the band of averaged runs."""
    planned = shown.factors.planned
    lowest = (
        "const card = document.querySelectorAll("
        "'[data-testid=\"experiment-view-compare-runs-card\"]')[1];"
        "return card.querySelector('.js-plotly-plot').layout.yaxis.range[0]"
    )
    shown.open(mlflow_view.save_view(planned, {"val/loss": AxisRange(0.25, 1.75)}))
    try:
        shown.chart(1, lines=len(FACTORS))
        assert shown.chrome.execute_script(lowest) == 0.25
    finally:
        mlflow_view.save_view(planned, {})


def test_without_repetitions_each_job_is_a_curve_of_its_colour(shown: Shown) -> None:
    ids = _ids_by_name(shown, shown.optimizers)
    mlflow_view.set_colors(shown.store.client(), ids)
    shown.open(shown.fragment(shown.optimizers))

    chart = shown.chart(0, lines=len(ids))

    assert (chart["title"], chart["axis"]) == ("train/loss", "train/examples_seen")
    assert set(chart["lines"]) == set(ids.values())
    assert len(set(chart["drawn"])) == len(ids)
    # They are in the order in which they were planned.
    assert shown.rows() == shown.optimizers.names
    picture(shown.chrome, ARTIFACTS / "optimizers.png")


def test_parent_and_children_fold_and_unfold(shown: Shown) -> None:
    fragment = _list_of_runs(shown)
    folded = ["lone", "sweep factor_at_fixed_micro_batch", "sweep optimizer_by_factor"]
    shown.open(fragment)
    shown.wait(lambda: _names(shown) == folded, "the list is not folded")
    picture(shown.chrome, ARTIFACTS / "folded.png")

    _expander(shown, "sweep optimizer_by_factor").click()
    unfolded = sorted([*folded, *shown.optimizers.names])
    shown.wait(lambda: _names(shown) == unfolded, "the children do not show")
    picture(shown.chrome, ARTIFACTS / "unfolded.png")

    _expander(shown, "sweep optimizer_by_factor").click()
    shown.wait(lambda: _names(shown) == folded, "the children still show")


def test_the_jobs_of_a_sweep_are_selected_and_compared(shown: Shown) -> None:
    shown.open(_list_of_runs(shown))
    shown.wait(
        lambda: "sweep factor_at_fixed_micro_batch" in shown.rows(), "no list of runs"
    )
    _expander(shown, "sweep factor_at_fixed_micro_batch").click()
    shown.wait(
        lambda: set(shown.factors.names) <= set(shown.rows()),
        "the children do not show",
    )
    for name in shown.factors.names:
        box = shown.chrome.find_element(
            By.XPATH, f"{_row(name)}//input[@type='checkbox']"
        )
        shown.chrome.execute_script("arguments[0].click()", box)
    find = shown.chrome.find_elements
    (button,) = shown.wait(
        lambda: find(By.CSS_SELECTOR, "[data-testid=runs-compare-button]"),
        "nothing is selected",
    )
    button.click()
    title = f"Comparing {len(shown.factors.names)} Runs from 1 Experiment"
    shown.wait(lambda: title in find(By.TAG_NAME, "body")[0].text, "no comparison")
    shown.wait(lambda: find(By.CSS_SELECTOR, ".js-plotly-plot"), "no plot")
    picture(shown.chrome, ARTIFACTS / "selected.png")


@pytest.mark.parametrize(
    "state",
    ["not a view", json.dumps({"name": "x", "createdAt": 1, "state": "deflate;AAAA"})],
)
def test_where_the_view_is_not_understood_the_plain_page_opens(
    shown: Shown, state: str
) -> None:
    fragment = shown.fragment(shown.factors)
    tag = mlflow_view.VIEW_TAG + shown.factors.run_id
    shown.store.client().set_experiment_tag(shown.factors.experiment_id, tag, state)

    # The UI then forgets the mode of the link: this user has chosen it before.
    added = shown.chrome.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument", {"source": PREFERENCES}
    )
    try:
        shown.open(fragment)
        shown.wait(lambda: "lone" in shown.rows(), "no list of runs")
    finally:
        shown.chrome.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_the_parents_description_leads_to_the_comparison(shown: Shown) -> None:
    sweep = shown.factors
    results = [["job", "val/loss"], *([name, "0.5"] for name in sweep.names)]
    text = mlflow_view.description(sweep.planned, shown.fragment(sweep), results)
    shown.store.client().set_tag(sweep.run_id, "mlflow.note.content", text)
    page = f"#/experiments/{sweep.experiment_id}/runs/{sweep.run_id}"
    shown.open(f"{page}?workflowType=machine_learning")
    find = shown.chrome.find_elements
    (link,) = shown.wait(
        lambda: find(By.LINK_TEXT, "Compare the runs of this sweep"), "no link"
    )
    picture(shown.chrome, ARTIFACTS / "parent.png")
    windows = shown.chrome.window_handles

    link.click()  # into a window of its own
    shown.wait(lambda: len(shown.chrome.window_handles) > len(windows), "no new window")
    shown.chrome.switch_to.window(shown.chrome.window_handles[-1])
    try:
        shown.wait(
            lambda: f"Group: factor={FACTORS[0]} {len(SEEDS)}" in shown.rows(),
            "no comparison",
        )
    finally:
        shown.chrome.close()
        shown.chrome.switch_to.window(windows[0])


def test_the_view_of_a_sweep_is_saved_once(stored: Shown) -> None:
    assert stored.fragment(stored.factors) == stored.fragment(stored.factors)

    tags = stored.store.client().get_experiment(stored.factors.experiment_id).tags
    view = json.loads(tags[mlflow_view.VIEW_TAG + stored.factors.run_id])
    packed = view["state"].removeprefix("deflate;")
    assert view["name"] == f"factor_at_fixed_micro_batch {stored.factors.run_id[:6]}"
    state = json.loads(zlib.decompress(base64.b64decode(packed)))
    assert state["searchFilter"] == f"tags.sweep = '{stored.factors.run_id}'"
    views = [key for key in tags if key.startswith(mlflow_view.VIEW_TAG)]
    assert len([key for key in views if stored.factors.run_id in key]) == 1


def test_an_mlflow_that_was_not_tried_gets_the_plain_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mlflow, "__version__", "3.170.0")
    nowhere = ParentRun("http://127.0.0.1:9", "2" * 32, "1", "untried", varied=["seed"])
    fragment = mlflow_view.save_view(nowhere, {})
    assert fragment == "#/experiments/1/runs?workflowType=machine_learning"


def test_a_spike_does_not_flatten_a_chart_and_no_chart_begins_at_0() -> None:
    losses = np.linspace(0.9, 0.5, 200).tolist()
    low, high = mlflow_view.robust_range([*losses, 1e6, float("nan"), float("inf")])
    assert 0.45 < low < 0.5
    assert 0.9 < high < 0.95
    # The beginning of a run is no spike.
    _, high = mlflow_view.robust_range([2.5, 1.9, *losses])
    assert high > 1.9
    assert mlflow_view.robust_range([float("nan")]) is None
    assert mlflow_view.robust_range([1.0, 1.0]) is None


def test_a_sweep_that_has_ended_has_charts_with_a_range(stored: Shown) -> None:
    planned = stored.factors.planned
    children = planned.children().values()
    client = stored.store.client()
    values = mlflow_view.metric_values(client, children, "val/loss")
    # In the short runs some evaluations fall on one update.
    assert len(values) > 20
    ranges = {"val/loss": mlflow_view.robust_range(values)}
    charts = view_settings.view_settings(planned, ranges)["compareRunCharts"]
    with_range = [chart for chart in charts if "range" in chart]
    assert {chart["metricKey"] for chart in with_range} == {"val/loss"}
    assert with_range[0]["range"]["yMin"] < min(values)
    assert with_range[0]["range"]["yMin"] > 0


def test_a_swept_group_is_grouped_too() -> None:
    groupings = []
    for varied in (["scaling", "accumulation.factor", "seed"], ["scaling"], ["seed"]):
        sweep = ParentRun("sqlite:///none.db", "2" * 32, "1", "x", varied=varied)
        groupings.append(view_settings.view_settings(sweep, {})["groupBy"])
    by_tag = [{"mode": "tag", "groupByData": "sweep.repeats"}]
    assert groupings[0]["groupByKeys"] == by_tag
    assert groupings[1:] == [None, None]


def color_of_group(name: str) -> int:
    """Return the place in the UI's palette of a group, as MLflow 3.17.2 hashes it."""
    first = 0
    second = 0
    for letter in f"tag.{view_settings.GROUP_TAG}.{name}":
        first = (first + ord(letter)) % 255
        second = (second + first) % 255
    return (first | second << 8) % 29


@pytest.mark.parametrize("micro", [8, 16, 32])
def test_the_groups_of_usual_sweeps_have_colors_of_their_own(micro: int) -> None:
    names = [f"factor={factor} batch={micro * factor}" for factor in (1, 2, 4, 8, 16)]
    assert len({color_of_group(name) for name in names}) == len(names)


@pytest.mark.parametrize(
    ("uri", "start"),
    [
        ("sqlite:///mlruns/mlflow.db", "http://127.0.0.1:5000/#/e"),
        ("http://host:81", "http://host:81/#/e"),
        ("https://me:secret@host/mlflow/", "https://host/mlflow/#/e"),
    ],
)
def test_the_link_names_the_server_and_no_password(uri: str, start: str) -> None:
    assert mlflow_view.page_url(uri, "#/e") == start


def test_a_description_fits_into_a_tag_and_says_what_it_leaves_out() -> None:
    rows = [["job", "val/loss"]]
    for number in range(1000):
        rows.append([f"factor={number} | x", str(number)])

    sweep = ParentRun(
        "sqlite:///none.db", "2" * 32, "1", "many", varied=["accumulation.factor"]
    )
    text = mlflow_view.description(sweep, "#/e", rows)

    kept = text.count("factor=") - text.count("`accumulation.factor=`")
    assert len(text) <= mlflow_view.LONGEST_TAG
    assert kept > 100
    assert f"\nand {1000 - kept} more\n" in text
    assert "| factor=0 \\| x | 0 |" in text


def test_jobs_that_differ_by_the_seed_share_a_colour(stored: Shown) -> None:
    mlflow_view.set_colors(stored.store.client(), _ids_by_name(stored, stored.factors))

    colors = {}
    for run in _children(stored, stored.factors):
        colors[run.info.run_name] = run.data.tags["mlflow.runColor"]
    for factor in FACTORS:
        assert len({colors[f"factor={factor} seed={seed}"] for seed in SEEDS}) == 1
    assert len(set(colors.values())) == len(FACTORS)


def _children(shown: Shown, sweep: synthetic.PlantedSweep) -> list:
    return list(
        shown.store.client().search_runs(
            [sweep.experiment_id], f"tags.sweep = '{sweep.run_id}'"
        )
    )


def _ids_by_name(shown: Shown, sweep: synthetic.PlantedSweep) -> dict[str, str]:
    return {run.info.run_name: run.info.run_id for run in _children(shown, sweep)}


def _list_of_runs(shown: Shown) -> str:
    experiment_id = shown.factors.experiment_id
    return f"#/experiments/{experiment_id}/runs?workflowType=machine_learning"


def _names(shown: Shown) -> list[str]:
    return sorted(shown.rows())


def _expander(shown: Shown, name: str) -> Any:
    return shown.chrome.find_element(
        By.XPATH, f"{_row(name)}//button[contains(@data-component-id, 'runnamecell')]"
    )


def _row(name: str) -> str:
    return f"//div[@role='row'][.//span[text()='{name}']]"


def _pages(shown: Shown) -> set[str]:
    """Return the pages that the navigation of an experiment offers."""
    links = shown.chrome.find_elements(
        By.CSS_SELECTOR, "a[href*='/experiments/'], nav a, aside a"
    )
    return {link.text.strip() for link in links if link.text.strip()}
