"""The page of runs: what differs between them, and every spike of their curves."""

from __future__ import annotations

import json
import math
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mlflow.entities import Metric
from selenium.webdriver.support.ui import WebDriverWait

from pipeline.common.errors import ConfigError
from pipeline.report import command, curve_plots, job_results, run_results, runs_page
from pipeline.report.curve_plots import BINS, extremes
from pipeline.report.key_differences import DifferingKeys
from pipeline.tracking import journal_file
from pipeline.tracking.journal_file import LockedPast
from pipeline.tracking.journal_lines import (
    Created,
    End,
    Evaluated,
    Row,
    RunIds,
    RunStart,
    Start,
)
from pipeline.tracking.journal_summary import ranked_metric
from tests import running, synthetic
from tests.browser import window
from tests.disks import disk
from tests.synthetic import PlantedSweep

UPDATES = 100_000
SPIKE = 77_777  # the update of the planted spike
HEIGHT = 1234.5  # its loss
# The most bytes of the page for the curve of one metric of one run, as the docs say.
MOST_BYTES = 45_000
NASTY = "</script><img src=x onerror=console.error('run')> {{ 7 * 7 }} &amp;"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return synthetic.store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def runs(store) -> PlantedSweep:
    """Return three runs in a store, of which the last two differ in the factor."""
    planted = PlantedSweep(store, [])
    teams = {1: "text", 2: "vision", 4: "vision"}
    for factor, team in teams.items():
        rows = np.linspace(2, 1 + factor / 10, 20)
        planted.job(
            f"factor={factor}",
            {"train/loss": rows, "val/accuracy": {10: 0.5, 20: 1 - factor / 10}},
            factor=factor,
            params={
                "tracking.run_name": f"factor={factor}",
                "optimizer._target_": "x",
                "training.keep_best.metric": "val/accuracy",
                "training.keep_best.mode": "max",
            },
            tags={"team": team, "git.commit": "abc"},
        )
    return planted


def loss_with_spike() -> np.ndarray:
    """Return losses of 100,000 updates between 1 and 3, and one that is far higher."""
    losses = 2 + np.random.default_rng(0).uniform(-1, 1, UPDATES)
    losses[SPIKE - 1] = HEIGHT
    return losses


EVALUATION = {"name": "test", "checksum": "0" * 64}


def journal_in(folder: Path, losses: np.ndarray, **more: str) -> Path:
    """Write the journal of a run that has not been shipped, and return its folder."""
    folder.mkdir()
    writer = journal_file.create(folder / journal_file.JOURNAL_NAME)
    start = RunStart(
        format=1,
        store="sqlite:///none.db",
        name=more.get("name", folder.name),
        params={"seed": 0, "derived.effective_batch_size": 8, "model": NASTY},
        tags={"journal": "0" * 32},
    )
    writer.write(Start(start, time=1).content())
    for update, loss in enumerate(losses, start=1):
        row = {more.get("metric", "train/loss"): float(loss)}
        writer.write(Row(update, row, time=1000 + update).content())
    if "run_id" in more:
        writer.write(Created(RunIds(more["run_id"])).content())
    if "end" in more:
        writer.write(End(more["end"], time=10_000_000).content())
    writer.close()
    return folder


def plots_on(page: str) -> list[dict]:
    """Return the plots that a page holds as data."""
    found = re.search(
        r'<script type="application/json" id="plots">(.*?)</script>', page
    )
    assert found is not None
    return json.loads(found[1])


# --- curves ---


def test_the_extremes_of_each_bin_are_drawn_and_nothing_else():
    losses = loss_with_spike()
    updates = np.arange(1.0, UPDATES + 1)
    drawn = extremes(updates, losses)
    assert SPIKE - 1 in drawn
    assert 0 in drawn
    assert UPDATES - 1 in drawn
    assert len(drawn) <= 2 * BINS + 2
    assert (np.diff(drawn) > 0).all()

    # An independent reference: the extremes of each part, one after the other.
    drawn_values = dict.fromkeys(losses[drawn])
    width = (UPDATES - 1) / BINS
    for part in range(BINS):
        inside = (updates - 1 >= part * width) & (updates - 1 < (part + 1) * width)
        assert losses[inside].min() in drawn_values
        assert losses[inside].max() in drawn_values


