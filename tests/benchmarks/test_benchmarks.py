"""The benchmarks run and show their figures; how fast anything is, is not asserted."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__, memory, processes
from benchmarks.figures import BEST_PEER, Figure, Summary, table
from benchmarks.processes import PEERS
from benchmarks.workloads import NAMES, WORKLOADS

ROOT = Path(__file__).parents[2]
TINY = ("--models", "mlp", "--rounds", "2", "--seconds", "0.01", "--starts", "1")
TRACKED = ("--tracked-rounds", "2", "--tracked-seconds", "0.05")
CONDITIONS = {
    "device",
    "processors",
    "platform",
    "versions",
    "begun",
    "seconds",
    "options",
}


def bench(*arguments):
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600
    )


def both_rounds(figure):
    """Return the lower and the higher of two values, from their quartiles.

    The quartiles of two values are a quarter of their distance within them.
    """
    assert figure["rounds"] == 2
    first, third = figure["quartiles"]
    quarter = (third - first) / 2
    return first - quarter, third + quarter


@pytest.mark.slow
def test_a_figure_for_every_contender_in_the_table_and_in_the_json(tmp_path):
    path = tmp_path / "result.json"
    parts = ("update", "tracking", "checkpoints")
    done = bench(*parts, *TINY, *TRACKED, "--output", str(path))
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert set(result) > CONDITIONS

    figures = result["figures"]
    names = {(figure["part"], figure["subject"], figure["what"]) for figure in figures}
    assert names == {
        ("update", "mlp", "update ÷ limit, calls"),
        ("update", "mlp", "update ÷ limit, strict"),
        ("update", "mlp", "with noise scale, 1 in 10 ÷ without"),
        ("update", "mlp", "time accumulated ÷ at factor 1"),
        ("update", "mlp", "speed at factor 32 ÷ at factor 1, same micro-batch"),
        ("tracking", "mlp", "tracked ÷ bare"),
        ("tracking", "mlp", "CPU time of a logged update"),
        ("checkpoints", "mlp", "stall"),
        ("checkpoints", "mlp", "cost of one"),
        ("checkpoints", "mlp", "every five minutes ÷ bare"),
    }
    for figure in figures:
        assert figure["what"] in done.stdout
        first, third = figure["quartiles"]
        assert first <= figure["median"] <= third
        assert math.isfinite(first)
        assert math.isfinite(third)
        if figure["what"] == "CPU time of a logged update":
            assert figure["rounds"] == 1
            assert figure["median"] > 0
        elif figure["what"] != "cost of one":
            lower, _ = both_rounds(figure)
            assert lower > 0

        is_ratio = not figure["unit"] and figure["part"] != "checkpoints"
        if is_ratio:
            assert figure["rounds"] == 2
            assert len(figure["best"]) == 2


@pytest.mark.soak
def test_the_start_is_measured_on_a_new_and_on_an_existing_store(tmp_path):
    path = tmp_path / "result.json"
    done = bench("startup", *TINY, "--output", str(path))
    assert done.returncode == 0, done.stderr
    figures = json.loads(path.read_text())["figures"]
    assert [figure["subject"] for figure in figures] == [
        "--help",
        "wrong config",
        "new store",
        "existing store",
    ]
    for figure in figures:
        assert figure["rounds"] == 1
        assert math.isfinite(figure["median"])


@pytest.mark.slow
def test_an_unknown_part_is_rejected(tmp_path):
    done = bench("updates", "--output", str(tmp_path / "result.json"))
    assert done.returncode == 2
    expected = "PART must be one of startup, main, auto, memory, update, peers, "
    assert expected in done.stderr
    assert "Received: updates" in done.stderr


@pytest.mark.soak
def test_every_peer_that_is_there_takes_turns(tmp_path):
    path = tmp_path / "result.json"
    done = bench("peers", *TINY, "--output", str(path))
    assert done.returncode == 0, done.stderr
    figures = {}
    for figure in json.loads(path.read_text())["figures"]:
        figures[figure["what"]] = figure

    others = {"train ÷ fit", "train ÷ fit, one update per execution"}
    if PEERS.exists():
        others |= {"train ÷ PyTorch", "train ÷ Accelerate", "train ÷ Lightning"}
    else:
        assert "`make peers` sets them up" in done.stderr
    assert set(figures) == others | {"train ÷ best peer"}
    for figure in figures.values():
        assert figure["rounds"] == 2
        assert figure["median"] > 0
    lowest = min(figures[what]["median"] for what in others)
    assert figures["train ÷ best peer"]["median"] == lowest


@pytest.mark.soak
def test_what_is_compiled_takes_turns(tmp_path):
    path = tmp_path / "result.json"
    done = bench("compiled", *TINY, "--output", str(path))
    assert done.returncode == 0, done.stderr
    medians = {}
    for figure in json.loads(path.read_text())["figures"]:
        assert figure["rounds"] == 2
        contender = figure["what"].removeprefix("hardware.xla=fastest ÷ ")
        medians[contender] = figure["median"]

    peers = {"fit, jit_compile=True"}
    if PEERS.exists():
        peers |= {"PyTorch", "PyTorch, compiled"}
    assert set(medians) == peers | {"hardware.xla=false", "best peer"}
    assert medians["best peer"] == min(medians[peer] for peer in peers) > 0


@pytest.mark.slow
def test_what_is_compiled_starts_fewer_operations():
    command = [sys.executable, "-m", "benchmarks.operations", "--models", "mlp"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *_, row = done.stdout.splitlines()
    numbers = [int(number) for number in re.findall(r"\d+", row)]
    micro_batch = numbers[0::2]
    rest = numbers[1::2]
    assert len(micro_batch) == len(rest) == 4
    without, step, apply, update = micro_batch
    assert without > step == apply > update == 0
    without, step, apply, update = rest
    assert without > 2 * apply > 2 * update > 0
    assert step > apply


TORCH_TWIN = """
import sys
import torch
from benchmarks.pytorch import networks
from benchmarks.workloads import WORKLOADS