def test_a_short_curve_is_drawn_as_it_is():
    values = np.random.default_rng(0).uniform(size=2 * BINS)
    assert extremes(np.arange(2.0 * BINS), values).tolist() == list(range(2 * BINS))
    assert extremes(np.array([]), np.array([])).tolist() == []
    same_place = np.full(5000, 7.0)
    assert len(extremes(same_place, np.arange(5000.0))) == 2


def test_the_extremes_of_updates_that_are_not_evenly_spaced():
    updates = np.array([*range(5000), 10**6], float)
    values = np.zeros(5001)
    values[3] = 5
    values[4] = -5
    drawn = extremes(updates, values)
    assert {0, 3, 4, 5000} <= set(drawn.tolist())
    assert len(drawn) < 20


def test_a_curve_takes_a_bounded_number_of_bytes():
    rng = np.random.default_rng(0)
    # The longest texts: all digits, a sign and an exponent of three digits.
    values = -rng.uniform(1, 9, UPDATES) * 10.0 ** rng.integers(-290, -100, UPDATES)
    x = rng.uniform(1, 2, UPDATES).cumsum() * 1e9
    drawn = curve_plots.curve_trace("loss", x, values, 0)
    assert len(json.dumps(drawn)) <= MOST_BYTES
    assert len(json.dumps(drawn)) > MOST_BYTES / 2  # the bound is no empty one


# --- runs beside each other ---


def page_of(
    runs: PlantedSweep, names: list[str] | None = None
) -> runs_page.FindingsPage:
    client = runs.client
    results = []
    for run in client.search_runs([runs.experiment_id], "tags.sweep.job != ''"):
        if names is None or run.info.run_name in names:
            results.append(run_results.from_store(client, run))
    results.sort(key=lambda result: result.name)
    return runs_page.page(run_results.with_unique_names(results))


def ids(runs: PlantedSweep) -> list[str]:
    """Return the IDs of the runs of the fixture `runs`."""
    condition = "tags.sweep.job LIKE 'factor=%'"
    stored = runs.client.search_runs([runs.experiment_id], condition)
    return [run.info.run_id for run in stored]


def test_only_the_keys_that_differ_are_on_the_page(runs):
    page = page_of(runs)
    (differing,) = [
        finding.result for finding in page.findings if finding.topic == "keys"
    ]
    assert differing == DifferingKeys(["accumulation.factor"], [])
    assert '<th scope="row">accumulation.factor</th><td>1</td><td>2</td>' in page.html
    # What only names a run stands apart, and what is equal is not there.
    apart = page.html.index("Keys of place, log and machine that differ</h2>")
    assert page.html.index("tracking.run_name</th>") > apart
    assert "optimizer._target_" not in page.html
    assert "hardware.precision" not in page.html


def test_last_and_best_values_and_the_status(runs):
    page = page_of(runs)
    assert '<th scope="row">val/accuracy</th><td>0.9, best 0.9 at 20</td>' in page.html
    (result,) = [
        finding.result for finding in page.findings if finding.topic == "result"
    ]
    assert result.metric == "val/accuracy"
    assert result.values == pytest.approx(
        {"factor=1": 0.9, "factor=2": 0.8, "factor=4": 0.6}
    )
    assert page.findings[0].text == "3 of 3 runs finished."
    keys = [plot["title"] for plot in plots_on(page.html)]
    assert keys[:2] == ["train/loss by updates", "val/accuracy by updates"]


@pytest.mark.parametrize(
    ("kept", "metric", "best"),
    [
        ([None, None], "val/loss", "run-0"),
        (["val/accuracy", "val/accuracy"], "val/accuracy", "run-1"),
        # They have no metric in common by which their users judge them.
        (["val/accuracy", "val/late/accuracy"], "val/loss", "run-0"),
    ],
)
def test_runs_are_ranked_by_the_metric_that_the_list_of_runs_shows(kept, metric, best):
    results = []
    for number, name in enumerate(kept):
        job = synthetic.job(f"run-{number}", 1.0 + number)
        accuracy = job_results.curve({1: 0.5, 2: 0.6 + number / 10})
        params = {"training.keep_best.metric": "null"}
        if name is not None:
            params = {
                "training.keep_best.metric": name,
                "training.keep_best.mode": "max",
            }
        shown = ranked_metric(params).name
        if len(set(kept)) == 1:
            assert shown == metric
        curves = {**job.curves, "val/accuracy": accuracy, "val/late/accuracy": accuracy}
        results.append(replace(job, curves=curves, params=params))

    page = runs_page.page(results)
    (result,) = [
        finding.result for finding in page.findings if finding.topic == "result"
    ]
    assert result.metric == metric
    assert next(iter(result.values)) == best


def test_one_run_has_a_page_with_all_of_its_metrics(runs):
    page = page_of(runs, ["factor=2"])
    assert [finding.topic for finding in page.findings] == ["runs", "result"]
    titles = [plot["title"] for plot in plots_on(page.html)]
    for metric in ("train/loss", "val/accuracy", "train/learning_rate"):
        assert f"{metric} by updates" in titles
    assert "perf/update_seconds by updates" in titles
    assert "Keys that differ" not in page.html


def test_runs_of_other_batches_are_drawn_by_examples(store):
    planted = PlantedSweep(store, [])
    for batch in (8, 9):
        planted.job(f"batch={batch}", {"train/loss": [2, 1]}, batch=batch)
    plot = plots_on(page_of(planted, ["batch=8", "batch=9"]).html)[0]
    assert plot["title"] == "train/loss by examples"
    assert [trace["x"] for trace in plot["data"]] == [[8, 16], [9, 18]]


def test_runs_of_other_programs_and_of_equal_names(store):
    client = store.client()
    results = []
    for _ in range(2):
        run = client.create_run(store.experiment("theirs"), run_name="mine")
        for step, loss in enumerate([3.0, 1.0, 2.0]):
            client.log_metric(run.info.run_id, "loss", loss, step=step)
            client.log_metric(run.info.run_id, "system/cpu", 1.0, step=step)
        run = client.get_run(run.info.run_id)
        results.append(run_results.from_store(client, run))
    runs = run_results.with_unique_names(results)
    assert [run.name for run in runs] == [f"mine {run.run_id[:8]}" for run in runs]
    assert len({run.name for run in runs}) == 2
    page = runs_page.page(runs).html
    assert '<th scope="row">loss</th><td>2, best 1 at 1</td>' in page
    (plot,) = plots_on(page)
    groups = [trace["meta"]["group"] for trace in plot["data"]]
    assert groups == [run.name for run in runs]

    twice = run_results.with_unique_names([runs[0], runs[0]])
    assert twice[0].name != twice[1].name


# --- run directories ---


def test_a_run_that_was_not_shipped_is_read_from_its_journal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    journal_in(tmp_path / "run", np.array([2.0, math.nan, 1.0]))
    result = run_results.from_directory(tmp_path / "run")
    assert result.status == "INTERRUPTED"
    assert result.run_id is None
    assert result.params["seed"] == "0"
    curve = result.curves["train/loss"]
    assert curve.steps.tolist() == [1, 2, 3]
    assert command.report(["run", "--out", "page.html"]) == 0
    page = Path("page.html").read_text()
    assert "not in a store yet; pipeline sync uploads it" in page
    assert "NaN or infinite values that are not drawn: 1." in page
    # No store was needed, and none was made.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


def test_rows_before_a_damaged_line_are_there(tmp_path):
    folder = journal_in(tmp_path / "run", np.arange(5.0), end="FINISHED")
    path = folder / journal_file.JOURNAL_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4].replace(b"3.0", b"9.0")
    path.write_bytes(b"".join(lines))
    result = run_results.from_directory(folder)
    assert result.curves["train/loss"].values.tolist() == [0, 1, 2]
    assert result.status == "INTERRUPTED"


def test_what_is_appended_to_an_ended_run_does_not_prolong_it(tmp_path):
    folder = journal_in(tmp_path / "run", np.arange(3.0), end="FINISHED")
    before = run_results.from_directory(folder)
    assert (before.started, before.ended) == (1, 10_000_000)
    appended = [
        Evaluated(3, {"test/loss": 1.0}, time=20_000_000, evaluation=EVALUATION),
        Created(RunIds("1" * 32), time=30_000_000),
    ]
    past = LockedPast.open(folder)
    writer = past.truncated_writer()
    for line in appended:
        writer.write(line.content())
    writer.close()
    after = run_results.from_directory(folder)
    assert after.run_id == "1" * 32
    assert (after.started, after.ended) == (1, 10_000_000)