workload = WORKLOADS[sys.argv[1]]
model = networks.build(workload)
x, y = map(torch.from_numpy, workload.examples(int(sys.argv[2])))
if networks.takes_images(workload):
    x = x.permute(0, 3, 1, 2)
outputs = model(x)
print(sum(parameter.numel() for parameter in model.parameters()))
print(sorted(outputs.shape))
print(torch.nn.functional.cross_entropy(outputs, y).item())
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_workload_in_pytorch_is_that_in_keras(name):
    """It has as many weights and outputs as in Keras.

    The first loss of either is about the logarithm of the number of classes.
    """
    if not PEERS.exists():
        pytest.skip(
            "PyTorch is compared with where `make peers` has set it up, "
            "which takes 6 GB"
        )
    from benchmarks import keras_models

    count = 2
    printed = subprocess.run(
        [str(PEERS), "-c", TORCH_TWIN, name, str(count)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    weights, *shape, loss = re.findall(r"[\d.]+", printed)

    workload = WORKLOADS[name]
    model = keras_models.build(workload)
    x, y = workload.examples(count)
    outputs = model(x, training=True)
    assert int(weights) == keras_models.weight_count(model)
    assert list(map(int, shape)) == sorted(outputs.shape)
    chance = math.log(outputs.shape[-1])
    assert float(loss) == pytest.approx(chance, rel=0.7)
    assert float(keras_models.loss()(y, outputs)) == pytest.approx(chance, rel=0.7)


@pytest.mark.soak
def test_memory(monkeypatch):
    monkeypatch.setattr(memory, "FACTORS", (1, 64))
    *peaks, growth = memory.measure(WORKLOADS["mlp"], 1)
    assert {(figure.what, figure.over) for figure in peaks} == {
        ("accumulated", 32),
        ("accumulated", 2048),
        ("at factor 1", 32),
        ("at factor 1", 2048),
        ("Keras' fit, accumulated", 2048),
    }
    assert growth.what == "growth from factor 1 to 64 beyond the batch"
    for figure in (*peaks, growth):
        assert math.isfinite(figure.median)


@pytest.mark.soak
def test_replicas_and_the_main_job(tmp_path, monkeypatch):
    """In this process.

    Each job runs once, which makes its store; how a command is timed, the benchmark of
    the start tests.
    """
    path = tmp_path / "result.json"
    monkeypatch.setattr(processes, "seconds", lambda *_: 2.0)
    command = ["benchmarks", "replicas", "main", *TINY, "--output", str(path)]
    monkeypatch.setattr(sys, "argv", command)
    __main__.main()
    figures = json.loads(path.read_text())["figures"]
    names = {figure["what"] for figure in figures}
    assert names >= {
        "speed with 2 logical devices ÷ with 1",
        "speed with 4 logical devices ÷ with 1",
        "time from start to end",
        "speed ÷ Keras with MLflow",
    }
    assert ("speed ÷ Lightning with MLflow" in names) == PEERS.exists()
    for figure in figures:
        assert math.isfinite(figure["median"])


def reported_figures():
    figures = [
        Figure("peers", "mlp", "train ÷ fit", [1.5, 1.6], best={"train": 1.0}),
        Figure("peers", "cnn", "train ÷ fit", [0.9, 0.95]),
        Figure("peers", "mlp", BEST_PEER, [1.5, 1.6], at_least=1.0, note="fit"),
        Figure("peers", "cnn", BEST_PEER, [0.9, 0.95], at_least=1.0, note="fit"),
        Figure(
            "startup", "pipeline --help", "time to the answer", [0.5], "s", at_most=1.0
        ),
    ]
    for what in ("accumulated", "at factor 1", "Keras' fit, accumulated"):
        for size in (32, 64):
            peaks = [100.0 * size]
            figures.append(Figure("memory", "cnn", what, peaks, "MiB", over=size))
    return figures


@pytest.mark.slow
def test_the_report_fills_the_page_and_draws(tmp_path):
    from benchmarks import report

    figures = [dataclasses.asdict(figure.summary()) for figure in reported_figures()]
    result = {
        "begun": 0.0,
        "seconds": 600.0,
        "device": "CPU",
        "processors": 2,
        "processor": "a processor",
        "platform": "Linux",
        "versions": {"keras": "3.15.1"},
        "figures": figures,
    }
    json_file = tmp_path / "result.json"
    json_file.write_text(json.dumps(result))
    page = tmp_path / "performance.md"
    page.write_text(f"before\n\n{report.BEGIN}\nold\n{report.END}\n\nafter\n")
    command = [sys.executable, "-m", "benchmarks.report"]
    command += [str(json_file), "--docs", str(tmp_path)]
    for _ in range(2):  # the same again
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    measured = (
        "Measured on 1 January 1970 in 10 minutes with `make bench`, on CPU: "
        "2 cores of a processor, Linux; keras 3.15.1. "
        "Targets missed: 1 of 3. All figures are in `docs/bench.json`."
    )
    best_of_mlp = "1.55 [1.52…1.58], fit"
    best_of_cnn = "0.93 [0.91…0.94], fit, **missed**"
    assert page.read_text().splitlines() == [
        "before",
        "",
        report.BEGIN,
        "",
        measured,
        "",
        "| part | figure | target | mlp | cnn |  |",
        "| --- | --- | --- | --- | --- | --- |",
        "| peers | train ÷ fit |  | 1.55 [1.52…1.58] | 0.93 [0.91…0.94] |  |",
        f"| peers | train ÷ best peer | ≥ 1.00 | {best_of_mlp} | {best_of_cnn} |  |",
        "| startup | pipeline --help: time to the answer | ≤ 1.00 s |  |  | 0.50 s |",
        "",
        *report.PICTURES.splitlines(),
        "",
        report.END,
        "",
        "after",
    ]
    assert (tmp_path / "bench.json").read_bytes() == json_file.read_bytes()
    for picture in ("bench_peers.png", "bench_memory.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")

    page.write_text("no place for it\n")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "needs a line" in done.stderr


def test_the_page_shows_the_table_of_the_json():
    from benchmarks import report

    result = json.loads((ROOT / "docs" / "bench.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    figures = [Summary(**figure) for figure in result["figures"]]
    assert report.table(figures) in page
    assert report.conditions(result, figures) in page


def test_the_figure_over_all_models_is_a_geometric_mean():
    from benchmarks import peers

    mlp = Figure("peers", "mlp", BEST_PEER, [2.0])
    cnn = Figure("peers", "cnn", BEST_PEER, [0.5])
    wide = Figure("peers", "wide", BEST_PEER, [8.0])
    other = Figure("peers", "mlp", "train ÷ fit", [100.0])
    (mean,) = peers.overall([mlp, cnn, wide, other])
    assert mean.median == pytest.approx(2.0)
    assert (mean.subject, mean.met) == ("3 models", True)
    assert peers.overall([mlp, other]) == []


def test_quartiles_and_targets():
    figure = Figure(
        "update",
        "mlp",
        "a ÷ b",
        [1.0, 3.0, 2.0, 4.0, 5.0],
        best={"a": 1234.0},
        at_least=3.0,
    )
    assert (figure.median, figure.quartiles, figure.met) == (3.0, (2.0, 4.0), True)
    missed = Figure(
        "startup", "pipeline --help", "time to the answer", [1.5], "s", at_most=1.0
    )
    assert (missed.quartiles, missed.met) == ((1.5, 1.5), False)
    assert Figure("tracking", "mlp", "c ÷ d", [1.0]).met is None

    head, _, *rows = table([figure, missed]).splitlines()
    assert head.split()[:4] == ["part", "of", "figure", "median"]
    assert rows[0].split()[-2:] == ["a", "1,234"]
    assert "MISSED" in rows[1]


def test_the_json_has_medians_and_quartiles_in_place_of_the_rounds():
    figure = Figure("update", "mlp", "a ÷ b", [1.0, 3.0, 2.0], at_most=2.5)
    summary = dataclasses.asdict(figure.summary())
    figure_fields = {field.name for field in dataclasses.fields(Figure)}
    added = {"rounds": 3, "median": 2.0, "quartiles": (1.5, 2.5), "met": True}
    assert set(summary) == figure_fields - {"values"} | set(added)
    for name, value in summary.items():
        expected = added[name] if name in added else getattr(figure, name)
        assert value == expected, name


def test_contenders_take_turns_and_their_errors_are_not_lost():
    from benchmarks.turns import Coroutine, alternate

    order = []

    def contender(name):
        def body(pause):
            while True:
                order.append(name)
                pause()

        return Coroutine(body)

    contenders = {"a": contender("a"), "b": contender("b")}
    times = alternate(contenders, 3)
    for coroutine in contenders.values():
        coroutine.close()
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}

    def broken(pause):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Coroutine(broken)()


CHILD = """
import sys
from benchmarks.child import Child
child = Child()
print("what a library prints")
child.ready(weights=7)
for update in range(5):
    open(sys.argv[1], "a").write("x")
    child.updated()
sys.exit("no more updates")
"""


@pytest.mark.slow
def test_a_contender_in_a_process_of_its_own(tmp_path):
    from benchmarks.processes import Process

    done = tmp_path / "done"
    process = Process([sys.executable, "-c", CHILD, str(done)], 2)
    assert process.facts == {"weights": 7}
    process()
    assert done.read_text() == "xx"
    process()
    assert done.read_text() == "xxxx"
    with pytest.raises(RuntimeError, match=r"ended with 1: (.*\n)*no more updates"):
        process()
    with pytest.raises(RuntimeError, match="no more updates"):
        process()
    with pytest.raises(RuntimeError, match=r"No module named benchmarks\.nothing"):
        Process([sys.executable, "-m", "benchmarks.nothing"], 1)

    waiting = Process([sys.executable, "-c", CHILD, str(done)], 1)
    waiting.close()
    assert done.read_text() == "xxxxx"