def test_a_report_reads_a_disk_that_it_may_not_write(tmp_path):
    with disk(tmp_path / "disk") as mounted:
        folder = journal_in(mounted / "run", np.arange(3.0))
        subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
        with pytest.raises(OSError, match="Read-only"):
            (mounted / "file").touch()
        assert run_results.from_directory(folder).status == "INTERRUPTED"


@pytest.mark.slow
def test_a_journal_has_what_the_store_has(tmp_path):
    running.pipeline("train", *running.TINY, cwd=tmp_path)
    store = running.Store(tmp_path)
    run = store.run()
    (journal,) = tmp_path.rglob(journal_file.JOURNAL_NAME)
    here = run_results.from_directory(journal.parent)
    there = run_results.from_store(store.client, run)
    assert here.curves.keys() == there.curves.keys()
    for metric, curve in here.curves.items():
        assert curve.steps.tolist() == there.curves[metric].steps.tolist()
        assert curve.values.tolist() == there.curves[metric].values.tolist()
    assert here.params == there.params
    for fact in ("run_id", "status", "started", "ended", "name", "factor"):
        assert getattr(here, fact) == getattr(there, fact), fact
    assert set(here.tags) <= set(there.tags)


# --- the command ---


def test_a_query_selects_runs_in_all_experiments_or_in_one(
    runs, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    uri = f"tracking.uri={runs.store.uri}"
    team = ["--filter", "tags.team='vision'", uri]
    assert command.report([*team, "--out", "page.html"]) == 0
    out = capsys.readouterr().out
    assert "Runs: 2 of 2 runs finished." in out
    assert f"report: {tmp_path}/page.html" in out
    page = (tmp_path / "page.html").read_text()
    assert "tags.team=&#39;vision&#39;" in page
    assert "<h1>2 runs</h1>" in page

    assert command.report([*team, "tracking.experiment=made", "--out", "b.html"]) == 0
    with pytest.raises(
        ConfigError, match=r"tracking\.experiment must be an experiment"
    ):
        command.report([*team, "tracking.experiment=none"])
    # The parent of a sweep is no run with curves.
    with pytest.raises(ConfigError, match="but selects 0"):
        command.report(["--filter", "tags.`sweep.name` = 'made'", uri])
    monkeypatch.setattr(runs_page, "MOST_RUNS", 1)
    with pytest.raises(ConfigError, match="from 1 to 1 runs of the store, but selects"):
        command.report(team)


@pytest.mark.slow
def test_what_is_no_request_is_one_line_and_creates_nothing(runs, tmp_path):
    uri = f"tracking.uri={runs.store.uri}"
    first, second, _ = ids(runs)
    start = first[:8]
    sweep = runs.run_id
    message_by_line = {
        "report": "SWEEP or RUN must name a sweep, two sweeps or runs",
        f"report nowhere {uri}": "SWEEP or RUN must name one sweep or run of the store",
        f"report 00000 {uri}": "SWEEP or RUN must name one sweep or run of the store",
        f"report --filter 'tags.' {uri}": "--filter must be a filter string of MLflow",
        f"report {start} --filter 'tags.a=1' {uri}": "SWEEP or RUN must be left out",
        f"report {sweep} --out x.html {uri}": "--out must be left out",
        f"report {sweep} {start} {uri}": "SWEEP or RUN must name only runs, one sweep",
        f"report {start} --out . {uri}": "--out must be a file that can be written",
        f"report {start} {uri} --info": "--info must be left out",
    }
    two = f"report {first} {second[:10]} {uri}"
    lines = {line: line for line in [*message_by_line, two]}
    results = running.one_process(lines, tmp_path)

    # What is one is written where the docs say.
    assert results[two]["status"] == 0, results[two]["err"]
    page = tmp_path / "outputs" / f"report-{first[:8]}-{second[:8]}.html"
    assert results[two]["out"].splitlines()[-1] == f"report: {page}"
    assert page.exists()
    for line, message in message_by_line.items():
        answer = results[line]
        assert answer["status"] == 2, (line, answer)
        assert len(answer["err"].splitlines()) == 1, line
        assert message in answer["err"], line
        assert answer["changed"] == [], line


def test_names_of_a_store_are_escaped(tmp_path):
    folder = tmp_path / "run"
    journal_in(folder, np.array([2.0, 1.0]), name=NASTY, metric=f"train/{NASTY}")
    other = journal_in(tmp_path / "other", np.array([2.0, 1.0]), end="FAILED")
    runs = [run_results.from_directory(place) for place in (folder, other)]
    runs[0].tags["failure"] = NASTY
    page = runs_page.page(run_results.with_unique_names(runs), NASTY).html
    ours = page[: page.index("<script>")]
    ours += page[page.index('<script type="application/json"') :]
    assert "<img" not in ours
    assert "49" not in page[: page.index("<script>")]
    assert ours.count("</script>") == 2  # those of the data and of our own code
    assert "http:" not in ours
    assert "https:" not in ours


# --- the page in a browser ---

DRAWN = "return document.body.dataset.drawn"
POINTS = """
const plot = document.getElementById(arguments[0]);
const line = plot.querySelector(".scatterlayer .js-line");
const box = line.getBBox();
const axis = plot._fullLayout.yaxis;
return {x: Array.from(plot.data[0].x), y: Array.from(plot.data[0].y),
  top: box.y, spike: axis.c2p(axis.d2c(arguments[1])), width: plot._fullLayout._size.w};
"""


def stored_run(store, losses: np.ndarray) -> str:
    """Store a run with a loss at each update, and return its ID."""
    client = store.client()
    run_id = client.create_run(store.experiment("made"), run_name="long").info.run_id
    points = []
    for update, loss in enumerate(losses, start=1):
        points.append(Metric("train/loss", float(loss), update, update))
    synthetic.log_points(store, run_id, points)
    return run_id


@pytest.mark.slow
def test_a_spike_in_100_000_updates_is_on_the_page(
    store, tmp_path, monkeypatch, chromium
):
    monkeypatch.chdir(tmp_path)
    losses = loss_with_spike()
    run_id = stored_run(store, losses)
    # A run without a spike is the control.
    flat = np.where(losses == HEIGHT, 2.0, losses)
    journal_in(tmp_path / "flat", flat, end="FINISHED")
    uri = f"tracking.uri={store.uri}"
    assert command.report([run_id, uri, "--out", "spike.html"]) == 0
    assert command.report(["flat", uri, "--out", "flat.html"]) == 0

    drawn = {}
    for name in ("spike", "flat"):
        page = tmp_path / f"{name}.html"
        (plot,) = [
            plot
            for plot in plots_on(page.read_text())
            if plot["title"] == "train/loss by updates"
        ]
        assert len(json.dumps(plot)) <= MOST_BYTES
        with window(chromium, 1200, 900) as chrome:
            chrome.get(page.as_uri())
            WebDriverWait(chrome, 120).until(
                lambda browser: browser.execute_script(DRAWN)
            )
            drawn[name] = chrome.execute_script(POINTS, plot["key"], HEIGHT)
            assert chrome.get_log("browser") == []

    spike = drawn["spike"]
    index = spike["x"].index(SPIKE)
    assert spike["y"][index] == HEIGHT
    # On the screen, the line reaches to where its axis has the spike.
    assert spike["top"] == pytest.approx(spike["spike"], abs=1.5)
    assert spike["width"] < BINS  # so a bin is no wider than a pixel
    # Each point that is drawn was logged, and so are the neighbors of the spike.
    for name, logged in (("spike", losses), ("flat", flat)):
        for update, loss in zip(drawn[name]["x"], drawn[name]["y"], strict=True):
            assert loss == pytest.approx(logged[int(update) - 1], rel=1e-6)
    assert max(spike["y"][:index] + spike["y"][index + 1 :]) < 3
    assert max(drawn["flat"]["y"]) < 3


@pytest.mark.slow
def test_hostile_names_run_nothing_in_a_browser(tmp_path, chromium):
    folder = tmp_path / "run"
    journal_in(folder, np.array([2.0, 1.0]), name=NASTY, metric=f"train/{NASTY}")
    runs = [run_results.from_directory(folder)]
    page = tmp_path / "page.html"
    page.write_text(runs_page.page(runs, NASTY).html)
    with window(chromium, 360, 740) as chrome:
        chrome.get(page.as_uri())
        WebDriverWait(chrome, 120).until(lambda browser: browser.execute_script(DRAWN))
        assert chrome.get_log("browser") == []
        assert chrome.execute_script("return document.images.length") == 0
        width = chrome.execute_script("return document.documentElement.scrollWidth")
        assert width == 360
